#include "plan/lower.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "plan/signature.h"

namespace pipecomm {

namespace {

// Where a box lies in a tensor, or in a staging buffer (-1).
struct Place {
  int tensor_idx = -1;
  int64_t offset_bytes = 0;
  Dims stride_bytes;
};

// A box and its place in a message, without dims of length 1.
struct PlacedBox {
  int64_t bytes = 0;
  int64_t itemsize = 1;
  Dims extent;
  Place in_tensor, in_message;
};

struct PlacedMessage {
  int64_t bytes = 0;
  std::vector<PlacedBox> boxes;  // only those with elements
};

struct Loop {
  int64_t count, src_stride_bytes, dst_stride_bytes;
};

// The smallest loop nest, outermost first, around the longest contiguous run.
struct LoopNest {
  int64_t run_bytes = 0;
  std::vector<Loop> loops;

  LoopNest(const Dims& extent, const Dims& src_stride_bytes, const Dims& dst_stride_bytes,
           int64_t itemsize)
      : run_bytes(itemsize) {
    for (int d = static_cast<int>(extent.size()) - 1; d >= 0; --d) {
      const Loop loop{extent[d], src_stride_bytes[d], dst_stride_bytes[d]};
      if (loops.empty() && loop.src_stride_bytes == run_bytes &&
          loop.dst_stride_bytes == run_bytes) {
        run_bytes *= loop.count;
      } else if (!loops.empty() && continues(loops.back(), loop)) {
        loops.back().count *= loop.count;
      } else {
        loops.push_back(loop);
      }
    }
    std::reverse(loops.begin(), loops.end());
  }

  // Whether `outer` continues where all of `inner` ends, on both sides.
  static bool continues(const Loop& inner, const Loop& outer) {
    return outer.src_stride_bytes == inner.count * inner.src_stride_bytes &&
           outer.dst_stride_bytes == inner.count * inner.dst_stride_bytes;
  }
};

bool is_single_run(const CopyTask& task) { return task.copy.num_dims == 0; }

// Appends tasks; a run that continues the previous one on both sides extends it.
class TaskList {
 public:
  explicit TaskList(std::vector<CopyTask>& tasks) : tasks_(tasks), first_(tasks.size()) {}

  void append(CopyTask task, const LoopNest& nest) {
    task.copy.run_bytes = nest.run_bytes;
    append_from(task, nest, 0);
  }

 private:
  // Loops beyond the maximum are unrolled, the outermost first: the order of runs is kept.
  void append_from(CopyTask task, const LoopNest& nest, size_t outer) {
    const size_t num_loops = nest.loops.size() - outer;
    if (num_loops > kMaxCopyDims) {
      const Loop& loop = nest.loops[outer];
      for (int64_t i = 0; i < loop.count; ++i) {
        append_from(task, nest, outer + 1);
        task.src_offset_bytes += loop.src_stride_bytes;
        task.dst_offset_bytes += loop.dst_stride_bytes;
      }
      return;
    }
    task.copy.num_dims = static_cast<int32_t>(num_loops);
    for (size_t d = 0; d < num_loops; ++d) {
      const Loop& loop = nest.loops[outer + d];
      task.copy.count[d] = loop.count;
      task.copy.src_stride_bytes[d] = loop.src_stride_bytes;
      task.copy.dst_stride_bytes[d] = loop.dst_stride_bytes;
    }
    if (tasks_.size() == first_ || !extend(tasks_.back(), task)) tasks_.push_back(task);
  }

  static bool extend(CopyTask& last, const CopyTask& next) {
    if (!is_single_run(last) || !is_single_run(next) ||
        last.src_tensor_idx != next.src_tensor_idx || last.dst_tensor_idx != next.dst_tensor_idx ||
        last.arithmetic != next.arithmetic ||
        last.src_offset_bytes + last.copy.run_bytes != next.src_offset_bytes ||
        last.dst_offset_bytes + last.copy.run_bytes != next.dst_offset_bytes) {
      return false;
    }
    last.copy.run_bytes += next.copy.run_bytes;
    return true;
  }

