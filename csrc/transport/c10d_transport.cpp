#include "transport/c10d_transport.h"

#include <ATen/ops/from_blob.h>

#include <cstring>

#include "plan/dtype.h"

namespace pipecomm {
namespace {

// Tags of our private backend. A body's tag carries its channel, so that two messages whose hashes
// collide are still posted in the same order on both ends.
constexpr int kMailboxTag = 1;
constexpr int kSentinelTag = 2;
constexpr int kBodyTagBit = 1 << 30;
constexpr int kBodyHashBits = 26;
static_assert(kNumChannels <= 1 << 4);

// Payloads up to this size travel inside a packet: one message instead of two, at the price of a
// copy.
constexpr int64_t kMaxInlineBytes = 32 * 1024;
// What may be under way to one peer unanswered: bounds the memory of records that wait for their
// receive.
constexpr size_t kWindowBytes = 4 << 20;
constexpr size_t kWindowRecords = 16384;
// A closed connection counts as a lost peer after this many ticks without a goodbye, which may
// still be in our mailbox.
constexpr int kGraceTicks = 2;

constexpr uint64_t kGoodbyeSeq = UINT64_MAX;  // the `seq` of an accept that answers a goodbye

constexpr uint8_t kVerified = 1;
constexpr uint8_t kArrived = 2;

at::Tensor bytes_view(std::byte* data, int64_t num_bytes) {
  return at::from_blob(data, {num_bytes}, at::TensorOptions().dtype(at::kByte));
}

int body_tag(const Descriptor& descriptor) {
  uint64_t hash = descriptor.digest() + 0x9e3779b97f4a7c15ull * (descriptor.seq + 1);
  hash ^= hash >> 31;
  hash *= 0x94d049bb133111ebull;
  return kBodyTagBit | descriptor.channel << kBodyHashBits |
         static_cast<int>(hash >> (64 - kBodyHashBits));
}

bool has_body(const Request& request) {
  return !request.refuses && request.descriptor.num_bytes > kMaxInlineBytes;
}

size_t num_inline_bytes(const Request& request) {
  return has_body(request) || request.refuses ? 0
                                              : static_cast<size_t>(request.descriptor.num_bytes);
}

}  // namespace

C10dTransport::C10dTransport(c10::intrusive_ptr<c10d::Backend> backend, int rank, int size,
                             uint32_t epoch, TransportEvents& events)
    : backend_(std::move(backend)),
      rank_(rank),
      size_(size),
      epoch_(epoch),
      events_(events),
      next_seq_(size) {
  for (int peer_idx = 0; peer_idx < size_; ++peer_idx) {
    auto& peer = peers_.emplace_back(std::make_unique<Peer>());
    if (peer_idx == rank_) continue;
    std::vector<at::Tensor> sentinel{bytes_view(peer->sentinel_byte.data(), 1)};
    peer->sentinel = backend_->recv(sentinel, peer_idx, kSentinelTag);
  }
  if (size_ == 1) return;  // nobody to talk to
  for (int slot = 0; slot < kNumMailboxSlots; ++slot) {
    mailbox_[slot].resize(wire::kMaxPacketBytes);
    post_mailbox(slot);
  }
  progress_thread_ = std::thread([this] { progress(); });
  body_thread_ = std::thread([this] { wait_for_bodies(); });
}

C10dTransport::~C10dTransport() { close(Clock::now()); }

// ----------------------------------------------------------------------------------------------
// any thread

void C10dTransport::post(std::vector<RequestPtr> batch) {
  if (aborted_) return;
  {
    std::lock_guard lock(submit_mutex_);
    for (RequestPtr& request : batch) {
      Descriptor& descriptor = request->descriptor;
      descriptor.seq =
          next_seq_[request->peer][static_cast<int>(request->direction)][descriptor.channel]++;
      if (has_body(*request)) post_body(request);
      submissions_.push_back(std::move(request));
    }
  }
  wake();
}

// The transfer of a body starts here, on the caller's thread; matching is gloo's, by tag.
void C10dTransport::post_body(const RequestPtr& request) {
  auto body = std::make_shared<Body>();
  body->request = request;
  std::vector<at::Tensor> tensors{bytes_view(request->data, request->descriptor.num_bytes)};
  const int tag = body_tag(request->descriptor);
  try {
    body->work = request->direction == Direction::send
                     ? backend_->send(tensors, request->peer, tag)
                     : backend_->recv(tensors, request->peer, tag);
  } catch (const std::exception& error) {
    gone_.emplace_back(request->peer, error.what());
    return;
  }
  request->transport_state = std::move(body);
}

void C10dTransport::wake() {
  std::lock_guard lock(mailbox_mutex_);
  if (const WorkPtr& work = mailbox_works_[current_slot_]) work->abort();
}

void C10dTransport::assist(Operation& operation) {
  for (const RequestPtr& request : operation.requests()) {
    if (request->settled || !has_body(*request)) continue;
    auto body = std::static_pointer_cast<Body>(request->transport_state);
    if (!body || body->claimed.exchange(true)) continue;
    if (wait_for_body(*body)) {
      body_arrived(body);
      continue;
    }
    // Freed by the watchdog, so that the caller can look at its deadline and signals.
    body->claimed = false;
    if (body->reached & kVerified) hand_to_waiter(std::move(body));
    return;
  }
}

// Blocks until the body is through (true), or until somebody aborts the wait or the connection
// breaks (false).
bool C10dTransport::wait_for_body(Body& body) {
  {
    std::lock_guard lock(waiting_mutex_);
    if (aborted_ || body.request->settled) return false;
    waiting_.insert(body.work.get());
  }
  bool through = false;
  try {
    through = body.work->wait();
  } catch (const std::exception&) {
    // The sentinel of this peer tells the story; do not spin on the broken work until it does.
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  std::lock_guard lock(waiting_mutex_);
  waiting_.erase(body.work.get());
  return through;
}

void C10dTransport::body_arrived(const BodyPtr& body) {
  Request& request = *body->request;
  if (request.direction ==
      Direction::send) {  // gloo hands a body over only to a receive with the same description
    Operation::settle(request, nullptr);
    return;
  }
  if ((body->reached.fetch_or(kArrived) | kArrived) != (kVerified | kArrived)) return;
  Operation::settle(request, nullptr);
  {
    std::lock_guard lock(submit_mutex_);
    accepts_.push_back(body->request);
  }
  wake();
}

void C10dTransport::hand_to_waiter(BodyPtr body) {
  {
    std::lock_guard lock(bodies_mutex_);
    bodies_.push_back(std::move(body));
  }
  bodies_changed_.notify_one();
}

void C10dTransport::tick() {
  {
    std::lock_guard lock(waiting_mutex_);
    for (c10d::Work* work : waiting_) work->abort();
  }
  for (int peer_idx = 0; peer_idx < size_; ++peer_idx) {
    Peer& peer = *peers_[peer_idx];
    if (!peer.sentinel) continue;
    try {
      // An aborted wait throws if the connection has failed, and returns at once if not.
      peer.sentinel->abort();
      peer.sentinel->wait();
    } catch (const std::exception& error) {
      if (++peer.num_ticks_closed < kGraceTicks) continue;
      peer.sentinel.reset();
      {
        std::lock_guard lock(submit_mutex_);
        gone_.emplace_back(peer_idx, error.what());
      }
      wake();
    }
  }
}

void C10dTransport::abort(const Failure& failure) {
  {
    std::lock_guard lock(submit_mutex_);
    if (aborted_.exchange(true)) return;
    failure_to_tell_ = encode_failure(failure);
  }
  {
    std::lock_guard lock(waiting_mutex_);
    for (c10d::Work* work : waiting_) work->abort();
  }
  bodies_changed_.notify_all();
  wake();
}

void C10dTransport::begin_close() {
  closing_ = true;
  wake();
}

void C10dTransport::close(Deadline deadline) {
  if (size_ == 1 || stopping_) return;
  closing_ = disconnecting_ = true;
  wake();
  {
    std::unique_lock lock(close_mutex_);
    close_changed_.wait_until(lock, deadline, [this] {
      for (int peer_idx = 0; peer_idx < size_; ++peer_idx) {
        const Peer& peer = *peers_[peer_idx];
        if (peer_idx != rank_ && peer.state != PeerState::lost && !peer.goodbye_answered)
          return false;
      }
      return true;
    });
  }
  aborted_ = true;
  stopping_ = true;
  {
    std::lock_guard lock(waiting_mutex_);
    for (c10d::Work* work : waiting_) work->abort();
  }
  bodies_changed_.notify_all();
  wake();
  progress_thread_.join();
  body_thread_.join();
  bodies_.clear();
  for (auto& peer : peers_) {
    peer->sentinel.reset();
    peer->packets.clear();
  }
  {
    std::lock_guard lock(mailbox_mutex_);
    for (WorkPtr& work : mailbox_works_) work.reset();
  }
  backend_.reset();
}

std::string C10dTransport::describe_peer(int peer) const {
  switch (peers_[peer]->state.load()) {
    case PeerState::open:
      return "connection open";
    case PeerState::closing:
      return "has closed its communicator";
    case PeerState::lost:
      return "connection lost";
  }
  return "";
}

// ----------------------------------------------------------------------------------------------
// body waiter

void C10dTransport::wait_for_bodies() {
  while (true) {
    BodyPtr body;
    {
      std::unique_lock lock(bodies_mutex_);
      bodies_changed_.wait(lock, [this] { return stopping_ || !bodies_.empty(); });
      if (stopping_) return;
      body = std::move(bodies_.front());
      bodies_.pop_front();
    }
    if (body->claimed.exchange(true)) continue;
    while (!aborted_ && !body->request->settled) {
      if (!wait_for_body(*body)) continue;
      body_arrived(body);
      break;
    }
  }
}

// ----------------------------------------------------------------------------------------------
// progress thread

void C10dTransport::progress() {
  while (!stopping_) {
    try {
      drain_submissions();
      flush_all();
      if (stopping_) break;
      turn_mailbox();
    } catch (const std::exception& error) {
      if (stopping_) break;
      events_.on_broken(error.what());
      // Keep turning, to pass the failure on and to say goodbye; never faster than a tick.
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  }
  drop_everything();
}

void C10dTransport::post_mailbox(int slot) {
  std::vector<at::Tensor> tensors{
      bytes_view(mailbox_[slot].data(), static_cast<int64_t>(mailbox_[slot].size()))};
  WorkPtr work = backend_->recvAnysource(tensors, kMailboxTag);
  std::lock_guard lock(mailbox_mutex_);
  mailbox_works_[slot] = std::move(work);
}

void C10dTransport::turn_mailbox() {
  WorkPtr work;
  {
    std::lock_guard lock(mailbox_mutex_);
    work = mailbox_works_[current_slot_];
  }
  {
    std::lock_guard lock(submit_mutex_);
    if (!submissions_.empty() || !accepts_.empty() || !gone_.empty() || failure_to_tell_) return;
  }
  if (!work->wait()) return;
  const int slot = current_slot_;
  handle_packet(work->sourceRank(), mailbox_[slot]);
  post_mailbox(slot);
  std::lock_guard lock(mailbox_mutex_);
  current_slot_ = (slot + 1) % kNumMailboxSlots;
}

void C10dTransport::drain_submissions() {
  std::vector<RequestPtr> requests;
  decltype(accepts_) accepts;
  decltype(gone_) gone;
  std::optional<std::string> failure;
  {
    std::lock_guard lock(submit_mutex_);
    requests.swap(submissions_);
    accepts.swap(accepts_);
    gone.swap(gone_);
    failure.swap(failure_to_tell_);
  }
  for (const RequestPtr& request : accepts)
    add_record(request->peer, wire::Kind::accept, request->descriptor.channel,
               request->descriptor.seq, nullptr, {});
  if (failure) {
    for (int peer = 0; peer < size_; ++peer)
      if (peer != rank_) add_text(peer, wire::Kind::failure, 0, 0, *failure);
    drop_everything();
  }
  if (!aborted_) {
    for (const RequestPtr& request : requests)
      request->direction == Direction::send ? enqueue_send(request) : enqueue_recv(request);
  }
  for (const auto& [peer, why] : gone) peer_gone(peer, why);
  if (closing_) say_what_is_due();
}

void C10dTransport::say_what_is_due() {
  for (int peer_idx = 0; peer_idx < size_; ++peer_idx) {
    if (peer_idx == rank_) continue;
    Peer& peer = *peers_[peer_idx];
    if (!std::exchange(peer.closing_said, true)) {
      add_record(peer_idx, wire::Kind::closing, 0, 0, nullptr, {});
      refuse_unexpected(peer, peer_idx);
    }
    if (disconnecting_ && !std::exchange(peer.goodbye_said, true))
      add_record(peer_idx, wire::Kind::goodbye, 0, 0, nullptr, {});
  }
}

// After our last post: what has not met a receive by now never will.
void C10dTransport::refuse_unexpected(Peer& peer, int peer_idx) {
  for (int channel_idx = 0; channel_idx < kNumChannels; ++channel_idx) {
    for (const Arrival& arrival : peer.channels[channel_idx].unexpected)
      add_text(peer_idx, wire::Kind::refused, channel_idx, arrival.header.seq,
               "it has closed its communicator");
    peer.channels[channel_idx].unexpected.clear();
  }
}

void C10dTransport::enqueue_send(const RequestPtr& request) {
  Peer& peer = *peers_[request->peer];
  if (peer.state == PeerState::lost) {
    Operation::settle(*request, gone(*request));
    return;
  }
  peer.backlog.push_back(request);
  pump_backlog(peer);
}

void C10dTransport::pump_backlog(Peer& peer) {
  while (!peer.backlog.empty() && peer.num_unanswered < kWindowRecords &&
         peer.num_unanswered_bytes < kWindowBytes) {
    const RequestPtr request = std::move(peer.backlog.front());
    peer.backlog.pop_front();
    transmit(peer, request);
  }
}

void C10dTransport::transmit(Peer& peer, const RequestPtr& request) {
  const Descriptor& descriptor = request->descriptor;
  peer.channels[descriptor.channel].unanswered.emplace(descriptor.seq, request);
  peer.num_unanswered += 1;
  peer.num_unanswered_bytes += num_inline_bytes(*request);
  if (request->refuses) {
    add_text(request->peer, wire::Kind::refuse, descriptor.channel, descriptor.seq,
             request->refusal);
  } else if (has_body(*request)) {
    add_record(request->peer, wire::Kind::announce, descriptor.channel, descriptor.seq, &descriptor,
               {});
  } else {
    add_record(request->peer, wire::Kind::data, descriptor.channel, descriptor.seq, &descriptor,
               {request->data, static_cast<size_t>(descriptor.num_bytes)});
  }
}

void C10dTransport::enqueue_recv(const RequestPtr& request) {
  Channel& channel = peers_[request->peer]->channels[request->descriptor.channel];
  if (!channel.unexpected.empty()) {
    const Arrival arrival = std::move(channel.unexpected.front());
    channel.unexpected.pop_front();
    match(request, arrival);
  } else if (peers_[request->peer]->state != PeerState::open) {
    Operation::settle(*request, gone(*request));
  } else {
    channel.posted.push_back(request);
  }
}

void C10dTransport::handle_packet(int source, std::span<const std::byte> packet) {
  Peer& peer = *peers_.at(source);
  const wire::PacketReader reader(packet, epoch_);
  if (reader.header().packet_number != peer.last_packet_received + 1)
    throw std::runtime_error("packet " + std::to_string(reader.header().packet_number) +
                             " from rank " + std::to_string(source) + " came after packet " +
                             std::to_string(peer.last_packet_received));
  peer.last_packet_received = reader.header().packet_number;
  while (!peer.packets.empty() && peer.packets.front().number <= reader.header().confirmed)
    peer.packets.pop_front();
  for (const wire::Record& record : reader.records()) handle_record(source, record);
}

void C10dTransport::handle_record(int source, const wire::Record& record) {
  Peer& peer = *peers_[source];
  switch (record.header.kind) {
    case wire::Kind::data:
    case wire::Kind::announce:
    case wire::Kind::refuse: {
      if (aborted_) return;
      Channel& channel = peer.channels[record.header.channel];
      if (record.header.seq != channel.next_arrival++)
        throw std::runtime_error("messages came out of order");
      Arrival arrival{record.header, record.descriptor, record.payload, {}};
      if (channel.posted.empty() && peer.closing_said) {
        add_text(source, wire::Kind::refused, record.header.channel, record.header.seq,
                 "it has closed its communicator");
        return;
      }
      if (channel.posted.empty()) {
        arrival.stored.assign(record.payload.begin(), record.payload.end());
        arrival.payload = arrival.stored;
        channel.unexpected.push_back(std::move(arrival));
        return;
      }
      const RequestPtr request = std::move(channel.posted.front());
      channel.posted.pop_front();
      match(request, arrival);
      return;
    }
    case wire::Kind::accept:
      if (record.header.seq == kGoodbyeSeq) {
        {
          std::lock_guard lock(close_mutex_);
          peer.goodbye_answered = true;
        }
        close_changed_.notify_all();
        return;
      }
      [[fallthrough]];
    case wire::Kind::reject:
    case wire::Kind::refused:
      answered(source, record);
      return;
    case wire::Kind::failure:
      events_.on_remote_failure(decode_failure(reinterpret_cast<const char*>(record.payload.data()),
                                               record.payload.size()));
      return;
    case wire::Kind::closing:
      if (peer.state == PeerState::open) peer.state = PeerState::closing;
      for (Channel& channel : peer.channels) {
        const auto posted = std::move(channel.posted);
        channel.posted.clear();
        for (const RequestPtr& request : posted) cancel(request, gone(*request));
      }
      return;
    case wire::Kind::goodbye:
      add_record(source, wire::Kind::accept, 0, kGoodbyeSeq, nullptr, {});
      return;
  }
}

void C10dTransport::match(const RequestPtr& request, const Arrival& arrival) {
  const int source = request->peer;
  const int channel = arrival.header.channel;
  const uint64_t seq = arrival.header.seq;
  if (arrival.header.kind == wire::Kind::refuse) {
    add_record(source, wire::Kind::accept, channel, seq, nullptr, {});
    const std::string_view reason(reinterpret_cast<const char*>(arrival.payload.data()),
                                  arrival.payload.size());
    cancel(request, request->refuses ? nullptr : refusal(*request, reason));
  } else if (request->refuses) {
    add_text(source, wire::Kind::refused, channel, seq, request->refusal);
    Operation::settle(*request, nullptr);
  } else if (!request->descriptor.agrees_with(arrival.descriptor)) {
    add_record(source, wire::Kind::reject, channel, seq, &request->descriptor, {});
    cancel(request, mismatch(*request, arrival.descriptor));
  } else if (arrival.header.kind == wire::Kind::data) {
    if (!arrival.payload.empty())
      std::memcpy(request->data, arrival.payload.data(), arrival.payload.size());
    add_record(source, wire::Kind::accept, channel, seq, nullptr, {});
    Operation::settle(*request, nullptr);
  } else if (auto body = std::static_pointer_cast<Body>(request->transport_state)) {
    if ((body->reached.fetch_or(kVerified) | kVerified) == (kVerified | kArrived)) {
      add_record(source, wire::Kind::accept, channel, seq, nullptr, {});
      Operation::settle(*request, nullptr);
    } else if (!body->claimed) {
      hand_to_waiter(std::move(body));
    }
  }
}

// The receiver's answer to one of our sends.
void C10dTransport::answered(int source, const wire::Record& record) {
  Peer& peer = *peers_[source];
  auto& unanswered = peer.channels[record.header.channel].unanswered;
  const auto found = unanswered.find(record.header.seq);
  if (found == unanswered.end()) {
    if (aborted_) return;
    throw std::runtime_error("an answer from rank " + std::to_string(source) +
                             " to a message never sent");
  }
  const RequestPtr request = std::move(found->second);
  unanswered.erase(found);
  peer.num_unanswered -= 1;
  peer.num_unanswered_bytes -= num_inline_bytes(*request);
  if (record.header.kind == wire::Kind::accept) {
    cancel(request, nullptr);
  } else if (record.header.kind == wire::Kind::reject) {
    cancel(request, mismatch(*request, record.descriptor));
  } else if (request->descriptor.op == OpCode::p2p) {  // only a rank that closes refuses these
    cancel(request, gone(*request));
  } else {
    cancel(request, refusal(*request, record.text()));
  }
  pump_backlog(peer);
}

// Settles a request whose body, if it has one, nobody needs to wait for any more.
void C10dTransport::cancel(const RequestPtr& request, FailurePtr failure) {
  Operation::settle(*request, std::move(failure));
  std::lock_guard lock(waiting_mutex_);
  const auto body = std::static_pointer_cast<Body>(request->transport_state);
  if (body && waiting_.contains(body->work.get())) body->work->abort();
}

void C10dTransport::add_record(int peer_idx, wire::Kind kind, int channel, uint64_t seq,
                               const Descriptor* descriptor, std::span<const std::byte> payload) {
  Peer& peer = *peers_[peer_idx];
  if (peer.state == PeerState::lost) return;
  if (peer.writer.add(kind, channel, seq, descriptor, payload)) return;
  flush(peer_idx);
  peer.writer.add(kind, channel, seq, descriptor, payload);
}

void C10dTransport::add_text(int peer, wire::Kind kind, int channel, uint64_t seq,
                             std::string_view text) {
  text = text.substr(0, wire::kMaxTextBytes);
  add_record(peer, kind, channel, seq, nullptr, std::as_bytes(std::span(text.data(), text.size())));
}

void C10dTransport::flush(int peer_idx) {
  Peer& peer = *peers_[peer_idx];
  if (peer.writer.empty() || peer.state == PeerState::lost) return;
  const uint32_t number = ++peer.last_packet_sent;
  Packet& packet = peer.packets.emplace_back(
      Packet{peer.writer.take(epoch_, number, peer.last_packet_received), number, nullptr});
  std::vector<at::Tensor> tensors{
      bytes_view(packet.bytes.data(), static_cast<int64_t>(packet.bytes.size()))};
  try {
    packet.work = backend_->send(tensors, peer_idx, kMailboxTag);
  } catch (const std::exception& error) {
    peer_gone(peer_idx, error.what());
  }
}

void C10dTransport::flush_all() {
  for (int peer = 0; peer < size_; ++peer) flush(peer);
}

void C10dTransport::peer_gone(int peer_idx, const std::string& why) {
  Peer& peer = *peers_[peer_idx];
  PeerState before;
  {
    std::lock_guard lock(close_mutex_);
    before = peer.state.exchange(PeerState::lost);
  }
  close_changed_.notify_all();
  if (before == PeerState::lost) return;
  fail_requests_of(peer_idx);
  if (before == PeerState::open && !disconnecting_) events_.on_peer_lost(peer_idx, why);
}

void C10dTransport::fail_requests_of(int peer_idx) {
  Peer& peer = *peers_[peer_idx];
  std::vector<RequestPtr> requests(peer.backlog.begin(), peer.backlog.end());
  peer.backlog.clear();
  for (Channel& channel : peer.channels) {
    requests.insert(requests.end(), channel.posted.begin(), channel.posted.end());
    channel.posted.clear();
    for (auto& [seq, request] : channel.unanswered) requests.push_back(std::move(request));
    channel.unanswered.clear();
  }
  peer.num_unanswered = peer.num_unanswered_bytes = 0;
  for (const RequestPtr& request : requests) cancel(request, gone(*request));
}

void C10dTransport::drop_everything() {
  for (auto& peer : peers_) {
    peer->backlog.clear();
    for (Channel& channel : peer->channels) {
      channel.posted.clear();
      channel.unexpected.clear();
      channel.unanswered.clear();
    }
    peer->num_unanswered = peer->num_unanswered_bytes = 0;
  }
}

// ----------------------------------------------------------------------------------------------
// what to say

namespace {

std::shared_ptr<Failure> failure_of(FailureKind kind, int rank, const Request& request) {
  auto failure = std::make_shared<Failure>();
  const Descriptor& descriptor = request.descriptor;
  failure->kind = kind;
  failure->op = op_name(descriptor.op);
  failure->rank = rank;
  failure->peer = request.peer;
  failure->channel = descriptor.channel;
  failure->seq = static_cast<int64_t>(descriptor.seq);
  failure->dtype = dtype_name(descriptor.dtype);
  const int num_dims = std::min<int>(descriptor.num_dims, kMaxDescriptorDims);
  failure->shape.assign(descriptor.shape.begin(), descriptor.shape.begin() + num_dims);
  return failure;
}

}  // namespace

FailurePtr C10dTransport::mismatch(const Request& request, const Descriptor& theirs) const {
  auto failure = failure_of(FailureKind::mismatch, rank_, request);
  const bool sends = request.direction == Direction::send;
  failure->origin_rank = sends ? request.peer : rank_;
  failure->message = "rank " + std::to_string(rank_) + ": " + request_text(request) +
                     (sends ? " carries " : " expects ") + request.descriptor.text() +
                     ", but rank " + std::to_string(request.peer) +
                     (sends ? " expects " : " sends ") + theirs.text();
  if (request.descriptor.text() == theirs.text())
    failure->message += " with other arguments (sizes, dims or source rank differ)";
  failure->message += "; nothing was transferred";
  return failure;
}

FailurePtr C10dTransport::refusal(const Request& request, std::string_view reason) const {
  auto failure = failure_of(FailureKind::mismatch, rank_, request);
  failure->origin_rank = request.peer;
  failure->message = "rank " + std::to_string(rank_) + ": " + op_name(request.descriptor.op) +
                     " was refused by rank " + std::to_string(request.peer) + ": " +
                     std::string(reason);
  return failure;
}

FailurePtr C10dTransport::gone(const Request& request) const {
  auto failure = failure_of(FailureKind::peer_lost, rank_, request);
  failure->origin_rank = request.peer;
  failure->message = "rank " + std::to_string(rank_) + ": " + request_text(request) + " of " +
                     request.descriptor.text() + " cannot complete: rank " +
                     std::to_string(request.peer) + " " + describe_peer(request.peer);
  return failure;
}

}  // namespace pipecomm
