#include "transport/nccl/nccl_transport.h"

#include <thread>
#include <utility>

namespace pipecomm {
namespace {

constexpr auto kPollInterval = std::chrono::microseconds(50);
// A launch takes tens of microseconds, a sleep at least a hundred.
constexpr auto kPollLimit = std::chrono::microseconds(200);
constexpr int kMaxCtas = 64;    // NCCL's limit
constexpr int kOwnChoice = 32;  // NCCL's own choice, at most

// Pauses between two polls for the progress of another thread: yields at first, sleeps later.
class Pause {
 public:
  explicit Pause(const NcclApi& api) : api_(api) {}
  void operator()() const {
    if (Clock::now() - begin_ < kPollLimit)
      std::this_thread::yield();
    else
      api_.sleep(kPollInterval);
  }

 private:
  const NcclApi& api_;
  const Clock::time_point begin_ = Clock::now();
};

// The communicator of the collectives leaves the choice to NCCL. NCCL refuses a minimum without a
// maximum.
NcclConfig config_of(const NcclConfig& given, const NcclLane& lane) {
  NcclConfig config = given;
  const LaneKey& key = lane.key;
  const bool is_of_collectives = key.channel == kCollectiveChannel && key.ranks.empty();
  if (!key.ranks.empty()) {
    config.name.append("-").append(std::to_string(key.ranks.front()));
    config.name.append(key.is_one_way ? "-" : "..").append(std::to_string(key.ranks.back()));
  }
  if (config.max_ctas < 0 && !is_of_collectives)
    config.max_ctas =
        std::max(lane.is_within_host ? kHostMaxCtas : kNetworkMaxCtas, config.min_ctas);
  else if (config.max_ctas < 0 && config.min_ctas > 0)
    config.max_ctas = kMaxCtas;
  return config;
}

}  // namespace

// Brackets the calls between ncclGroupStart and ncclGroupEnd. The group is ended even if a call
// throws: NCCL keeps the nesting depth per thread, and an open group would swallow every later
// call.
class NcclTransport::GroupCalls {
 public:
  explicit GroupCalls(const NcclTransport& transport) : transport_(transport) {
    transport_.require("ncclGroupStart", transport_.api_.group_start(), nullptr);
  }
  ~GroupCalls() {
    if (open_) transport_.api_.group_end();
  }
  void end(Comms comms, const KeepWaiting& keep_waiting) {
    open_ = false;
    transport_.settle("ncclGroupEnd", transport_.api_.group_end(), comms, keep_waiting);
  }