  std::vector<CopyTask>& tasks_;
  const size_t first_;  // tasks before this one belong to other messages
};

void validate_layouts(const std::vector<TensorSpec>& tensors,
                      const std::vector<StridedLayout>& layouts, bool are_outputs) {
  const char* role = are_outputs ? "output" : "input";
  if (tensors.size() != layouts.size()) {
    throw std::invalid_argument("the plan has " + std::to_string(tensors.size()) + " " + role +
                                " tensors, got " + std::to_string(layouts.size()));
  }
  for (size_t i = 0; i < tensors.size(); ++i) {
    const TensorSpec& tensor = tensors[i];
    const StridedLayout& layout = layouts[i];
    const std::string name = std::string(role) + " " + std::to_string(i);
    if (layout.shape != tensor.shape || layout.itemsize != tensor.dtype.itemsize) {
      throw std::invalid_argument(name + " must be " + to_string(tensor) + ", got shape " +
                                  to_string(layout.shape) + " of " +
                                  std::to_string(layout.itemsize) + "-byte elements");
    }
    if (layout.strides.size() != layout.shape.size()) {
      throw std::invalid_argument(name + " has shape " + to_string(layout.shape) + " but strides " +
                                  to_string(layout.strides));
    }
    int64_t last_element = 0;
    for (size_t d = 0; d < layout.shape.size(); ++d) {
      if (layout.strides[d] < 0) {
        throw std::invalid_argument(name + " has negative strides " + to_string(layout.strides));
      }
      if (layout.shape[d] < 2) continue;
      if (are_outputs && layout.strides[d] == 0) {
        throw std::invalid_argument(name + " has elements that share memory: shape " +
                                    to_string(layout.shape) + ", strides " +
                                    to_string(layout.strides));
      }
      last_element = checked_add(last_element, checked_mul(layout.shape[d] - 1, layout.strides[d]));
    }
    checked_mul(last_element, layout.itemsize);
  }
}

PlacedBox place_box(const Box& box, const StridedLayout& layout) {
  PlacedBox placed;
  placed.bytes = placed.itemsize = layout.itemsize;
  placed.in_tensor.tensor_idx = box.tensor_idx;
  for (int d = static_cast<int>(box.extent.size()) - 1; d >= 0; --d) {
    const int64_t stride_bytes = layout.strides[d] * layout.itemsize;
    placed.in_tensor.offset_bytes += box.start[d] * stride_bytes;
    if (box.extent[d] == 1) continue;
    placed.extent.push_back(box.extent[d]);
    placed.in_tensor.stride_bytes.push_back(stride_bytes);
    placed.in_message.stride_bytes.push_back(placed.bytes);
    placed.bytes *= box.extent[d];
  }
  for (Dims* dims :
       {&placed.extent, &placed.in_tensor.stride_bytes, &placed.in_message.stride_bytes})
    std::ranges::reverse(*dims);
  return placed;
}

PlacedMessage place_message(const Transfer& transfer, const std::vector<StridedLayout>& layouts) {
  PlacedMessage message;
  MessageCursor cursor;
  for (const Box& box : transfer.boxes) {
    if (checked_product(box.extent) == 0) continue;
    PlacedBox placed = place_box(box, layouts[box.tensor_idx]);
    placed.in_message.offset_bytes = cursor.place(box.tensor_idx, placed.bytes);
    message.boxes.push_back(std::move(placed));
  }
  message.bytes = cursor.message_bytes();
  return message;
}

// Hashes the dtypes of runs, not of boxes: the two ends may cut one message into different boxes.
uint64_t hash_dtypes(const PlacedMessage& message, const std::vector<TensorSpec>& tensors) {
  if (message.boxes.empty()) return 0;
  Signature signature("dtypes");
  const DType* previous = nullptr;
  for (const PlacedBox& box : message.boxes) {
    const DType& dtype = tensors[box.in_tensor.tensor_idx].dtype;
    if (!previous || *previous != dtype) signature.add(dtype);
    previous = &dtype;
  }
  return signature.value();
}

// Whether all bytes of the message lie in order and without gaps in one tensor.
bool is_one_run(const PlacedMessage& message) {
  for (size_t i = 0; i < message.boxes.size(); ++i) {
    const auto& [tensor_idx, offset_bytes, stride_bytes] = message.boxes[i].in_tensor;
    if (stride_bytes != message.boxes[i].in_message.stride_bytes) return false;
    if (i == 0) continue;
    const PlacedBox& previous = message.boxes[i - 1];
    if (tensor_idx != previous.in_tensor.tensor_idx ||
        offset_bytes != previous.in_tensor.offset_bytes + previous.bytes) {
      return false;
    }
  }
  return !message.boxes.empty();
}

class Lowering {
 public:
  Lowering(const ExchangePlan& plan, const std::vector<StridedLayout>& input_layouts,
           const std::vector<StridedLayout>& output_layouts, bool all_staged)
      : plan_(plan), inputs_(input_layouts), outputs_(output_layouts), all_staged_(all_staged) {
    lowered_.scale = plan.scale;
  }

