#include "message/failure.h"

#include <algorithm>

#include "message/bytes.h"

namespace pipecomm {
namespace {

constexpr uint32_t kMaxTextBytes = 2048;
constexpr uint32_t kMaxDims = 64;

}  // namespace

std::vector<std::byte> encode_failure(const Failure& failure) {
  std::vector<std::byte> bytes;
  const auto put = [&bytes](auto value) { append(bytes, &value, sizeof value); };
  const auto put_text = [&](const std::string& text) {
    const auto num_bytes = static_cast<uint32_t>(std::min<size_t>(text.size(), kMaxTextBytes));
    put(num_bytes);
    append(bytes, text.data(), num_bytes);
  };
  const auto put_shape = [&](const std::vector<int64_t>& shape) {
    const auto num_dims = static_cast<uint32_t>(std::min<size_t>(shape.size(), kMaxDims));
    put(num_dims);
    append(bytes, shape.data(), num_dims * sizeof(int64_t));
  };
  put(static_cast<uint8_t>(failure.kind));
  for (int field : {failure.rank, failure.peer, failure.channel, failure.origin_rank})
    put(int32_t{field});
  put(failure.seq);
  for (const std::string* text : {&failure.message, &failure.op, &failure.dtype}) put_text(*text);
  put_shape(failure.shape);
  for (const auto* side : {&failure.ours, &failure.theirs}) {
    put(uint8_t{side->has_value()});
    if (!*side) continue;
    put_text((*side)->op);
    put_text((*side)->dtype);
    put_shape((*side)->shape);
    put((*side)->num_bytes);
  }
  return bytes;
}

Failure decode_failure(std::span<const std::byte> bytes) {
  ByteReader in(bytes, "failure record");
  const auto read_text = [&in](std::string& text) {
    const auto num_bytes = in.value<uint32_t>("a length");
    if (num_bytes > kMaxTextBytes) in.fail("text too long");
    const auto chars = in.take(num_bytes, "a text");
    text.assign(reinterpret_cast<const char*>(chars.data()), chars.size());
  };
  const auto read_shape = [&in](std::vector<int64_t>& shape) {
    const auto num_dims = in.value<uint32_t>("a length");
    if (num_dims > kMaxDims) in.fail("too many dims");
    for (uint32_t dim = 0; dim < num_dims; ++dim) shape.push_back(in.value<int64_t>("the shape"));
  };
  Failure failure;
  const auto kind = in.value<uint8_t>("its kind");
  if (kind > static_cast<uint8_t>(FailureKind::aborted)) in.fail("unknown kind");
  failure.kind = static_cast<FailureKind>(kind);
  for (int* field : {&failure.rank, &failure.peer, &failure.channel, &failure.origin_rank})
    *field = in.value<int32_t>("a number");
  failure.seq = in.value<int64_t>("a number");
  for (std::string* text : {&failure.message, &failure.op, &failure.dtype}) read_text(*text);
  read_shape(failure.shape);
  for (auto* side : {&failure.ours, &failure.theirs}) {
    const auto is_there = in.value<uint8_t>("a side");
    if (is_there > 1) in.fail("a side that is neither there nor not");
    if (is_there == 0) continue;
    MessageDescription& description = side->emplace();
    read_text(description.op);
    read_text(description.dtype);
    read_shape(description.shape);
    description.num_bytes = in.value<int64_t>("a number");
  }
  if (!in.at_end()) in.fail("bytes at the end");
  return failure;
}

}  // namespace pipecomm
