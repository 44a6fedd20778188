// Writing and reading the bytes of records that ranks exchange: little-endian, packed.
#pragma once

#include <bit>
#include <cstddef>
#include <cstring>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

namespace pipecomm {

static_assert(std::endian::native == std::endian::little, "the wire format is little-endian");

inline void append(std::vector<std::byte>& bytes, const void* data, size_t num_bytes) {
  const size_t old_size = bytes.size();
  bytes.resize(old_size + num_bytes);  // g++ 12 wrongly warns about an insert
  if (num_bytes > 0) std::memcpy(bytes.data() + old_size, data, num_bytes);
}

// Reads bytes from the front and never beyond the end. Errors are std::runtime_error:
// "malformed packet: a descriptor is cut off".
class ByteReader {
 public:
  ByteReader(std::span<const std::byte> bytes, const char* record)
      : left_(bytes), record_(record) {}

  bool at_end() const { return left_.empty(); }
  std::span<const std::byte> take(size_t num_bytes, const char* what) {
    if (num_bytes > left_.size()) fail(std::string(what) + " is cut off");
    const auto taken = left_.first(num_bytes);
    left_ = left_.subspan(num_bytes);
    return taken;
  }
  template <class T>
  T value(const char* what) {
    T value;
    std::memcpy(&value, take(sizeof value, what).data(), sizeof value);
    return value;
  }
  [[noreturn]] void fail(const std::string& what) const {
    throw std::runtime_error(std::string("malformed ") + record_ + ": " + what);
  }

 private:
  std::span<const std::byte> left_;
  const char* const record_;
};

}  // namespace pipecomm
