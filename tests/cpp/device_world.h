// Several ranks as threads of one process, over a simulated device and control plane: what the tests
// of communicators over a DeviceExecution share.
#pragma once

#include "check.h"
#include "engine/communicator.h"
#include "engine/device/device_execution.h"
#include "fake_control.h"
#include "fake_device.h"

using check::contains;

inline const auto kNothing = [] {};

struct Options : CommunicatorOptions, DeviceOptions {
  std::function<NcclResult(const std::string& call, int rank)> inject;  // an error for a call
  std::function<void(fake::World&)> prepare;
  std::vector<uint64_t> hosts;  // of the ranks; empty: `host` is that of all
};

inline Options options_of(int size, Check check = Check::first_use) {
  Options options;
  options.size = size;
  options.timeout = 20s;
  options.check = check;
  return options;
}

struct Rank {
  int rank, size;
  std::shared_ptr<fake::Runtime> runtime;
  fake::Hub& hub;
  std::unique_ptr<Communicator> comm;

  // Waits for the operation; ends the communicator in a deadlock.
  void finish(const OperationPtr& posted) {
    const auto& operation = static_cast<const DeviceOperation&>(*posted);
    struct Waiting {
      int rank;
      ~Waiting() { fake::world->end_wait(rank); }
    } waiting{rank};
    std::vector<EventPtr> ends;
    for (const auto& end : operation.ends) ends.push_back(end.event);
    if (!operation.is_captured()) fake::world->begin_wait(rank, std::move(ends));
    const Deadline limit = Clock::now() + 150s;  // on busy cores; deadlocks are found below
    int num_stuck = 0;
    while (!comm->wait(*posted, Clock::now() + 5ms, kNothing)) {
      if (fake::world->is_stuck(&num_stuck)) comm->abort("all streams wait");
      if (Clock::now() < limit) continue;
      CHECK(!"an operation must end");
      return;
    }
  }
  OperationPtr p2p(const std::vector<PointToPoint>& batch, bool is_async = false) {
    return comm->batch_p2p(batch, {.is_async = is_async});
  }
  // Makes the current stream wait.
  void follow(const OperationPtr& operation) { comm->follow(*operation, kNothing); }
};

// Every rank on a thread.
inline void run(const Options& options, const std::function<void(Rank&)>& body) {
  const NcclApi api = fake::make_api();
  // On the heap: ThreadSanitizer forgets the order of locks with the memory that held them, but it
  // does not see a place on the stack used again.
  const auto owned_world = std::make_unique<fake::World>();
  fake::World& world = *owned_world;
  world.inject = options.inject;
  world.num_hosts = options.size;
  if (options.prepare) options.prepare(world);
  fake::world = &world;
  const auto owned_hub = std::make_unique<fake::Hub>(options.size);
  fake::Hub& hub = *owned_hub;
  check::in_threads(options.size, [&](int number) {
    Options mine = options;
    mine.rank = number;
    if (!mine.hosts.empty()) mine.host = mine.hosts[size_t(number)];
    Rank rank{number, options.size, std::make_shared<fake::Runtime>(), hub, nullptr};
    {
      std::lock_guard lock(world.mutex);
      world.rank_of_device[rank.runtime.get()] = number;
    }
    rank.comm =
        make_device_communicator(mine, mine, rank.runtime, api, [&](TransportEvents& events) {
          return std::make_unique<fake::HubTransport>(hub, number, events);
        });
    body(rank);
    world.end_host();
    if (!rank.comm) return;  // the test has destroyed it
    try {
      rank.comm->close(kNothing);
      rank.comm->close(kNothing);
    } catch (const PipeCommException&) {
    }
    CHECK(rank.comm->closed());
    rank.comm.reset();
  });
  for (const auto& comm : world.comms)
    if (world.expects_all_to_connect && world.num_joined[comm->id] < comm->size)
      check::fail(__FILE__, __LINE__, "a thread waits in NCCL for a rank that does not come");
  if (!world.finish()) check::fail(__FILE__, __LINE__, "a communicator was leaked");
  if (world.found_stuck != world.expects_stuck)
    check::fail(__FILE__, __LINE__, world.found_stuck ? "all streams wait" : "no deadlock");
  for (const std::string& error : world.errors) check::fail(__FILE__, __LINE__, error);
  fake::world = nullptr;
}

