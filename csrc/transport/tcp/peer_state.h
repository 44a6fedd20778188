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
  constexpr uint32_t kUnmet = after(unused, wanted, connecting, attached, missed);
  switch (state) {
    case unused:
      return {"unused", 0};
    case wanted:
      return {"wanted", after(unused)};
    case connecting:
      return {"connecting", after(unused, wanted, attached)};
    case attached:
      return {"attached", after(wanted, connecting, attached, missed)};
    case connected:
      return {"connected", after(attached)};
    case closing:
      return {"closing", after(attached, connected)};
    case missed:
      return {"missed", after(wanted, connecting, attached, closing, missed)};
    case closed:
      return {"closed", kUnmet | after(connected, closing)};
    case lost:
      return {"lost", kUnmet | after(connected, closing)};
  }
  return {};
}

}  // namespace pipecomm::tcp
