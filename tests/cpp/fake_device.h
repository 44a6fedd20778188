// A device and an NCCL without any hardware, for several ranks in one process.
//
// Streams are queues of work that a simulation advances under one lock. NCCL is simulated at its
// strictest: a send has no buffer and moves its bytes only while the kernels of both ends run, and
// work of one communicator that is not ordered by streams is an error. Captures follow CUDA's rules
// (forks by events, no dependency on work outside, no questions about captured events).
#pragma once

#include <algorithm>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "copy/copy_cpu.h"
#include "copy/device_runtime.h"
#include "transport/nccl_api.h"

namespace fake {

struct Half {  // one direction of a message inside a kernel
  std::byte* data;
  size_t num_bytes;
  bool done = false;
};
using HalfPtr = std::shared_ptr<Half>;

struct Kernel {
  struct Op {
    bool sends;
    int peer;
    HalfPtr half;
  };
  std::vector<Op> ops;
  int root = -1;  // of a broadcast, of `data`
  HalfPtr data;
  bool running = false;
};
using KernelPtr = std::shared_ptr<Kernel>;

struct Event {
  bool done = false;
  bool captured = false;
};

struct Stream {
  std::deque<std::function<bool()>> work;  // true: done
  bool capturing = false;
};

}  // namespace fake

namespace pipecomm {
struct NcclComm {
  NcclComm(int the_id, int the_rank, int the_size) : id(the_id), rank(the_rank), size(the_size) {}
  int id, rank, size;
  int num_polls_to_ready = 3;
  NcclResult async_error = NcclResult::success;
  bool aborted = false;
  fake::KernelPtr running;
};
}  // namespace pipecomm

namespace fake {

using namespace pipecomm;

// Everything that the ranks of a test share.
struct World {
  std::recursive_mutex mutex;
  std::vector<std::unique_ptr<Stream>> streams;
  std::vector<std::unique_ptr<NcclComm>> comms;
  std::map<std::tuple<int, int, int>, std::deque<HalfPtr>> sends, recvs;  // id, source, dest
  std::map<int, int> num_joined;                                          // per id
  std::map<std::pair<int, int>, int> num_broadcasts;                      // id, rank
  std::map<std::pair<int, int>, std::vector<std::byte>> broadcasts;       // id, number: data
  std::vector<std::string> errors;  // what a real device would punish with a hang or garbage
  size_t max_group_ops = 0;
  int num_groups = 0;
  int num_aborts = 0;
  int num_event_queries = 0;
  std::function<NcclResult(const std::string& call, int rank)> inject;  // an error for a call

  void advance() {
    for (bool moved = true; moved;) {
      moved = false;
      for (size_t idx = 0; idx < streams.size(); ++idx) {
        while (!streams[idx]->work.empty() && streams[idx]->work.front()()) {
          streams[idx]->work.pop_front();
          moved = true;
        }
      }
      moved |= match();
    }
  }

