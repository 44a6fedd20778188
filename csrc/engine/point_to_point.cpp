#include "engine/point_to_point.h"

#include <algorithm>
#include <stdexcept>

#include "engine/overlap.h"
#include "plan/signature.h"
#include "transport/transport.h"

namespace pipecomm {

int64_t TensorRef::num_bytes() const {
  int64_t num_bytes = dtype.itemsize;
  for (const int64_t length : shape) num_bytes = checked_mul(num_bytes, length);
  return num_bytes;
}

bool TensorRef::is_contiguous() const {
  int64_t pitch = 1;
  for (size_t dim = shape.size(); dim-- > 0;) {
    if (shape[dim] != 1 && strides[dim] != pitch) return false;
    pitch *= shape[dim];
  }
  return true;
}

Descriptor describe(OpCode op, int channel, const TensorRef& tensor, uint64_t signature,
                    int64_t num_bytes) {
  Descriptor descriptor;
  descriptor.op = op;
  descriptor.channel = static_cast<uint8_t>(channel);
  descriptor.dtype = tensor.dtype.code;
  descriptor.num_dims = static_cast<uint8_t>(tensor.shape.size());
  const size_t num_kept = std::min<size_t>(tensor.shape.size(), kMaxDescriptorDims);
  std::copy_n(tensor.shape.begin(), num_kept, descriptor.shape.begin());
  // The signatures of collectives cover all that the ranks must share.
  if (op == OpCode::p2p && num_kept < tensor.shape.size())
    signature = Signature()
                    .add(static_cast<int64_t>(signature))
                    .add(std::span(tensor.shape).subspan(num_kept))
                    .value();
  descriptor.signature = signature;
  descriptor.num_bytes = num_bytes;
  return descriptor;
}

void check_peer(int peer, int size, const std::string& what) {
  if (peer >= 0 && peer < size) return;
  throw std::invalid_argument(what + " " + std::to_string(peer) + " is not in 0.." +
                              std::to_string(size - 1) +
                              "; it is a rank within the group, not a global rank");
}

void check_batch(std::span<const PointToPoint> batch, int size, int num_channels) {
  auto at = [&](size_t op_idx) {
    return batch.size() == 1 ? std::string() : "ops[" + std::to_string(op_idx) + "]: ";
  };
  struct Interval {
    const std::byte* begin;
    const std::byte* end;
    size_t op_idx;
  };
  InlineVector<Interval, 8> intervals;
  bool receives = false;
  for (size_t op_idx = 0; op_idx < batch.size(); ++op_idx) {
    const PointToPoint& op = batch[op_idx];
    if (op.peer < 0 || op.peer >= size) check_peer(op.peer, size, at(op_idx) + "peer");
    if (op.channel < 0 || op.channel >= num_channels)
      throw std::invalid_argument(
          at(op_idx) + "channel " + std::to_string(op.channel) + " is not in 0.." +
          std::to_string(num_channels - 1) +
          (op.channel >= kMaxUserChannels
               ? "; " + std::to_string(kMaxUserChannels - 1) +
                     " is the highest channel, and so the highest tag= of torch.distributed's calls"
               : "; make the Communicator with channels=" + std::to_string(op.channel + 1)));
    receives |= op.direction == Direction::recv;
    const std::byte* const end = end_of(op.tensor);
    if (end > op.tensor.data) intervals.push_back({op.tensor.data, end, op_idx});
  }
  if (!receives || intervals.size() < 2) return;
  // Sends may share memory with sends; a receive must not share memory.
  const auto receives_into = [&](const Interval& interval) {
    return batch[interval.op_idx].direction == Direction::recv;
  };
  const auto refuse = [](size_t a, size_t b) {
    throw std::invalid_argument(
        "ops[" + std::to_string(std::min(a, b)) + "] and ops[" + std::to_string(std::max(a, b)) +
        "] share memory, and at least one of them receives into it; use separate tensors");
  };
  std::sort(intervals.begin(), intervals.end(),
            [](const Interval& a, const Interval& b) { return a.begin < b.begin; });
  const Interval* furthest =
      nullptr;  // of the earlier contiguous ones, the one with the highest end
  const Interval* furthest_recv = nullptr;  // the same among receives
  for (const Interval& interval : intervals) {
    const TensorRef& tensor = batch[interval.op_idx].tensor;
    const bool is_recv = receives_into(interval);
    const Interval* before = is_recv ? furthest : furthest_recv;
    if (before && before->end > interval.begin) refuse(before->op_idx, interval.op_idx);
    if (!tensor.is_contiguous()) {
      for (const Interval* next = &interval + 1;
           next != intervals.end() && next->begin < interval.end; ++next)
        if ((is_recv || receives_into(*next)) && overlap(tensor, batch[next->op_idx].tensor))
          refuse(interval.op_idx, next->op_idx);
      continue;
    }
    if (!furthest || interval.end > furthest->end) furthest = &interval;
    if (is_recv && (!furthest_recv || interval.end > furthest_recv->end)) furthest_recv = &interval;
  }
}

OwnMessages pair_own_messages(std::span<const PointToPoint> batch, int rank) {
  std::vector<const PointToPoint*> sends, recvs;
  for (const PointToPoint& op : batch) {
    if (op.peer != rank) continue;
    (op.direction == Direction::send ? sends : recvs).push_back(&op);
  }
  if (sends.empty() && recvs.empty()) return {};
  auto by_channel = [](const PointToPoint* a, const PointToPoint* b) {
    return a->channel < b->channel;
  };
  std::stable_sort(sends.begin(), sends.end(), by_channel);
  std::stable_sort(recvs.begin(), recvs.end(), by_channel);
  const bool pairs_up = std::equal(sends.begin(), sends.end(), recvs.begin(), recvs.end(),
                                   [](const PointToPoint* send, const PointToPoint* recv) {
                                     return send->channel == recv->channel;
                                   });
  const std::string who = "a message of rank " + std::to_string(rank) + " to itself ";
  if (!pairs_up)
    throw std::invalid_argument(
        who + "needs its receive on the same channel in the same batch, but there are " +
        std::to_string(sends.size()) + " sends and " + std::to_string(recvs.size()) + " receives");
  std::vector<std::pair<const PointToPoint*, const PointToPoint*>> pairs;
  for (size_t idx = 0; idx < sends.size(); ++idx) {
    const TensorSpec from{sends[idx]->tensor.shape, sends[idx]->tensor.dtype};
    const TensorSpec to{recvs[idx]->tensor.shape, recvs[idx]->tensor.dtype};
    if (from != to || sends[idx]->signature != recvs[idx]->signature)
      throw std::invalid_argument(who + "carries " + to_string(from) +
                                  ", but the receive expects " + to_string(to) +
                                  (from == to ? " as part of another list of tensors" : ""));
    pairs.emplace_back(sends[idx], recvs[idx]);
  }
  return pairs;
}

}  // namespace pipecomm
