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
  switch (state) {
    case unwanted:
      return {"unwanted", 0};
    case wanted:
      return {"wanted", after(unwanted)};
    case mapped:
      return {"mapped", after(unwanted, wanted)};
    case met:
      return {"met", after(unwanted, wanted)};
    case refused:
      return {"refused", after(unwanted, wanted, mapped, met)};
    case settling:
      return {"settling", after(unwanted, wanted, mapped, met, refused)};
    case shm:
      return {"shm", after(settling)};
    case tcp:
      return {"tcp", after(settling)};
    case gone:
      return {"gone", after(settling)};
  }
  return {};
}

constexpr bool is_decided(RouteState state) { return state >= RouteState::shm; }

}  // namespace pipecomm
