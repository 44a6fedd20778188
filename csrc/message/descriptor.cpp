#include "message/descriptor.h"

#include <algorithm>
#include <cstdio>
#include <utility>

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
    {OpCode::all_reduce, "all_reduce"},
    {OpCode::reduce, "reduce"},
    {OpCode::reduce_scatter, "reduce_scatter"},
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
  // The ranks of a collective may hold tensors of different shapes. The signature covers everything
  // that they must share.
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

std::string Descriptor::text() const {
  if (op == OpCode::barrier) return "barrier";
  const int num_shown = std::min<int>(num_dims, kMaxDescriptorDims);
  std::string tensor =
      dtype_name(dtype) + to_string(std::vector(shape.begin(), shape.begin() + num_shown));
  if (num_dims > num_shown) tensor.insert(tensor.size() - 1, ", ...");
  if (op == OpCode::p2p) return tensor + " (" + bytes_text(num_bytes) + ")";
  return std::string(op_name(op)) + " of " + tensor + " with a message of " + bytes_text(num_bytes);
}

// Four small fields, four bytes of padding, then the other fields.
void append(std::vector<std::byte>& bytes, const Descriptor& d) {
  const uint8_t small[8] = {static_cast<uint8_t>(d.op), d.dtype, d.num_dims, d.channel};
  append(bytes, small, sizeof small);
  for (const uint64_t value : {d.seq, d.signature, uint64_t(d.num_bytes)})
    append(bytes, &value, sizeof value);
  append(bytes, d.shape.data(), sizeof d.shape);
}

Descriptor read_descriptor(ByteReader& in) {
  const auto small = in.value<std::array<uint8_t, 8>>("a descriptor");
  Descriptor d{
      .op = OpCode(small[0]), .dtype = small[1], .num_dims = small[2], .channel = small[3]};
  d.seq = in.value<uint64_t>("a descriptor");
  d.signature = in.value<uint64_t>("a descriptor");
  d.num_bytes = in.value<int64_t>("a descriptor");
  d.shape = in.value<decltype(d.shape)>("a descriptor");
  if (d.num_bytes < 0) in.fail("a message of negative size");
  if (std::ranges::min(d.shape) < 0) in.fail("a negative extent");
  return d;
}

}  // namespace pipecomm