  LoweredExchange run() {
    lower_sends();
    lowered_.num_pack_tasks = num_tasks();
    lower_self();
    lowered_.num_local_tasks = num_tasks() - lowered_.num_pack_tasks;
    lower_recvs();
    return std::move(lowered_);
  }

 private:
  int num_tasks() const { return static_cast<int>(lowered_.tasks.size()); }

  // If the message needs no tasks, fills in where it lies.
  bool lower_in_place(const PlacedMessage& placed, bool scaled, LoweredMessage& message) const {
    message.bytes = placed.bytes;
    if (placed.bytes == 0) return true;
    if (scaled || all_staged_ || !is_one_run(placed)) return false;
    message.tensor_idx = placed.boxes[0].in_tensor.tensor_idx;
    message.offset_bytes = placed.boxes[0].in_tensor.offset_bytes;
    return true;
  }

  static int64_t reserve(int64_t& staging_bytes, int64_t message_bytes) {
    const int64_t offset = checked_align_up(staging_bytes, kStagingAlignBytes);
    staging_bytes = checked_add(offset, message_bytes);
    return offset;
  }

  void lower_sends() {
    // Staged transfers so far, each with the number of its message. Equal ones share one copy.
    std::vector<std::pair<const Transfer*, int>> staged;
    for (const Transfer& send : plan_.sends) {
      if (send.peer == plan_.rank) continue;
      LoweredMessage message{.peer = send.peer};
      const PlacedMessage placed = place_message(send, inputs_);
      message.dtypes = hash_dtypes(placed, plan_.inputs);
      if (!lower_in_place(placed, !plan_.scale.is_none(), message)) {
        const auto same = std::find_if(staged.begin(), staged.end(), [&](const auto& earlier) {
          return earlier.first->boxes == send.boxes;
        });
        if (same != staged.end()) {
          message = lowered_.sends[same->second];
          message.peer = send.peer;
        } else {
          message.offset_bytes = reserve(lowered_.send_staging_bytes, message.bytes);
          message.task_begin = num_tasks();
          TaskList tasks(lowered_.tasks);
          for (const PlacedBox& box : placed.boxes)
            copy(box, box.in_tensor, staged_at(box, message), tasks);
          message.task_end = num_tasks();
          staged.emplace_back(&send, static_cast<int>(lowered_.sends.size()));
        }
      }
      lowered_.sends.push_back(message);
    }
  }

  void lower_recvs() {
    const int first_unpack_task = num_tasks();
    for (const Transfer& recv : plan_.recvs) {
      if (recv.peer == plan_.rank) continue;
      LoweredMessage message{.peer = recv.peer};
      const PlacedMessage placed = place_message(recv, outputs_);
      message.dtypes = hash_dtypes(placed, plan_.outputs);
      if (!lower_in_place(placed, false, message)) {
        message.offset_bytes = reserve(lowered_.recv_staging_bytes, message.bytes);
        message.task_begin = num_tasks() - first_unpack_task;
        TaskList tasks(lowered_.tasks);
        for (const PlacedBox& box : placed.boxes)
          copy(box, staged_at(box, message), box.in_tensor, tasks);
        message.task_end = num_tasks() - first_unpack_task;
      }
      lowered_.recvs.push_back(message);
    }
  }

