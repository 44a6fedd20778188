#include "fake_nccl.h"

namespace fake {
namespace {

struct Kernel {
  struct Op {
    bool sends;
    int peer;
    std::byte* data;
    size_t num_bytes;
  };
  NcclComm* comm;
  std::vector<Op> ops;
  std::optional<CollectiveCall> collective = std::nullopt;  // in place of messages

  size_t num_blocks() const { return size_t(std::max(2, comm->config.max_ctas) / 2); }
};

// One run of a kernel.
class KernelRun {
 public:
  KernelRun(const Kernel& kernel, const void* device) : kernel_(kernel), device_(device) {}

  bool operator()() {
    NcclComm& comm = *kernel_.comm;
    if (comm.aborted || comm.revoked) return leave();  // immediately, with garbage
    if (!running_ && !begin(comm)) return false;
    world->has_started = true;
    if (!(kernel_.collective ? collective_done(comm) : messages_done())) return false;
    comm.running = false;
    return leave();
  }

 private:
  bool leave() {
    if (std::exchange(running_, false)) world->num_resident[device_] -= kernel_.num_blocks();
    return true;
  }
  bool begin(NcclComm& comm) {
    if (world->num_resident[device_] + kernel_.num_blocks() > world->max_resident) return false;
    if (comm.running) {
      world->errors.push_back("two kernels of one communicator at once");
      return false;
    }
    comm.running = running_ = true;
    world->num_resident[device_] += kernel_.num_blocks();
    if (kernel_.collective) {
      number_ = comm.num_collectives++;
      world->collectives[{comm.id, number_}].join(comm.rank, comm.size, *kernel_.collective);
    } else {
      for (const Kernel::Op& op : kernel_.ops) {
        halves_.push_back(std::make_shared<Half>(Half{op.data, op.num_bytes}));
        const int source = op.sends ? comm.rank : op.peer,
                  destination = op.sends ? op.peer : comm.rank;
        Pipe& pipe = world->pipes[{comm.id, source, destination}];
        (op.sends ? pipe.sends : pipe.recvs).push_back(halves_.back());
        world->touch(pipe);
      }
    }
    world->note_progress();
    return true;
  }
  bool messages_done() const {
    return std::all_of(halves_.begin(), halves_.end(),
                       [](const HalfPtr& half) { return half->done; });
  }
  bool collective_done(const NcclComm& comm) const {
    return world->collectives[{comm.id, number_}].finish(comm.rank, comm.size, world->fifo_bytes,
                                                         *kernel_.collective);
  }

