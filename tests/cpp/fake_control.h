// A host transport between the ranks of one process: matches requests in memory, and can lose a
// rank. Events of peers are reported on a thread of the hub, as by real transports: a failing rank
// holds locks that another failing rank must not wait for.
#pragma once

#include "check.h"

#include "message/matching.h"
#include "transport/transport.h"

namespace fake {

class Hub {
 public:
  explicit Hub(int size) : events_(size), joined_(size), messenger_([this] { deliver_news(); }) {}
  ~Hub() {
    {
      std::lock_guard lock(news_mutex_);
      stopping_ = true;
    }
    news_changed_.notify_one();
    messenger_.join();
  }

  void lose(int rank) {
    {
      std::lock_guard lock(mutex_);
      lost_.insert(rank);
    }
    for (int peer = 0; peer < int(events_.size()); ++peer)
      if (peer != rank)
        tell(peer,
             [rank](TransportEvents& events) { events.on_peer_lost(rank, "connection closed"); });
  }
  int num_control() {
    std::lock_guard lock(mutex_);
    return num_control_;
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
  using News = std::function<void(TransportEvents&)>;

  void tell(int peer, News news) {
    {
      std::lock_guard lock(news_mutex_);
      news_.emplace_back(peer, std::move(news));
    }
    news_changed_.notify_one();
  }
  void deliver_news() {
    std::unique_lock lock(news_mutex_);
    while (true) {
      news_changed_.wait(lock, [this] { return stopping_ || !news_.empty(); });
      if (stopping_) return;
      const auto [peer, news] = std::move(news_.front());
      news_.pop_front();
      lock.unlock();
      {
        std::lock_guard delivery_lock(delivery_mutex_);
        if (TransportEvents* const events = events_[peer]) news(*events);
      }
      lock.lock();
    }
  }
  // Nothing is delivered to this rank any more.
  void leave(int rank) {
    std::lock_guard delivery_lock(delivery_mutex_);
    events_[rank] = nullptr;
  }

  std::recursive_mutex mutex_;
  std::vector<std::atomic<TransportEvents*>> events_;
  std::map<std::tuple<int, int, int>, Queue> queues_;  // source, destination, channel
  std::set<int> lost_;
  std::set<std::pair<int, int>> closed_;  // a rank, and a peer that knows it
  std::latch joined_;
  int num_control_ = 0;
  int num_messages_ = 0;

  std::mutex news_mutex_;
  std::condition_variable news_changed_;
  std::deque<std::pair<int, News>> news_;  // for rank
  bool stopping_ = false;
  std::mutex delivery_mutex_;  // held while an event is reported
  std::thread messenger_;
};

class HubTransport final : public HostTransport {
 public:
  // Without the hub's lock: the owner may hold one that it also takes when the hub calls it.
  HubTransport(Hub& hub, int rank, TransportEvents& events) : hub_(hub), rank_(rank) {
    hub_.events_[rank] = &events;
    hub_.joined_.arrive_and_wait();
  }
  ~HubTransport() override { hub_.leave(rank_); }

  void post(std::span<const RequestPtr> batch, bool /*is_async*/) override {
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
  void send_control(int peer, std::span<const std::byte> message) override {
    {
      std::lock_guard lock(hub_.mutex_);
      ++hub_.num_control_;
    }
    hub_.tell(peer, [rank = rank_, message = std::vector(message.begin(), message.end())](
                        TransportEvents& events) { events.on_control(rank, message); });
  }
  bool tick() override { return false; }
  void abort(const Failure& failure) override {
    std::lock_guard lock(hub_.mutex_);
    std::erase_if(hub_.queues_, [this](const auto& entry) {
      return std::get<0>(entry.first) == rank_ || std::get<1>(entry.first) == rank_;
    });
    if (hub_.lost_.contains(rank_)) return;
    for (int peer = 0; peer < int(hub_.events_.size()); ++peer)
      if (peer != rank_)
        hub_.tell(peer, [failure](TransportEvents& events) { events.on_remote_failure(failure); });
  }
  void begin_close() override {}
  // Peers learn of it after what this rank has sent before.
  void close(Deadline) override {
    for (int peer = 0; peer < int(hub_.events_.size()); ++peer)
      hub_.tell(peer, [this_hub = &hub_, known = std::pair(rank_, peer)](TransportEvents&) {
        std::lock_guard lock(this_hub->mutex_);
        this_hub->closed_.insert(known);
      });
    hub_.leave(rank_);
  }
  bool has_closed(int peer) const override {
    std::lock_guard lock(hub_.mutex_);
    return hub_.closed_.contains({peer, rank_});
  }
  std::string describe_peer(int) const override { return "is connected"; }

 private:
  static void match(Request& send, Request& recv) {
    const int sender = recv.peer, receiver = send.peer;
    if (send.refuses || recv.refuses) {
      Operation::settle(send, send.refuses ? nullptr : refusal_failure(sender, send, recv.refusal));
      Operation::settle(recv,
                        recv.refuses ? nullptr : refusal_failure(receiver, recv, send.refusal));
    } else if (!send.descriptor.agrees_with(recv.descriptor)) {
      Operation::settle(send, mismatch_failure(sender, send, recv.descriptor));
      Operation::settle(recv, mismatch_failure(receiver, recv, send.descriptor));
    } else {
      const int64_t num_bytes = send.descriptor.num_bytes;
      if (num_bytes > 0) std::memcpy(recv.data, send.data, size_t(num_bytes));
      Operation::settle(send, nullptr);
      Operation::settle(recv, nullptr);
    }
  }

  Hub& hub_;
  const int rank_;
};

}  // namespace fake
