#include "transport/shm/shm_transport.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <span>

#include "message/start_thread.h"

namespace pipecomm::shm {
namespace {

// How long a thread that waits stays awake: it spins if there is a core for every rank, else yields
// to ranks that have work.
constexpr auto kSpinTime = std::chrono::microseconds(50);
constexpr int kNumYields = 20;
// A waiting thread returns to the engine this often, which looks at deadlines and signals.
constexpr auto kAssistTime = std::chrono::milliseconds(50);
constexpr uint32_t kMovesPerLook = 16;  // at the clock, of a thread that moves data

// How often a thread that is about to sleep looks for an emptier core, and how long it stays there.
constexpr auto kLookInterval = std::chrono::milliseconds(1);
constexpr auto kShortestStay = std::chrono::milliseconds(5);
constexpr int kLeftToHigher = 4;  // looks

// No thread depends on being woken for longer than this, whatever the system does.
constexpr auto kLongestSleep = std::chrono::seconds(1);

// Messages of this size wake a second thread, which costs some microseconds.
constexpr int64_t kMinSharedBytes = 2 << 20;

}  // namespace

ShmTransport::ShmTransport(SegmentPtr own, ShmOptions options, TransportEvents& events)
    : own_segment_(std::move(own)),
      own_(*own_segment_),
      options_(std::move(options)),
      rank_(own_.rank()),
      size_(own_.shape().size),
      num_cores_(static_cast<int>(usable_cores().count())),
      events_(events),
      peers_(static_cast<size_t>(size_)),
      met_(static_cast<size_t>(size_)),
      spin_time_(kSpinTime) {
  context_.rank = rank_;
  context_.epoch = own_.shape().epoch;
  if (own_.window_bytes() > 0) {
    window_.emplace(own_segment_);
    context_.window = &*window_;
  }
  multicast_.emplace(own_, [this, lane = own_.shape().num_channels](int reader, uint64_t seq) {
    const Peer& peer = *peers_[reader];
    return peer.segment->status().goodbye.load() != 0 ||
           peer.outbound[lane]->is_final_for_receiver(seq);
  });
  if (size_ == 1) return;
  try {
    progress_thread_ = start_thread([this] { progress(); }, rank_);
  } catch (const PipeCommException& error) {
    abort(*error.failure());
    throw;
  }
}

ShmTransport::~ShmTransport() { close(Clock::now()); }

std::shared_ptr<std::byte> ShmTransport::allocate_result(int64_t num_bytes) {
  return window_ && size_ > 1 && num_bytes >= kMinResultBytes ? window_->allocate(num_bytes)
                                                              : nullptr;
}

int ShmTransport::lane_of(const Request& request) const {
  const int channel = request.descriptor.channel;
  if (channel < kCollectiveChannel) return channel;
  return own_.shape().num_channels + (channel - kCollectiveChannel);
}

// ----------------------------------------------------------------------------------------------
// peers

void ShmTransport::add_peer(SegmentPtr segment, std::unique_ptr<ProcessWatch> watch) {
  const int peer_idx = segment->rank();
  Status& status = segment->status();
  auto peer = std::make_unique<Peer>();
  peer->segment = std::move(segment);
  peer->watch = std::move(watch);
  {
    std::lock_guard lock(mutex_);
    for (int lane = 0; lane < own_.shape().num_lanes(); ++lane) {
      peer->outbound.push_back(std::make_unique<Outbound>(context_, *peer->segment, lane));
      peer->inbound.push_back(std::make_unique<Inbound>(context_, own_, *peer->segment, lane));
    }
    multicast_->add_reader(peer_idx, status.bell);
    peers_[peer_idx] = std::move(peer);
    ++num_peers_;
  }
  status.met[rank_].store(1);
  status.num_met.fetch_add(1);
  wake(status.bell, kEverybody);
}

std::vector<int> ShmTransport::newly_met() {
  std::vector<int> peers;
  const uint64_t num_met = own_.status().num_met.load();
  if (std::exchange(num_met_, num_met) == num_met) return peers;
  for (int peer_idx = 0; peer_idx < size_; ++peer_idx) {
    if (met_[peer_idx] || own_.status().met[peer_idx].load() == 0) continue;
    met_[peer_idx] = true;
    peers.push_back(peer_idx);
  }
  return peers;
}

void ShmTransport::note_routed(int peer_idx) {
  std::lock_guard lock(mutex_);
  peers_[peer_idx]->is_routed = true;
  if (closing_) finish(*peers_[peer_idx]);
}

void ShmTransport::finish(Peer& peer) {
  for (auto& lane : peer.outbound) lane->finish();
  for (auto& lane : peer.inbound) lane->finish();
  wake_sleepers(peer.segment->status().bell);
}

void ShmTransport::nudge() {
  Bell& bell = own_.status().bell;
  if ((bell.sleepers.load() & kWaiter) != 0) wake(bell, kWaiter);
}

// ----------------------------------------------------------------------------------------------
// moving messages

void ShmTransport::post(std::span<const RequestPtr> batch, bool is_async) {
  {
    std::lock_guard lock(mutex_);
    if (aborted_) return;
    for (const RequestPtr& request : batch) {
      Peer& peer = *peers_[request->peer];
      const int lane = lane_of(*request);
      if (request->direction == Direction::send) {
        Outbound& outbound = *peer.outbound[lane];
        if (!outbound.busy()) sending_.push_back(&outbound);
        outbound.post(request);
      } else {
        Inbound& inbound = *peer.inbound[lane];
        if (!inbound.busy()) receiving_.push_back(&inbound);
        inbound.post(request);
      }
    }
    post_multicasts(batch);
  }
  if (is_async)
    hand_over();
  else
    turn(By::others, kNobody);  // the caller continues in assist()
}

// Does what takes little time, and leaves the rest to the progress thread. If nothing moves, all that
// is left waits for a peer, which will wake this rank.
void ShmTransport::hand_over() {
  for (int num_turns = 0; num_turns < 2; ++num_turns)
    if (turn(By::others, kProgress) != Turn::moved) return;
  wake_unless_deferred(own_.status().bell);
}

// The readers of a ring never change: it is used for payloads to all peers, once all are added.
void ShmTransport::post_multicasts(std::span<const RequestPtr> batch) {
  if (!all_added_ || batch.empty() || batch.front()->descriptor.op != OpCode::broadcast) return;
  std::vector<RequestPtr> sends;
  for (const RequestPtr& request : batch)
    if (request->direction == Direction::send && !request->refuses &&
        request->descriptor.num_bytes > max_eager_bytes(own_.shape().ring_bytes))
      sends.push_back(request);
  const bool is_one_payload = std::all_of(sends.begin(), sends.end(), [&](const RequestPtr& send) {
    return send->data == sends.front()->data;
  });
  if (is_one_payload && !sends.empty() && static_cast<int>(sends.size()) == num_peers_)
    multicast_->post(sends);
}

bool ShmTransport::busy() const {
  return !receiving_.empty() || !sending_.empty() || multicast_->busy();
}

bool ShmTransport::is_urgent() const {
  const auto is_urgent = [](const auto* lane) { return lane->is_urgent(); };
  return is_awaited_ || multicast_->busy() || std::ranges::any_of(receiving_, is_urgent) ||
         std::ranges::any_of(sending_, is_urgent);
}

// Called after a turn, before which the peers were told which threads to wake. If nothing is left, they wake
// none; if this rank may defer its progress, it sets that; else it wakes peers that have deferred theirs.
void ShmTransport::update_sleepers(uint32_t sleepers) {
  Word& asleep = own_.status().bell.sleepers;
  if (!busy()) {
    is_awaited_ = false;
    if (sleepers == kProgress) asleep.store(kNobody);
  } else if (sleepers == kProgress && !is_urgent()) {
    asleep.store(kDeferred);
  } else if (sleepers != kNobody) {
    for (Inbound* lane : receiving_) lane->wake_peer();
    for (Outbound* lane : sending_) lane->wake_peer();
  }
}

// Checks once, under the lock, everything that may have moved, then completes requests without it.
// `sleepers` are the threads that peers shall wake from now on; if a thread assists, it decides. A
// message that this rank has not posted yet need not wake any thread, which would cost a system call
// per message, except one that waits: another thread may be about to post what it waits for.
ShmTransport::Turn ShmTransport::turn(By by, uint32_t sleepers) {
  Settlements settled;
  std::vector<Failure> failures;
  std::vector<int> met;
  std::optional<std::string> broken;
  bool moved = false;
  bool assisted_by_other = false;
  bool has_pieces = false;
  {
    std::lock_guard lock(mutex_);
    if (over_) return Turn::over;
    Word& asleep = own_.status().bell.sleepers;
    assisted_by_other = assisted_ && by == By::others;
    if (!assisted_by_other && asleep.load(std::memory_order_relaxed) != sleepers)
      asleep.store(sleepers);
    try {
      moved = advance_lanes();
      has_pieces = any_pieces();
      look_for_failures(failures);
      met = newly_met();
    } catch (const std::exception& error) {
      broken = error.what();
    }
    if (!assisted_by_other) update_sleepers(sleepers);
    settled = std::move(context_.settled);
    // A peer's failure explains the messages that can no longer match. The thread that saw it reports it
    // to the owner, perhaps later, and the owner then fails all operations for that cause.
    if (any_failure_seen_)
      for (Settlement& settlement : settled)
        if (settlement.failure) settlement.request = nullptr;
  }
  for (const Settlement& settlement : settled)
    if (settlement.request) Operation::settle(*settlement.request, settlement.failure);
  for (const Failure& failure : failures) events_.on_remote_failure(failure);
  for (const int peer : met)
    if (options_.on_met) options_.on_met(peer);
  if (!settled.empty()) {
    if (assisted_by_other) wake(own_.status().bell, kWaiter);
    if (options_.on_settled) options_.on_settled();
  }
  if (broken) events_.on_broken(*broken);
  if (has_pieces) moved |= write_piece(by);
  return moved ? Turn::moved : Turn::idle;
}

bool ShmTransport::advance_lanes() {
  bool moved = false;
  auto advance = [&moved](auto* lane) {
    moved |= lane->advance();
    return !lane->busy();
  };
  std::erase_if(receiving_, advance);
  std::erase_if(sending_, advance);
  if (multicast_->busy()) moved |= multicast_->advance();
  return moved;
}

bool ShmTransport::any_pieces() const {
  return std::any_of(sending_.begin(), sending_.end(),
                     [](const Outbound* lane) { return lane->has_piece(); });
}

// Must not call anything that might wait for the piece to be written.
bool ShmTransport::write_piece(By by) {
  std::unique_lock lock(mutex_);
  const auto lane = std::find_if(sending_.begin(), sending_.end(),
                                 [](const Outbound* each) { return each->has_piece(); });
  if (over_ || lane == sending_.end()) return false;
  const Piece piece = (*lane)->take_piece();
  std::rotate(sending_.begin(), lane + 1, sending_.end());  // the next piece: another lane's
  ++num_pieces_;
  lock.unlock();
  if (by == By::assistant && num_cores_ > 1 && piece.begin == 0 &&
      piece.send->descriptor.num_bytes >= kMinSharedBytes)
    wake(own_.status().bell, kProgress);
  piece.write();
  lock.lock();
  piece.lane->note_written();
  if (--num_pieces_ == 0) pieces_written_.notify_all();
  return true;
}

void ShmTransport::look_for_failures(std::vector<Failure>& failures) {
  for (const auto& peer : peers_) {
    if (!peer || peer->failure_seen) continue;
    const Status& status = peer->segment->status();
    if (status.failed.load() == 0) continue;
    peer->failure_seen = any_failure_seen_ = true;
    const size_t num_bytes = std::min<size_t>(status.num_failure_bytes, kMaxFailureBytes);
    const std::vector<std::byte> record(status.failure.begin(), status.failure.begin() + num_bytes);
    failures.push_back(decode_failure(record));
  }
}

bool ShmTransport::assist(Operation& operation) {
  std::unique_lock role(assist_mutex_, std::try_to_lock);
  if (!role) {
    {
      std::lock_guard lock(mutex_);
      is_awaited_ = true;
    }
    hand_over();  // in case the assisting thread is just leaving
    return true;
  }
  {
    std::lock_guard lock(mutex_);
    assisted_ = true;
  }
  Bell& bell = own_.status().bell;
  const auto until = Clock::now() + kAssistTime;
  const bool spins = options_.cores->suffice();
  Patience patience(spins ? &spin_time_ : nullptr, spins ? 0 : kNumYields);
  Word& core = own_.status().core;
  if (const auto mine = static_cast<uint32_t>(current_core() + 1); core.load() != mine)
    core.store(mine);
  bool cut_short = false;
  uint32_t num_moves = 0;
  while (!operation.done()) {
    const Turn result = turn(By::assistant, kNobody);
    if (result == Turn::over) break;
    if (operation.done()) break;
    if (result == Turn::moved) {
      patience.note_moved();
      if (++num_moves % kMovesPerLook != 0) continue;
    } else if (patience.lasts()) {
      continue;
    }
    const auto now = Clock::now();
    if (now >= until) {
      cut_short = true;
      break;
    }
    if (result == Turn::moved) continue;
    if (leave_crowded_core(now)) {
      patience.note_moved();
      continue;
    }
    const uint32_t count = bell.count.load();
    if (turn(By::assistant, kWaiter) != Turn::idle || operation.done()) {
      patience.note_moved();
      continue;
    }
    sleep(bell, count, kWaiter, until - now);
    patience.note_slept();
  }
  bool leaves_work;
  {
    std::lock_guard lock(mutex_);
    assisted_ = false;
    leaves_work = busy();
    if (!leaves_work) bell.sleepers.store(kNobody);
  }
  if (leaves_work) hand_over();  // the progress thread has slept meanwhile
  return !cut_short;
}

// The kernel wakes a thread on the core of the thread that wakes it, and may leave ranks that wait for each
// other there although fewer run on another core, since none of them runs for long: two that have a core each
// then take ten times as long for a message. Of the ranks on a core the highest moves, or another one if that
// does not, since it sleeps too rarely to notice.
bool ShmTransport::leave_crowded_core(Clock::time_point now) {
  const int core = current_core();
  if (core < 0 || core >= static_cast<int>(CoreSet().size()) || now < next_look_at_) return false;
  next_look_at_ = now + kLookInterval;
  std::array<int, kMaxRanks> core_of_other;  // allocates nothing, which could fail
  size_t num_others = 0;
  bool is_highest = true, is_alone = true;
  {
    std::lock_guard lock(mutex_);
    for (int peer_idx = 0; peer_idx < size_; ++peer_idx) {
      if (!peers_[peer_idx]) continue;
      const Status& status = peers_[peer_idx]->segment->status();
      const uint32_t theirs = status.core.load();
      if (theirs == 0 || theirs > CoreSet().size() || status.goodbye.load() != 0) continue;
      const int other = core_of_other[num_others++] = static_cast<int>(theirs - 1);
      if (other != core) continue;
      is_alone = false;
      if (peer_idx > rank_) is_highest = false;
    }
  }
  if (is_alone) return false;
  const CoreSet usable = usable_cores();
  const auto others = std::span(core_of_other).first(num_others);
  if (emptier_cores(core, usable, others).none()) return false;
  if (!is_highest && ++num_left_to_higher_ % kLeftToHigher != 0) return false;
  next_look_at_ = now + kShortestStay;
  // The thread's memory stays where it is.
  if (!move_to(emptier_cores(core, usable & near_cores(core), others))) return false;
  own_.status().core.store(static_cast<uint32_t>(current_core() + 1));
  return true;
}

void ShmTransport::progress() {
  Bell& bell = own_.status().bell;
  while (true) {
    while (turn(By::others, kNobody) == Turn::moved) {
    }
    const uint32_t count = bell.count.load();
    if (stopping_) return;
    if (turn(By::others, kProgress) != Turn::moved) sleep(bell, count, kProgress, kLongestSleep);
  }
}

// ----------------------------------------------------------------------------------------------
// life and death

bool ShmTransport::tick() {
  hand_over();  // in case a caller posted in order to wait, and then did not
  std::vector<std::pair<int, SegmentPtr>> ended;
  std::vector<int> met;
  {
    std::lock_guard lock(mutex_);
    met = newly_met();  // also after a failure, which must reach them
    for (int peer_idx = 0; peer_idx < size_; ++peer_idx) {
      Peer* const peer = peers_[peer_idx].get();
      if (!peer) continue;
      if (!met_[peer_idx] && peer->segment->status().goodbye.load() != 0) {
        met_[peer_idx] = true;
        met.push_back(peer_idx);  // it has left without having met this rank
      }
      if (!peer->watch || !peer->watch->has_ended()) continue;
      peer->watch.reset();
      peer->lost = true;
      ended.emplace_back(peer_idx, peer->segment);
    }
  }
  for (const int peer : met)
    if (options_.on_met) options_.on_met(peer);
  if (ended.empty()) return false;
  turn(By::others, kProgress);  // reads their last messages, if any
  for (const auto& [peer, segment] : ended)
    if (segment->status().goodbye.load() == 0 && segment->status().failed.load() == 0)
      events_.on_peer_lost(peer, "its process has ended");
  return false;
}

void ShmTransport::wake_peers() {
  std::vector<SegmentPtr> segments;
  {
    std::lock_guard lock(mutex_);
    for (const auto& peer : peers_)
      if (peer) segments.push_back(peer->segment);
  }
  for (const SegmentPtr& segment : segments) wake_sleepers(segment->status().bell);
}

// With the lock, once nothing moves any more. A peer that is stopped in the middle of a payload goes on
// writing when it is continued, and nobody waits for that.
void ShmTransport::end_window() {
  std::vector<RequestPtr> granted;
  for (const auto& peer : peers_)
    if (peer)
      for (const auto& lane : peer->inbound)
        if (RequestPtr recv = lane->landing()) granted.push_back(std::move(recv));
  if (window_) window_->end(granted);
}

void ShmTransport::abort(const Failure& failure) {
  {
    std::unique_lock lock(mutex_);
    if (std::exchange(aborted_, true)) return;
    over_ = true;
    pieces_written_.wait(lock, [this] { return num_pieces_ == 0; });
    const std::vector<std::byte> record = encode_failure(failure);
    Status& status = own_.status();
    if (record.size() <= kMaxFailureBytes) {
      std::copy(record.begin(), record.end(), status.failure.begin());
      status.num_failure_bytes = static_cast<uint32_t>(record.size());
      status.failed.store(1);
    }
    end_window();
    for (const auto& peer : peers_) {
      if (!peer) continue;
      for (auto& lane : peer->outbound) lane->drop();
      for (auto& lane : peer->inbound) lane->drop();
    }
    multicast_->drop();
    sending_.clear();
    receiving_.clear();
  }
  wake_peers();
  wake(own_.status().bell, kEverybody);
}

void ShmTransport::begin_close() {
  std::lock_guard lock(mutex_);
  if (std::exchange(closing_, true)) return;
  for (const auto& peer : peers_)
    if (peer && peer->is_routed) finish(*peer);
}

// Peers need nothing from this rank any more: its messages and answers are in their memory. Only broadcasts
// lie in its own, which peers may still have to read.
void ShmTransport::close(Deadline /*deadline*/) {
  if (stopping_.exchange(true)) return;
  begin_close();
  {
    std::unique_lock lock(mutex_);
    over_ = true;
    pieces_written_.wait(lock, [this] { return num_pieces_ == 0; });
    own_.status().goodbye.store(1);
    end_window();
  }
  wake_peers();
  wake(own_.status().bell, kEverybody);
  if (progress_thread_.joinable()) progress_thread_.join();
  std::lock_guard lock(mutex_);
  std::vector<int> sources;
  for (int peer_idx = 0; peer_idx < size_; ++peer_idx) {
    if (!peers_[peer_idx]) continue;
    peers_[peer_idx]->watch.reset();
    sources.push_back(peer_idx);
  }
  own_.close_fd();
  own_.release_rings(sources);
}

std::string ShmTransport::describe_peer(int peer_idx) const {
  std::lock_guard lock(mutex_);
  const Peer* const peer = peers_[peer_idx].get();
  if (!peer) return "is not connected";
  if (peer->segment->status().goodbye.load() != 0) return "has closed its communicator";
  if (peer->lost) return "died";
  for (const auto& lane : peer->outbound)
    if (lane->is_final_for_receiver(UINT64_MAX)) return "has closed its communicator";
  return met_[peer_idx] ? "is connected" : "has not answered through shared memory";
}

}  // namespace pipecomm::shm
