#include "engine/message_check.h"

#include <algorithm>

namespace pipecomm {
namespace {

// Bounds of what is remembered per order. A claim about a message that has left the log is not
// compared any more; one too far ahead of us is dropped.
constexpr size_t kMaxRuns = 256;
constexpr size_t kMaxClaimsAhead = 16384;

}  // namespace

MessageCheck::MessageCheck(int size, int num_channels, Check check)
    : size_(size),
      num_channels_(num_channels),
      check_(check),
      orders_(size_t(size) * 2 * size_t(num_channels)) {}

MessageCheck::Posted MessageCheck::posted(int peer, Direction direction, Descriptor& descriptor) {
  std::lock_guard lock(mutex_);
  Order& order = orders_[order_idx(peer, direction, descriptor.channel)];
  descriptor.seq = order.next_seq++;
  Posted posted;
  if (check_ == Check::off) return posted;

  if (!order.runs.empty() && order.runs.back().descriptor.agrees_with(descriptor)) {
    order.runs.back().end = order.next_seq;
  } else {
    if (order.runs.size() == kMaxRuns) order.runs.pop_front();
    order.runs.push_back({descriptor.seq, order.next_seq, descriptor});
  }
  posted.claim = order.known.insert(descriptor.digest()).second || check_ == Check::full;

  if (const auto claim = order.claims.find(descriptor.seq); claim != order.claims.end()) {
    if (!descriptor.agrees_with(claim->second))
      posted.mismatch = Mismatch{peer, direction, descriptor, claim->second};
    order.claims.erase(claim);
  }
  return posted;
}

std::optional<MessageCheck::Mismatch> MessageCheck::heard(int peer, Direction direction,
                                                          const Descriptor& theirs) {
  if (check_ == Check::off || peer < 0 || peer >= size_ || theirs.channel >= num_channels_)
    return std::nullopt;
  const Direction ours = direction == Direction::send ? Direction::recv : Direction::send;
  std::lock_guard lock(mutex_);
  Order& order = orders_[order_idx(peer, ours, theirs.channel)];
  if (theirs.seq >= order.next_seq) {
    if (order.claims.size() < kMaxClaimsAhead) order.claims.emplace(theirs.seq, theirs);
    return std::nullopt;
  }
  const auto run = std::find_if(order.runs.rbegin(), order.runs.rend(),
                                [&](const Run& run) { return run.begin <= theirs.seq; });
  if (run == order.runs.rend() || run->descriptor.agrees_with(theirs)) return std::nullopt;
  Mismatch mismatch{peer, ours, run->descriptor, theirs};
  mismatch.ours.seq = theirs.seq;
  return mismatch;
}

bool MessageCheck::is_known(int peer, Direction direction, const Descriptor& descriptor) const {
  std::lock_guard lock(mutex_);
  if (check_ == Check::off) return true;
  return orders_[order_idx(peer, direction, descriptor.channel)].known.contains(
      descriptor.digest());
}

}  // namespace pipecomm
