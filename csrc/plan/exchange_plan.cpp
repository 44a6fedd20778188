#include "plan/exchange_plan.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <set>
#include <stdexcept>

namespace pipecomm {

namespace {

std::string describe(const Box& box) {
  return "box of tensor " + std::to_string(box.tensor_idx) + " at " + to_string(box.start) +
         " with extent " + to_string(box.extent);
}

bool is_empty(const Box& box) {
  return std::find(box.extent.begin(), box.extent.end(), 0) != box.extent.end();
}

int64_t box_bytes(const Box& box, const std::vector<TensorSpec>& tensors) {
  return checked_mul(checked_product(box.extent), tensors[box.tensor_idx].dtype.itemsize);
}

void validate_tensor(const TensorSpec& tensor) {
  for (int64_t length : tensor.shape) {
    if (length < 0) {
      throw std::invalid_argument("shape " + to_string(tensor.shape) + " has a negative length");
    }
  }
  const int itemsize = tensor.dtype.itemsize;
  if (itemsize > 16 || !std::has_single_bit(static_cast<unsigned>(itemsize))) {
    throw std::invalid_argument("element size must be 1, 2, 4, 8 or 16 bytes, got " +
                                std::to_string(itemsize) + " for " + dtype_name(tensor.dtype.code));
  }
  tensor.bytes();
}

void validate_box(const Box& box, const std::vector<TensorSpec>& tensors, const char* role) {
  if (box.tensor_idx < 0 || box.tensor_idx >= std::ssize(tensors)) {
    throw std::invalid_argument(describe(box) + ": there are " + std::to_string(tensors.size()) +
                                " " + role + " tensors");
  }
  const Dims& shape = tensors[box.tensor_idx].shape;
  if (box.start.size() != shape.size() || box.extent.size() != shape.size()) {
    throw std::invalid_argument(describe(box) + " needs one number per dim of shape " +
                                to_string(shape));
  }
  for (size_t d = 0; d < shape.size(); ++d) {
    if (box.start[d] < 0 || box.extent[d] < 0 ||
        checked_add(box.start[d], box.extent[d]) > shape[d]) {
      throw std::invalid_argument(describe(box) + " leaves the " + role + " tensor of shape " +
                                  to_string(shape) + " in dim " + std::to_string(d));
    }
  }
}

void validate_transfers(const std::vector<Transfer>& transfers, int size,
                        const std::vector<TensorSpec>& tensors, const char* role) {
  int last_peer = -1;
  for (const Transfer& transfer : transfers) {
    if (transfer.peer < 0 || transfer.peer >= size) {
      throw std::invalid_argument("peer " + std::to_string(transfer.peer) +
                                  " is not a rank in a group of " + std::to_string(size));
    }
    if (transfer.peer <= last_peer) {
      throw std::invalid_argument(
          "peers must increase, one transfer each: " + std::to_string(transfer.peer) + " follows " +
          std::to_string(last_peer));
    }
    last_peer = transfer.peer;
    for (const Box& box : transfer.boxes) validate_box(box, tensors, role);
    message_bytes(transfer, tensors);
  }
}

const Transfer* find_peer(const std::vector<Transfer>& transfers, int peer) {
  const auto it = std::lower_bound(transfers.begin(), transfers.end(), peer,
                                   [](const Transfer& t, int rank) { return t.peer < rank; });
  return it != transfers.end() && it->peer == peer ? &*it : nullptr;
}

void validate_self_transfer(const ExchangePlan& plan) {
  const Transfer* send = find_peer(plan.sends, plan.rank);
  const Transfer* recv = find_peer(plan.recvs, plan.rank);
  const int64_t sent = send ? message_bytes(*send, plan.inputs) : 0;
  const int64_t received = recv ? message_bytes(*recv, plan.outputs) : 0;
  if (sent != received) {
    throw std::invalid_argument("rank " + std::to_string(plan.rank) + " sends " +
                                std::to_string(sent) + " bytes to itself but receives " +
                                std::to_string(received));
  }
}

bool overlap(const Box& a, const Box& b) {
  for (size_t d = 0; d < a.start.size(); ++d) {
    if (a.start[d] >= b.start[d] + b.extent[d] || b.start[d] >= a.start[d] + a.extent[d]) {
      return false;
    }
  }
  return true;
}

// Sweeps along the dim in which the boxes start at the most positions, so that a set of pieces
// along one dim takes n log n steps.
void validate_disjoint(std::vector<const Box*>& boxes) {
  if (boxes.size() < 2) return;
  const size_t num_dims = boxes[0]->start.size();
  size_t sweep_dim = 0, most_starts = 0;
  for (size_t d = 0; d < num_dims; ++d) {
    std::set<int64_t> starts;
    for (const Box* box : boxes) starts.insert(box->start[d]);
    if (starts.size() > most_starts) {
      most_starts = starts.size();
      sweep_dim = d;
    }
  }
  if (num_dims > 0) {
    std::sort(boxes.begin(), boxes.end(), [sweep_dim](const Box* a, const Box* b) {
      return a->start[sweep_dim] < b->start[sweep_dim];
    });
  }
  for (size_t i = 0; i < boxes.size(); ++i) {
    for (size_t j = i + 1; j < boxes.size(); ++j) {
      const Box &a = *boxes[i], &b = *boxes[j];
      if (num_dims > 0 && b.start[sweep_dim] >= a.start[sweep_dim] + a.extent[sweep_dim]) break;
      if (overlap(a, b)) {
        throw std::invalid_argument("two receives write the same elements: " + describe(a) +
                                    " and " + describe(b));
      }
    }
  }
}

void validate_disjoint_receives(const ExchangePlan& plan) {
  std::vector<std::vector<const Box*>> boxes(plan.outputs.size());
  for (const Transfer& recv : plan.recvs) {
    for (const Box& box : recv.boxes) {
      if (!is_empty(box)) boxes[box.tensor_idx].push_back(&box);
    }
  }
  for (auto& boxes_of_output : boxes) validate_disjoint(boxes_of_output);
}

void validate_scale(const ExchangePlan& plan) {
  if (plan.scale.is_none()) return;
  if (!std::isfinite(plan.scale.factor) || plan.scale.factor == 0) {
    throw std::invalid_argument("the scale factor must be finite and not zero, got " +
                                std::to_string(plan.scale.factor));
  }
  for (const TensorSpec& input : plan.inputs) {
    if (arithmetic_of(input.dtype) == Arithmetic::kBytes) {
      throw std::invalid_argument(
          std::string("only float16, bfloat16, float32 and float64 can be scaled, got ") +
          dtype_name(input.dtype.code));
    }
  }
}

}  // namespace

int64_t MessageCursor::place(int tensor_idx, int64_t bytes) {
  if (bytes == 0) return end_;
  if (last_tensor_idx_ >= 0 && tensor_idx != last_tensor_idx_) {
    end_ = checked_align_up(end_, kTensorAlignBytes);
  }
  last_tensor_idx_ = tensor_idx;
  const int64_t begin = end_;
  end_ = checked_add(end_, bytes);
  return begin;
}

int64_t message_bytes(const Transfer& transfer, const std::vector<TensorSpec>& tensors) {
  MessageCursor cursor;
  for (const Box& box : transfer.boxes) cursor.place(box.tensor_idx, box_bytes(box, tensors));
  return cursor.message_bytes();
}

std::string to_string(const TensorSpec& tensor) {
  return to_string(tensor.shape) + " " + dtype_name(tensor.dtype.code);
}

void ExchangePlan::validate() const {
  try {
    if (size < 1 || rank < 0 || rank >= size) {
      throw std::invalid_argument("rank " + std::to_string(rank) + " is not a rank in a group of " +
                                  std::to_string(size));
    }
    for (const TensorSpec& tensor : inputs) validate_tensor(tensor);
    for (const TensorSpec& tensor : outputs) validate_tensor(tensor);
    validate_transfers(sends, size, inputs, "input");
    validate_transfers(recvs, size, outputs, "output");
    validate_self_transfer(*this);
    validate_disjoint_receives(*this);
    validate_scale(*this);
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument(op + ": " + error.what());
  }
}

}  // namespace pipecomm
