// How a descriptor travels.
#pragma once

#include <cstdint>
#include <vector>

#include "message/bytes.h"
#include "message/descriptor.h"

namespace pipecomm {

struct WireDescriptor {
  uint8_t op, dtype, num_dims, channel;
  uint32_t reserved;
  uint64_t seq;
  uint64_t signature;
  int64_t num_bytes;
  int64_t shape[kMaxDescriptorDims];
};
static_assert(sizeof(WireDescriptor) == 32 + 8 * kMaxDescriptorDims);

void append(std::vector<std::byte>& bytes, const Descriptor& descriptor);
// Throws std::runtime_error if a size is negative.
Descriptor read_descriptor(ByteReader& in);

}  // namespace pipecomm
