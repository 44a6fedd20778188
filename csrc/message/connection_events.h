// The states that the connections of a rank have entered, to find out after a hang where each of them
// stands. Each kind of connection has one enum of states, with a StateRule for each of them.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "message/operation.h"

namespace pipecomm {

// The name of a state, and the states that it may follow.
struct StateRule {
  const char* name;
  uint32_t predecessors;
};
template <class... States>
constexpr uint32_t after(States... states) {
  return (0u | ... | (1u << static_cast<unsigned>(states)));
}

struct ConnectionEvent {
  Clock::time_point at;
  std::string connection;  // its kind, and what else tells it from others with the same peer
  int peer = -1;           // -1: of several ranks
  std::string state;       // that it has entered
  std::string detail;      // why, or by what; may be empty
  // What the transport says of the peer now, as a predicate; for the reader of the latest event.
  std::string peer_now{};
};

// Thread-safe. Connections change so rarely that an event may take a lock and memory.
class ConnectionEvents {
 public:
  // The latest event of each connection is kept, and this many earlier ones.
  static constexpr size_t kNumEarlier = 1024;

  // Gives a connection its next state and records that. With the lock that guards `state`. Throws
  // std::logic_error if the next state may not follow the present one.
  template <class Held, class State>
  void enter(Held& state, State next, const std::string& connection, int peer,
             const std::string& detail = "") {
    const State present = state;
    const StateRule rule = rule_of(next);
    if ((rule.predecessors & after(present)) == 0)
      throw std::logic_error(connection + ", peer " + std::to_string(peer) +
                             ": no transition from " + rule_of(present).name + " to " + rule.name);
    add({Clock::now(), connection, peer, rule.name, detail});
    state = next;
  }

  // All that are kept, in the order of their time.
  std::vector<ConnectionEvent> all() const;

 private:
  void add(ConnectionEvent event);

  mutable std::mutex mutex_;
  std::map<std::pair<std::string, int>, ConnectionEvent> latest_;
  std::deque<ConnectionEvent> earlier_;  // those that others of their connection have followed
};

}  // namespace pipecomm
