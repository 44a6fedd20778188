#include "engine/failure.h"

#include <algorithm>
#include <cstring>

namespace pipecomm {
namespace {

constexpr uint32_t kMaxTextBytes = 2048;
constexpr uint32_t kMaxDims = 64;

class Writer {
 public:
  template <class T>
  void value(T v) {
    bytes_.append(reinterpret_cast<const char*>(&v), sizeof v);
  }
  void text(const std::string& text) {
    const auto num_bytes = static_cast<uint32_t>(std::min<size_t>(text.size(), kMaxTextBytes));
    value(num_bytes);
    bytes_.append(text, 0, num_bytes);
  }
  std::string take() { return std::move(bytes_); }

 private:
  std::string bytes_;
};

class Reader {
 public:
  Reader(const char* data, size_t num_bytes) : data_(data), left_(num_bytes) {}
  template <class T>
  T value() {
    T v;
    std::memcpy(&v, bytes(sizeof v), sizeof v);
    return v;
  }
  std::string text() {
    const auto num_bytes = value<uint32_t>();
    if (num_bytes > kMaxTextBytes)
      throw std::runtime_error("malformed failure record: text too long");
    return std::string(bytes(num_bytes), num_bytes);
  }
  bool at_end() const { return left_ == 0; }

 private:
  const char* bytes(size_t num_bytes) {
    if (num_bytes > left_) throw std::runtime_error("malformed failure record: cut off");
    const char* first = data_;
    data_ += num_bytes;
    left_ -= num_bytes;
    return first;
  }
  const char* data_;
  size_t left_;
};

}  // namespace

std::string encode_failure(const Failure& failure) {
  Writer out;
  out.value(static_cast<uint8_t>(failure.kind));
  for (int field : {failure.rank, failure.peer, failure.channel, failure.origin_rank})
    out.value(int32_t{field});
  out.value(failure.seq);
  out.text(failure.message);
  out.text(failure.op);
  out.text(failure.dtype);
  const auto num_dims = static_cast<uint32_t>(std::min<size_t>(failure.shape.size(), kMaxDims));
  out.value(num_dims);
  for (uint32_t dim = 0; dim < num_dims; ++dim) out.value(failure.shape[dim]);
  return out.take();
}

Failure decode_failure(const char* data, size_t num_bytes) {
  Reader in(data, num_bytes);
  Failure failure;
  const auto kind = in.value<uint8_t>();
  if (kind > static_cast<uint8_t>(FailureKind::aborted))
    throw std::runtime_error("malformed failure record: kind");
  failure.kind = static_cast<FailureKind>(kind);
  for (int* field : {&failure.rank, &failure.peer, &failure.channel, &failure.origin_rank})
    *field = in.value<int32_t>();
  failure.seq = in.value<int64_t>();
  failure.message = in.text();
  failure.op = in.text();
  failure.dtype = in.text();
  const auto num_dims = in.value<uint32_t>();
  if (num_dims > kMaxDims) throw std::runtime_error("malformed failure record: too many dims");
  for (uint32_t dim = 0; dim < num_dims; ++dim) failure.shape.push_back(in.value<int64_t>());
  if (!in.at_end()) throw std::runtime_error("malformed failure record: bytes at the end");
  return failure;
}

}  // namespace pipecomm
