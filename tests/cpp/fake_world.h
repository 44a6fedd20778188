// The state that the ranks of a test share: streams, which one simulation advances under one lock,
// the thread in which NCCL launches, and the detection of deadlocks.
#pragma once

#include "check.h"

#include "copy/device_runtime.h"
#include "fake_collectives.h"
#include "transport/nccl/nccl_api.h"

namespace fake {

using FakeClock = std::chrono::steady_clock;

using Work = std::function<bool()>;  // true: done
struct Graph;
struct Stream;
using Clocks =
    std::map<Stream*, size_t>;  // of each stream of a capture, how much is known to be before

struct Event {
  bool done = false;
  std::weak_ptr<Graph> graph;  // if it was recorded in a capture
  bool captured = false;
  Clocks before;
};

// Events of a captured graph are new ones in each replay.
struct Replay {
  std::map<Event*, std::shared_ptr<Event>> events;
  std::shared_ptr<Event> of(const std::shared_ptr<Event>& event) {
    auto& own = events[event.get()];
    if (!own) own = std::make_shared<Event>();
    return own;
  }
};
using Make = std::function<Work(Replay&)>;

struct Graph {
  std::map<Stream*, std::vector<Make>> parts;
  std::vector<std::shared_ptr<std::atomic<int>>> refs;  // of the communicators in it
  std::vector<std::shared_ptr<void>> pool;              // memory allocated during the capture
  bool capturing = true;
  bool is_broken =
      false;  // by a forbidden call: nothing more can be captured, and there is no graph
  ~Graph() {
    for (const auto& ref : refs) --*ref;
  }
};
using GraphPtr = std::shared_ptr<Graph>;

// One task of a stream. Work that waits for its peers has `started` when they come.
struct Task {
  Work work;
  bool is_record = false, started = false;
};

struct Stream {
  const void* device = nullptr;
  std::deque<Task> tasks;
  std::deque<Stream*>* queue = nullptr;
  size_t num_passed = 0;  // of its tasks, in a pass over the queue
  GraphPtr capture;
  Clocks before;
  int num_launching = 0;  // NCCL calls that are launching: nothing else may be enqueued
};

// The device whose captures are not invalidated by calls of this thread, as it has requested.
inline thread_local const void* adopted = nullptr;

struct Half {  // one direction of a message inside a kernel
  std::byte* data;
  size_t num_bytes;
  bool done = false;
};
using HalfPtr = std::shared_ptr<Half>;

// The messages of one communicator from one rank to another. Small ones wait in the receiver's
// memory if there is room; a large one moves while both kernels run.
struct Pipe {
  std::deque<HalfPtr> sends, recvs;
  std::deque<std::vector<std::byte>> buffered;
  size_t num_buffered_bytes = 0;

  void lose_buffered() {
    buffered.clear();
    num_buffered_bytes = 0;
  }
  bool advance(size_t capacity) {
    bool moved = false;
    for (bool again = true; again; moved |= again) again = take(capacity);
    return moved;
  }

 private:
  bool take(size_t capacity) {
    if (!sends.empty() && num_buffered_bytes + sends.front()->num_bytes <= capacity) {
      const Half& send = *sends.front();
      buffered.emplace_back(send.data, send.data + send.num_bytes);
      num_buffered_bytes += send.num_bytes;
      sends.front()->done = true;
      sends.pop_front();
      return true;
    }
    if (recvs.empty() || (buffered.empty() && sends.empty())) return false;
    const HalfPtr recv = recvs.front();
    recvs.pop_front();
    if (buffered.empty()) {
      deliver(*recv, sends.front()->data, sends.front()->num_bytes);
      sends.front()->done = true;
      sends.pop_front();
    } else {
      deliver(*recv, buffered.front().data(), buffered.front().size());
      num_buffered_bytes -= buffered.front().size();
      buffered.pop_front();
    }
    return true;
  }
  static void deliver(Half& recv, const std::byte* data, size_t num_bytes) {
    std::copy(data, data + std::min(num_bytes, recv.num_bytes), recv.data);
    recv.done = recv.num_bytes <= num_bytes;  // one that expects more waits forever
  }
};

}  // namespace fake

namespace pipecomm {
struct NcclComm {
  NcclComm(int the_id, int the_rank, int the_size) : id(the_id), rank(the_rank), size(the_size) {}
  int id, rank, size;
  const void* device = nullptr;
  NcclConfig config;
  bool joined = false;
  bool ready = false;     // all ranks have joined
  int num_launching = 0;  // groups that are not launched yet
  NcclResult async_error = NcclResult::success;
  bool revoked = false, aborted = false, finalized = false, ended = false;
  int num_calls = 0;  // calls of NCCL that are using it
  bool running = false;
  int num_collectives = 0;
  std::shared_ptr<std::atomic<int>> refs = std::make_shared<std::atomic<int>>(0);  // live graphs
};
}  // namespace pipecomm

namespace fake {

struct World {
  // Set by a test:
  std::chrono::microseconds launch_cost{15};
  size_t fifo_bytes = 0;  // per pair and communicator
  int ranks_per_host = 1 << 20;
  int num_multiprocessors = 132;
  size_t max_resident = size_t(-1);  // thread blocks of NCCL that a device runs at a time
  size_t max_queue = size_t(-1);     // operations of a stream, beyond which NCCL's calls wait
  size_t num_queues = size_t(-1);    // of the hardware, which the streams of a device share in turn
  bool init_waits = false;           // while kernels of NCCL run on the device of its rank
  int inits_wait_for = 0;            // until this many have been in progress on a device at once
  int num_hosts = 0;                 // threads of ranks
  bool expects_stuck = false;
  bool expects_all_to_connect = false;  // no rank waits in NCCL for one that does not come
  bool is_blocking = true;              // as NCCL_COMM_BLOCKING has it
  bool abort_is_stuck = false;          // until finish()
  std::function<NcclResult(const std::string& call, int rank)> inject;  // an error for a call

