// The part of DeviceExecution that makes links, or waits for those that a call needs.
#include <algorithm>
#include <cstdlib>
#include <numeric>
#include <set>

#include "engine/device/device_execution.h"

namespace pipecomm {
namespace {

constexpr auto kPoll = std::chrono::milliseconds(10);

// Sorts links so that ranks which need many begin with different peers: for one distance around the
// ring of ranks and one channel, each rank has links with two others at most.
std::vector<LaneKey> by_distance(std::span<const LaneKey> keys, int size) {
  std::vector<LaneKey> ordered(keys.begin(), keys.end());
  std::ranges::stable_sort(ordered, {}, [size](const LaneKey& key) {
    if (!key.is_one_way) return std::pair(0, key.channel);
    const int distance = std::abs(key.ranks.front() - key.ranks.back());
    return std::pair(std::min(distance, size - distance), key.channel);
  });
  return ordered;
}

}  // namespace

void DeviceExecution::connect(std::span<const int> peers,
                              const std::optional<std::vector<int>>& channels,
                              std::optional<Direction> direction) {
  if (!nccl_) return;
  std::vector<int> all(num_channels());
  std::iota(all.begin(), all.end(), 0);
  std::set<int> others(peers.begin(), peers.end());
  others.erase(rank());
  std::vector<LaneKey> keys;
  for (const int peer : others)
    for (const int channel : channels.value_or(all))
      for (const Direction each : {Direction::send, Direction::recv})
        if (direction.value_or(each) == each) keys.push_back(lane_of(channel, each, rank(), peer));
  for (const LaneKey& key : by_distance(keys, size())) links_->begin(key);
  if (!channels && !direction && others.size() == size_t(size() - 1)) links_->begin({});
}

void DeviceExecution::connect(const Scope& scope) {
  if (nccl_) links_->begin(lane_of_exchange(scope));
}

// Peers make links in the background, independent of their application. So this does not wait for a
// call of another rank.
void DeviceExecution::require_links(OpCode op, std::span<const LaneKey> keys,
                                    const Interrupted& interrupted) {
  const auto is_ready = [this](const LaneKey& key) { return links_->is_ready(key); };
  if (std::ranges::all_of(keys, is_ready)) return;
  if (runtime_->is_capturing(runtime_->current_stream()))
    throw std::invalid_argument(
        std::string("first ") + op_name(op) +
        " between these ranks inside a CUDA graph capture, where NCCL cannot connect them; run it "
        "once before capturing, or call connect() in time");
  const Clock::time_point begin = Clock::now();
  const Deadline deadline = dispatch_.deadline_from_now();
  for (const LaneKey& key : by_distance(keys, size())) links_->begin(key);
  for (const LaneKey& key : keys) {
    while (!links_->wait_until_ready(key, Clock::now() + kPoll)) {
      dispatch_.check_usable(op);
      if (const auto error = links_->error(has_closed())) {
        fail_connecting(op, *error);
        throw_failure(dispatch_);
      }
      check_answer(op, key, begin, deadline);
      if (interrupted) interrupted();
    }
  }
}

// Throws if a link has not come in time, or will not come.
void DeviceExecution::check_answer(OpCode op, const LaneKey& key, Clock::time_point begin,
                                   Deadline deadline) {
  const auto require_open = [&](int peer, bool has_closed) {
    if (!has_closed) return;
    dispatch_.check_usable(op);  // a rank that fails and closes may do both after the check before
    throw PipeCommException(closed_failure(dispatch_, op, peer));
  };
  if (const auto peer = links_->refused_by(key)) require_open(*peer, true);
  const bool is_answered = links_->is_answered(key);
  std::vector<int> peers = ranks_of(key, size());
  std::erase(peers, rank());
  for (const int peer : peers)
    require_open(
        peer, dispatch_.transport().has_closed(peer) || (!is_answered && checks_.is_closing(peer)));
  if (Clock::now() < deadline) return;
  if (peers.size() == 1)
    fail_late(dispatch_, op, begin, deadline,
              "NCCL has not connected this rank and rank " + std::to_string(peers.front()),
              peers.front());
  const std::string all = key.ranks.empty() ? "all" : std::to_string(peers.size() + 1);
  fail_late(dispatch_, op, begin, deadline, "NCCL has not connected " + all + " ranks",
            std::nullopt);
}

DeviceUsage DeviceExecution::device_usage() const {
  if (!nccl_) return {};
  const NcclTransport::Usage usage = nccl_->usage();
  return {usage.num_comms, usage.num_bytes};
}

std::string DeviceExecution::take_warning() {
  if (!nccl_ || has_warned_ || nccl_->usage().num_within_host < kManyWithinHost ||
      has_warned_.exchange(true))
    return "";
  return "rank " + std::to_string(rank()) + " has made " +
         std::to_string(nccl_->usage().num_within_host) +
         " NCCL communicators with ranks of its host; on a host with NVSwitch NCCL takes one of "
         "128 multicast groups for each, which torch's communicators need, too. Set "
         "NCCL_NVLS_ENABLE=0, use fewer channels, or one exchange instead of messages between many "
         "pairs";
}

}  // namespace pipecomm
