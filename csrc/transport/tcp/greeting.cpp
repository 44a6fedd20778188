#include "transport/tcp/greeting.h"

#include <sys/random.h>

#include <cerrno>
#include <cstring>
#include <system_error>

#include "transport/tcp/wire.h"

namespace pipecomm::tcp {
namespace {

constexpr uint32_t kMagic = 0x32484350;  // "PCH2"

Digest proof_of(const Greeting& greeting, const Nonces& nonces, const Key& key) {
  constexpr size_t kNumSaid = offsetof(Greeting, nonce);
  std::array<std::byte, kNumSaid + sizeof nonces> message;
  std::memcpy(message.data(), &greeting, kNumSaid);
  std::memcpy(message.data() + kNumSaid, &nonces, sizeof nonces);
  return hmac_sha256(key, message);
}

}  // namespace

Nonce draw_nonce() {
  Nonce nonce;
  if (getrandom(nonce.data(), nonce.size(), 0) != static_cast<ssize_t>(nonce.size()))
    throw std::system_error(errno, std::generic_category(), "cannot draw a random number");
  return nonce;
}

Greeting make_greeting(Word word, int from, int to, uint32_t attempt, const Nonces& nonces,
                       const Key& key) {
  const bool is_guest = word == Word::hello || word == Word::ready;
  Greeting greeting{.magic = kMagic,
                    .version = wire::kVersion,
                    .word = word,
                    .from = static_cast<uint32_t>(from),
                    .to = static_cast<uint32_t>(to),
                    .attempt = attempt,
                    .nonce = is_guest ? nonces.guest : nonces.listener};
  if (word != Word::hello) greeting.proof = proof_of(greeting, nonces, key);
  return greeting;
}

bool is_greeting(const Greeting& greeting, int from, int to) {
  return greeting.magic == kMagic && greeting.version == wire::kVersion &&
         greeting.from == static_cast<uint32_t>(from) && greeting.to == static_cast<uint32_t>(to);
}

bool is_proven(const Greeting& greeting, const Nonces& nonces, const Key& key) {
  const Digest proof = proof_of(greeting, nonces, key);
  std::byte difference{};  // compares in constant time
  for (size_t idx = 0; idx < proof.size(); ++idx) difference |= proof[idx] ^ greeting.proof[idx];
  return difference == std::byte{0};
}

}  // namespace pipecomm::tcp
