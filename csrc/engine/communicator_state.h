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
  constexpr StateRule kRules[] = {
      {"open", 0},
      {"failed", after(open)},
      {"closing", after(open, failed)},
      {"closed", after(closing)},
  };
  return kRules[static_cast<size_t>(state)];
}

}  // namespace pipecomm
