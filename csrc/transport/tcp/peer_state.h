// The states of the TCP connection to a peer.
#pragma once

#include "message/connection_events.h"

namespace pipecomm::tcp {

enum class PeerState : uint8_t {
  unused,
  wanted,      // where the peer listens is not known
  connecting,  // attempts are made, by this rank or by the peer
  attached,    // there is a connection, but the peer has not sent a packet on it
  connected,   // the peer has
  closing,     // the peer will post nothing more; its earlier packets may still arrive
  missed,      // no process listens for the peer: its record is looked up once more
  // Over: nothing is read any more.
  closed,
  lost,
};

constexpr StateRule rule_of(PeerState state) {
  using enum PeerState;
  constexpr uint32_t kNotOver = after(wanted, connecting, attached, connected, closing, missed);
  constexpr StateRule kRules[] = {
      {"unused", 0},
      {"wanted", after(unused)},
      {"connecting", after(unused, wanted, attached)},
      {"attached", after(wanted, connecting, attached, missed)},
      {"connected", after(attached)},
      {"closing", after(attached, connected)},
      {"missed", after(wanted, connecting, attached, closing, missed)},
      {"closed", kNotOver},
      {"lost", kNotOver},
  };
  return kRules[static_cast<size_t>(state)];
}

}  // namespace pipecomm::tcp
