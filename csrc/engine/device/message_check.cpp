#include "engine/device/message_check.h"

#include <algorithm>

namespace pipecomm {
namespace {

// Bounds of what is remembered per order. A claim about a message that has left the log is not
// compared any more; one too far ahead of us is dropped.
constexpr size_t kMaxRuns = 256;
constexpr size_t kMaxClaimsAhead = 16384;
// Both ends forget the same description at the same message, and so compare it again together.
constexpr size_t kMaxKnown = 4096;
constexpr uint64_t kNotNumbered = ~uint64_t{0};  // the `seq` of a claim about a whole order

}  // namespace

MessageCheck::MessageCheck(int size, int num_channels, Check check)
    : size_(size), num_channels_(num_channels), check_(check) {}

MessageCheck::Order& MessageCheck::order_of(int peer, Direction direction, int channel) {
  const auto [found, is_new] = orders_.try_emplace({peer, direction, channel});
  if (is_new) found->second.is_numbered = !unnumbered_channels_.contains(channel);
  return found->second;
}

MessageCheck::Posted MessageCheck::posted(int peer, Direction direction, Descriptor& descriptor) {
  std::lock_guard lock(mutex_);
  Order& order = order_of(peer, direction, descriptor.channel);
  descriptor.seq = order.next_seq++;
  Posted posted;
  if (check_ == Check::off) return posted;
  const bool is_new = learn(order, descriptor);
  if (!order.is_numbered) return posted;

  if (!order.runs.empty() && order.runs.back().end == descriptor.seq &&
      order.runs.back().descriptor.agrees_with(descriptor)) {
    order.runs.back().end = order.next_seq;
  } else {
    if (order.runs.size() == kMaxRuns) order.runs.pop_front();
    order.runs.push_back({descriptor.seq, order.next_seq, descriptor});
  }
  posted.claim = is_new || check_ == Check::full;

  if (const auto claim = order.claims.find(descriptor.seq); claim != order.claims.end()) {
    if (!descriptor.agrees_with(claim->second))
      posted.mismatch = Mismatch{peer, direction, descriptor, claim->second};
    order.claims.erase(claim);
  }
  return posted;
}

std::optional<MessageCheck::Mismatch> MessageCheck::heard(int peer, Direction direction,
                                                          const Descriptor& theirs) {
  if (check_ == Check::off || peer < 0 || peer >= size_ ||
      (theirs.channel >= num_channels_ && theirs.channel != kCollectiveChannel))
    return std::nullopt;
  const Direction ours = direction == Direction::send ? Direction::recv : Direction::send;
  std::lock_guard lock(mutex_);
  Order& order = order_of(peer, ours, theirs.channel);
  if (theirs.seq == kNotNumbered) stop_numbers(order);
  if (!order.is_numbered) return std::nullopt;
  if (theirs.seq >= order.next_seq) {
    if (order.claims.size() < kMaxClaimsAhead) order.claims.emplace(theirs.seq, theirs);
    return std::nullopt;
  }
  const auto run = std::find_if(order.runs.rbegin(), order.runs.rend(),
                                [&](const Run& each) { return each.begin <= theirs.seq; });
  if (run == order.runs.rend() || run->end <= theirs.seq || run->descriptor.agrees_with(theirs))
    return std::nullopt;
  Mismatch mismatch{peer, ours, run->descriptor, theirs};
  mismatch.ours.seq = theirs.seq;
  return mismatch;
}

bool MessageCheck::is_known(int peer, Direction direction, const Descriptor& descriptor) const {
  std::lock_guard lock(mutex_);
  if (check_ == Check::off) return true;
  const auto found = orders_.find({peer, direction, descriptor.channel});
  return found != orders_.end() && found->second.known.contains(descriptor.digest());
}

void MessageCheck::skip(int peer, Direction direction, Descriptor& descriptor) {
  std::lock_guard lock(mutex_);
  Order& order = order_of(peer, direction, descriptor.channel);
  descriptor.seq = order.next_seq++;
  order.claims.erase(descriptor.seq);
}

void MessageCheck::learn(int peer, Direction direction, const Descriptor& descriptor) {
  std::lock_guard lock(mutex_);
  learn(order_of(peer, direction, descriptor.channel), descriptor);
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

void MessageCheck::stop_numbers(int channel) {
  std::lock_guard lock(mutex_);
  unnumbered_channels_.insert(channel);
  for (auto& [key, order] : orders_)
    if (std::get<2>(key) == channel) stop_numbers(order);
}

void MessageCheck::stop_numbers(Order& order) {
  order.is_numbered = false;
  order.runs.clear();
  order.claims.clear();
}

std::optional<Descriptor> MessageCheck::captured(int peer, Direction direction,
                                                 const Descriptor& descriptor) {
  std::lock_guard lock(mutex_);
  Order& order = order_of(peer, direction, descriptor.channel);
  if (check_ == Check::off || !order.is_numbered) return std::nullopt;
  stop_numbers(order);
  Descriptor news = descriptor;
  news.seq = kNotNumbered;
  return news;
}

}  // namespace pipecomm
