// The states of a communicator.
#pragma once

#include "message/connection_events.h"

namespace pipecomm {

enum class CommunicatorState : uint8_t {
  open,
  failed,   // calls raise its failure
  closing,  // nothing more may be posted; it may still fail
  closed,
};

constexpr StateRule rule_of(CommunicatorState state) {
  using enum CommunicatorState;
  switch (state) {
    case open:
      return {"open", 0};
    case failed:
      return {"failed", after(open)};
    case closing:
      return {"closing", after(open, failed)};
    case closed:
      return {"closed", after(closing)};
  }
  return {};
}

}  // namespace pipecomm