 private:
  bool match() {
    bool moved = false;
    for (auto& [key, senders] : sends) {
      auto& receivers = recvs[key];
      while (!senders.empty() && !receivers.empty()) {
        const HalfPtr send = senders.front(), recv = receivers.front();
        senders.pop_front();
        receivers.pop_front();
        const size_t num_bytes = std::min(send->num_bytes, recv->num_bytes);
        std::memcpy(recv->data, send->data, num_bytes);
        send->done = true;
        recv->done = recv->num_bytes <= num_bytes;  // one that expects more waits forever
        moved = true;
      }
    }
    return moved;
  }
};

inline World* world = nullptr;

// ------------------------------------------------------------------------------------------------
// NCCL

inline thread_local int group_depth = 0;
inline thread_local std::vector<std::pair<NcclComm*, Stream*>> group_order;
inline thread_local std::map<NcclComm*, KernelPtr> group_kernels;

inline bool run(NcclComm* comm, const KernelPtr& kernel) {
  if (comm->aborted) return true;  // leaves at once, with garbage
  if (!kernel->running) {
    if (comm->running) {
      world->errors.push_back("two kernels of one communicator at once");
      return false;
    }
    comm->running = kernel;
    kernel->running = true;
    for (const Kernel::Op& op : kernel->ops)
      (op.sends ? world->sends[{comm->id, comm->rank, op.peer}]
                : world->recvs[{comm->id, op.peer, comm->rank}])
          .push_back(op.half);
  }
  for (const Kernel::Op& op : kernel->ops)
    if (!op.half->done) return false;
  if (kernel->root >= 0) {
    int& number = world->num_broadcasts[{comm->id, comm->rank}];
    const std::pair key(comm->id, number);
    std::byte* const data = kernel->data->data;
    if (kernel->root == comm->rank)
      world->broadcasts[key].assign(data, data + kernel->data->num_bytes);
    const auto found = world->broadcasts.find(key);
    if (found == world->broadcasts.end()) return false;
    std::memcpy(data, found->second.data(), kernel->data->num_bytes);
    ++number;
  }
  comm->running = nullptr;
  return true;
}

inline void launch(NcclComm* comm, Stream* stream, const KernelPtr& kernel) {
  if (stream->capturing) return;
  stream->work.push_back([comm, kernel] { return run(comm, kernel); });
}

inline NcclResult injected(const std::string& call, int rank) {
  return world->inject ? world->inject(call, rank) : NcclResult::success;
}

inline NcclResult add_to_group(const std::string& call, bool sends, std::byte* data,
                               size_t num_bytes, int dtype, int peer, NcclComm* comm,
                               NcclStream stream) {
  std::lock_guard lock(world->mutex);
  const NcclResult error = injected(call, comm->rank);
  if (error != NcclResult::success) return error;
  if (group_depth != 1 || dtype != kNcclBytes || num_bytes == 0 || peer == comm->rank)
    world->errors.push_back("a wrong " + call);
  KernelPtr& kernel = group_kernels[comm];
  if (!kernel) {
    kernel = std::make_shared<Kernel>();
    group_order.emplace_back(comm, static_cast<Stream*>(stream));
  }
  kernel->ops.push_back({sends, peer, std::make_shared<Half>(Half{data, num_bytes})});
  return NcclResult::success;
}

inline NcclApi make_api() {
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
    std::memset(id, 0, sizeof *id);
    return NcclResult::success;
  };
  api.comm_init = [](NcclComm** comm, int size, const NcclUniqueId& id, int rank,
                     const NcclConfig&) {
    std::lock_guard lock(world->mutex);
    const NcclResult error = injected("ncclCommInitRankConfig", rank);
    if (error != NcclResult::success) return error;
    world->comms.push_back(std::make_unique<NcclComm>(int(id.bytes[0]), rank, size));
    *comm = world->comms.back().get();
    ++world->num_joined[id.bytes[0]];
    return NcclResult::in_progress;
  };
  api.comm_get_async_error = [](NcclComm* comm, NcclResult* result) {
    std::lock_guard lock(world->mutex);
    const bool joined = world->num_joined[comm->id] == comm->size;
    if (joined && comm->num_polls_to_ready > 0) --comm->num_polls_to_ready;
    *result = comm->async_error != NcclResult::success ? comm->async_error
              : comm->num_polls_to_ready > 0           ? NcclResult::in_progress
                                                       : NcclResult::success;
    return NcclResult::success;
  };
  api.comm_finalize = [](NcclComm*) { return NcclResult::success; };
  api.comm_destroy = [](NcclComm*) { return NcclResult::success; };
  api.comm_abort = [](NcclComm* comm) {
    std::lock_guard lock(world->mutex);
    comm->aborted = true;
    ++world->num_aborts;
    for (auto& [key, queue] : world->sends)
      if (std::get<0>(key) == comm->id && std::get<1>(key) == comm->rank) queue.clear();
    for (auto& [key, queue] : world->recvs)
      if (std::get<0>(key) == comm->id && std::get<2>(key) == comm->rank) queue.clear();
    world->advance();
    return NcclResult::success;
  };
  api.group_start = [] {
    ++group_depth;
    return NcclResult::success;
  };
  api.group_end = [] {
    std::lock_guard lock(world->mutex);
    if (--group_depth != 0) {
      world->errors.push_back("groups are not bracketed");
      return NcclResult::invalid_usage;
    }
    for (const auto& [comm, stream] : std::exchange(group_order, {})) {
      const KernelPtr kernel = group_kernels[comm];
      world->max_group_ops = std::max(world->max_group_ops, kernel->ops.size());
      ++world->num_groups;
      launch(comm, stream, kernel);
    }
    group_kernels.clear();
    world->advance();
    return NcclResult::success;
  };
  api.send = [](const void* data, size_t count, int dtype, int peer, NcclComm* comm,
                NcclStream stream) {
    return add_to_group("ncclSend", true, static_cast<std::byte*>(const_cast<void*>(data)), count,
                        dtype, peer, comm, stream);
  };
  api.recv = [](void* data, size_t count, int dtype, int peer, NcclComm* comm, NcclStream stream) {
    return add_to_group("ncclRecv", false, static_cast<std::byte*>(data), count, dtype, peer, comm,
                        stream);
  };
  api.broadcast = [](const void*, void* data, size_t count, int, int root, NcclComm* comm,
                     NcclStream stream) {
    std::lock_guard lock(world->mutex);
    const auto kernel = std::make_shared<Kernel>();
    kernel->root = root;
    kernel->data = std::make_shared<Half>(Half{static_cast<std::byte*>(data), count});
    launch(comm, static_cast<Stream*>(stream), kernel);
    world->advance();
    return NcclResult::success;
  };
  return api;
}

