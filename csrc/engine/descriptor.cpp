#include "engine/descriptor.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "plan/dtype.h"

namespace pipecomm {

const char* op_name(OpCode op) {
  switch (op) {
    case OpCode::p2p:
      return "p2p";
    case OpCode::barrier:
      return "barrier";
    case OpCode::broadcast:
      return "broadcast";
    case OpCode::all_to_all:
      return "all_to_all";
    case OpCode::all_gather:
      return "all_gather";
    case OpCode::exchange:
      return "exchange";
    case OpCode::relay:
      return "relay";
  }
  return "unknown operation";
}

bool Descriptor::agrees_with(const Descriptor& other) const {
  if (op != other.op || signature != other.signature || num_bytes != other.num_bytes) return false;
  // The ranks of a collective may hold tensors of different shapes; what they must share is in the
  // signature.
  return op != OpCode::p2p ||
         (dtype == other.dtype && num_dims == other.num_dims && shape == other.shape);
}

uint64_t Descriptor::digest() const {
  uint64_t hash = 0x9e3779b97f4a7c15ull;
  auto mix = [&hash](uint64_t value) {
    hash ^= value;
    hash *= 0xbf58476d1ce4e5b9ull;
    hash ^= hash >> 29;
  };
  mix(static_cast<uint64_t>(op) << 8 | channel);
  mix(signature);
  mix(static_cast<uint64_t>(num_bytes));
  if (op == OpCode::p2p) {
    mix(uint64_t{dtype} << 8 | num_dims);
    for (int64_t extent : shape) mix(static_cast<uint64_t>(extent));
  }
  return hash == 0 ? 1 : hash;
}

std::string bytes_text(int64_t num_bytes) {
  if (num_bytes < 1024) return std::to_string(num_bytes) + " B";
  static constexpr const char* kUnits[] = {"KiB", "MiB", "GiB", "TiB", "PiB"};
  double value = static_cast<double>(num_bytes);
  const char* unit = "B";
  for (const char* next : kUnits) {
    if (value < 1024) break;
    value /= 1024;
    unit = next;
  }
  char text[32];
  std::snprintf(text, sizeof text, "%.1f %s", value, unit);
  return text;
}

std::string shape_text(const Descriptor& descriptor) {
  std::string text = "[";
  const int num_shown = std::min<int>(descriptor.num_dims, kMaxDescriptorDims);
  for (int dim = 0; dim < num_shown; ++dim) {
    if (dim > 0) text += ", ";
    text += std::to_string(descriptor.shape[dim]);
  }
  if (descriptor.num_dims > num_shown) text += ", ...";
  return text + "]";
}

std::string Descriptor::text() const {
  if (op == OpCode::barrier) return "barrier";
  const std::string tensor = std::string(dtype_name(dtype)) + shape_text(*this);
  if (op == OpCode::p2p) return tensor + " (" + bytes_text(num_bytes) + ")";
  return std::string(op_name(op)) + " of " + tensor + " with a message of " + bytes_text(num_bytes);
}

}  // namespace pipecomm
