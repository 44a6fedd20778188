// A host transport between the ranks of one process: matches requests in memory, and can lose a
// rank.
#pragma once

#include <atomic>
#include <cstring>
#include <deque>
#include <latch>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "transport/transport.h"

namespace fake {

using namespace pipecomm;

class Hub {
 public:
  explicit Hub(int size) : events_(size), joined_(size) {}

  void lose(int rank) {
    std::lock_guard lock(mutex_);
    lost_.insert(rank);
    for (size_t peer = 0; peer < events_.size(); ++peer)
      if (events_[peer] && int(peer) != rank)
        events_[peer].load()->on_peer_lost(rank, "connection closed");
  }
  int num_claims() {
    std::lock_guard lock(mutex_);
    return num_claims_;
  }
  int num_messages() {
    std::lock_guard lock(mutex_);
    return num_messages_;
  }

 private:
  friend class HubTransport;
  struct Queue {
    std::deque<RequestPtr> sends, recvs;
  };
  std::recursive_mutex mutex_;
  std::vector<std::atomic<TransportEvents*>> events_;
  std::map<std::tuple<int, int, int>, Queue> queues_;  // source, destination, channel
  std::set<int> lost_;
  std::latch joined_;
  int num_claims_ = 0;
  int num_messages_ = 0;
};

class HubTransport final : public HostTransport {
 public:
  // Without the hub's lock: the owner may hold one that it also takes when the hub calls it.
  HubTransport(Hub& hub, int rank, TransportEvents& events) : hub_(hub), rank_(rank) {
    hub_.events_[rank] = &events;
    hub_.joined_.arrive_and_wait();
  }
  ~HubTransport() override { leave(); }

  void post(std::vector<RequestPtr> batch, bool /*is_async*/) override {
    std::lock_guard lock(hub_.mutex_);
    for (const RequestPtr& request : batch) {
      const bool sends = request->direction == Direction::send;
      const int peer = request->peer;
      auto& queue =
          hub_.queues_[{sends ? rank_ : peer, sends ? peer : rank_, request->descriptor.channel}];
      (sends ? queue.sends : queue.recvs).push_back(request);
      hub_.num_messages_ += sends;
      while (!queue.sends.empty() && !queue.recvs.empty()) {
        const RequestPtr send = queue.sends.front(), recv = queue.recvs.front();
        queue.sends.pop_front();
        queue.recvs.pop_front();
        match(*send, *recv);
      }
    }
  }
  void claim(int peer, Direction direction, const Descriptor& descriptor) override {
    std::lock_guard lock(hub_.mutex_);
    ++hub_.num_claims_;
    if (TransportEvents* events = hub_.events_[peer])
      events->on_claim(rank_, direction, descriptor);
  }
  void tick() override {}
  void abort(const Failure& failure) override {
    std::lock_guard lock(hub_.mutex_);
    std::erase_if(hub_.queues_, [this](const auto& entry) {
      return std::get<0>(entry.first) == rank_ || std::get<1>(entry.first) == rank_;
    });
    if (hub_.lost_.contains(rank_)) return;
    for (size_t peer = 0; peer < hub_.events_.size(); ++peer)
      if (hub_.events_[peer] && int(peer) != rank_)
        hub_.events_[peer].load()->on_remote_failure(failure);
  }
  void begin_close() override {}
  void close(Deadline) override { leave(); }
  std::string describe_peer(int) const override { return "is connected"; }

 private:
  void leave() {
    std::lock_guard lock(hub_.mutex_);
    hub_.events_[rank_] = nullptr;
  }
  static void match(Request& send, Request& recv) {
    auto fail = [](Request& request, const std::string& text) {
      auto failure =
          std::make_shared<Failure>(Failure{.kind = FailureKind::mismatch, .message = text});
      name_message(*failure, request.peer, request.descriptor);
      Operation::settle(request, std::move(failure));
    };
    if (send.refuses || recv.refuses) {
      const std::string text = "refused: " + (send.refuses ? send.refusal : recv.refusal);
      send.refuses ? Operation::settle(send, nullptr) : fail(send, text);
      recv.refuses ? Operation::settle(recv, nullptr) : fail(recv, text);
    } else if (!send.descriptor.agrees_with(recv.descriptor)) {
      const std::string text = send.descriptor.text() + " against " + recv.descriptor.text();
      fail(send, text);
      fail(recv, text);
    } else {
      if (send.descriptor.num_bytes > 0)
        std::memcpy(recv.data, send.data, size_t(send.descriptor.num_bytes));
      Operation::settle(send, nullptr);
      Operation::settle(recv, nullptr);
    }
  }

  Hub& hub_;
  const int rank_;
};

}  // namespace fake
