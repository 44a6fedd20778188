#include "transport/c10d/c10d_transport.h"

#include <ATen/ops/from_blob.h>

#include "message/start_thread.h"
#include "plan/signature.h"

namespace pipecomm {
namespace {

// Tags of our private backend. A body's tag carries its channel, so that two messages whose hashes
// collide are still posted in the same order on both ends.
constexpr int kPacketTag = 1;
constexpr int kBodyTagBit = 1 << 30;
constexpr int kBodyHashBits = 26;
static_assert(kCollectiveChannel < 1 << 4);  // the control channel carries no bodies

// Deadlines are ours: a wait that expires inside gloo closes every connection.
constexpr auto kForever = std::chrono::hours(24 * 3650);

// How long to wait for a body whose peer has gone.
constexpr auto kLastBodyLimit = std::chrono::milliseconds(200);

at::Tensor bytes_view(std::byte* data, int64_t num_bytes) {
  return at::from_blob(data, {num_bytes}, at::TensorOptions().dtype(at::kByte));
}

int body_tag(const Descriptor& descriptor) {
  Signature hash;
  hash.add(static_cast<int64_t>(descriptor.digest())).add(static_cast<int64_t>(descriptor.seq));
  return kBodyTagBit | descriptor.channel << kBodyHashBits |
         static_cast<int>(hash.value() >> (64 - kBodyHashBits));
}

// gloo's texts begin with "[path:line] ".
std::string reason_of(const std::exception& error) {
  const std::string text = error.what();
  const size_t end = text.starts_with('[') ? text.find("] ") : std::string::npos;
  return end == std::string::npos ? text : text.substr(end + 2);
}

}  // namespace

C10dTransport::C10dTransport(c10::intrusive_ptr<c10d::Backend> backend, int rank, int size,
                             uint32_t epoch, TransportEvents& events, Watches watches)
    : backend_(std::move(backend)), rank_(rank), size_(size), events_(events), num_open_(size - 1) {
  for (int peer = 0; peer < size_; ++peer) {
    Connection& connection = *connections_.emplace_back(std::make_unique<Connection>());
    connection.link = std::make_unique<PeerLink>(
        rank_, peer, epoch, [this, peer](std::vector<std::byte> bytes, uint64_t number) {
          send_packet(peer, std::move(bytes), number);
        });
    if (const auto watch = watches.find(peer); watch != watches.end())
      connection.watch = std::move(watch->second);
  }
  if (size_ == 1) return;
  for_each_peer([this](int peer, Connection& connection) {
    for (int slot = 0; slot < kNumSlots; ++slot) {
      connection.slots[slot].resize(wire::kMaxPacketBytes);
      try {
        post_slot(peer, slot);
      } catch (const std::exception&) {
        // The peer is gone already; its reader is about to say so.
      }
    }
  });
  std::unique_lock gate(starting_mutex_);
  try {
    for_each_peer([this](int peer, Connection& connection) {
      connection.reader = start_thread([this, peer] { read_packets(peer); }, rank_);
    });
    body_thread_ = start_thread([this] { wait_for_bodies(); }, rank_);
  } catch (const PipeCommException& error) {
    abort(*error.failure());
    stopping_ = true;
    gate.unlock();
    stop();
    throw;
  }
}

C10dTransport::~C10dTransport() { close(Clock::now()); }

template <class Function>
void C10dTransport::for_each_peer(Function function) {
  for (int peer = 0; peer < size_; ++peer)
    if (peer != rank_) function(peer, *connections_[peer]);
}

// Releases the lock, then does what the link has decided. User code may run here.
void C10dTransport::act(Connection& connection, std::unique_lock<std::mutex>& lock) {
  const auto outcomes = connection.link->take_outcomes();
  const auto verified = connection.link->take_verified();
  const auto claims = connection.link->take_claims();
  const auto failure = connection.link->take_failure();
  lock.unlock();
  const auto settle = [&](bool failed) {
    for (const PeerLink::Outcome& outcome : outcomes) {
      if ((outcome.failure != nullptr) != failed) continue;
      Operation::settle(*outcome.request, outcome.failure);
      if (const Body* body = body_of(*outcome.request)) {
        std::lock_guard waiting_lock(waiting_mutex_);
        if (waiting_.contains(body->work.get())) body->work->abort();
      }
    }
  };
  settle(false);
  // A peer's failure explains the messages that can no longer match: it comes before those.
  if (failure) events_.on_remote_failure(*failure);
  settle(true);
  for (const RequestPtr& request : verified) {
    const Body* body = body_of(*request);
    if (body && !body->claimed) hand_to_body_thread(request);
  }
  for (const PeerLink::Claim& claim : claims)
    events_.on_claim(connection.link->peer(), claim.direction, claim.descriptor);
}

// ------------------------------------------------------------------------------------------------
// callers

void C10dTransport::post(std::vector<RequestPtr> batch, bool /*is_async*/) {
  if (aborted_) return;
  std::vector<bool> touched(size_);
  for (const RequestPtr& request : batch) {
    Connection& connection = *connections_[request->peer];
    std::unique_lock lock(connection.mutex);
    if (aborted_) return;  // what was posted before is among the dropped
    connection.link->number(*request);
    if (has_body(*request)) start_body(request);
    connection.link->post(request);
    touched[request->peer] = true;
  }
  for_each_peer([&](int peer, Connection& connection) {
    if (!touched[peer]) return;
    std::unique_lock lock(connection.mutex);
    connection.link->flush_urgent();
    act(connection, lock);
  });
}

void C10dTransport::claim(int peer, Direction direction, const Descriptor& descriptor) {
  if (aborted_) return;
  Connection& connection = *connections_[peer];
  std::unique_lock lock(connection.mutex);
  connection.link->say_claim(direction, descriptor);
  connection.link->flush();
  act(connection, lock);
}

void C10dTransport::start_body(const RequestPtr& request) {
  auto body = std::make_shared<Body>();
  std::vector<at::Tensor> tensors{bytes_view(request->data, request->descriptor.num_bytes)};
  const int tag = body_tag(request->descriptor);
  try {
    body->work = request->direction == Direction::send
                     ? backend_->send(tensors, request->peer, tag)
                     : backend_->recv(tensors, request->peer, tag);
  } catch (const std::exception&) {
    return;  // the connection is broken; its reader is about to say so
  }
  request->transport_state = std::move(body);
}

C10dTransport::Body* C10dTransport::body_of(const Request& request) {
  return static_cast<Body*>(request.transport_state.get());
}

bool C10dTransport::assist(Operation& operation) {
  for (const RequestPtr& request : operation.requests()) {
    if (request->settled) continue;
    Body* body = body_of(*request);
    if (!body || body->claimed.exchange(true)) continue;
    if (!wait_for_body(*request, *body)) {
      // Cut short so that the caller can look at its deadline and signals. It may not come back.
      body->claimed = false;
      Connection& connection = *connections_[request->peer];
      std::lock_guard lock(connection.mutex);
      if (connection.link->awaits_body(*request)) hand_to_body_thread(request);
      return false;
    }
    body_through(request);
  }
  return true;
}

// Blocks until the body is through. False if the wait is cut short or the connection breaks.
bool C10dTransport::wait_for_body(const Request& request, Body& body) {
  {
    std::lock_guard lock(waiting_mutex_);
    if (aborted_ || request.settled) return false;
    waiting_.insert(body.work.get());
  }
  bool through = false;
  try {
    through = body.work->wait(kForever);
  } catch (const std::exception&) {
    // The reader of this peer reports the cause; do not spin on the broken work until it does.
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  std::lock_guard lock(waiting_mutex_);
  waiting_.erase(body.work.get());
  return through;
}

void C10dTransport::body_through(const RequestPtr& request) {
  Connection& connection = *connections_[request->peer];
  std::unique_lock lock(connection.mutex);
  if (request->direction == Direction::send)
    connection.link->body_gone(request);
  else
    connection.link->body_arrived(request);
  connection.link->flush_urgent();
  act(connection, lock);
}

void C10dTransport::hand_to_body_thread(RequestPtr request) {
  {
    std::lock_guard lock(bodies_mutex_);
    bodies_.push_back(std::move(request));
  }
  bodies_changed_.notify_one();
}

void C10dTransport::wait_for_bodies() {
  while (true) {
    RequestPtr request;
    {
      std::unique_lock lock(bodies_mutex_);
      bodies_changed_.wait(lock, [this] { return stopping_ || !bodies_.empty(); });
      if (stopping_) return;
      request = std::move(bodies_.front());
      bodies_.pop_front();
    }
    Body& body = *body_of(*request);
    if (body.claimed.exchange(true)) continue;
    while (!aborted_ && !request->settled) {
      if (!wait_for_body(*request, body)) continue;
      body_through(request);
      break;
    }
  }
}

void C10dTransport::tick() {
  {
    std::lock_guard lock(waiting_mutex_);
    for (c10d::Work* work : waiting_) work->abort();
  }
  for_each_peer([this](int, Connection& connection) {
    std::unique_lock lock(connection.mutex, std::try_to_lock);
    if (!lock || stopping_) return;
    connection.link->flush();
    look_after(connection);
  });
}

// With the connection's lock held.
void C10dTransport::look_after(Connection& connection) {
  if (!connection.watch || !connection.watch->has_ended() || --connection.num_ticks_left > 0)
    return;
  connection.watch.reset();
  connection.ended = true;
  for (const WorkPtr& work : connection.slot_works)
    if (work) work->abort();  // frees the reader
}

std::string C10dTransport::describe_peer(int peer) const {
  Connection& connection = *connections_[peer];
  std::lock_guard lock(connection.mutex);
  return connection.link->describe();
}

// ------------------------------------------------------------------------------------------------
// packets

// Called by the link, with the connection's lock held.
void C10dTransport::send_packet(int peer, std::vector<std::byte> bytes, uint64_t number) {
  Packet& packet =
      connections_[peer]->packets.emplace_back(Packet{number, std::move(bytes), nullptr});
  std::vector<at::Tensor> tensors{
      bytes_view(packet.bytes.data(), static_cast<int64_t>(packet.bytes.size()))};
  try {
    packet.work = backend_->send(tensors, peer, kPacketTag);
  } catch (const std::exception&) {
    // The connection is broken; its reader is about to say so.
  }
}

void C10dTransport::post_slot(int peer, int slot) {
  Connection& connection = *connections_[peer];
  auto& bytes = connection.slots[slot];
  std::vector<at::Tensor> tensors{bytes_view(bytes.data(), static_cast<int64_t>(bytes.size()))};
  connection.slot_works[slot] = backend_->recv(tensors, peer, kPacketTag);
}

void C10dTransport::read_packets(int peer) {
  // Before the constructor has returned there is nobody to report to, and if it fails there never is.
  {
    std::lock_guard gate(starting_mutex_);
  }
  Connection& connection = *connections_[peer];
  for (int slot = 0; !stopping_; slot = (slot + 1) % kNumSlots) {
    WorkPtr work;
    {
      std::lock_guard lock(connection.mutex);
      work = connection.slot_works[slot];
    }
    if (!work) return lost(peer, "the connection was closed before its first message");
    try {
      while (!work->wait(kForever)) {
        if (stopping_) return;
        if (connection.ended) return lost(peer, "its process has ended");
      }
    } catch (const std::exception& error) {
      return lost(peer, reason_of(error));
    }
    std::unique_lock lock(connection.mutex);
    const bool answered_before = connection.link->goodbye_answered();
    try {
      connection.link->handle_packet(connection.slots[slot]);
    } catch (const std::exception& error) {
      lock.unlock();
      events_.on_broken(error.what());
      return lost(peer, error.what());
    }
    std::string broken;
    try {
      post_slot(peer, slot);
    } catch (const std::exception& error) {
      broken = reason_of(error);
    }
    while (!connection.packets.empty() &&
           connection.packets.front().number <= connection.link->last_confirmed())
      connection.packets.pop_front();
    connection.link->flush_urgent();
    const bool answered = connection.link->goodbye_answered() && !answered_before;
    act(connection, lock);
    if (answered) {
      {
        std::lock_guard close_lock(close_mutex_);
        --num_open_;
      }
      close_changed_.notify_all();
    }
    if (!broken.empty()) return lost(peer, broken);
  }
}

// Bodies that a peer has sent before it left in order are there, noticed or not.
void C10dTransport::take_last_bodies(Connection& connection) {
  std::vector<RequestPtr> requests;
  {
    std::lock_guard lock(connection.mutex);
    if (connection.link->state() != PeerLink::State::disconnecting) return;
    requests = connection.link->awaiting_bodies();
  }
  const Deadline limit = Clock::now() + kLastBodyLimit;
  for (const RequestPtr& request : requests) {
    Body* body = body_of(*request);
    if (!body) continue;
    // The thread that has claimed it is about to settle it, or to find that it never came.
    bool is_mine = false;
    while (!request->settled && !(is_mine = !body->claimed.exchange(true)) && Clock::now() < limit)
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    if (is_mine && wait_for_body(*request, *body)) body_through(request);
  }
}

void C10dTransport::lost(int peer, const std::string& why) {
  Connection& connection = *connections_[peer];
  take_last_bodies(connection);
  std::unique_lock lock(connection.mutex);
  const bool orderly = disconnecting_ || connection.link->state() == PeerLink::State::disconnecting;
  const bool answered = connection.link->goodbye_answered();
  connection.link->lose();
  if (orderly) {
    act(connection, lock);
  } else {
    lock.unlock();
    events_.on_peer_lost(peer, why);
    lock.lock();
    act(connection, lock);
  }
  if (!answered) {
    {
      std::lock_guard close_lock(close_mutex_);
      --num_open_;
    }
    close_changed_.notify_all();
  }
}

// ------------------------------------------------------------------------------------------------
// end

void C10dTransport::abort(const Failure& failure) {
  if (aborted_.exchange(true)) return;
  for_each_peer([&](int, Connection& connection) {
    std::lock_guard lock(connection.mutex);
    if (stopping_) return;
    connection.link->say_failure(failure);
    connection.link->flush();
    connection.dropped = connection.link->drop();
  });
  {
    std::lock_guard lock(waiting_mutex_);
    for (c10d::Work* work : waiting_) work->abort();
  }
  std::lock_guard lock(bodies_mutex_);
  bodies_.clear();
}

void C10dTransport::begin_close() {
  for_each_peer([this](int, Connection& connection) {
    std::unique_lock lock(connection.mutex);
    connection.link->say_closing();
    connection.link->flush();
    act(connection, lock);
  });
}

void C10dTransport::close(Deadline deadline) {
  if (size_ == 1 || stopping_) return;
  begin_close();
  disconnecting_ = true;
  for_each_peer([this](int, Connection& connection) {
    std::unique_lock lock(connection.mutex);
    connection.link->say_goodbye();
    connection.link->flush();
    act(connection, lock);
  });
  {
    std::unique_lock lock(close_mutex_);
    close_changed_.wait_until(lock, deadline, [this] { return num_open_ == 0; });
  }
  aborted_ = stopping_ = true;
  stop();
}

// Ends what threads there are.
void C10dTransport::stop() {
  for_each_peer([this](int, Connection& connection) {
    std::lock_guard lock(connection.mutex);
    for (const WorkPtr& work : connection.slot_works)
      if (work) work->abort();
  });
  {
    std::lock_guard lock(waiting_mutex_);
    for (c10d::Work* work : waiting_) work->abort();
  }
  {
    std::lock_guard lock(bodies_mutex_);  // so that the body thread sees `stopping_` or the notice
    bodies_changed_.notify_all();
  }
  for_each_peer([](int, Connection& connection) {
    if (connection.reader.joinable()) connection.reader.join();
  });
  if (body_thread_.joinable()) body_thread_.join();
  {
    std::lock_guard lock(bodies_mutex_);
    bodies_.clear();
  }
  for_each_peer([](int, Connection& connection) {
    // Threads that still wait, tick or abort see `stopping_` under this lock.
    std::vector<RequestPtr> dropped;
    std::lock_guard lock(connection.mutex);
    dropped = connection.link->drop();
    dropped.insert(dropped.end(), connection.dropped.begin(), connection.dropped.end());
    connection.dropped.clear();
    connection.packets.clear();
    for (WorkPtr& work : connection.slot_works) work.reset();
    connection.watch.reset();
  });
  backend_.reset();
}

}  // namespace pipecomm
