// The fixed-size description that is sent with (or ahead of) every message, so that two ends detect
// a disagreement before any byte is written to a tensor.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "message/bytes.h"

namespace pipecomm {

// Codes are part of the wire format: append only.
enum class OpCode : uint8_t {
  p2p = 1,
  barrier = 2,
  broadcast = 3,
  all_to_all = 4,
  all_gather = 5,
  exchange = 6,
  relay = 7,
  all_reduce = 8,
  reduce = 9,
  reduce_scatter = 10,
};

const char* op_name(OpCode op);
std::optional<OpCode> op_code(std::string_view op_name);

// Further dims are covered by `signature` and `num_bytes`.
inline constexpr int kMaxDescriptorDims = 8;

struct Descriptor {
  OpCode op = OpCode::p2p;
  uint8_t dtype = 0;  // see DType
  uint8_t num_dims = 0;
  uint8_t channel = 0;
  uint64_t seq = 0;        // position within (source, destination, channel), set by the transport
  uint64_t signature = 0;  // other things that both ends must share, such as arguments
  int64_t num_bytes = 0;   // payload bytes of this one message
  std::array<int64_t, kMaxDescriptorDims> shape{};  // of the tensor that this rank passed in

  // Whether both ends describe the same message. `seq` and `channel` are not compared: matching
  // only pairs messages with equal ones.
  bool agrees_with(const Descriptor& other) const;
  // "broadcast of bfloat16[8, 4096] (64.0 KiB)"
  std::string text() const;
  // Equal for descriptors of one channel that agree.
  uint64_t digest() const;
};

// Its size on the wire.
inline constexpr size_t kDescriptorBytes = 32 + 8 * kMaxDescriptorDims;
void append(std::vector<std::byte>& bytes, const Descriptor& descriptor);
// Throws std::runtime_error if a size is negative.
Descriptor read_descriptor(ByteReader& in);

std::string bytes_text(int64_t num_bytes);

}  // namespace pipecomm