// ------------------------------------------------------------------------------------------------
// the device of one rank

class Runtime final : public DeviceRuntime {
 public:
  Runtime() : current_(new_stream()) {}

  void set_current(StreamHandle stream) { current_ = stream; }
  void begin_capture() { static_cast<Stream*>(current_)->capturing = true; }
  void end_capture() {
    for (StreamHandle stream : streams_) static_cast<Stream*>(stream)->capturing = false;
  }

  StreamHandle current_stream() override { return current_; }
  StreamHandle new_stream() override {
    std::lock_guard lock(world->mutex);
    world->streams.push_back(std::make_unique<Stream>());
    streams_.push_back(world->streams.back().get());
    return streams_.back();
  }
  bool is_capturing(StreamHandle stream) override {
    return static_cast<Stream*>(stream)->capturing;
  }

  EventPtr record(StreamHandle stream) override {
    auto event = std::make_shared<Event>();
    event->captured = is_capturing(stream);
    enqueue(stream, [event] { return event->done = true; });
    return event;
  }
  void wait(StreamHandle stream, const EventPtr& pointer) override {
    const auto event = std::static_pointer_cast<Event>(pointer);
    auto* const waiting = static_cast<Stream*>(stream);
    if (waiting->capturing && !event->captured)
      throw std::runtime_error("CUDA: dependency created on uncaptured work in another stream");
    if (event->captured) waiting->capturing = true;
    enqueue(stream, [event] { return event->done; });
  }
  bool is_done(const EventPtr& pointer) override {
    const auto event = std::static_pointer_cast<Event>(pointer);
    if (event->captured) throw std::runtime_error("CUDA: query of a captured event");
    std::lock_guard lock(world->mutex);
    ++world->num_event_queries;
    world->advance();
    return event->done;
  }

  // Like memory of a stream-ordered allocator: overwritten once the work enqueued until it was
  // dropped is done.
  std::shared_ptr<std::byte> allocate(int64_t num_bytes, StreamHandle stream) override {
    if (num_bytes == 0) return nullptr;
    auto memory = std::make_shared<std::vector<std::byte>>(num_bytes);
    return {memory->data(), [this, memory, stream](std::byte*) {
              enqueue(stream, [memory] {
                std::fill(memory->begin(), memory->end(), std::byte{0xEE});
                return true;
              });
            }};
  }
  void copy(void* destination, const void* source, int64_t num_bytes,
            StreamHandle stream) override {
    enqueue(stream, [=] {
      std::memcpy(destination, source, size_t(num_bytes));
      return true;
    });
  }
  void execute(std::span<const CopyTask> tasks, const CopyBuffers& buffers, const Scale& scale,
               StreamHandle stream) override {
    enqueue(stream,
            [tasks = std::vector<CopyTask>(tasks.begin(), tasks.end()),
             inputs = std::vector<const void*>(buffers.inputs.begin(), buffers.inputs.end()),
             outputs = std::vector<void*>(buffers.outputs.begin(), buffers.outputs.end()),
             send = buffers.send_staging, recv = buffers.recv_staging, scale] {
              execute_cpu(tasks, {inputs, outputs, send, recv}, scale);
              return true;
            });
  }

 private:
  void enqueue(StreamHandle stream, std::function<bool()> work) {
    std::lock_guard lock(world->mutex);
    auto* const queue = static_cast<Stream*>(stream);
    if (queue->capturing) return;
    queue->work.push_back(std::move(work));
    world->advance();
  }

  std::vector<StreamHandle> streams_;
  StreamHandle current_;
};

}  // namespace fake
