#include "transport/directory.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "message/start_thread.h"

namespace pipecomm {
namespace {

using namespace std::chrono_literals;

// Between two looks at peers that are not there yet: ranks mostly start together, or much later.
constexpr auto kFirstRest = 2ms;
constexpr auto kLongestRest = 100ms;

}  // namespace

Directory::Directory(int rank, Lookup lookup, OnFound on_found)
    : rank_(rank), lookup_(std::move(lookup)), on_found_(std::move(on_found)) {}

Directory::~Directory() { stop(); }

void Directory::start() {
  thread_ = start_thread([this] { run(); }, rank_);
}

void Directory::stop() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void Directory::want(int peer) {
  {
    std::lock_guard lock(mutex_);
    wanted_.push_back(peer);
  }
  changed_.notify_all();
}

std::string Directory::problem(int peer) const {
  std::lock_guard lock(mutex_);
  const auto found = problems_.find(peer);
  return found == problems_.end() ? "" : found->second;
}

void Directory::run() {
  Clock::duration rest = kFirstRest;
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    if (wanted_.empty() && missing_.empty()) {
      changed_.wait(lock);
    } else if (wanted_.empty()) {
      changed_.wait_for(lock, rest);
      rest = std::min<Clock::duration>(2 * rest, kLongestRest);
    }
    for (const int peer : std::exchange(wanted_, {}))
      if (!found_.contains(peer) && missing_.insert(peer).second) rest = kFirstRest;
    const std::set<int> peers = missing_;
    for (const int peer : peers) {
      if (stopping_) return;
      lock.unlock();
      const bool is_found = look_up(peer);
      lock.lock();
      if (!is_found) continue;
      missing_.erase(peer);
      found_.insert(peer);
      problems_.erase(peer);
    }
  }
}

bool Directory::look_up(int peer) {
  std::string problem = "has not made its communicator";
  try {
    if (const auto introduction = lookup_(peer)) {
      on_found_(peer, *introduction);
      return true;
    }
  } catch (const std::exception& error) {
    problem += std::string(", as far as this rank knows: ") + error.what();
  }
  std::lock_guard lock(mutex_);
  problems_[peer] = problem;
  return false;
}

}  // namespace pipecomm
