#include "message/descriptor.h"

#include <algorithm>
#include <cstdio>
#include <utility>

#include "message/descriptor_bytes.h"
#include "plan/dtype.h"
#include "plan/signature.h"

namespace pipecomm {

namespace {

constexpr std::pair<OpCode, const char*> kOpNames[] = {
    {OpCode::p2p, "p2p"},
    {OpCode::barrier, "barrier"},
    {OpCode::broadcast, "broadcast"},
    {OpCode::all_to_all, "all_to_all"},
    {OpCode::all_gather, "all_gather"},
    {OpCode::exchange, "exchange"},
    {OpCode::relay, "relay"},
};

}  // namespace

const char* op_name(OpCode op) {
  for (const auto& [code, name] : kOpNames)
    if (code == op) return name;
  return "unknown operation";
}

std::optional<OpCode> op_code(std::string_view op_name) {
  for (const auto& [code, name] : kOpNames)
    if (name == op_name) return code;
  return std::nullopt;
}

bool Descriptor::agrees_with(const Descriptor& other) const {
  if (op != other.op || signature != other.signature || num_bytes != other.num_bytes) return false;
  // The ranks of a collective may hold tensors of different shapes. The signature covers all that
  // they must share.
  return op != OpCode::p2p ||
         (dtype == other.dtype && num_dims == other.num_dims && shape == other.shape);
}

uint64_t Descriptor::digest() const {
  Signature hash;
  hash.add(int64_t{static_cast<uint8_t>(op)} << 8 | channel);
  hash.add(static_cast<int64_t>(signature)).add(num_bytes);
  if (op == OpCode::p2p) {
    hash.add(int64_t{dtype} << 8 | num_dims);
    for (int64_t extent : shape) hash.add(extent);
  }
  return hash.value();
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

void append(std::vector<std::byte>& bytes, const Descriptor& d) {
  WireDescriptor wire{static_cast<uint8_t>(d.op),
                      d.dtype,
                      d.num_dims,
                      d.channel,
                      0,
                      d.seq,
                      d.signature,
                      d.num_bytes,
                      {}};
  std::ranges::copy(d.shape, wire.shape);
  append(bytes, &wire, sizeof wire);
}

Descriptor read_descriptor(ByteReader& in) {
  const auto wire = in.value<WireDescriptor>("a descriptor");
  Descriptor d{.op = static_cast<OpCode>(wire.op),
               .dtype = wire.dtype,
               .num_dims = wire.num_dims,
               .channel = wire.channel,
               .seq = wire.seq,
               .signature = wire.signature,
               .num_bytes = wire.num_bytes};
  std::ranges::copy(wire.shape, d.shape.begin());
  if (d.num_bytes < 0) in.fail("a message of negative size");
  if (std::ranges::any_of(d.shape, [](int64_t extent) { return extent < 0; }))
    in.fail("a negative extent");
  return d;
}

}  // namespace pipecomm
