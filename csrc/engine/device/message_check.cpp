#include "engine/device/message_check.h"

#include <algorithm>

#include "transport/transport.h"

namespace pipecomm {
namespace {

// Limits of the log per order. A claim about a message that has left the log is not compared any
// more; a claim too far ahead of this rank is dropped.
constexpr size_t kMaxRuns = 256;
constexpr size_t kMaxClaimsAhead = 16384;
// Both ends forget the same description at the same message, and so compare it again together.
constexpr size_t kMaxKnown = 4096;
constexpr uint64_t kNotNumbered = ~uint64_t{0};  // the `seq` of a claim about a whole order

}  // namespace

// ------------------------------------------------------------------------------------------------
// messages of this rank

void MessageCheck::post(int peer, Direction direction, Descriptor descriptor, bool is_awaited,
                        Posted& posted) {
  if (check_ == Check::off) return;
  std::lock_guard lock(mutex_);
  post({descriptor.channel, false, peer, direction}, {0, 0, descriptor, is_awaited, false}, posted);
}

MessageCheck::Posted MessageCheck::post(const Collective& collective, bool is_awaited,
                                        bool is_refused) {
  Posted posted;
  posted.is_compared = check_ != Check::off;
  if (!posted.is_compared) return posted;
  std::lock_guard lock(mutex_);
  const Messages messages = compared_messages(collective);
  for (const auto& [key, descriptor] : messages)
    post(key, {0, 0, descriptor, is_awaited, is_refused}, posted);
  if (messages.empty()) return posted;
  Collectives& collectives = collectives_on(collective.channel);
  for (const int peer : collective.peers)
    if (uint64_t& count = collectives.num_with[size_t(peer)]; count != kNotNumbered) ++count;
  if (collectives.latest.size() == kMaxRuns) collectives.latest.pop_front();
  Run empty{0, 0, messages.front().second, is_awaited, is_refused};
  empty.descriptor.num_bytes = 0;
  collectives.latest.emplace_back(collective.peers, empty);
  return posted;
}

void MessageCheck::post(const Key& key, Run message, Posted& posted) {
  Order& order = order_of(key);
  message.begin = message.descriptor.seq = order.next_seq++;
  message.end = order.next_seq;
  const bool is_new = !message.is_refused && learn(order, message.descriptor);
  if (!order.is_numbered) {
    posted.is_compared = false;
    return;
  }
  Run* const last = order.runs.empty() ? nullptr : &order.runs.back();
  if (last && last->end == message.begin && last->is_awaited == message.is_awaited &&
      last->is_refused == message.is_refused && last->descriptor.agrees_with(message.descriptor)) {
    last->end = message.end;
  } else {
    if (order.runs.size() == kMaxRuns) order.runs.pop_front();
    order.runs.push_back(message);
  }
  if (is_new || message.is_refused || check_ == Check::full)
    posted.announcements.push_back({std::get<2>(key), std::get<3>(key), message.descriptor});
  const auto claim = order.claims.extract(message.begin);
  if (!claim) return;
  if (auto mismatch = compare(key, message, message.begin, claim.mapped()); !posted.mismatch) {
    posted.mismatch = std::move(mismatch);
    if (posted.mismatch) posted.mismatch->is_under_way = false;
  }
}

// The messages with peers that have an order already, or get one now.
MessageCheck::Messages MessageCheck::compared_messages(const Collective& collective) const {
  std::vector<int> peers = collective.compared;
  for (auto order = orders_.lower_bound({collective.channel, true, 0, Direction::send});
       order != orders_.end() && std::get<0>(order->first) == collective.channel; ++order) {
    const int peer = std::get<2>(order->first);
    if (std::ranges::binary_search(collective.peers, peer)) peers.push_back(peer);
  }
  std::ranges::sort(peers);
  peers.erase(std::ranges::unique(peers).begin(), peers.end());
  Messages messages;
  for (const PeerMessages& pair : collective.messages_with(peers)) {
    messages.emplace_back(Key{collective.channel, true, pair.peer, Direction::send}, pair.send);
    messages.emplace_back(Key{collective.channel, true, pair.peer, Direction::recv}, pair.recv);
  }
  return messages;
}

bool MessageCheck::is_known(int peer, Direction direction, const Descriptor& descriptor) const {
  std::lock_guard lock(mutex_);
  return is_known({descriptor.channel, false, peer, direction}, descriptor);
}

bool MessageCheck::is_known(const Collective& collective) const {
  std::lock_guard lock(mutex_);
  return std::ranges::all_of(compared_messages(collective), [this](const auto& message) {
    return is_known(message.first, message.second);
  });
}

bool MessageCheck::is_known(const Key& key, const Descriptor& descriptor) const {
  const auto found = orders_.find(key);
  return check_ == Check::off ||
         (found != orders_.end() && found->second.known.contains(descriptor.digest()));
}

void MessageCheck::capture(int peer, Direction direction, const Descriptor& descriptor,
                           Posted& posted) {
  std::lock_guard lock(mutex_);
  capture({descriptor.channel, false, peer, direction}, descriptor, posted);
}

MessageCheck::Posted MessageCheck::capture(const Collective& collective) {
  std::lock_guard lock(mutex_);
  Posted posted;
  for (const auto& [key, descriptor] : compared_messages(collective))
    capture(key, descriptor, posted);
  for (const int peer : collective.peers)
    collectives_on(collective.channel).num_with[size_t(peer)] = kNotNumbered;
  return posted;
}

void MessageCheck::capture(const Key& key, const Descriptor& descriptor, Posted& posted) {
  Order& order = order_of(key);
  if (check_ == Check::off || !order.is_numbered) return;
  stop_numbers(order);
  auto& news = posted.announcements.emplace_back(std::get<2>(key), std::get<3>(key), descriptor);
  news.descriptor.seq = kNotNumbered;
}

// ------------------------------------------------------------------------------------------------
// claims of peers

std::optional<MessageCheck::Mismatch> MessageCheck::receive(int peer, Direction direction,
                                                            const Descriptor& theirs,
                                                            const std::string& refusal) {
  if (check_ == Check::off || peer < 0 || peer >= size_ ||
      (theirs.channel >= num_channels_ && theirs.channel != kCollectiveChannel))
    return std::nullopt;
  const Key key{theirs.channel, theirs.op != OpCode::p2p, peer, opposite(direction)};
  const Claim claim{theirs, refusal};
  std::lock_guard lock(mutex_);
  const bool is_first = !orders_.contains(key);
  Order& order = order_of(key);
  if (theirs.seq == kNotNumbered) stop_numbers(order);
  if (!order.is_numbered) {
    // Without numbers, the message of this rank cannot be found.
    return refusal.empty()
               ? std::nullopt
               : std::optional(Mismatch{peer, opposite(direction), theirs, theirs, refusal, true});
  }
  if (theirs.seq >= order.next_seq) {
    if (order.claims.size() < kMaxClaimsAhead) order.claims.emplace(theirs.seq, claim);
  } else {
    const Run* const ours = find(key, order, theirs.seq, is_first && theirs.num_bytes > 0);
    auto mismatch = ours ? compare(key, *ours, theirs.seq, claim) : std::nullopt;
    if (mismatch) return mismatch;
  }
  order.num_received = theirs.seq + 1;
  changed_.notify_all();
  return std::nullopt;
}

std::optional<int> MessageCheck::missing(std::span<const Announcement> announcements,
                                         Deadline until) const {
  std::unique_lock lock(mutex_);
  const auto find = [&] {
    return std::ranges::find_if(announcements, [&](const Announcement& each) {
      const Descriptor& descriptor = each.descriptor;
      const Order& order =
          orders_.at({descriptor.channel, descriptor.op != OpCode::p2p, each.peer, each.direction});
      return order.is_numbered && order.num_received <= descriptor.seq;
    });
  };
  changed_.wait_until(lock, until, [&] { return find() == announcements.end(); });
  const auto found = find();
  return found == announcements.end() ? std::nullopt : std::optional(found->peer);
}

// The message that this rank has posted, if it is still in the log. `is_first`: the peer has
// announced data of a collective that, like all earlier ones, has none here.
const MessageCheck::Run* MessageCheck::find(const Key& key, const Order& order, uint64_t seq,
                                            bool is_first) {
  const auto run = std::find_if(order.runs.rbegin(), order.runs.rend(),
                                [&](const Run& each) { return each.begin <= seq; });
  if (run != order.runs.rend() && seq < run->end) return &*run;
  if (!is_first || !std::get<1>(key)) return nullptr;
  const auto& latest = collectives_on(std::get<0>(key)).latest;
  uint64_t number = order.next_seq;
  for (auto each = latest.rbegin(); each != latest.rend(); ++each)
    if (std::ranges::binary_search(each->first, std::get<2>(key)) && --number == seq)
      return &each->second;
  return nullptr;
}

std::optional<MessageCheck::Mismatch> MessageCheck::compare(const Key& key, const Run& ours,
                                                            uint64_t seq, const Claim& theirs) {
  const bool agrees = theirs.refusal.empty() && ours.descriptor.agrees_with(theirs.descriptor);
  if (agrees || ours.is_refused)
    return std::nullopt;  // a peer that takes part receives our refusal
  Mismatch mismatch{std::get<2>(key),  std::get<3>(key), ours.descriptor,
                    theirs.descriptor, theirs.refusal,   !ours.is_awaited};
  mismatch.ours.seq = seq;
  return mismatch;
}

// ------------------------------------------------------------------------------------------------
// orders

MessageCheck::Order& MessageCheck::order_of(const Key& key) {
  const auto [found, is_new] = orders_.try_emplace(key);
  const auto& [channel, is_collective, peer, direction] = key;
  if (is_new && is_collective) {
    const uint64_t count = collectives_on(channel).num_with[size_t(peer)];
    found->second.is_numbered = count != kNotNumbered;
    found->second.next_seq = found->second.is_numbered ? count : 0;
  }
  return found->second;
}

MessageCheck::Collectives& MessageCheck::collectives_on(int channel) {
  Collectives& collectives = collectives_[channel];
  collectives.num_with.resize(size_t(size_));
  return collectives;
}

bool MessageCheck::learn(Order& order, const Descriptor& descriptor) {
  const uint64_t digest = descriptor.digest();
  if (!order.known.insert(digest).second) return false;
  order.known_in_order.push_back(digest);
  if (order.known.size() > kMaxKnown) {
    order.known.erase(order.known_in_order.front());
    order.known_in_order.pop_front();
  }
  return true;
}

void MessageCheck::stop_numbers(Order& order) {
  order.is_numbered = false;
  order.runs.clear();
  order.claims.clear();
  changed_.notify_all();
}

}  // namespace pipecomm
