// A transport between threads of one process: the protocol of PeerLink over queues in memory, with
// deliveries at random moments.
#pragma once

#include "check.h"

#include "transport/tcp/peer_link.h"
#include "transport/transport.h"

namespace local {

// Connects the ranks: one inbox each.
class Hub {
 public:
  explicit Hub(int size) : inboxes_(size) {}
  int size() const { return int(inboxes_.size()); }

  struct Delivery {  // a packet, or the body of message `seq` of a channel; neither: disconnected
    int from = -1;
    std::vector<std::byte> bytes = {};
    int channel = -1;
    uint64_t seq = 0;
  };

  void send(int to, Delivery delivery) {
    Inbox& inbox = inboxes_[to];
    {
      std::lock_guard lock(inbox.mutex);
      if (inbox.shut) return;
      inbox.queue.push_back(std::move(delivery));
    }
    inbox.changed.notify_one();
  }
  // False once the inbox was shut.
  bool receive(int rank, Delivery& delivery) {
    Inbox& inbox = inboxes_[rank];
    std::unique_lock lock(inbox.mutex);
    inbox.changed.wait(lock, [&] { return inbox.shut || !inbox.queue.empty(); });
    if (inbox.shut) return false;
    delivery = std::move(inbox.queue.front());
    inbox.queue.pop_front();
    return true;
  }
  void shut(int rank) {
    Inbox& inbox = inboxes_[rank];
    std::deque<Delivery> unread;  // destroyed without the lock
    {
      std::lock_guard lock(inbox.mutex);
      inbox.shut = true;
      unread.swap(inbox.queue);
    }
    inbox.changed.notify_all();
  }
  // The end of all connections of a rank, seen from both sides.
  void disconnect(int rank) {
    for (int peer = 0; peer < size(); ++peer)
      if (peer != rank) send(peer, {.from = rank});
    for (int peer = 0; peer < size(); ++peer)
      if (peer != rank) send(rank, {.from = peer});
  }

 private:
  struct Inbox {
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<Delivery> queue;
    bool shut = false;
  };
  std::vector<Inbox> inboxes_;
};

class Transport final : public HostTransport {
 public:
  Transport(std::shared_ptr<Hub> hub, int rank, TransportEvents& events)
      : hub_(std::move(hub)), rank_(rank), events_(events), num_open_(hub_->size() - 1) {
    for (int peer = 0; peer < hub_->size(); ++peer) {
      auto& connection = connections_.emplace_back(std::make_unique<Connection>());
      connection->link =
          std::make_unique<PeerLink>(rank, peer, 1, [this, peer](std::vector<std::byte> packet) {
            hub_->send(peer, {.from = rank_, .bytes = std::move(packet)});
          });
    }
    reader_ = std::thread([this] { read(); });
  }
  ~Transport() override { close(Clock::now()); }

  void post(std::span<const RequestPtr> batch, bool /*is_async*/) override {
    for (const RequestPtr& request : batch) {
      Connection& connection = *connections_[request->peer];
      std::unique_lock lock(connection.mutex);
      if (aborted_) return;
      connection.link->number(*request);
      connection.link->post(request);
    }
    for (Connection* connection : peers()) {
      std::unique_lock lock(connection->mutex);
      flush(*connection);
      act(*connection, lock);
    }
  }
  bool tick() override {
    for (Connection* connection : peers()) {
      std::unique_lock lock(connection->mutex);
      if (!stopped_) flush(*connection);
      act(*connection, lock);
    }
    return false;
  }
  void abort(const Failure& failure) override {
    if (aborted_.exchange(true)) return;
    std::vector<RequestPtr> dropped;
    for (Connection* connection : peers()) {
      std::lock_guard lock(connection->mutex);
      if (stopped_) return;
      connection->link->say_failure(failure);
      flush(*connection);
      for (RequestPtr& request : connection->link->drop()) dropped.push_back(std::move(request));
    }
  }
  void begin_close() override {
    for (Connection* connection : peers()) {
      std::unique_lock lock(connection->mutex);
      connection->link->say_closing();
      flush(*connection);
      act(*connection, lock);
    }
  }
  void close(Deadline deadline) override {
    if (stopped_) return;
    begin_close();
    closing_ = true;
    for (Connection* connection : peers()) {
      std::unique_lock lock(connection->mutex);
      connection->link->say_goodbye();
      flush(*connection);
      act(*connection, lock);
    }
    {
      std::unique_lock lock(close_mutex_);
      close_changed_.wait_until(lock, deadline, [this] { return num_open_ == 0; });
    }
    aborted_ = stopped_ = true;
    hub_->shut(rank_);
    reader_.join();
    hub_->disconnect(rank_);
    std::vector<RequestPtr> dropped;
    for (Connection* connection : peers()) {
      std::lock_guard lock(connection->mutex);
      for (RequestPtr& request : connection->link->drop()) dropped.push_back(std::move(request));
    }
  }
  std::string describe_peer(int peer) const override {
    std::lock_guard lock(connections_[peer]->mutex);
    return connections_[peer]->link->describe();
  }

