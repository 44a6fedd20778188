// The states of the route to a peer.
#pragma once

#include "message/connection_events.h"

namespace pipecomm {

enum class RouteState : uint8_t {
  unwanted,
  wanted,    // the peer's record is looked up
  mapped,    // this rank has mapped the peer's memory, but not the peer this rank's
  met,       // the peer has mapped this rank's memory, but this rank not the peer's
  refused,   // the peer takes no part, or the two share no memory and may not use TCP
  settling,  // the way is known, and messages that waited are being posted
  // Decided: how messages travel.
  shm,
  tcp,
  gone,  // the peer has closed its communicator or died before the two met
};

constexpr StateRule rule_of(RouteState state) {
  using enum RouteState;
  constexpr StateRule kRules[] = {
      {"unwanted", 0},
      {"wanted", after(unwanted)},
      {"mapped", after(unwanted, wanted)},
      {"met", after(unwanted, wanted)},
      {"refused", after(unwanted, wanted, mapped, met)},
      {"settling", after(unwanted, wanted, mapped, met, refused)},
      {"shm", after(settling)},
      {"tcp", after(settling)},
      {"gone", after(settling)},
  };
  return kRules[static_cast<size_t>(state)];
}

constexpr bool is_decided(RouteState state) { return state >= RouteState::shm; }

}  // namespace pipecomm