  std::atomic<bool> driver_is_stuck{false};  // event queries do not return

  std::recursive_mutex mutex;
  std::vector<std::unique_ptr<Stream>> streams;
  std::map<const void*, std::deque<std::deque<Stream*>>>
      queues;                                 // by device: whose tasks, in order
  std::map<const void*, size_t> num_streams;  // by device
  bool has_started = false;                   // the current task runs from now on
  std::vector<std::unique_ptr<NcclComm>> comms;
  std::map<const void*, int> rank_of_device;
  int host_of(const void* device) const { return rank_of_device.at(device) / ranks_per_host; }
  std::map<std::tuple<int, int, int>, Pipe> pipes;              // id, source, destination
  std::map<int, int> num_joined, num_leaving;                   // ranks, per id
  bool connects_at_reductions = false;                          // at the first of each kind
  std::map<std::pair<int, int>, std::set<int>> ranks_reducing;  // per id and kind
  std::map<std::pair<int, int>, Collective> collectives;        // id, number
  std::vector<std::string> errors;  // that would hang or produce garbage on a real device
  int num_ids = 0;
  size_t max_group_ops = 0;  // of one communicator
  int num_kernels = 0;
  std::map<int, int> num_group_ends;               // with messages, by rank
  std::map<const void*, size_t> num_resident;      // thread blocks, by device
  std::map<const void*, int64_t> num_taken_bytes;  // by the communicators of a device
  int num_aborts = 0;
  int max_in_the_making = 0;  // communicators of a device at a time
  int num_event_queries = 0;
  std::deque<DeviceRuntime::Counter> counters;
  int num_sleeps = 0;  // of threads that wait for NCCL
  FakeClock::duration shortest_before_sleep = FakeClock::duration::max();  // since a call
  bool found_stuck = false;

  World();
  ~World();

  // Lets all calls that wait for something return; false if a communicator was leaked.
  bool finish();

  // Blocks the calling thread until `done`, or the end of the test.
  void block(const std::function<bool()>& done);
  bool finished() const { return finished_; }

  void launch_later(std::function<void()> launch) {
    launches_.push_back({FakeClock::now() + launch_cost, std::move(launch)});
  }

  // The process of a rank ends: what NCCL holds on its host for receivers of other hosts is lost.
  void end_process(int rank);

  // Multicast slots of the host that uses most: NVSwitch has 128, of which NCCL takes one for each
  // communicator that has two devices there.
  int max_slots();

  int num_group_ends_of(int rank) {
    std::lock_guard lock(mutex);
    return num_group_ends[rank];
  }
  void note_progress() { ++progress_; }
  void touch(Pipe& pipe) { touched_pipes_.push_back(&pipe); }  // more of it can move than before
  // Ended work may drop memory, which is new work.
  void advance();
  void run_queue(std::deque<Work>& work) {
    for (; !work.empty() && work.front()(); ++progress_) work.pop_front();
  }
  Stream* new_stream(const void* device);
  void enqueue(Stream* stream, Work work, bool is_record = false) {
    if (stream->tasks.empty()) stream->num_passed = 0;  // possibly during a pass
    stream->tasks.push_back({std::move(work), is_record});
    if (stream->queue->empty()) busy_queues_.push_back(stream->queue);
    stream->queue->push_back(stream);
  }
  // In the order in which the tasks came. A task that cannot start yet, since it waits for an
  // event, for room or for the previous one of its stream, blocks all later ones of any stream; a
  // record does not.
  void run_hardware_queue(std::deque<Stream*>& queue);

  // Hosts that wait for events, or add no work any more. If all hosts do, and none of these events
  // can come, the program is in a deadlock.
  void begin_wait(int rank, std::vector<EventPtr> ends) {
    std::lock_guard lock(mutex);
    waiting_[rank] = std::move(ends);
  }
  void end_wait(int rank) {
    std::lock_guard lock(mutex);
    waiting_.erase(rank);
  }
  void end_host() {
    std::lock_guard lock(mutex);
    ++num_ended_hosts_;
  }
  // Another host may be about to fail for another reason, so unless the test expects a deadlock, it
  // must last for a while, which `num_stuck` counts.
  bool is_stuck(int* num_stuck);

 private:
  bool nothing_moves();

  struct Launch {
    FakeClock::time_point due;
    std::function<void()> launch;
  };
  // Launches independent of calls.
  void launch_loop() {
    while (!stopping_) {
      std::this_thread::sleep_for(std::chrono::microseconds(300));
      std::lock_guard lock(mutex);
      if (!launches_.empty()) advance();
    }
  }

  std::deque<Launch> launches_;
  uint64_t progress_ = 0;
  bool advances_ = false;
  std::vector<std::deque<Stream*>*> busy_queues_;
  std::vector<Pipe*> touched_pipes_;
  std::map<int, std::vector<EventPtr>> waiting_;
  int num_ended_hosts_ = 0;
  std::atomic<int> num_calls_{0};
  std::atomic<bool> finished_{false}, stopping_{false};
  std::thread launcher_;
};

inline World* world = nullptr;

}  // namespace fake
