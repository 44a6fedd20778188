// The fixed description that travels with (or ahead of) every message, so that two ends that
// disagree find out before any byte lands in a tensor.
#pragma once

#include <array>
#include <cstdint>
#include <string>

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
};

const char* op_name(OpCode op);

inline constexpr int kMaxDescriptorDims =
    8;  // further dims are covered by `signature` and `num_bytes`

struct Descriptor {
  OpCode op = OpCode::p2p;
  uint8_t dtype = 0;  // c10::ScalarType number
  uint8_t num_dims = 0;
  uint8_t channel = 0;
  uint64_t seq = 0;  // position within (source, destination, channel), assigned by the transport
  uint64_t signature = 0;  // what both ends must share besides, such as a collective's arguments
  int64_t num_bytes = 0;   // payload bytes of this very message
  std::array<int64_t, kMaxDescriptorDims> shape{};  // of the tensor that this rank passed in

  // Do both ends speak of the same message? `seq` and `channel` are equal by construction of the
  // match and not compared.
  bool agrees_with(const Descriptor& other) const;
  // "broadcast of bfloat16[8, 4096] (64.0 KiB)"
  std::string text() const;
  // Equal for descriptors of one channel that agree; never 0.
  uint64_t digest() const;
};

std::string shape_text(const Descriptor& descriptor);
std::string bytes_text(int64_t num_bytes);

}  // namespace pipecomm
