// An owner of a transport that ignores all events.
#pragma once

#include "check.h"
#include "transport/transport.h"

struct Listener : TransportEvents {
  void on_peer_lost(int, const std::string&) override {}
  void on_remote_failure(const Failure&) override {}
  void on_refused(int, const std::string&) override {}
  void on_broken(const std::string&) override {}
};
