// What the kernels of one collective do together: a broadcast, or a reduction that rounds to the dtype
// at each rank, as NCCL's do. Kernels whose calls differ wait forever.
#pragma once

#include "check.h"

#include "copy/reduce_cpu.h"

namespace fake {

enum class CollectiveKind { broadcast, all_reduce, reduce, reduce_scatter, all_gather };

// One rank's call.
struct CollectiveCall {
  CollectiveKind kind;
  const std::byte* source;
  std::byte* destination;
  size_t count;
  int dtype;
  int op = 0;
  int root = 0;

  // By the numbers of nccl.h.
  DType element() const {
    static constexpr DType kDTypes[] = {
        dtypes::kInt8,   dtypes::kUInt8,   dtypes::kInt32,   dtypes::kUInt32,  dtypes::kInt64,
        dtypes::kUInt64, dtypes::kFloat16, dtypes::kFloat32, dtypes::kFloat64, dtypes::kBFloat16};
    return kDTypes[dtype];
  }
  Reduction reduction() const {
    static constexpr Reduction kOperators[] = {Reduction::kSum, Reduction::kProduct,
                                               Reduction::kMax, Reduction::kMin, Reduction::kMean};
    return kOperators[op];
  }
  size_t num_bytes() const { return count * element().itemsize; }
  size_t num_source_bytes(int size) const {
    return num_bytes() * (kind == CollectiveKind::reduce_scatter ? size_t(size) : 1);
  }
  bool agrees_with(const CollectiveCall& other) const {
    return kind == other.kind && num_bytes() == other.num_bytes() && dtype == other.dtype &&
           op == other.op && root == other.root;
  }
};

class Collective {
 public:
  void join(int rank, int size, const CollectiveCall& call) {
    are_equal_ &= sources_.empty() || first_.agrees_with(call);
    if (sources_.empty()) first_ = call;
    auto& source = sources_[rank];
    if (call.kind != CollectiveKind::broadcast || call.root == rank)
      source.assign(call.source, call.source + call.num_source_bytes(size));
  }

  // Writes the result of a rank once it can have it; false: it must wait. A source of up to
  // `fifo_bytes` may leave before the other ranks come.
  bool finish(int rank, int size, size_t fifo_bytes, const CollectiveCall& call) const {
    if (call.kind == CollectiveKind::broadcast) return finish_broadcast(size, fifo_bytes, call);
    if (int(sources_.size()) < size || !are_equal_) return false;
    const size_t num_bytes = call.num_bytes();
    switch (call.kind) {
      case CollectiveKind::all_gather:
        for (const auto& [source, data] : sources_)
          std::copy(data.begin(), data.end(), call.destination + size_t(source) * num_bytes);
        break;
      case CollectiveKind::reduce_scatter:
        reduce(call, size_t(rank) * num_bytes);
        break;
      default:
        if (call.kind == CollectiveKind::all_reduce || rank == call.root) reduce(call, 0);
    }
    return true;
  }

 private:
  bool finish_broadcast(int size, size_t fifo_bytes, const CollectiveCall& call) const {
    const auto root = sources_.find(call.root);
    const bool is_small = call.num_bytes() <= fifo_bytes;
    if (root == sources_.end() || (!is_small && int(sources_.size()) < size)) return false;
    std::memcpy(call.destination, root->second.data(),
                std::min(call.num_bytes(), root->second.size()));
    return true;
  }
  // The bytes of all sources from `offset` on.
  void reduce(const CollectiveCall& call, size_t offset) const {
    const auto count = int64_t(call.count);
    std::vector<const void*> rows;
    for (const auto& [rank, data] : sources_) rows.push_back(data.data() + offset);
    if (call.reduction() == Reduction::kMean)
      return reduce_cpu(Reduction::kMean, call.destination, rows, count, call.element());
    std::memcpy(call.destination, rows[0], call.num_bytes());
    for (size_t rank = 1; rank < rows.size(); ++rank) {
      const void* pair[] = {call.destination, rows[rank]};
      reduce_cpu(call.reduction(), call.destination, pair, count, call.element());
    }
  }

  CollectiveCall first_{};
  bool are_equal_ = true;
  std::map<int, std::vector<std::byte>> sources_;  // of the ranks whose kernels run
};

}  // namespace fake
