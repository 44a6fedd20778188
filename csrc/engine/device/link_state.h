// The states of a link: of the NCCL communicator that some ranks make together.
#pragma once

#include "message/connection_events.h"

namespace pipecomm {

enum class LinkState : uint8_t {
  unused,
  waiting,     // for the other ranks of the link to ask for it
  offered,     // it will be made, or one of its ranks refuses it
  connecting,  // NCCL connects its ranks
  ready,
  failed,
  refused,
};

constexpr StateRule rule_of(LinkState state) {
  using enum LinkState;
  constexpr StateRule kRules[] = {
      {"unused", 0},
      {"waiting", after(unused)},
      {"offered", after(waiting)},
      {"connecting", after(offered)},
      {"ready", after(connecting)},
      {"failed", after(connecting, ready)},
      {"refused", after(unused, waiting, offered)},
  };
  return kRules[static_cast<size_t>(state)];
}

}  // namespace pipecomm