 private:
  struct Connection {
    std::mutex mutex;
    std::unique_ptr<PeerLink> link;
    bool ended = false;
    bool is_open = true;  // counted in num_open_
  };

  std::vector<Connection*> peers() const {
    std::vector<Connection*> peers;
    for (int peer = 0; peer < hub_->size(); ++peer)
      if (peer != rank_) peers.push_back(connections_[peer].get());
    return peers;
  }

  void act(Connection& connection, std::unique_lock<std::mutex>& lock) {
    const auto outcomes = connection.link->take_outcomes();
    const auto failure = connection.link->failure();
    const bool ends =
        (connection.ended || connection.link->goodbye_answered()) && connection.is_open;
    if (ends) connection.is_open = false;
    lock.unlock();
    // As a transport does: a failure explains the messages that can no longer match.
    for (const PeerLink::Outcome& outcome : outcomes)
      if (!outcome.failure) Operation::settle(*outcome.request, nullptr);
    if (failure) events_.on_remote_failure(*failure);
    for (const PeerLink::Outcome& outcome : outcomes)
      if (outcome.failure && !failure) Operation::settle(*outcome.request, outcome.failure);
    if (!ends) return;
    std::lock_guard close_lock(close_mutex_);
    --num_open_;
    close_changed_.notify_all();
  }

  // Bodies are delivered like packets, after their announcements.
  void flush(Connection& connection) {
    PeerLink& link = *connection.link;
    std::vector<RequestPtr> departing;
    do {
      link.flush();
      departing = link.take_departing();
      for (const RequestPtr& send : departing) {
        const std::byte* const data = send->data;
        hub_->send(link.peer(), {.from = rank_,
                                 .bytes = {data, data + send->descriptor.num_bytes},
                                 .channel = send->descriptor.channel,
                                 .seq = send->descriptor.seq});
        link.body_gone(send);
      }
    } while (!departing.empty());
  }

  static void take_body(PeerLink& link, const Hub::Delivery& body) {
    const std::span<std::byte> place =
        link.place_for(body.channel, body.seq, uint32_t(body.bytes.size()));
    std::copy_n(body.bytes.data(), place.size(), place.data());
    link.piece_arrived(body.channel, body.seq);
  }

  void read() {
    std::mt19937 random(rank_);
    Hub::Delivery delivery;
    while (hub_->receive(rank_, delivery)) {
      if (random() % 8 == 0) std::this_thread::yield();
      if (delivery.bytes.empty()) {
        lost(delivery.from);
      } else {
        Connection& connection = *connections_[delivery.from];
        std::unique_lock lock(connection.mutex);
        if (connection.ended) continue;
        if (delivery.channel >= 0)
          take_body(*connection.link, delivery);
        else
          connection.link->handle_packet(delivery.bytes);
        flush(connection);
        act(connection, lock);
      }
    }
  }

  void lost(int peer) {
    Connection& connection = *connections_[peer];
    std::unique_lock lock(connection.mutex);
    const bool orderly = closing_ || connection.link->state() == PeerLink::State::disconnecting;
    connection.ended = true;
    if (!orderly) {  // before the messages end one by one, which tick() may settle on its thread
      lock.unlock();
      events_.on_peer_lost(peer, "disconnected");
      lock.lock();
    }
    connection.link->lose();
    act(connection, lock);
  }

  const std::shared_ptr<Hub> hub_;
  const int rank_;
  TransportEvents& events_;
  std::vector<std::unique_ptr<Connection>> connections_;
  std::atomic<bool> aborted_{false}, closing_{false}, stopped_{false};
  std::mutex close_mutex_;
  std::condition_variable close_changed_;
  int num_open_;
  std::thread reader_;
};

}  // namespace local
