#include "transport/nccl/nccl_transport.h"

#include <algorithm>
#include <thread>
#include <utility>

namespace pipecomm {
namespace {

constexpr auto kPollInterval = std::chrono::microseconds(50);
// A launch takes tens of microseconds, a sleep at least a hundred.
constexpr auto kPollLimit = std::chrono::microseconds(200);
constexpr int kMaxCtas = 64;  // NCCL's limit
// How long an abort waits for a thread that is inside an NCCL call before it goes on regardless.
constexpr auto kAbortPatience = std::chrono::seconds(2);

// Between two looks at something that another thread does: at first nothing but a look around.
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

// NCCL refuses a minimum without a maximum.
NcclConfig config_of(const NcclConfig& given, Reach reach, size_t lane_idx) {
  NcclConfig config = given;
  config.name.append("-").append(std::to_string(lane_idx));
  if (config.max_ctas < 0 && reach != Reach::all)
    config.max_ctas = std::max(kLaneMaxCtas, config.min_ctas);
  else if (config.max_ctas < 0 && config.min_ctas > 0)
    config.max_ctas = kMaxCtas;
  return config;
}

// The lock, or none once patience is over.
std::unique_lock<std::mutex> lock_with_patience(std::mutex& mutex) {
  const Deadline limit = Clock::now() + kAbortPatience;
  std::unique_lock lock(mutex, std::try_to_lock);
  while (!lock && Clock::now() < limit) {
    std::this_thread::sleep_for(kPollInterval);
    lock.try_lock();
  }
  return lock;
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
      max_ops_per_group_(max_ops_per_group) {
  if (max_ops_per_group < 2)
    throw std::invalid_argument("max_ops_per_group must be at least 2, not " +
                                std::to_string(max_ops_per_group));
}

NcclTransport::~NcclTransport() { abort(); }

void NcclTransport::require(const char* call, NcclResult result, NcclComm* comm) const {
  if (result == NcclResult::success || result == NcclResult::in_progress) return;
  throw NcclError(result, nccl_error_text(api_, call, result, comm));
}

// The state of a communicator, whose call goes on in a thread of NCCL; throws its error.
bool NcclTransport::in_progress(const char* call, NcclComm* comm) const {
  NcclResult state = NcclResult::success;
  require("ncclCommGetAsyncError", api_.comm_get_async_error(comm, &state), comm);
  require(call, state, comm);
  return state == NcclResult::in_progress;
}

// A call of a non-blocking communicator returns "in progress" and goes on in a thread of NCCL.
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
  if (ended_) throw NcclError(NcclResult::invalid_usage, "the NCCL communicators are aborted");
}

void NcclTransport::connect(std::span<const NcclLane> lanes, const NcclConfig& config) {
  {
    std::lock_guard lock(connect_mutex_);
    check_alive();
    connecting_ = true;
  }
  std::unique_lock calls_lock(calls_);
  std::exception_ptr error;
  try {
    init(lanes, config);
    check_alive();
    connect_pairs(lanes);
  } catch (...) {
    error = std::current_exception();
  }
  bool has_ended;
  {
    std::lock_guard lock(connect_mutex_);
    connecting_ = false;
    has_ended = ended_.exchange(ended_ || error);
  }
  if (has_ended || error) abort_all();
  if (error) std::rethrow_exception(error);
  check_alive();
}

// All communicators in one group: they find each other at the same time.
void NcclTransport::init(std::span<const NcclLane> lanes, const NcclConfig& config) {
  comms_.resize(lanes.size());
  for (size_t lane_idx = 0; lane_idx < lanes.size(); ++lane_idx)
    configs_.push_back(config_of(config, lanes[lane_idx].reach, lane_idx));
  GroupCalls group(*this);
  for (size_t lane_idx = 0; lane_idx < lanes.size(); ++lane_idx)
    require("ncclCommInitRankConfig",
            api_.comm_init(&comms_[lane_idx], size_, lanes[lane_idx].id, rank_, configs_[lane_idx]),
            nullptr);
  group.end(comms_, [] {});
}

// One byte in each direction of a lane, and a broadcast: NCCL connects a pair, and builds its rings
// and trees, at their first use.
void NcclTransport::connect_pairs(std::span<const NcclLane> lanes) {
  std::vector<std::shared_ptr<std::byte>> scratch;
  std::vector<LaneMessages> hello;
  for (size_t lane_idx = 0; lane_idx < lanes.size(); ++lane_idx) {
    const NcclLane& lane = lanes[lane_idx];
    std::byte* data = scratch.emplace_back(runtime_->allocate(size_ + 1, lane.stream)).get();
    auto& messages = hello.emplace_back(LaneMessages{int(lane_idx), lane.stream, {}}).messages;
    for (int peer = 0; peer < size_; ++peer) {
      if (peer == rank_) continue;
      if (lane.reach == Reach::all || (lane.reach == Reach::up) == (peer > rank_))
        messages.push_back({Direction::send, peer, data + size_, 1});
      if (lane.reach == Reach::all || (lane.reach == Reach::up) == (peer < rank_))
        messages.push_back({Direction::recv, peer, data + peer, 1});
    }
  }
  enqueue(hello, [] {});
  for (size_t lane_idx = 0; lane_idx < lanes.size(); ++lane_idx)
    if (lanes[lane_idx].reach == Reach::all)
      enqueue_broadcast(int(lane_idx), scratch[lane_idx].get(), 1, 0, lanes[lane_idx].stream,
                        [] {});
  const Pause pause(api_);
  for (const NcclLane& lane : lanes) {
    const EventPtr connected = runtime_->record(lane.stream);
    while (!runtime_->is_done(connected)) {
      check_alive();
      for (NcclComm* comm : comms_) in_progress("connecting", comm);
      pause();
    }
  }
}

// The i-th group holds the i-th round of every lane. Rounds of a lane are alike on both ends of each
// message; lanes have streams of their own, so how their rounds meet in groups does not matter.
void NcclTransport::enqueue(std::span<const LaneMessages> lanes, const KeepWaiting& keep_waiting) {
  std::vector<std::vector<std::vector<DeviceMessage>>> rounds;  // [lane][round][message]
  size_t num_rounds = 0;
  for (const LaneMessages& lane : lanes) {
    rounds.push_back(cut_rounds(lane.messages, rank_, size_, max_ops_per_group_));
    num_rounds = std::max(num_rounds, rounds.back().size());
  }
  for (size_t round_idx = 0; round_idx < num_rounds; ++round_idx) {
    std::vector<NcclComm*> comms;
    GroupCalls group(*this);
    for (size_t idx = 0; idx < lanes.size(); ++idx) {
      if (round_idx >= rounds[idx].size()) continue;
      NcclComm* const comm = comms.emplace_back(comms_[lanes[idx].lane_idx]);
      const StreamHandle stream = lanes[idx].stream;
      for (const auto& [direction, peer, data, num_bytes] : rounds[idx][round_idx]) {
        const auto count = static_cast<size_t>(num_bytes);
        if (direction == Direction::send)
          require("ncclSend", api_.send(data, count, kNcclBytes, peer, comm, stream), comm);
        else
          require("ncclRecv", api_.recv(data, count, kNcclBytes, peer, comm, stream), comm);
      }
    }
    group.end(comms, keep_waiting);
  }
}

// NCCL on one device is given work by one thread at a time, even for several communicators.
void NcclTransport::send_and_receive(std::span<const LaneMessages> lanes,
                                     const KeepWaiting& keep_waiting) {
  std::scoped_lock lock(calls_, runtime_->launch_mutex());
  check_alive();
  enqueue(lanes, keep_waiting);
}

void NcclTransport::enqueue_broadcast(int lane_idx, std::byte* data, int64_t num_bytes, int source,
                                      StreamHandle stream, const KeepWaiting& keep_waiting) {
  NcclComm* const comm = comms_.at(lane_idx);
  const NcclResult result =
      api_.broadcast(data, data, static_cast<size_t>(num_bytes), kNcclBytes, source, comm, stream);
  settle("ncclBroadcast", result, std::span(&comm, 1), keep_waiting);
}

void NcclTransport::broadcast(int lane_idx, std::byte* data, int64_t num_bytes, int source,
                              StreamHandle stream, const KeepWaiting& keep_waiting) {
  std::scoped_lock lock(calls_, runtime_->launch_mutex());
  check_alive();
  enqueue_broadcast(lane_idx, data, num_bytes, source, stream, keep_waiting);
}

void NcclTransport::poll() {
  std::unique_lock lock(calls_, std::try_to_lock);
  if (!lock || ended_) return;  // a call under way looks at errors itself
  for (NcclComm* comm : comms_) in_progress("NCCL", comm);
}

void NcclTransport::abort() {
  {
    std::lock_guard lock(connect_mutex_);
    if (ended_.exchange(true) || connecting_) return;
  }
  const auto lock = lock_with_patience(calls_);
  abort_all();
}

// In one group, so that the kernels of all communicators are told to leave before any call waits
// for the device.
void NcclTransport::abort_all() {
  api_.group_start();
  for (NcclComm* comm : std::exchange(comms_, {}))
    if (comm) api_.comm_abort(comm);
  api_.group_end();
}

void NcclTransport::finish() {
  if (ended_.exchange(true)) return;
  std::lock_guard lock(calls_);
  try {
    for (NcclComm* comm : comms_) require("ncclCommFinalize", api_.comm_finalize(comm), comm);
    for (NcclComm* comm : comms_)
      while (in_progress("ncclCommFinalize", comm)) api_.sleep(kPollInterval);
    for (NcclComm*& comm : comms_)
      require("ncclCommDestroy", api_.comm_destroy(std::exchange(comm, nullptr)), nullptr);
  } catch (const NcclError&) {
    abort_all();
  }
}

}  // namespace pipecomm
