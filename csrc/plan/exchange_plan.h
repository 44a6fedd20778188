// A communication operation as data: which boxes of my inputs go to each peer, and which boxes of my
// outputs each peer's message fills.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "plan/checked.h"
#include "plan/dtype.h"

namespace pipecomm {

struct TensorSpec {
  Dims shape;
  DType dtype;

  bool operator==(const TensorSpec&) const = default;
  int64_t num_elements() const { return checked_product(shape); }
  int64_t bytes() const { return checked_mul(num_elements(), dtype.itemsize); }
};

// The n-d slice [start, start + extent) of one tensor, in elements. A box of a 0-d tensor has no
// dims and one element.
struct Box {
  int tensor_idx = 0;
  Dims start;
  Dims extent;

  bool operator==(const Box&) const = default;
};

// The message that one rank sends to, or receives from, one peer: the bytes of the boxes in list
// order, each box row-major. The next box of the same tensor follows directly; a change of tensor
// rounds the offset up to kTensorAlignBytes (boxes without elements do not count). The k-th box of
// a send and the k-th box of the matching receive have the same number of bytes.
struct Transfer {
  int peer = 0;
  std::vector<Box> boxes;

  bool operator==(const Transfer&) const = default;
};

inline constexpr int64_t kTensorAlignBytes = 16;

// Walks a message: place() returns the byte offset of the next box.
class MessageCursor {
 public:
  int64_t place(int tensor_idx, int64_t bytes);
  int64_t message_bytes() const { return end_; }

 private:
  int64_t end_ = 0;
  int last_tensor_idx_ = -1;
};

// A factor applied to every element where inputs are read, in the dtype of the input.
struct Scale {
  enum class Kind : uint8_t { kNone, kMultiply, kDivide };
  Kind kind = Kind::kNone;
  double factor = 1.0;

  bool operator==(const Scale&) const = default;
  bool is_none() const { return kind == Kind::kNone; }
  static Scale none() { return {}; }
  static Scale multiply(double factor) { return {Kind::kMultiply, factor}; }
  static Scale divide(double factor) { return {Kind::kDivide, factor}; }
};

// The rank that a plan is for: its number in its group, and the size of the group.
struct Member {
  int rank = 0;
  int size = 1;
};

struct ExchangePlan {
  std::string op;
  int rank = 0;
  int size = 1;
  std::vector<TensorSpec> inputs, outputs;
  std::vector<Transfer> sends, recvs;  // at most one per peer, by increasing peer, self allowed
  Scale scale;
  // Hash of the operation and of every argument that all ranks share: equal if they agree.
  uint64_t signature = 0;
  // The tensor that errors name, if it is not the first input or output.
  std::optional<TensorSpec> shown;

  // Throws std::invalid_argument if the plan cannot be executed: ranks, tensor numbers or boxes out
  // of range, outputs written twice, self transfers that do not match, types that cannot be scaled.
  void validate() const;
};

int64_t message_bytes(const Transfer& transfer, const std::vector<TensorSpec>& tensors);

// "[2, 3] bfloat16"
std::string to_string(const TensorSpec& tensor);

}  // namespace pipecomm
