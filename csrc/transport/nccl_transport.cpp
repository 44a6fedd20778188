#include "transport/nccl_transport.h"

#include <thread>
#include <utility>

namespace pipecomm {
namespace {

constexpr auto kPollInterval = std::chrono::microseconds(50);
// How long an abort waits for the thread that is inside an NCCL call to notice, before it goes on
// regardless.
constexpr auto kAbortPatience = std::chrono::seconds(2);

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

// Brackets the calls of one group. Whatever happens between, the group is ended: NCCL keeps the
// nesting depth per thread, and one left open would swallow every later call.
class NcclTransport::Group {
 public:
  explicit Group(const NcclTransport& transport) : transport_(transport) {
    transport_.require("ncclGroupStart", transport_.api_.group_start(), nullptr);
  }
  ~Group() {
    if (open_) transport_.api_.group_end();
  }
  void end(NcclComm* comm, const KeepWaiting& keep_waiting) {
    open_ = false;
    transport_.settle("ncclGroupEnd", transport_.api_.group_end(), comm, keep_waiting);
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

// Communicators are non-blocking: a call that has to wait (for a bootstrap, a connection) returns
// "in progress" and goes on in a thread of NCCL; nothing else may be called until it is through.
void NcclTransport::settle(const char* call, NcclResult result, NcclComm* comm,
                           const KeepWaiting& keep_waiting) const {
  require(call, result, comm);
  while (result == NcclResult::in_progress) {
    if (ended_) throw NcclError(result, std::string(call) + ": the communicator was aborted");
    keep_waiting();
    std::this_thread::sleep_for(kPollInterval);
    NcclResult state = NcclResult::success;
    require("ncclCommGetAsyncError", api_.comm_get_async_error(comm, &state), comm);
    require(call, state, comm);
    result = state;
  }
}

void NcclTransport::connect(std::span<const NcclUniqueId> ids, const NcclConfig& config,
                            const KeepWaiting& keep_waiting) {
  std::lock_guard lock(calls_);
  for (size_t comm_idx = 0; comm_idx < ids.size(); ++comm_idx) {
    NcclConfig own = config;
    own.name += "-" + std::to_string(comm_idx);
    NcclComm*& comm = comms_.emplace_back(nullptr);
    const NcclResult result = api_.comm_init(&comm, size_, ids[comm_idx], rank_, own);
    settle("ncclCommInitRankConfig", result, comm, keep_waiting);
  }
  // One byte to and from everybody, and a broadcast: NCCL connects a pair, and builds its rings and
  // trees, at their first use.
  const StreamHandle stream = runtime_->current_stream();
  const auto scratch = runtime_->allocate(size_ + 1, stream);
  std::vector<DeviceMessage> hello;
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    hello.push_back({Direction::send, peer, scratch.get() + size_, 1});
    hello.push_back({Direction::recv, peer, scratch.get() + peer, 1});
  }
  for (NcclComm* comm : comms_) {
    enqueue(comm, hello, stream, keep_waiting);
    const NcclResult result =
        api_.broadcast(scratch.get(), scratch.get(), 1, kNcclBytes, 0, comm, stream);
    settle("ncclBroadcast", result, comm, keep_waiting);
  }
  const EventPtr connected = runtime_->record(stream);
  while (!runtime_->is_done(connected)) {
    keep_waiting();
    for (NcclComm* comm : comms_) {
      NcclResult state = NcclResult::success;
      require("ncclCommGetAsyncError", api_.comm_get_async_error(comm, &state), comm);
      require("connecting", state, comm);
    }
    std::this_thread::sleep_for(kPollInterval);
  }
}

void NcclTransport::enqueue(NcclComm* comm, std::span<const DeviceMessage> messages,
                            StreamHandle stream, const KeepWaiting& keep_waiting) {
  for (const auto& round : cut_rounds(messages, rank_, size_, max_ops_per_group_)) {
    Group group(*this);
    for (const DeviceMessage& message : round) {
      const auto count = static_cast<size_t>(message.num_bytes);
      if (message.direction == Direction::send)
        require("ncclSend", api_.send(message.data, count, kNcclBytes, message.peer, comm, stream),
                comm);
      else
        require("ncclRecv", api_.recv(message.data, count, kNcclBytes, message.peer, comm, stream),
                comm);
    }
    group.end(comm, keep_waiting);
  }
}

void NcclTransport::exchange(int comm_idx, std::span<const DeviceMessage> messages,
                             StreamHandle stream, const KeepWaiting& keep_waiting) {
  std::lock_guard lock(calls_);
  if (ended_) throw NcclError(NcclResult::invalid_usage, "the NCCL communicators are aborted");
  enqueue(comms_.at(comm_idx), messages, stream, keep_waiting);
}

void NcclTransport::broadcast(int comm_idx, std::byte* data, int64_t num_bytes, int source,
                              StreamHandle stream, const KeepWaiting& keep_waiting) {
  std::lock_guard lock(calls_);
  if (ended_) throw NcclError(NcclResult::invalid_usage, "the NCCL communicators are aborted");
  NcclComm* comm = comms_.at(comm_idx);
  const NcclResult result =
      api_.broadcast(data, data, static_cast<size_t>(num_bytes), kNcclBytes, source, comm, stream);
  settle("ncclBroadcast", result, comm, keep_waiting);
}

void NcclTransport::poll() {
  std::unique_lock lock(calls_, std::try_to_lock);
  if (!lock || ended_) return;  // a call that is under way looks at errors itself
  for (NcclComm* comm : comms_) {
    NcclResult state = NcclResult::success;
    require("ncclCommGetAsyncError", api_.comm_get_async_error(comm, &state), comm);
    require("NCCL", state, comm);
  }
}

void NcclTransport::abort() {
  if (ended_.exchange(true)) return;
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

void NcclTransport::close(Deadline deadline) {
  if (ended_.exchange(true)) return;
  const auto lock = lock_with_patience(calls_);
  const KeepWaiting until_deadline = [deadline] {
    if (Clock::now() >= deadline) throw NcclError(NcclResult::in_progress, "too late");
  };
  try {
    for (NcclComm* comm : comms_) {
      NcclResult state = api_.comm_finalize(comm);
      require("ncclCommFinalize", state, comm);
      while (state == NcclResult::in_progress) {
        until_deadline();
        std::this_thread::sleep_for(kPollInterval);
        require("ncclCommGetAsyncError", api_.comm_get_async_error(comm, &state), comm);
        require("ncclCommFinalize", state, comm);
      }
    }
    for (NcclComm*& comm : comms_) require("ncclCommDestroy", api_.comm_destroy(comm), nullptr);
    comms_.clear();
  } catch (const NcclError&) {
    abort_all();
  }
}

}  // namespace pipecomm
