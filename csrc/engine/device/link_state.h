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
  switch (state) {
    case unused:
      return {"unused", 0};
    case waiting:
      return {"waiting", after(unused)};
    case offered:
      return {"offered", after(waiting)};
    case connecting:
      return {"connecting", after(offered)};
    case ready:
      return {"ready", after(connecting)};
    case failed:
      return {"failed", after(connecting, ready)};
    case refused:
      return {"refused", after(unused, waiting, offered)};
  }
  return {};
}

}  // namespace pipecomm
