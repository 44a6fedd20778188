// The greetings that the two ends of a new connection exchange before it carries packets. Each
// proves that it is a rank of this communicator, since an address may lead to another host, or a
// port to another program. The key that all ranks share is never sent. Each end draws a nonce, and
// the other's next word carries a keyed hash of both nonces and of the whole word: the proof is
// valid for this word of this end of this connection only, and cannot be replayed.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "transport/tcp/sha256.h"

namespace pipecomm::tcp {

using Key = std::array<std::byte, 32>;
using Nonce = std::array<std::byte, 16>;

// The end that connects is the guest, the other end the listener.
enum class Word : uint16_t {
  hello = 1,  // guest: a rank wants to connect; proves nothing yet
  welcome,    // listener: the guest may continue
  ready,      // guest: the listener may use the connection, if it wants it
  taken,      // listener: the guest may use it as well
  gone,       // listener: the two will not connect any more
};

struct Nonces {
  Nonce guest{}, listener{};
};

struct Greeting {
  uint32_t magic = 0;
  uint16_t version = 0;
  Word word{};
  uint32_t from = 0, to = 0;
  uint32_t attempt = 0;  // of the guest, counted for this listener from 1
  uint32_t reserved = 0;
  Nonce nonce{};  // of the sender
  Digest proof{};
};
static_assert(sizeof(Greeting) == 72);

Nonce draw_nonce();  // throws std::system_error
Greeting make_greeting(Word word, int from, int to, uint32_t attempt, const Nonces& nonces,
                       const Key& key);
// Whether it comes from rank `from` of this version and is meant for `to`; the proof identifies the
// communicator.
bool is_greeting(const Greeting& greeting, int from, int to);
bool is_proven(const Greeting& greeting, const Nonces& nonces, const Key& key);

}  // namespace pipecomm::tcp
