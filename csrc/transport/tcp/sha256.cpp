#include "transport/tcp/sha256.h"

#include <bit>
#include <cstdint>
#include <vector>

namespace pipecomm {
namespace {

constexpr size_t kBlockBytes = 64;
constexpr uint32_t kRound[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

void take_block(std::array<uint32_t, 8>& state, const std::byte* block) {
  uint32_t w[64];
  for (int idx = 0; idx < 16; ++idx) {
    w[idx] = 0;
    for (int byte = 0; byte < 4; ++byte)
      w[idx] = w[idx] << 8 | std::to_integer<uint32_t>(block[4 * idx + byte]);
  }
  for (int idx = 16; idx < 64; ++idx) {
    const uint32_t old = w[idx - 15], late = w[idx - 2];
    w[idx] = w[idx - 16] + (std::rotr(old, 7) ^ std::rotr(old, 18) ^ old >> 3) + w[idx - 7] +
             (std::rotr(late, 17) ^ std::rotr(late, 19) ^ late >> 10);
  }
  auto [a, b, c, d, e, f, g, h] = state;
  for (int idx = 0; idx < 64; ++idx) {
    const uint32_t one = h + (std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25)) +
                         ((e & f) ^ (~e & g)) + kRound[idx] + w[idx];
    const uint32_t two =
        (std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
    h = g, g = f, f = e, e = d + one, d = c, c = b, b = a, a = one + two;
  }
  const uint32_t words[8] = {a, b, c, d, e, f, g, h};
  for (int idx = 0; idx < 8; ++idx) state[idx] += words[idx];
}

}  // namespace

Digest sha256(std::span<const std::byte> bytes) {
  std::array<uint32_t, 8> state = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                   0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::vector<std::byte> padded(bytes.begin(), bytes.end());
  padded.push_back(std::byte{0x80});
  while (padded.size() % kBlockBytes != kBlockBytes - 8) padded.push_back(std::byte{0});
  for (int shift = 56; shift >= 0; shift -= 8)
    padded.push_back(static_cast<std::byte>(uint64_t{bytes.size()} * 8 >> shift));
  for (size_t at = 0; at < padded.size(); at += kBlockBytes) take_block(state, &padded[at]);
  Digest digest;
  for (size_t idx = 0; idx < digest.size(); ++idx)
    digest[idx] = static_cast<std::byte>(state[idx / 4] >> (24 - 8 * (idx % 4)));
  return digest;
}

Digest hmac_sha256(std::span<const std::byte> key, std::span<const std::byte> message) {
  std::vector<std::byte> block(key.begin(), key.end());
  if (key.size() > kBlockBytes) {
    const Digest digest = sha256(key);
    block.assign(digest.begin(), digest.end());
  }
  block.resize(kBlockBytes);
  std::vector<std::byte> inner, outer;
  for (const std::byte each : block) {
    inner.push_back(each ^ std::byte{0x36});
    outer.push_back(each ^ std::byte{0x5c});
  }
  inner.insert(inner.end(), message.begin(), message.end());
  const Digest digest = sha256(inner);
  outer.insert(outer.end(), digest.begin(), digest.end());
  return sha256(outer);
}

}  // namespace pipecomm
