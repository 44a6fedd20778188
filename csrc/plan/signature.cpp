#include "plan/signature.h"

#include <bit>

namespace pipecomm {

// The finaliser of splitmix64 after each word: each bit of the value affects each bit of the state.
Signature& Signature::add(int64_t value) {
  uint64_t x = state_ * 0xd1342543de82ef95u + static_cast<uint64_t>(value) + 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  state_ = x ^ (x >> 31);
  return *this;
}

Signature& Signature::add(std::string_view text) {
  add(static_cast<int64_t>(text.size()));
  for (char c : text) add(static_cast<int64_t>(static_cast<unsigned char>(c)));
  return *this;
}

Signature& Signature::add(std::span<const int64_t> values) {
  add(static_cast<int64_t>(values.size()));
  for (int64_t value : values) add(value);
  return *this;
}

Signature& Signature::add(DType dtype) {
  return add(int64_t{dtype.code}).add(int64_t{dtype.itemsize});
}

Signature& Signature::add(const Scale& scale) {
  return add(static_cast<int64_t>(scale.kind)).add(std::bit_cast<int64_t>(scale.factor));
}

}  // namespace pipecomm
