#include "engine/reductions.h"

#include <cstdint>
#include <memory>
#include <utility>

#include "plan/split.h"

namespace pipecomm {
namespace {

// Memory that peers write directly, if the transport has some. It outlives a failed operation.
std::shared_ptr<std::byte> memory_for(Communicator& communicator, int64_t num_bytes) {
  if (auto shared = communicator.transport().allocate_result(num_bytes)) return shared;
  return communicator.scratch.acquire(num_bytes);
}

// Elements [begin, begin + length) of a contiguous tensor.
TensorRef part_of(const TensorRef& tensor, int64_t begin, int64_t length) {
  return {tensor.data + begin * tensor.dtype.itemsize, tensor.dtype, {length}, {1}, tensor.storage};
}

int64_t length_of(const TensorRef& tensor) { return tensor.num_bytes() / tensor.dtype.itemsize; }

class Reducer {
 public:
  Reducer(Communicator& communicator, OpCode op, DType dtype, Reduction reduction,
          const Interrupted& interrupted)
      : communicator_(communicator),
        op_(op),
        rank_(communicator.rank()),
        size_(communicator.size()),
        dtype_(dtype),
        reduction_(reduction),
        interrupted_(interrupted) {}

  // Receives every other rank's whole tensor.
  void reduce_whole(const PreparedExchangePtr& plan, const TensorRef& whole) {
    const int64_t length = length_of(whole);
    const TensorRef rows = new_row(size_ * length);
    exchange(plan, whole, {&rows, 1});
    InlineVector<const void*, 8> sources;
    for (int rank = 0; rank < size_; ++rank)
      sources.push_back(rank == rank_ ? whole.data : part_of(rows, rank * length, length).data);
    reduce(sources, whole);
  }

  // Receives this rank's piece from every other rank. `next`: the exchange that follows, or null.
  void reduce_pieces(const PreparedExchangePtr& plan, const TensorRef& whole, const TensorRef& own,
                     const TensorRef& target, const Scope* next = nullptr) {
    const int64_t length = length_of(own);
    const TensorRef rows = new_row((size_ - 1) * length);
    InlineVector<TensorRef, 4> others;
    InlineVector<const void*, 8> sources;
    for (int rank = 0; rank < size_; ++rank) {
      if (rank == rank_) {
        sources.push_back(own.data);
        continue;
      }
      others.push_back(part_of(rows, static_cast<int64_t>(others.size()) * length, length));
      sources.push_back(others.back().data);
    }
    exchange(plan, whole, others, {}, next);
    reduce(sources, target);
  }

  void exchange(const PreparedExchangePtr& plan, const TensorRef& input,
                std::span<const TensorRef> outputs, const Scope& scope = {},
                const Scope* next = nullptr) {
    const OperationPtr operation =
        communicator_.exchange(op_, plan, {&input, 1}, outputs, {false, interrupted_}, scope);
    try {
      communicator_.follow(*operation, interrupted_);
    } catch (const PipeCommException&) {
      throw;
    } catch (...) {  // thrown by `interrupted_`: this rank takes no part in the next exchange
      if (next) refuse(*next);
      throw;
    }
  }

 private:
  void refuse(const Scope& scope) {
    try {
      communicator_.refuse(op_, "an exception ended its first part on this rank", scope);
    } catch (const PipeCommException&) {
      // That failure reaches all ranks.
    }
  }
  TensorRef new_row(int64_t length) {
    auto memory = memory_for(communicator_, length * dtype_.itemsize);
    std::byte* const data = memory.get();
    return {data, dtype_, {length}, {1}, std::move(memory)};
  }
  void reduce(std::span<const void* const> sources, const TensorRef& target) {
    reduce_cpu(reduction_, target.data, sources, length_of(target), dtype_);
  }

  Communicator& communicator_;
  const OpCode op_;
  const int rank_, size_;
  const DType dtype_;
  const Reduction reduction_;
  const Interrupted& interrupted_;
};

}  // namespace

void all_reduce(Communicator& communicator, const TensorRef& tensor, Reduction reduction,
                std::span<const PreparedExchangePtr> plans, const Scope& second,
                const Interrupted& interrupted) {
  Reducer reducer(communicator, OpCode::all_reduce, tensor.dtype, reduction, interrupted);
  const TensorRef whole = part_of(tensor, 0, length_of(tensor));
  if (plans.size() == 1) return reducer.reduce_whole(plans[0], whole);
  const Sizes lengths = remainder_first(length_of(tensor), communicator.size());
  const auto rank = static_cast<size_t>(communicator.rank());
  int64_t begin = 0;
  for (size_t idx = 0; idx < rank; ++idx) begin += lengths[idx];
  const TensorRef own = part_of(tensor, begin, lengths[rank]);
  reducer.reduce_pieces(plans[0], whole, own, own, &second);
  reducer.exchange(plans[1], own, {&whole, 1}, second);
}

void all_gather(Communicator& communicator, const TensorRef& output, const TensorRef& input,
                const PreparedExchangePtr& plan, const Interrupted& interrupted) {
  const TensorRef own = part_of(input, 0, length_of(input));
  const TensorRef whole = part_of(output, 0, length_of(output));
  const OperationPtr operation =
      communicator.exchange(OpCode::all_gather, plan, {&own, 1}, {&whole, 1}, {false, interrupted});
  communicator.follow(*operation, interrupted);
}

void reduce_scatter(Communicator& communicator, const TensorRef& output, const TensorRef& input,
                    Reduction reduction, const PreparedExchangePtr& plan,
                    const Interrupted& interrupted) {
  Reducer reducer(communicator, OpCode::reduce_scatter, input.dtype, reduction, interrupted);
  const int64_t length = length_of(output);
  reducer.reduce_pieces(plan, part_of(input, 0, length_of(input)),
                        part_of(input, communicator.rank() * length, length), output);
}

}  // namespace pipecomm