 private:
  const NcclTransport& transport_;
  bool open_ = true;
};

NcclTransport::NcclTransport(const NcclApi& api, std::shared_ptr<DeviceRuntime> runtime, int rank,
                             int size, int max_ops_per_group)
    : api_(api),
      runtime_(std::move(runtime)),
      rank_(rank),
      size_(size),
      max_ops_per_group_(max_ops_per_group),
      max_blocks_(runtime_->num_multiprocessors() / 2) {
  if (max_ops_per_group < 2)
    throw std::invalid_argument("max_ops_per_group must be at least 2, not " +
                                std::to_string(max_ops_per_group));
}

NcclTransport::~NcclTransport() { abort(); }

void NcclTransport::require(const char* call, NcclResult result, NcclComm* comm) const {
  if (result == NcclResult::success || result == NcclResult::in_progress) return;
  throw NcclError(result, nccl_error_text(api_, call, result, comm));
}

// Whether a call of the communicator still runs on a thread of NCCL; throws its error.
bool NcclTransport::in_progress(const char* call, NcclComm* comm) const {
  NcclResult state = NcclResult::success;
  require("ncclCommGetAsyncError", api_.comm_get_async_error(comm, &state), comm);
  require(call, state, comm);
  return state == NcclResult::in_progress;
}

// A call of a non-blocking communicator returns "in progress" and continues on a thread of NCCL.
// Nothing else may be called until it is done.
void NcclTransport::settle(const char* call, NcclResult result, Comms comms,
                           const KeepWaiting& keep_waiting) const {
  require(call, result, comms.front());
  if (result == NcclResult::success) return;
  const Pause pause(api_);
  for (NcclComm* comm : comms) {
    while (in_progress(call, comm)) {
      if (ended_) throw NcclError(result, std::string(call) + ": the communicator was aborted");
      keep_waiting();
      pause();
    }
  }
}

void NcclTransport::check_alive() const {
  if (ended_) throw_ended();
}

void NcclTransport::throw_ended() {
  throw NcclError(NcclResult::invalid_usage, "the NCCL communicators are aborted");
}

NcclUniqueId NcclTransport::new_id() const {
  NcclUniqueId id;
  require("ncclGetUniqueId", api_.get_unique_id(&id), nullptr);
  return id;
}

int NcclTransport::connect(const NcclLane& lane, const NcclConfig& config) {
  const int64_t free_bytes_before = runtime_->free_bytes();
  {
    std::lock_guard lock(connect_mutex_);
    check_alive();
    if (num_connecting_++ == 0) free_bytes_before_ = free_bytes_before;
  }
  Comm comm;
  std::exception_ptr error;
  try {
    init(lane, config, comm);
    check_alive();
    greet_peers(lane, comm);
  } catch (...) {
    error = std::current_exception();
  }
  const int64_t free_bytes = runtime_->free_bytes();
  {
    std::scoped_lock lock(calls_, connect_mutex_);
    if (--num_connecting_ == 0) num_bytes_ += std::max(int64_t{0}, free_bytes_before_ - free_bytes);
    if (!error && !ended_) {
      comms_.push_back(comm);
      num_within_host_ += comm.is_within_host || comm.ranks.size() > 2;
      num_comms_ = static_cast<int>(comms_.size());
      return num_comms_ - 1;
    }
  }
  abort_all({comm});
  if (error) std::rethrow_exception(error);
  throw_ended();
}

// Not in a group: for several communicators NCCL would call CUDA from threads of its own, where a
// call that another thread's capture forbids would fail and invalidate that capture, see
// adopt_thread().
void NcclTransport::init(const NcclLane& lane, const NcclConfig& config, Comm& comm) {
  comm.key = lane.key;
  comm.ranks = ranks_of(lane.key, size_);
  const NcclConfig* kept;
  {
    std::lock_guard lock(connect_mutex_);
    kept = &configs_.emplace_back(config_of(config, lane));
  }
  comm.is_within_host = lane.is_within_host;
  comm.num_blocks = std::max(1, (kept->max_ctas > 0 ? kept->max_ctas : kOwnChoice) / 2);
  const NcclResult result =
      api_.comm_init(&comm.comm, int(comm.ranks.size()), lane.id, comm.rank_of(rank_), *kept);
  settle("ncclCommInitRankConfig", result, std::span(&comm.comm, 1), [] {});
}

// Sends one byte in each direction that the communicator carries messages; with all ranks also a
// broadcast: NCCL connects a pair, and builds its rings and trees, at their first use.
void NcclTransport::greet_peers(const NcclLane& lane, const Comm& comm) {
  const std::shared_ptr<std::byte> scratch =
      runtime_->allocate(int64_t(comm.ranks.size()) + 1, lane.stream);
  LaneMessages hello{0, lane.stream, {}};
  std::byte* place = scratch.get();
  for (const int peer : comm.ranks) {
    if (peer == rank_) continue;
    if (!lane.key.is_one_way || rank_ == lane.key.ranks.front())
      hello.messages.push_back({Direction::send, peer, scratch.get() + comm.ranks.size(), 1});
    if (!lane.key.is_one_way || peer == lane.key.ranks.front())
      hello.messages.push_back({Direction::recv, peer, place++, 1});
  }
  enqueue({&hello, 1}, {&comm, 1}, [] {});
  if (lane.key.ranks.empty()) enqueue_broadcast(comm.comm, scratch.get(), 1, 0, lane.stream, [] {});
  const Pause pause(api_);
  const EventPtr connected = runtime_->record(lane.stream);
  while (!runtime_->is_done(connected)) {
    check_alive();
    in_progress("connecting", comm.comm);
    pause();
  }
}

// The i-th group holds the i-th round of every lane. Rounds of a lane are the same on both ends of
// each message; lanes have separate streams, so it does not matter which of their rounds share a
// group.
void NcclTransport::enqueue(std::span<const LaneMessages> lanes, std::span<const Comm> comms,
                            const KeepWaiting& keep_waiting) {
  std::vector<std::vector<std::vector<DeviceMessage>>> rounds;  // [lane][round][message]
  size_t num_rounds = 0;
  for (const LaneMessages& lane : lanes) {
    const Comm& comm = comms[size_t(lane.comm_idx)];
    std::vector<DeviceMessage> messages = lane.messages;
    for (DeviceMessage& message : messages) message.peer = comm.rank_of(message.peer);
    rounds.push_back(
        cut_rounds(messages, comm.rank_of(rank_), int(comm.ranks.size()), max_ops_per_group_));
    num_rounds = std::max(num_rounds, rounds.back().size());
  }
  for (size_t round_idx = 0; round_idx < num_rounds; ++round_idx) {
    std::vector<NcclComm*> used;
    GroupCalls group(*this);
    for (size_t idx = 0; idx < lanes.size(); ++idx) {
      if (round_idx >= rounds[idx].size()) continue;
      NcclComm* const comm = used.emplace_back(comms[size_t(lanes[idx].comm_idx)].comm);
      const StreamHandle stream = lanes[idx].stream;
      for (const auto& [direction, peer, data, num_bytes] : rounds[idx][round_idx]) {
        const auto count = static_cast<size_t>(num_bytes);
        if (direction == Direction::send)
          require("ncclSend", api_.send(data, count, kNcclBytes, peer, comm, stream), comm);
        else
          require("ncclRecv", api_.recv(data, count, kNcclBytes, peer, comm, stream), comm);
      }
    }
    group.end(used, keep_waiting);
  }
}

// The distance of a lane's messages around the ring of all ranks, and their channel: the same on
// both ends.
std::pair<int, int> NcclTransport::step_of(const LaneMessages& lane) const {
  const int channel = comms_[size_t(lane.comm_idx)].key.channel;
  if (lane.messages.empty()) return {0, channel};
  const DeviceMessage& message = lane.messages.front();
  const int distance =
      message.direction == Direction::send ? message.peer - rank_ : rank_ - message.peer;
  return {(distance + size_) % size_, channel};
}

// Kernels whose peers depend on each other must fit on the device together, along with those of the
// user: a batch with too many thread blocks is cut, in the order of its steps. The send and the
// receive of a step stay together, so ranks cannot wait in a circle for sends that come after
// receives.
std::vector<std::span<const LaneMessages>> NcclTransport::cut_batch(
    std::span<const LaneMessages> lanes) const {
  std::vector<std::span<const LaneMessages>> parts;
  size_t begin = 0;
  int num_blocks = 0;
  for (size_t idx = 0; idx < lanes.size();) {
    size_t end = idx;
    int num_more = 0;
    for (; end < lanes.size() && step_of(lanes[end]) == step_of(lanes[idx]); ++end)
      num_more += comms_[size_t(lanes[end].comm_idx)].num_blocks;
    if (idx > begin && num_blocks + num_more > max_blocks_) {
      parts.push_back(lanes.subspan(begin, idx - begin));
      begin = idx;
      num_blocks = 0;
    }
    num_blocks += num_more;
    idx = end;
  }
  parts.push_back(lanes.subspan(begin));
  return parts;
}

void NcclTransport::note_use(const LaneMessages& lane) {
  Comm& comm = comms_[size_t(lane.comm_idx)];
  comm.is_in_a_graph |= lane.is_captured;
  const auto sends = [](const auto& message) { return message.direction == Direction::send; };
  if (!comm.is_within_host && std::ranges::any_of(lane.messages, sends))
    sent_over_network_at_ = Clock::now();
}

// Only one thread at a time enqueues NCCL work on a device, even for several communicators.
int NcclTransport::send_and_receive(std::span<const LaneMessages> lanes,
                                    const KeepWaiting& keep_waiting) {
  std::scoped_lock lock(calls_, runtime_->launch_mutex());
  check_alive();
  int num_blocks = 0;
  for (const LaneMessages& lane : lanes) {
    note_use(lane);
    num_blocks += comms_[size_t(lane.comm_idx)].num_blocks;
  }
  if (lanes.size() == 1 || num_blocks <= max_blocks_) {
    enqueue(lanes, comms_, keep_waiting);
    return num_blocks;
  }
  std::vector<LaneMessages> in_order(lanes.begin(), lanes.end());
  std::ranges::stable_sort(in_order, {}, [this](const auto& lane) { return step_of(lane); });
  std::span<const LaneMessages> before;
  for (const auto part : cut_batch(in_order)) {
    // All lanes of a part wait for one event, which comes after all lanes of the previous part.
    for (const LaneMessages& lane : before)
      runtime_->wait(part.front().stream, runtime_->record(lane.stream));
    if (const EventPtr start = before.empty() ? nullptr : runtime_->record(part.front().stream))
      for (const LaneMessages& lane : part.subspan(1)) runtime_->wait(lane.stream, start);
    enqueue(part, comms_, keep_waiting);
    before = part;
  }
  return num_blocks;
}

void NcclTransport::enqueue_broadcast(NcclComm* comm, std::byte* data, int64_t num_bytes,
                                      int source, StreamHandle stream,
                                      const KeepWaiting& keep_waiting) {
  const NcclResult result =
      api_.broadcast(data, data, static_cast<size_t>(num_bytes), kNcclBytes, source, comm, stream);
  settle("ncclBroadcast", result, std::span(&comm, 1), keep_waiting);
}

void NcclTransport::broadcast(const LaneMessages& lane, int source,
                              const KeepWaiting& keep_waiting) {
  std::scoped_lock lock(calls_, runtime_->launch_mutex());
  check_alive();
  note_use(lane);
  const DeviceMessage& message = lane.messages.front();
  enqueue_broadcast(comms_[size_t(lane.comm_idx)].comm, message.data, message.num_bytes, source,
                    lane.stream, keep_waiting);
}

void NcclTransport::reduce(const LaneMessages& lane, const NcclReduction& call,
                           const KeepWaiting& keep_waiting) {
  std::scoped_lock lock(calls_, runtime_->launch_mutex());
  check_alive();
  note_use(lane);
  NcclComm* const comm = comms_[size_t(lane.comm_idx)].comm;
  const auto& [op, source, destination, count, dtype, reduction, root] = call;
  const auto enqueued = [&](const char* name, NcclResult result) {
    settle(name, result, std::span(&comm, 1), keep_waiting);
  };
  if (op == OpCode::all_reduce)
    enqueued("ncclAllReduce",
             api_.all_reduce(source, destination, count, dtype, reduction, comm, lane.stream));
  else if (op == OpCode::reduce)
    enqueued("ncclReduce",
             api_.reduce(source, destination, count, dtype, reduction, root, comm, lane.stream));
  else if (op == OpCode::reduce_scatter)
    enqueued("ncclReduceScatter",
             api_.reduce_scatter(source, destination, count, dtype, reduction, comm, lane.stream));
  else
    enqueued("ncclAllGather",
             api_.all_gather(source, destination, count, dtype, comm, lane.stream));
}

void NcclTransport::poll() {
  std::unique_lock lock(calls_, std::try_to_lock);
  if (!lock || ended_) return;  // a running call checks for errors itself
  for (const Comm& comm : comms_) in_progress("NCCL", comm.comm);
}

// With comm_revoke, kernels and calls in flight return before anything is freed: otherwise a thread
// inside such a call would use freed memory.
void NcclTransport::abort() {
  if (ended_.exchange(true)) return;
  if (api_.comm_revoke) {
    std::lock_guard lock(connect_mutex_);
    for (const Comm& comm : comms_) api_.comm_revoke(comm.comm, 0);
  }
  std::lock_guard lock(calls_);
  abort_all(std::exchange(comms_, {}));
}

// In one group, so that the kernels of all communicators are told to return before any call waits
// for the device.
void NcclTransport::abort_all(std::vector<Comm> comms) {
  api_.group_start();
  for (const Comm& comm : comms)
    if (comm.comm) api_.comm_abort(comm.comm);
  api_.group_end();
}

// NCCL waits for the ranks of one communicator after another, so all ranks end them in one order.
// Communicators that a graph may block come last.
void NcclTransport::finish() {
  if (ended_.exchange(true)) return;
  std::lock_guard lock(calls_);
  std::ranges::sort(comms_, {},
                    [](const Comm& comm) { return std::pair(comm.is_in_a_graph, comm.key); });
  const auto captured = std::ranges::find(comms_, true, &Comm::is_in_a_graph);
  try {
    end_in_order({comms_.begin(), captured});
    end_in_order({captured, comms_.end()});
  } catch (const NcclError&) {
    abort_all(std::exchange(comms_, {}));
  }
}

void NcclTransport::end_in_order(std::span<Comm> comms) {
  for (const Comm& comm : comms)
    require("ncclCommFinalize", api_.comm_finalize(comm.comm), comm.comm);
  for (const Comm& comm : comms)
    while (in_progress("ncclCommFinalize", comm.comm)) api_.sleep(kPollInterval);
  for (Comm& comm : comms)
    require("ncclCommDestroy", api_.comm_destroy(std::exchange(comm.comm, nullptr)), nullptr);
}

}  // namespace pipecomm
