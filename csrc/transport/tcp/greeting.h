// What the two ends of a new connection say to each other before it carries packets, and how each proves
// that it is a rank of this communicator: an address may lead to another host, or a port to another
// program. The key that all ranks share is never said. Each end draws a nonce, and the other's next word
// carries a keyed hash of both nonces and of all that the word says: it holds for this word of this
// end of this connection, and nobody can use it again.
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
  welcome,    // listener: go on
  ready,      // guest: the connection is the listener's, if it wants it
  taken,      // listener: it is the guest's as well
  gone,       // listener: the two are through with each other
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
  Nonce nonce{};  // of the end that says this
  Digest proof{};
};
static_assert(sizeof(Greeting) == 72);

Nonce draw_nonce();  // throws std::system_error
Greeting make_greeting(Word word, int from, int to, uint32_t attempt, const Nonces& nonces,
                       const Key& key);
// Whether it comes from a rank of this version that speaks to this one; of which communicator shows in
// the proof.
bool is_greeting(const Greeting& greeting, int from, int to);
bool is_proven(const Greeting& greeting, const Nonces& nonces, const Key& key);

}  // namespace pipecomm::tcp
