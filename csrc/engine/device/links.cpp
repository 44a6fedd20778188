#include "engine/device/links.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <thread>

#include "message/start_thread.h"
#include "plan/signature.h"
#include "transport/group_tree.h"

namespace pipecomm {
namespace {

constexpr auto kMeetingPoll = std::chrono::milliseconds(1);

LinkError link_error(const std::exception& error) {
  const auto* const of_nccl = dynamic_cast<const NcclError*>(&error);
  return {of_nccl ? of_nccl->result : NcclResult::internal_error, error.what()};
}

// The name of a link in messages.
uint64_t name_of(const LaneKey& key) {
  Signature signature("link");
  signature.add(int64_t{key.channel}).add(int64_t{key.is_one_way});
  for (const int rank : key.ranks) signature.add(int64_t{rank});
  return signature.value();
}

bool has(const std::vector<int>& ranks, int rank) {
  return std::ranges::find(ranks, rank) != ranks.end();
}

// The ranks in an invitation, if they are a valid link with both of these ranks.
std::optional<std::vector<int>> ranks_in(const ControlMessage& message, int size, int mine,
                                         int theirs) {
  const bool is_one_way = message.is_one_way;
  std::vector<int> ranks(message.payload.size() / sizeof(int));
  if (is_one_way && ranks.size() != 2) return std::nullopt;
  if (ranks.empty()) return ranks;
  std::memcpy(ranks.data(), message.payload.data(), message.payload.size());
  std::vector<int> increasing = ranks;
  std::ranges::sort(increasing);
  const bool are_valid = increasing.front() >= 0 && increasing.back() < size &&
                         std::ranges::adjacent_find(increasing) == increasing.end() &&
                         has(ranks, mine) && has(ranks, theirs);
  return are_valid && (is_one_way || ranks == increasing) ? std::optional(ranks) : std::nullopt;
}

std::optional<int> other_of_pair(const LaneKey& key, int rank) {
  if (!key.is_one_way) return std::nullopt;
  return key.ranks.front() == rank ? key.ranks.back() : key.ranks.front();
}

// "nccl of ranks 0 > 1 on channel 2"
std::string text_of(const LaneKey& key) {
  std::string ranks;
  for (const int rank : key.ranks)
    ranks += (ranks.empty() ? "ranks " : key.is_one_way ? " > " : ", ") + std::to_string(rank);
  return "nccl of " + (ranks.empty() ? "all ranks" : ranks) + " on channel " +
         std::to_string(key.channel);
}

}  // namespace

Links::Links(int rank, int size, uint64_t host, std::shared_ptr<DeviceRuntime> runtime,
             std::shared_ptr<NcclTransport> nccl, NcclConfig config, Send send,
             std::shared_ptr<ConnectionEvents> connection_events)
    : rank_(rank),
      size_(size),
      host_(host),
      runtime_(std::move(runtime)),
      nccl_(std::move(nccl)),
      config_(std::move(config)),
      connection_events_(std::move(connection_events)),
      send_(std::move(send)) {}

// ------------------------------------------------------------------------------------------------
// making links

Links::Entry& Links::entry_of(const LaneKey& key) {
  const auto [found, is_new] = links_.try_emplace(key);
  if (is_new) {
    Link& link = found->second;
    link.ranks = ranks_of(key, size_);
    const int size = static_cast<int>(link.ranks.size());
    const int mine = static_cast<int>(std::ranges::find(link.ranks, rank_) - link.ranks.begin());
    const TreePlace place = tree_place(mine, size);
    if (!place.is_root()) link.parent = link.ranks[size_t(place.parent)];
    for (const int child : place.children) link.children.push_back(link.ranks[size_t(child)]);
    link.has_met_in_round.resize(size_t(std::bit_width(unsigned(size - 1))));
    link.name = name_of(key);
    link.host = host_;
    names_.emplace(link.name, &*found);
  }
  return *found;
}

void Links::enter(Entry& entry, State state, const std::string& detail) {
  auto& [key, link] = entry;
  connection_events_->enter(link.state, state, text_of(key), other_of_pair(key, rank_).value_or(-1),
                            detail);
}

void Links::begin(const LaneKey& key) {
  ToDo to_do;
  {
    std::lock_guard lock(mutex_);
    begin_locked(entry_of(key), rank_, to_do);
  }
  perform(to_do);
}

void Links::begin_locked(Entry& entry, int invited_by, ToDo& to_do) {
  Link& link = entry.second;
  if (is_ending_ || link.state == State::refused) return;
  const bool is_new = link.state == State::unused;
  if (is_new) enter(entry, State::waiting);
  go_on(entry, to_do);
  if (!is_new) return;
  for (const int child : link.children)
    if (child != invited_by && !link.have_asked.contains(child))
      to_do.to_send.push_back({child, message_of(entry, Kind::invite)});
  if (link.parent >= 0 && link.parent != invited_by && !link.has_asked)
    to_do.to_send.push_back({link.parent, message_of(entry, Kind::invite)});
}

// Takes the next steps of this rank, as far as possible now.
void Links::go_on(Entry& entry, ToDo& to_do) {
  Link& link = entry.second;
  const bool is_root = link.parent < 0;
  if (link.state == State::waiting && link.have_asked.size() == link.children.size()) {
    if (!is_root) {
      if (!std::exchange(link.has_asked, true))
        to_do.to_send.push_back({link.parent, message_of(entry, Kind::ask, link.host)});
    } else if (!is_ending_ && take_place(entry)) {
      enter(entry, State::offered);
      send_to_children(entry, message_of(entry, Kind::offer), to_do);
    }
  }
  if (link.state != State::offered || link.have_joined.size() < link.children.size()) return;
  if (is_root) {
    enter(entry, State::connecting);
    to_do.to_connect.push_back({&entry, link.host != 0, std::nullopt});
  } else if (!link.has_joined && take_place(entry)) {
    link.has_joined = true;
    to_do.to_send.push_back({link.parent, message_of(entry, Kind::join)});
  }
}

bool Links::take_place(Entry& entry) {
  auto& [key, link] = entry;
  if (!key.is_one_way || link.has_place) return true;
  if (num_in_the_making_ == kMaxInTheMaking) {
    if (std::ranges::find(wait_for_place_, &entry) == wait_for_place_.end())
      wait_for_place_.push_back(&entry);
    return false;
  }
  ++num_in_the_making_;
  return link.has_place = true;
}

void Links::leave_place(Entry& entry, ToDo& to_do) {
  if (!std::exchange(entry.second.has_place, false)) return;
  --num_in_the_making_;
  while (num_in_the_making_ < kMaxInTheMaking && !wait_for_place_.empty()) {
    Entry& next = *wait_for_place_.front();
    wait_for_place_.pop_front();
    go_on(next, to_do);
  }
}

// Marks a link as refused, unless its ranks already connect.
void Links::refuse_locked(Entry& entry, int by, ToDo& to_do) {
  Link& link = entry.second;
  if (link.state > State::offered) return;
  enter(entry, State::refused, "by rank " + std::to_string(by));
  link.refused_by = by;
  changed_.notify_all();
  const ControlMessage refusal = message_of(entry, Kind::refuse, uint64_t(by));
  if (link.parent >= 0) to_do.to_send.push_back({link.parent, refusal});
  send_to_children(entry, refusal, to_do);
  leave_place(entry, to_do);
}

ControlMessage Links::message_of(const Entry& entry, Kind kind, uint64_t number,
                                 std::span<const std::byte> id) {
  const auto& [key, link] = entry;
  ControlMessage message{.kind = kind,
                         .channel = key.channel,
                         .is_one_way = key.is_one_way,
                         .link = link.name,
                         .number = number,
                         .payload = {id.begin(), id.end()}};
  if (message.has_ranks()) {
    const auto ranks = std::as_bytes(std::span(key.ranks));
    message.payload.insert(message.payload.end(), ranks.begin(), ranks.end());
  }
  return message;
}

void Links::send_to_children(const Entry& entry, const ControlMessage& message, ToDo& to_do) {
  for (const int child : entry.second.children) to_do.to_send.push_back({child, message});
}

void Links::perform(const ToDo& to_do) {
  for (const auto& [peer, message] : to_do.to_send) send(peer, message);
  for (const Connecting& connecting : to_do.to_connect) connect_apart(connecting);
}

void Links::send(int peer, const ControlMessage& message) {
  std::lock_guard lock(sending_mutex_);
  if (send_) send_(peer, message);
}

void Links::stop_sending() {
  std::lock_guard lock(sending_mutex_);
  send_ = nullptr;
}

void Links::connect_apart(const Connecting& connecting) {
  try {
    start_thread([self = shared_from_this(), connecting] { self->connect(connecting); }, rank_)
        .detach();
  } catch (const PipeCommException& error) {
    settle(connecting.entry->first, State::failed,
           [&](Link& link) { link.error = link_error(error); });
  }
}

void Links::connect(const Connecting& connecting) {
  const auto& [entry, is_within_host, id] = connecting;
  const LaneKey& key = entry->first;
  try {
    runtime_->adopt_thread();
    const NcclLane lane{key, id ? *id : nccl_->new_id(), is_within_host, runtime_->new_stream()};
    if (!id) {
      ToDo go;
      send_to_children(
          *entry,
          message_of(*entry, Kind::go, is_within_host, std::as_bytes(std::span(lane.id.bytes))),
          go);
      perform(go);
    }
    const int comm_idx = nccl_->connect(lane, config_);
    settle(key, State::ready, [&](Link&) {
      Lane& kept = lanes_[key];
      if (!kept.stream) kept.stream = lane.stream;
      kept.comm_idx = comm_idx;
    });
  } catch (const std::exception& error) {
    settle(key, State::failed, [&](Link& link) { link.error = link_error(error); });
  }
}

void Links::settle(const LaneKey& key, State state, const std::function<void(Link&)>& note) {
  ToDo to_do;
  {
    std::lock_guard lock(mutex_);
    Entry& entry = entry_of(key);
    note(entry.second);
    const auto& error = entry.second.error;
    enter(entry, state, error ? error->text : "");
    leave_place(entry, to_do);
  }
  changed_.notify_all();
  perform(to_do);
}

// ------------------------------------------------------------------------------------------------
// messages of peers

// The link that a message is about, or null.
Links::Entry* Links::named(int peer, const ControlMessage& message) {
  const auto found = names_.find(message.link);
  Entry* entry = found == names_.end() ? nullptr : found->second;
  if (!message.has_ranks()) return entry && has(entry->second.ranks, peer) ? entry : nullptr;
  const auto ranks = ranks_in(message, size_, rank_, peer);
  if (!ranks) return nullptr;
  const LaneKey key{message.channel, *ranks, message.is_one_way};
  if (!entry && name_of(key) == message.link) entry = &entry_of(key);
  return entry && entry->first == key ? entry : nullptr;
}

bool Links::receive(int peer, const ControlMessage& message) {
  if (!nccl_) return false;
  ToDo to_do;
  {
    std::lock_guard lock(mutex_);
    Entry* const entry = named(peer, message);
    if (!entry || !handle(peer, *entry, message, to_do)) return false;
  }
  perform(to_do);
  return true;
}

bool Links::handle(int peer, Entry& entry, const ControlMessage& message, ToDo& to_do) {
  Link& link = entry.second;
  const uint64_t number = message.number;
  if (message.kind == Kind::meet) {
    if (number >= link.has_met_in_round.size()) return false;
    return link.has_met_in_round[number] = true;
  }
  const bool is_from_child = has(link.children, peer), is_from_parent = peer == link.parent;
  if (!is_from_child && !is_from_parent) return false;
  switch (message.kind) {
    case Kind::ask:
      if (!is_from_child) return false;
      link.have_asked.insert(peer);
      if (number != link.host) link.host = 0;
      [[fallthrough]];
    case Kind::invite:
      if (is_ending_ && link.state <= State::waiting)
        refuse_locked(entry, rank_, to_do);
      else
        begin_locked(entry, peer, to_do);
      return true;
    case Kind::offer:
      if (!is_from_parent) return false;
      if (link.state == State::refused) return true;
      if (link.state != State::waiting) return false;
      if (is_ending_) {
        refuse_locked(entry, rank_, to_do);
        return true;
      }
      enter(entry, State::offered);
      send_to_children(entry, message_of(entry, Kind::offer), to_do);
      go_on(entry, to_do);
      return true;
    case Kind::join:
      if (!is_from_child) return false;
      link.have_joined.insert(peer);
      go_on(entry, to_do);
      return true;
    case Kind::go: {
      if (!is_from_parent || !link.has_joined || link.state != State::offered) return false;
      NcclUniqueId id{};
      std::memcpy(&id, message.payload.data(), sizeof id);
      enter(entry, State::connecting);
      send_to_children(entry, message, to_do);
      to_do.to_connect.push_back({&entry, number != 0, id});
      return true;
    }
    case Kind::refuse:
      if (number >= uint64_t(size_)) return false;
      refuse_locked(entry, static_cast<int>(number), to_do);
      return true;
    default:
      return false;
  }
}

// ------------------------------------------------------------------------------------------------
// their state

bool Links::is_ready(const LaneKey& key) const {
  std::lock_guard lock(mutex_);
  const auto found = links_.find(key);
  return found != links_.end() && found->second.state == State::ready;
}

bool Links::wait_until_ready(const LaneKey& key, Deadline until) const {
  std::unique_lock lock(mutex_);
  return changed_.wait_until(lock, until, [&] { return links_.at(key).state == State::ready; });
}

bool Links::is_answered(const LaneKey& key) const {
  std::lock_guard lock(mutex_);
  return links_.at(key).state > State::waiting;
}

std::optional<int> Links::refused_by(const LaneKey& key) const {
  std::lock_guard lock(mutex_);
  return links_.at(key).refused_by;
}

std::optional<LinkError> Links::error(const std::function<bool(int peer)>& has_closed) {
  std::lock_guard lock(mutex_);
  for (auto& [key, link] : links_) {
    if (!link.error) continue;
    const auto peer = other_of_pair(key, rank_);
    if (!peer || !has_closed(*peer)) return link.error;
    link.refused_by = *peer;
  }
  return std::nullopt;
}

void Links::refuse_more() {
  ToDo to_do;
  {
    std::lock_guard lock(mutex_);
    is_ending_ = true;
    for (Entry& entry : links_)
      if (entry.second.state == State::waiting) refuse_locked(entry, rank_, to_do);
  }
  perform(to_do);
}

Lane& Links::lane(const LaneKey& key) {
  std::lock_guard lock(mutex_);
  Lane& lane = lanes_[key];
  if (!lane.stream) lane.stream = runtime_->new_stream();
  return lane;
}

StreamHandle Links::stream_of(const LaneKey& key) const {
  std::lock_guard lock(mutex_);
  const auto found = lanes_.find(key);
  return found == lanes_.end() ? nullptr : found->second.stream;
}

// ------------------------------------------------------------------------------------------------
// the end

// In round k of a link, a rank sends a message to the rank 2^k above it once it has those of the
// earlier rounds.
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
  const auto is_being_made = [&](const Entry& entry) {
    const auto& [key, link] = entry;
    const auto peer = other_of_pair(key, rank_);
    return (link.state == State::offered || link.state == State::connecting) &&
           !(peer && has_closed(*peer));
  };
  std::vector<Entry*> ready;
  {
    // The other ranks of a link that is being made will complete it, and then wait for this one.
    std::unique_lock lock(mutex_);
    if (!wait_for(lock, [&] { return std::ranges::none_of(links_, is_being_made); })) return false;
    for (Entry& entry : links_)
      if (entry.second.state == State::ready) ready.push_back(&entry);
  }
  const auto send_above = [&](const Entry& entry, size_t round) {
    const auto& [key, link] = entry;
    const auto mine = size_t(std::ranges::find(link.ranks, rank_) - link.ranks.begin());
    const int above = link.ranks[(mine + (size_t{1} << round)) % link.ranks.size()];
    send(above, message_of(entry, Kind::meet, round));
  };
  for (const Entry* const entry : ready) send_above(*entry, 0);
  for (const Entry* const entry : ready) {
    const std::vector<bool>& has_met = entry->second.has_met_in_round;
    for (size_t round = 0; round < has_met.size(); ++round) {
      if (round > 0) send_above(*entry, round);
      std::unique_lock lock(mutex_);
      if (!wait_for(lock, [&] { return has_met[round]; })) return false;
    }
  }
  return true;
}

}  // namespace pipecomm