  const Kernel kernel_;
  const void* const device_;
  bool running_ = false;
  int number_ = 0;
  std::vector<HalfPtr> halves_;
};

// The calls of a group, per thread.
struct Group {
  int depth = 0;
  std::vector<std::pair<Kernel, Stream*>> kernels;
  std::vector<NcclComm*> inits, aborts;
};
thread_local Group group;
thread_local FakeClock::time_point latest_call;  // that may go on in another thread

NcclResult injected(const std::string& call, int rank) {
  return world->inject ? world->inject(call, rank) : NcclResult::success;
}

bool is_usable(const NcclComm* comm, const std::string& call) {
  if (comm->ended)
    world->errors.push_back(call + " of a communicator that is destroyed");
  else if (!comm->aborted && (!comm->ready || comm->num_launching > 0))
    world->errors.push_back(call + " while a call on the communicator is in progress");
  return !comm->ended;
}

void enqueue_kernel(const Kernel& kernel, Stream* stream) {
  ++world->num_kernels;
  world->max_group_ops = std::max(world->max_group_ops, kernel.ops.size());
  const Make make = [kernel, device = stream->device](Replay&) -> Work {
    return [run = std::make_shared<KernelRun>(kernel, device)] { return (*run)(); };
  };
  if (!stream->capture) {
    Replay once;
    return world->enqueue(stream, make(once));
  }
  stream->before[stream] = stream->capture->parts[stream].size() + 1;
  stream->capture->parts[stream].push_back(make);
  stream->capture->refs.push_back(kernel.comm->refs);
  ++*kernel.comm->refs;
}

void launch(const std::vector<std::pair<Kernel, Stream*>>& kernels) {
  for (const auto& [kernel, stream] : kernels) {
    --kernel.comm->num_launching;
    --stream->num_launching;
    enqueue_kernel(kernel, stream);
  }
  world->advance();
}

// With a full launch queue, the call waits until earlier kernels have left.
void wait_for_room(const std::vector<std::pair<Kernel, Stream*>>& kernels) {
  std::unique_lock lock(world->mutex);
  for (const auto& [kernel, stream] : kernels) ++kernel.comm->num_calls;
  lock.unlock();
  world->block([&] {
    return std::ranges::all_of(kernels, [](const auto& each) {
      return each.second->tasks.size() < world->max_queue || each.first.comm->revoked;
    });
  });
  lock.lock();
  for (const auto& [kernel, stream] : kernels) --kernel.comm->num_calls;
}

// Takes the time of a launch, or returns immediately if another thread launches.
NcclResult launch_group(std::vector<std::pair<Kernel, Stream*>> kernels) {
  if (world->max_queue != size_t(-1)) wait_for_room(kernels);
  {
    std::lock_guard lock(world->mutex);
    for (const auto& [kernel, stream] : kernels) {
      ++kernel.comm->num_launching;
      ++stream->num_launching;
    }
    if (kernels.front().first.comm->rank % 2 == 1) std::reverse(kernels.begin(), kernels.end());
    latest_call = FakeClock::now();
    if (!world->is_blocking) {
      world->launch_later([kernels = std::move(kernels)] { launch(kernels); });
      return NcclResult::in_progress;
    }
  }
  while (FakeClock::now() - latest_call < world->launch_cost) {
  }
  std::lock_guard lock(world->mutex);
  launch(kernels);
  return NcclResult::success;
}

NcclResult add_to_group(const char* call, bool sends, std::byte* data, size_t num_bytes, int dtype,
                        int peer, NcclComm* comm, NcclStream pointer) {
  std::lock_guard lock(world->mutex);
  const NcclResult error = injected(call, comm->rank);
  if (error != NcclResult::success) return error;
  if (!is_usable(comm, call)) return NcclResult::invalid_usage;
  if (group.depth != 1 || dtype != kNcclBytes || num_bytes == 0 || peer == comm->rank)
    world->errors.push_back(std::string("a wrong ") + call);
  auto* const stream = static_cast<Stream*>(pointer);
  auto found = std::find_if(group.kernels.begin(), group.kernels.end(),
                            [&](const auto& each) { return each.first.comm == comm; });
  if (found == group.kernels.end()) found = group.kernels.insert(found, {Kernel{comm, {}}, stream});
  if (found->second != stream)
    world->errors.push_back("two streams of one communicator in a group");
  found->first.ops.push_back({sends, peer, data, num_bytes});
  return NcclResult::success;
}

// Several communicators of a group are made on threads of NCCL's own, whose calls break a capture in
// CUDA's default mode and fail.
bool breaks_capture() {
  bool breaks = false;
  for (const auto& stream : world->streams) {
    if (stream->device != adopted || !stream->capture || !stream->capture->capturing) continue;
    stream->capture->is_broken = breaks = true;
  }
  return breaks;
}

// CUDA may wait for kernels of the device when NCCL allocates device memory.
bool may_join(const NcclComm* comm) {
  return (!world->init_waits || world->num_resident[comm->device] == 0) &&
         world->max_in_the_making >= world->inits_wait_for;
}
void join(NcclComm* comm) {
  comm->joined = true;
  ++world->num_joined[comm->id];
  world->num_taken_bytes[comm->device] += kBytesPerPeer * (comm->size - 1);
}

NcclResult end_group() {
  std::unique_lock lock(world->mutex);
  if (--group.depth != 0) {
    world->errors.push_back("groups are not bracketed");
    return NcclResult::invalid_usage;
  }
  const Group ended = std::exchange(group, {});
  latest_call = FakeClock::now();
  for (NcclComm* comm : ended.inits) join(comm);
  if (ended.inits.size() > 1 && breaks_capture()) return NcclResult::unhandled_cuda_error;
  if (!ended.kernels.empty()) ++world->num_group_ends[ended.kernels.front().first.comm->rank];
  lock.unlock();
  for (NcclComm* comm : ended.aborts) {
    world->block([comm] { return *comm->refs == 0 && !world->abort_is_stuck; });
    std::lock_guard end_lock(world->mutex);
    comm->ended = true;
  }
  if (!ended.kernels.empty()) return launch_group(ended.kernels);
  if (ended.inits.empty()) return NcclResult::success;
  if (!world->is_blocking) return NcclResult::in_progress;
  for (NcclComm* comm : ended.inits) {
    world->block([comm] { return world->num_joined[comm->id] == comm->size; });
    std::lock_guard ready_lock(world->mutex);
    comm->ready = true;
    if (comm->async_error != NcclResult::success) return comm->async_error;
  }
  return NcclResult::success;
}

NcclResult init(NcclComm** comm, int size, const NcclUniqueId& id, int rank,
                const NcclConfig& config) {
  std::lock_guard lock(world->mutex);
  const NcclResult error = injected("ncclCommInitRankConfig", rank);
  if (error != NcclResult::success) return error;
  if (!adopted) world->errors.push_back("ncclCommInitRankConfig on a thread that breaks captures");
  if (config.min_ctas > config.max_ctas) return NcclResult::invalid_argument;  // unset: below all
  int number = 0;
  std::memcpy(&number, id.bytes, sizeof number);
  world->comms.push_back(std::make_unique<NcclComm>(number, rank, size));
  *comm = world->comms.back().get();
  (*comm)->config = config;
  (*comm)->device = adopted;
  int num_making = 0;
  for (const auto& each : world->comms)
    num_making += each->device == adopted && !each->ready && !each->aborted && each->size == 2;
  world->max_in_the_making = std::max(world->max_in_the_making, num_making);
  if (group.depth > 0)
    group.inits.push_back(*comm);
  else if (may_join(*comm))
    join(*comm);
  latest_call = FakeClock::now();
  return NcclResult::in_progress;
}

NcclResult get_async_error(NcclComm* comm, NcclResult* result) {
  std::lock_guard lock(world->mutex);
  if (comm->ended) world->errors.push_back("ncclCommGetAsyncError of a destroyed communicator");
  world->advance();
  if (!comm->joined && may_join(comm)) join(comm);
  comm->ready |= world->num_joined[comm->id] == comm->size;
  const bool in_progress = !comm->ready || comm->num_launching > 0 ||
                           (comm->finalized && *comm->refs > 0 && !world->finished());
  *result = comm->async_error != NcclResult::success ? comm->async_error
            : in_progress                            ? NcclResult::in_progress
                                                     : NcclResult::success;
  return NcclResult::success;
}

NcclResult finalize(NcclComm* comm) {
  {
    std::lock_guard lock(world->mutex);
    if (!is_usable(comm, "ncclCommFinalize")) return NcclResult::invalid_argument;
    const NcclResult error = injected("ncclCommFinalize", comm->rank);
    if (error != NcclResult::success) return error;
    comm->finalized = true;
    if (!world->is_blocking) return NcclResult::in_progress;
  }
  world->block([comm] { return *comm->refs == 0; });
  return NcclResult::success;
}

// Blocks until no graph holds the communicator and all its ranks, which are on one node, have come.
NcclResult destroy(NcclComm* comm) {
  {
    std::lock_guard lock(world->mutex);
    if (!is_usable(comm, "ncclCommDestroy")) return NcclResult::invalid_argument;
    const NcclResult error = injected("ncclCommDestroy", comm->rank);
    ++world->num_leaving[comm->id];
    comm->ended = error != NcclResult::success;
    if (comm->ended) return error;
  }
  world->block([comm] { return *comm->refs == 0 && world->num_leaving[comm->id] == comm->size; });
  std::lock_guard lock(world->mutex);
  comm->ended = true;
  return NcclResult::success;
}

// Kernels are told to leave at once.
void leave(NcclComm* comm) {
  for (auto& [key, pipe] : world->pipes) {
    if (std::get<0>(key) != comm->id) continue;
    if (std::get<1>(key) == comm->rank) pipe.sends.clear();
    if (std::get<2>(key) == comm->rank) pipe.recvs.clear();
  }
  world->advance();
}

// The rest, at the end of the group, blocks. It must not run while a call uses the communicator.
NcclResult abort(NcclComm* comm) {
  std::lock_guard lock(world->mutex);
  if (comm->ended || comm->aborted) {
    world->errors.push_back("ncclCommAbort of a communicator that is destroyed");
    return NcclResult::invalid_argument;
  }
  if (group.depth != 1) world->errors.push_back("ncclCommAbort outside of a group");
  group.aborts.push_back(comm);
  comm->aborted = !world->abort_is_stuck;
  ++world->num_aborts;
  ++world->num_leaving[comm->id];
  if (comm->num_calls > 0) world->errors.push_back("ncclCommAbort under a call that uses it");
  if (!world->abort_is_stuck) leave(comm);
  return NcclResult::success;
}

// Kernels and calls that wait for them return; nothing is freed.
NcclResult revoke(NcclComm* comm, int flags) {
  std::lock_guard lock(world->mutex);
  if (comm->ended || flags != 0) world->errors.push_back("a wrong ncclCommRevoke");
  if (world->abort_is_stuck) return NcclResult::success;
  comm->revoked = true;
  leave(comm);
  return NcclResult::success;
}

// The first reductions of an algorithm, here of a kind, connect their ranks while the callers wait.
NcclResult connect_for(const CollectiveCall& call, NcclComm* comm) {
  std::unique_lock lock(world->mutex);
  std::set<int>& ranks = world->ranks_reducing[{comm->id, int(call.kind)}];
  ranks.insert(comm->rank);
  ++comm->num_calls;
  lock.unlock();
  world->block([&] { return int(ranks.size()) == comm->size || comm->revoked; });
  lock.lock();
  --comm->num_calls;
  return comm->revoked ? NcclResult::internal_error : NcclResult::success;
}

NcclResult collect(const char* name, const CollectiveCall& call, NcclComm* comm,
                   NcclStream stream) {
  const std::pair kernel(Kernel{comm, {}, call}, static_cast<Stream*>(stream));
  {
    std::lock_guard lock(world->mutex);
    const NcclResult error = injected(name, comm->rank);
    if (error != NcclResult::success) return error;
    if (!is_usable(comm, name)) return NcclResult::invalid_usage;
    if (call.count == 0 || !call.source || !call.destination || group.depth > 0)
      world->errors.push_back(std::string("a wrong ") + name);
  }
  if (world->connects_at_reductions && call.kind != CollectiveKind::broadcast)
    if (const NcclResult error = connect_for(call, comm); error != NcclResult::success)
      return error;
  return launch_group({kernel});
}

void note_sleep(std::chrono::microseconds duration) {
  {
    std::lock_guard lock(world->mutex);
    ++world->num_sleeps;
    world->shortest_before_sleep =
        std::min(world->shortest_before_sleep, FakeClock::now() - latest_call);
  }
  std::this_thread::sleep_for(duration);
}

}  // namespace

int group_depth() { return group.depth; }

NcclApi make_api() {
  NcclApi api{};
  api.get_version = [](int* version) {
    *version = 22809;
    return NcclResult::success;
  };
  api.get_error_string = [](NcclResult result) {
    return result == NcclResult::remote_error ? "remote process exited" : "some error";
  };
  api.get_last_error = [](NcclComm*) { return "details of the fake"; };
  api.get_unique_id = [](NcclUniqueId* id) {
    std::lock_guard lock(world->mutex);
    const int number = world->num_ids++;
    std::memset(id, 0, sizeof *id);
    std::memcpy(id->bytes, &number, sizeof number);
    return NcclResult::success;
  };
  api.comm_init = init;
  api.comm_get_async_error = get_async_error;
  api.comm_finalize = finalize;
  api.comm_destroy = destroy;
  api.comm_abort = abort;
  if (world_has_revoke) api.comm_revoke = revoke;
  api.group_start = [] {
    ++group.depth;
    return NcclResult::success;
  };
  api.group_end = end_group;
  api.send = [](const void* data, size_t count, int dtype, int peer, NcclComm* comm,
                NcclStream stream) {
    return add_to_group("ncclSend", true, static_cast<std::byte*>(const_cast<void*>(data)), count,
                        dtype, peer, comm, stream);
  };
  api.recv = [](void* data, size_t count, int dtype, int peer, NcclComm* comm, NcclStream stream) {
    return add_to_group("ncclRecv", false, static_cast<std::byte*>(data), count, dtype, peer, comm,
                        stream);
  };
  using Kind = CollectiveKind;
  static constexpr auto call_of = [](Kind kind, const void* source, void* destination, size_t count,
                                     int dtype, int op = 0, int root = 0) {
    return CollectiveCall{kind,
                          static_cast<const std::byte*>(source),
                          static_cast<std::byte*>(destination),
                          count,
                          dtype,
                          op,
                          root};
  };
  api.broadcast = [](const void* source, void* destination, size_t count, int dtype, int root,
                     NcclComm* comm, NcclStream stream) {
    return collect("ncclBroadcast",
                   call_of(Kind::broadcast, source, destination, count, dtype, 0, root), comm,
                   stream);
  };
  api.all_reduce = [](const void* source, void* destination, size_t count, int dtype, int op,
                      NcclComm* comm, NcclStream stream) {
    return collect("ncclAllReduce",
                   call_of(Kind::all_reduce, source, destination, count, dtype, op), comm, stream);
  };
  api.reduce = [](const void* source, void* destination, size_t count, int dtype, int op, int root,
                  NcclComm* comm, NcclStream stream) {
    return collect("ncclReduce", call_of(Kind::reduce, source, destination, count, dtype, op, root),
                   comm, stream);
  };
  api.reduce_scatter = [](const void* source, void* destination, size_t count, int dtype, int op,
                          NcclComm* comm, NcclStream stream) {
    return collect("ncclReduceScatter",
                   call_of(Kind::reduce_scatter, source, destination, count, dtype, op), comm,
                   stream);
  };
  api.all_gather = [](const void* source, void* destination, size_t count, int dtype,
                      NcclComm* comm, NcclStream stream) {
    return collect("ncclAllGather", call_of(Kind::all_gather, source, destination, count, dtype),
                   comm, stream);
  };
  api.sleep = note_sleep;
  return api;
}

}  // namespace fake
