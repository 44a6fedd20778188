#include "transport/directory.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "message/start_thread.h"

namespace pipecomm {
namespace {

using namespace std::chrono_literals;

// Between two look-ups of missing peers: ranks mostly start together, or much later.
constexpr auto kFirstRest = 2ms;
constexpr auto kLongestRest = 100ms;

}  // namespace

Directory::Directory(int rank, Lookup lookup, Events events)
    : rank_(rank), lookup_(std::move(lookup)), events_(std::move(events)) {}

Directory::~Directory() { stop(); }

void Directory::start() {
  thread_ = start_thread([this] { run(); }, rank_);
}

void Directory::begin_stop() {
  std::lock_guard lock(mutex_);
  stopping_ = true;
  changed_.notify_all();
}

void Directory::stop() {
  begin_stop();
  if (thread_.joinable()) thread_.join();
}

void Directory::want(int peer) {
  std::lock_guard lock(mutex_);
  wanted_.push_back(peer);
  changed_.notify_all();
}

void Directory::miss(int peer, const std::string& why) {
  std::lock_guard lock(mutex_);
  missed_.emplace(peer, why);
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
  const auto has_news = [this] { return stopping_ || !wanted_.empty() || !missed_.empty(); };
  while (true) {
    if (missing_.empty()) {
      changed_.wait(lock, has_news);
    } else if (!changed_.wait_for(lock, rest, has_news)) {
      rest = std::min<Clock::duration>(2 * rest, kLongestRest);
    }
    if (stopping_) return;
    for (const auto& [peer, why] : std::exchange(missed_, {})) {
      if (stopping_) return;
      lock.unlock();
      events_.on_gone(peer, farewell_of(peer), why);
      lock.lock();
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
      problem = events_.on_found(peer, *introduction);
      if (problem.empty()) return true;
    }
  } catch (const std::exception& error) {
    problem += std::string(", as far as this rank knows: ") + error.what();
  }
  std::lock_guard lock(mutex_);
  problems_[peer] = problem;
  return false;
}

std::optional<std::string> Directory::farewell_of(int peer) const {
  try {
    if (const auto introduction = lookup_(peer)) return introduction->farewell;
  } catch (const std::exception&) {
    // The store cannot tell.
  }
  return std::nullopt;
}

}  // namespace pipecomm