// Waits until the communicator has failed, at most 15 s: its failure.
inline FailurePtr failure_of(Rank& rank) {
  for (int attempt = 0; attempt < 1500 && !rank.comm->failure(); ++attempt)
    std::this_thread::sleep_for(10ms);
  CHECK(rank.comm->failure() != nullptr);
  return rank.comm->failure() ? rank.comm->failure() : std::make_shared<Failure>();
}

struct Tensor {
  Tensor(Dims the_shape, float first = -1) : shape(std::move(the_shape)) {
    // A kernel of a failed communicator may write to it until the abort: like memory of a device, it
    // stays in the process.
    data = {new std::vector<float>(checked_product(shape)), [](std::vector<float>* memory) {
              static std::mutex mutex;
              static auto* const freed = new std::vector<std::unique_ptr<std::vector<float>>>;
              std::lock_guard lock(mutex);
              freed->emplace_back(memory);
            }};
    for (size_t idx = 0; idx < data->size(); ++idx) (*data)[idx] = first + float(idx);
  }
  Dims shape;
  std::shared_ptr<std::vector<float>> data;

  TensorRef ref() const {
    TensorRef ref;
    ref.data = reinterpret_cast<std::byte*>(data->data());
    ref.dtype = dtypes::kFloat32;
    ref.shape = shape;
    ref.strides = StridedLayout::contiguous({shape, dtypes::kFloat32}).strides;
    ref.storage = data;
    return ref;
  }
  PointToPoint to(int peer, int channel = 0) const {
    return {Direction::send, peer, channel, ref()};
  }
  PointToPoint from(int peer, int channel = 0) const {
    return {Direction::recv, peer, channel, ref()};
  }
  bool counts_from(float first) const {
    for (size_t idx = 0; idx < data->size(); ++idx)
      if ((*data)[idx] != first + float(idx)) return false;
    return true;
  }
};

template <class Function>
std::string failure_text(FailureKind kind, Function&& function) {
  try {
    function();
  } catch (const PipeCommException& error) {
    CHECK(error.failure()->kind == kind);
    return error.what();
  }
  CHECK(!"a PipeCommException was expected");
  return "";
}

// The end of a program that is in a deadlock. The abort of one rank frees its streams, after which
// an operation of a peer may still succeed.
inline void finish_stuck(Rank& me, const std::function<void()>& finish) {
  try {
    finish();
  } catch (const PipeCommException& error) {
    CHECK(error.failure()->kind == FailureKind::aborted);
  }
  CHECK(failure_of(me)->kind == FailureKind::aborted);
}

inline void meet(Rank& me) { me.comm->wait(*me.comm->barrier(), Clock::now() + 20s, kNothing); }

template <class Condition>
bool comes_true(Condition&& condition) {
  for (int attempt = 0; attempt < 10000 && !condition(); ++attempt)
    std::this_thread::sleep_for(1ms);
  return condition();
}

// Captures the work that `body` enqueues as a graph; and runs one replay of it to its end.
template <class Body>
fake::GraphPtr capture(Rank& me, Body&& body) {
  me.runtime->begin_capture();
  body();
  return me.runtime->end_capture();
}
inline void play(Rank& me, const fake::GraphPtr& graph) {
  me.runtime->replay(graph);
  const EventPtr end = me.runtime->record(me.runtime->current_stream());
  CHECK(comes_true([&] { return me.runtime->is_done(end); }));
}

// The tensors that two ranks send each other.
struct Swap {
  explicit Swap(const Rank& me) : peer(1 - me.rank), mine({4}, float(me.rank)) {}
  std::vector<PointToPoint> on(int channel = 0) const {
    return {mine.to(peer, channel), theirs.from(peer, channel)};
  }
  bool has_come() const { return theirs.counts_from(float(peer)); }

  int peer;
  Tensor mine, theirs{{4}};
};