  static Place staged_at(const PlacedBox& box, const LoweredMessage& message) {
    Place place = box.in_message;
    place.offset_bytes += message.offset_bytes;
    return place;
  }

  void lower_self() {
    const PlacedMessage sent = place_self(plan_.sends, inputs_);
    const PlacedMessage received = place_self(plan_.recvs, outputs_);
    if (sent.boxes.empty()) return;
    const bool boxes_match =
        std::equal(sent.boxes.begin(), sent.boxes.end(), received.boxes.begin(),
                   received.boxes.end(), [](const PlacedBox& a, const PlacedBox& b) {
                     return a.extent == b.extent && a.bytes == b.bytes &&
                            a.in_message.offset_bytes == b.in_message.offset_bytes;
                   });
    TaskList tasks(lowered_.tasks);
    if (boxes_match) {
      for (size_t i = 0; i < sent.boxes.size(); ++i)
        copy(sent.boxes[i], sent.boxes[i].in_tensor, received.boxes[i].in_tensor, tasks);
    } else if (is_one_run(sent) && is_one_run(received)) {
      PlacedBox from = sent.boxes[0], to = received.boxes[0];
      from.extent = {sent.bytes / from.itemsize};
      from.in_tensor.stride_bytes = to.in_tensor.stride_bytes = {from.itemsize};
      copy(from, from.in_tensor, to.in_tensor, tasks);
    } else {
      throw std::invalid_argument(
          plan_.op + ": the boxes that rank " + std::to_string(plan_.rank) +
          " sends to itself must have the shapes of those it receives, or both be contiguous");
    }
  }

  PlacedMessage place_self(const std::vector<Transfer>& transfers,
                           const std::vector<StridedLayout>& layouts) const {
    for (const Transfer& transfer : transfers) {
      if (transfer.peer == plan_.rank) return place_message(transfer, layouts);
    }
    return {};
  }

  // Scales what it reads from an input.
  void copy(const PlacedBox& box, const Place& from, const Place& to, TaskList& tasks) {
    CopyTask task;
    task.src_tensor_idx = from.tensor_idx;
    task.dst_tensor_idx = to.tensor_idx;
    task.src_offset_bytes = from.offset_bytes;
    task.dst_offset_bytes = to.offset_bytes;
    if (from.tensor_idx >= 0 && !plan_.scale.is_none())
      task.arithmetic = arithmetic_of(plan_.inputs[from.tensor_idx].dtype);
    tasks.append(task, LoopNest(box.extent, from.stride_bytes, to.stride_bytes, box.itemsize));
  }

  const ExchangePlan& plan_;
  const std::vector<StridedLayout>& inputs_;
  const std::vector<StridedLayout>& outputs_;
  const bool all_staged_;
  LoweredExchange lowered_;
};

}  // namespace

StridedLayout StridedLayout::contiguous(const TensorSpec& tensor) {
  StridedLayout layout{tensor.shape, Dims(tensor.shape.size()), tensor.dtype.itemsize};
  int64_t stride = 1;
  for (int d = static_cast<int>(tensor.shape.size()) - 1; d >= 0; --d) {
    layout.strides[d] = stride;
    stride = checked_mul(stride, std::max<int64_t>(tensor.shape[d], 1));
  }
  return layout;
}

LoweredExchange lower(const ExchangePlan& plan, const std::vector<StridedLayout>& input_layouts,
                      const std::vector<StridedLayout>& output_layouts, bool all_staged) {
  try {
    validate_layouts(plan.inputs, input_layouts, false);
    validate_layouts(plan.outputs, output_layouts, true);
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument(plan.op + ": " + error.what());
  }
  return Lowering(plan, input_layouts, output_layouts, all_staged).run();
}

}  // namespace pipecomm
