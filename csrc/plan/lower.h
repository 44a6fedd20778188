// Lowers a plan, for tensors of given strides, to the copies that a machine executes.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "plan/exchange_plan.h"
#include "plan/strided_copy.h"

namespace pipecomm {

// Where the elements of an actual tensor lie. Strides in elements, none negative.
struct StridedLayout {
  Dims shape;
  Dims strides;
  int64_t itemsize = 1;

  static StridedLayout contiguous(const TensorSpec& tensor);
};

// One copy between tensors and staging buffers. Packing reads an input and writes the send staging,
// unpacking reads the receive staging and writes an output, a self transfer reads an input and
// writes an output.
struct CopyTask {
  int32_t src_tensor_idx = -1;  // input, or -1: receive staging
  int32_t dst_tensor_idx = -1;  // output, or -1: send staging
  int64_t src_offset_bytes = 0;
  int64_t dst_offset_bytes = 0;
  Arithmetic arithmetic = Arithmetic::kBytes;  // other than kBytes: elements are scaled
  StridedCopy copy;
};

// One message to or from another rank, perhaps of zero bytes. Its bytes lie at offset_bytes of
// tensor tensor_idx, or, if that is -1, of the staging buffer. The tasks [task_begin, task_end) of
// pack() or unpack(), in the order of the message's bytes, then connect it with the tensors.
struct LoweredMessage {
  int peer = 0;
  int64_t bytes = 0;
  int tensor_idx = -1;
  int64_t offset_bytes = 0;
  int task_begin = 0;
  int task_end = 0;
  uint64_t dtypes = 0;  // hash of the dtypes of its elements, in their order; 0 if it has none

  bool is_staged() const { return tensor_idx < 0; }
};

struct LoweredExchange {
  int64_t send_staging_bytes = 0;
  int64_t recv_staging_bytes = 0;
  std::vector<LoweredMessage> sends, recvs;  // other ranks only, by increasing peer
  std::vector<CopyTask> tasks;               // pack, then local, then unpack
  int num_pack_tasks = 0;
  int num_local_tasks = 0;
  Scale scale;

  std::span<const CopyTask> pack() const { return {tasks.data(), size_t(num_pack_tasks)}; }
  std::span<const CopyTask> local() const {
    return {tasks.data() + num_pack_tasks, size_t(num_local_tasks)};
  }
  // Everything that reads inputs, for a single launch before the exchange.
  std::span<const CopyTask> pack_and_local() const {
    return {tasks.data(), size_t(num_pack_tasks + num_local_tasks)};
  }
  std::span<const CopyTask> unpack() const {
    return std::span<const CopyTask>(tasks).subspan(num_pack_tasks + num_local_tasks);
  }
  // Passes over staged data, 0 to 2. A self transfer is the transfer itself and does not count.
  int copy_passes() const { return int(num_pack_tasks > 0) + int(!unpack().empty()); }
};

inline constexpr int64_t kStagingAlignBytes = 64;

// `all_staged`: no message is sent from, or received into, the tensors in place. Throws
// std::invalid_argument if the layouts do not have the shapes of the plan's tensors, for
// negative strides, and for outputs whose elements share memory (stride 0).
LoweredExchange lower(const ExchangePlan& plan, const std::vector<StridedLayout>& input_layouts,
                      const std::vector<StridedLayout>& output_layouts, bool all_staged = false);

}  // namespace pipecomm
