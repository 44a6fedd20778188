#include "message/connection_events.h"

#include <algorithm>

namespace pipecomm {

void ConnectionEvents::add(ConnectionEvent event) {
  std::lock_guard lock(mutex_);
  const auto [latest, is_first] = latest_.try_emplace({event.connection, event.peer}, event);
  if (is_first) return;
  earlier_.push_back(std::exchange(latest->second, std::move(event)));
  if (earlier_.size() > kNumEarlier) earlier_.pop_front();
}

std::vector<ConnectionEvent> ConnectionEvents::all() const {
  std::vector<ConnectionEvent> events;
  {
    std::lock_guard lock(mutex_);
    events.assign(earlier_.begin(), earlier_.end());
    for (const auto& [connection, event] : latest_) events.push_back(event);
  }
  std::stable_sort(events.begin(), events.end(),
                   [](const ConnectionEvent& a, const ConnectionEvent& b) { return a.at < b.at; });
  return events;
}

}  // namespace pipecomm
