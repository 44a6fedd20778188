#include "engine/device/links.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "message/start_thread.h"
#include "transport/group_tree.h"

namespace pipecomm {
namespace {

// Signatures of what ranks say of a link with OpCode::connect. The `seq` of a refusal is its rank.
enum Word : uint64_t { kAsk, kId, kJoin, kGo, kRefuse };
constexpr auto kMeetingPoll = std::chrono::milliseconds(1);

LinkError link_error(const std::exception& error) {
  const auto* const of_nccl = dynamic_cast<const NcclError*>(&error);
  return {of_nccl ? of_nccl->result() : NcclResult::internal_error, error.what()};
}

}  // namespace

Links::Links(int rank, int size, std::shared_ptr<DeviceRuntime> runtime,
             std::shared_ptr<NcclTransport> nccl, NcclConfig config, Tell tell)
    : rank_(rank),
      size_(size),
      runtime_(std::move(runtime)),
      nccl_(std::move(nccl)),
      config_(std::move(config)),
      tell_(std::move(tell)),
      shared_(std::make_shared<Shared>()) {}

int Links::parent_in(const LaneKey& key) const {
  return key.peer == kEverybody ? tree_place(rank_, size_).parent : key.peer;
}

std::vector<int> Links::children_in(const LaneKey& key) const {
  if (key.peer == kEverybody) return tree_place(rank_, size_).children;
  return is_root(key) ? std::vector{key.peer} : std::vector<int>{};
}

// ------------------------------------------------------------------------------------------------
// making links

Links::Link& Links::link_of(const LaneKey& key) {
  const auto [found, is_new] = shared_->links.try_emplace(key);
  if (is_new)
    found->second.heard_in_round.resize(
        key.peer == kEverybody ? size_t(std::bit_width(size_t(size_ - 1))) : 1);
  return found->second;
}

Links::Step Links::begin_locked(const LaneKey& key, Link& link) {
  if (shared_->is_ending || std::exchange(link.is_begun, true)) return Step::nothing;
  const Step step = next_step(key, link);
  return step == Step::nothing && key.peer != kEverybody ? Step::invite : step;
}

Links::Step Links::next_step(const LaneKey& key, Link& link) {
  if (!link.is_begun || link.refused_by || link.state != State::waiting ||
      link.have_asked.size() < children_in(key).size())
    return Step::nothing;
  if (!is_root(key)) return std::exchange(link.has_asked, true) ? Step::nothing : Step::ask;
  link.state = State::offered;
  return Step::choose;
}

// Once all ranks below have joined a link, the root lets them go, and any other rank joins, too.
Links::Step Links::step_after_id(const LaneKey& key, Link& link) {
  if (link.state != State::offered || link.refused_by ||
      link.have_joined.size() < children_in(key).size())
    return Step::nothing;
  if (!is_root(key)) return Step::join;
  link.state = State::connecting;
  return Step::go;
}

// Marks a link as refused, unless its ranks have been let go.
Links::Step Links::refuse_locked(Link& link, int by) {
  if (link.refused_by || (link.state != State::waiting && link.state != State::offered))
    return Step::nothing;
  link.refused_by = by;
  shared_->changed.notify_all();
  return Step::refuse;
}

void Links::begin(const LaneKey& key) {
  Step step;
  {
    std::lock_guard lock(shared_->mutex);
    step = begin_locked(key, link_of(key));
  }
  take(step, key);
}

void Links::take(Step step, const LaneKey& key) {
  switch (step) {
    case Step::nothing:
      return;
    case Step::invite:
      return say(key.peer, OpCode::connect, key, kAsk);
    case Step::ask:
      return say(parent_in(key), OpCode::connect, key, kAsk);
    case Step::choose:
      return choose(key);
    case Step::offer: {
      NcclUniqueId id;
      Step next;
      {
        std::lock_guard lock(shared_->mutex);
        Link& link = link_of(key);
        id = link.id;
        next = step_after_id(key, link);
      }
      say_to_children(key, kId, std::as_bytes(std::span(id.bytes)));
      return take(next, key);
    }
    case Step::join:
      return say(parent_in(key), OpCode::connect, key, kJoin);
    case Step::go:
      say_to_children(key, kGo);
      return connect_apart(key);
    case Step::refuse: {
      uint64_t by;
      {
        std::lock_guard lock(shared_->mutex);
        by = uint64_t(*link_of(key).refused_by);
      }
      if (!is_root(key)) say(parent_in(key), OpCode::connect, key, kRefuse, by);
      for (const int child : children_in(key)) say(child, OpCode::connect, key, kRefuse, by);
      return;
    }
  }
}

void Links::choose(const LaneKey& key) {
  NcclUniqueId id;
  try {
    id = nccl_->new_id();
  } catch (const std::exception& error) {
    std::lock_guard lock(shared_->mutex);
    link_of(key).state = State::failed;
    link_of(key).error = link_error(error);
    return;
  }
  {
    std::lock_guard lock(shared_->mutex);
    link_of(key).id = id;
  }
  take(Step::offer, key);
}

// The thread owns what it needs: it is left behind if NCCL does not return.
void Links::connect_apart(const LaneKey& key) {
  const auto fail = [key, shared = shared_](const LinkError& error) {
    std::lock_guard lock(shared->mutex);
    shared->links.at(key).state = State::failed;
    shared->links.at(key).error = error;
  };
  NcclUniqueId id;
  {
    std::lock_guard lock(shared_->mutex);
    id = link_of(key).id;
  }
  const auto connect = [key, id, fail, shared = shared_, runtime = runtime_, nccl = nccl_,
                        config = config_] {
    try {
      runtime->adopt_thread();
      const NcclLane made{id, key.peer, key.channel, key.goes_up, runtime->new_stream()};
      const int comm_idx = nccl->connect(made, config);
      std::lock_guard lock(shared->mutex);
      Lane& lane = shared->lanes[key];
      if (!lane.stream) lane.stream = made.stream;
      lane.comm_idx = comm_idx;
      shared->links.at(key).state = State::ready;
    } catch (const std::exception& error) {
      fail(link_error(error));
    }
    shared->changed.notify_all();
  };
  try {
    start_thread(connect, rank_).detach();
  } catch (const PipeCommException& error) {
    fail(link_error(error));
  }
}

void Links::say(int peer, OpCode op, const LaneKey& key, uint64_t signature, uint64_t seq,
                std::span<const std::byte> note) const {
  Descriptor claim{.op = op,
                   .num_dims = key.peer == kEverybody,
                   .channel = uint8_t(key.channel),
                   .signature = signature};
  claim.seq = seq;
  const bool sends = key.peer == kEverybody || key.goes_up == (key.peer > rank_);
  tell_(peer, sends ? Direction::send : Direction::recv, claim, note);
}

void Links::say_to_children(const LaneKey& key, uint64_t signature,
                            std::span<const std::byte> note) const {
  for (const int child : children_in(key)) say(child, OpCode::connect, key, signature, 0, note);
}

bool Links::on_claim(int peer, Direction theirs, const Descriptor& claim,
                     std::span<const std::byte> note) {
  const bool is_of_all = claim.num_dims != 0;
  const LaneKey key = is_of_all ? LaneKey{} : lane_of(claim.channel, opposite(theirs), rank_, peer);
  if (!nccl_ || claim.channel > kCollectiveChannel ||
      (is_of_all && claim.channel != kCollectiveChannel))
    return false;
  NcclUniqueId id{};
  const bool has_id = claim.op == OpCode::connect && claim.signature == kId;
  if (note.size() != (has_id ? sizeof id : 0)) return false;
  if (has_id) std::memcpy(&id, note.data(), sizeof id);

  const std::vector<int> children = children_in(key);
  const bool is_from_child = std::ranges::find(children, peer) != children.end();
  const bool is_from_parent = !is_root(key) && peer == parent_in(key);
  Step step = Step::nothing;
  {
    std::lock_guard lock(shared_->mutex);
    Link& link = link_of(key);
    if (claim.op == OpCode::close) {
      if (claim.seq >= link.heard_in_round.size()) return false;
      link.heard_in_round[claim.seq] = true;
      return true;
    }
    switch (claim.signature) {
      case kAsk:
        if (is_from_child) link.have_asked.insert(peer);
        if (shared_->is_ending && link.state == State::waiting)
          step = refuse_locked(link, rank_);  // later, it has joined
        else if (is_of_all || link.is_begun)
          step = next_step(key, link);
        else
          step = begin_locked(key, link);  // of a pair, each rank takes part if the other one asks
        break;
      case kId:
        if (!is_from_parent || link.state != State::waiting) return false;
        if (link.refused_by) break;
        link.id = id;
        link.state = State::offered;
        step = shared_->is_ending ? refuse_locked(link, rank_) : Step::offer;
        break;
      case kJoin:
        if (!is_from_child) return false;
        link.have_joined.insert(peer);
        step = step_after_id(key, link);
        break;
      case kGo:
        if (!is_from_parent || link.state != State::offered) return false;
        link.state = State::connecting;
        step = Step::go;
        break;
      case kRefuse:
        if (claim.seq >= uint64_t(size_)) return false;
        step = refuse_locked(link, static_cast<int>(claim.seq));
        break;
      default:
        return false;
    }
  }
  take(step, key);
  return true;
}

// ------------------------------------------------------------------------------------------------
// their state

bool Links::is_ready(const LaneKey& key) const {
  std::lock_guard lock(shared_->mutex);
  const auto found = shared_->links.find(key);
  return found != shared_->links.end() && found->second.state == State::ready;
}

bool Links::wait_until_ready(const LaneKey& key, Deadline until) const {
  std::unique_lock lock(shared_->mutex);
  return shared_->changed.wait_until(lock, until,
                                     [&] { return shared_->links.at(key).state == State::ready; });
}

bool Links::is_answered(const LaneKey& key) const {
  std::lock_guard lock(shared_->mutex);
  return shared_->links.at(key).state != State::waiting;
}

std::optional<int> Links::refused_by(const LaneKey& key) const {
  std::lock_guard lock(shared_->mutex);
  return shared_->links.at(key).refused_by;
}

std::optional<LinkError> Links::error(const std::function<bool(int peer)>& has_closed) const {
  std::lock_guard lock(shared_->mutex);
  for (auto& [key, link] : shared_->links) {
    if (!link.error) continue;
    if (key.peer == kEverybody || !has_closed(key.peer)) return link.error;
    link.refused_by = key.peer;
  }
  return std::nullopt;
}

void Links::refuse_more() {
  std::vector<LaneKey> refused;
  {
    std::lock_guard lock(shared_->mutex);
    shared_->is_ending = true;
    for (auto& [key, link] : shared_->links)
      if (link.state == State::waiting && (link.is_begun || !link.have_asked.empty()) &&
          refuse_locked(link, rank_) == Step::refuse)
        refused.push_back(key);
  }
  for (const LaneKey& key : refused) take(Step::refuse, key);
}

Lane& Links::lane(const LaneKey& key) {
  std::lock_guard lock(shared_->mutex);
  Lane& lane = shared_->lanes[key];
  if (!lane.stream) lane.stream = runtime_->new_stream();
  return lane;
}

StreamHandle Links::stream_of(const LaneKey& key) const {
  std::lock_guard lock(shared_->mutex);
  const auto found = shared_->lanes.find(key);
  return found == shared_->lanes.end() ? nullptr : found->second.stream;
}

// ------------------------------------------------------------------------------------------------
// the end

// In round k of a link a rank tells the one 2^k above it that all it has heard of have come.
bool Links::meet(const std::function<bool()>& keeps_waiting,
                 const std::function<bool(int peer)>& has_closed) {
  const auto wait_for = [&](std::unique_lock<std::mutex>& lock, auto&& condition) {
    while (!condition()) {
      lock.unlock();
      if (!keeps_waiting()) return false;
      std::this_thread::sleep_for(kMeetingPoll);
      lock.lock();
    }
    return true;
  };
  const auto is_being_made = [&](const auto& each) {
    const auto& [key, link] = each;
    return (link.state == State::offered || link.state == State::connecting) && !link.refused_by &&
           (key.peer == kEverybody || !has_closed(key.peer));
  };
  std::vector<std::pair<LaneKey, size_t>> ready;  // and the number of its rounds
  {
    // A rank whose link is nearly made will make it, and then waits for this one.
    std::unique_lock lock(shared_->mutex);
    if (!wait_for(lock, [&] { return std::ranges::none_of(shared_->links, is_being_made); }))
      return false;
    for (const auto& [key, link] : shared_->links)
      if (link.state == State::ready) ready.emplace_back(key, link.heard_in_round.size());
  }
  const auto tell_above = [&](const LaneKey& key, size_t round) {
    const auto above = (size_t(rank_) + (size_t{1} << round)) % size_t(size_);
    say(key.peer == kEverybody ? static_cast<int>(above) : key.peer, OpCode::close, key, kMeeting,
        round);
  };
  for (const auto& [key, num_rounds] : ready) tell_above(key, 0);
  for (const auto& [key, num_rounds] : ready) {
    for (size_t round = 0; round < num_rounds; ++round) {
      if (round > 0) tell_above(key, round);
      std::unique_lock lock(shared_->mutex);
      if (!wait_for(lock, [&] { return shared_->links.at(key).heard_in_round[round]; }))
        return false;
    }
  }
  return true;
}

}  // namespace pipecomm
