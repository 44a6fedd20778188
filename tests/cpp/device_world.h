// Several ranks as threads of one process, over a simulated device and control plane: what the tests
// of communicators over a DeviceExecution share.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "engine/device/device_execution.h"
#include "fake_control.h"
#include "fake_device.h"

using namespace pipecomm;
using namespace std::chrono_literals;

inline std::mutex check_mutex;

#define EXPECT(condition)                                       \
  do {                                                          \
    const bool expected = static_cast<bool>(condition);         \
    std::lock_guard expect_lock(check_mutex);                   \
    if (!expected) check::fail(__FILE__, __LINE__, #condition); \
  } while (false)

inline const auto kNothing = [] {};

struct Options : CommunicatorOptions, DeviceOptions {};

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

  // Waits for the operation; if nothing can move any more, ends the communicator.
  void finish(const OperationPtr& posted) {
    const auto& operation = static_cast<const DeviceOperation&>(*posted);
    struct Waiting {
      int rank;
      ~Waiting() { fake::world->end_wait(rank); }
    } waiting{rank};
    std::vector<EventPtr> ends;
    for (const auto& end : operation.ends) ends.push_back(end.event);
    if (!operation.is_captured()) fake::world->begin_wait(rank, std::move(ends));
    const Deadline limit = Clock::now() + 30s;
    int num_stuck = 0;
    while (!comm->wait(*posted, Clock::now() + 5ms, kNothing)) {
      if (fake::world->is_stuck(&num_stuck)) comm->abort("all streams wait");
      if (Clock::now() < limit) continue;
      EXPECT(!"an operation must end");
      return;
    }
  }
  OperationPtr p2p(const std::vector<PointToPoint>& batch, bool is_async = false) {
    return comm->batch_p2p(batch, {.is_async = is_async});
  }
  // Makes the current stream wait.
  void follow(const OperationPtr& operation) { comm->follow(*operation, kNothing); }
};

// Every rank on a thread; what a rank throws out of its construction goes to `broken`.
inline void run(const char* name, Options options, const std::function<void(Rank&)>& body,
                const std::function<void(const std::exception&)>& broken = nullptr,
                const std::function<NcclResult(const std::string&, int)>& inject = nullptr,
                const std::function<void(fake::World&)>& prepare = nullptr) {
  check::context = name;
  const NcclApi api = fake::make_api();
  // On the heap: ThreadSanitizer forgets the order of locks with the memory that held them, but it
  // does not see a place on the stack used again.
  const auto owned_world = std::make_unique<fake::World>();
  fake::World& world = *owned_world;
  world.inject = inject;
  world.num_hosts = options.size;
  if (prepare) prepare(world);
  fake::world = &world;
  const auto owned_hub = std::make_unique<fake::Hub>(options.size);
  fake::Hub& hub = *owned_hub;
  std::vector<std::thread> threads;
  for (int number = 0; number < options.size; ++number) {
    threads.emplace_back([&, number] {
      Options mine = options;
      mine.rank = number;
      Rank rank{number, options.size, std::make_shared<fake::Runtime>(), hub, nullptr};
      try {
        rank.comm =
            make_device_communicator(mine, mine, rank.runtime, api, [&](TransportEvents& events) {
              return std::make_unique<fake::HubTransport>(hub, number, events);
            });
      } catch (const std::exception& error) {
        EXPECT(broken != nullptr);
        if (broken) broken(error);
        return;
      }
      body(rank);
      world.end_host();
      if (!rank.comm) return;  // the test has destroyed it
      try {
        rank.comm->close(kNothing);
        rank.comm->close(kNothing);
      } catch (const PipeCommException&) {
      }
      EXPECT(rank.comm->closed());
      rank.comm.reset();
    });
  }
  for (std::thread& thread : threads) thread.join();
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
  EXPECT(rank.comm->failure() != nullptr);
  return rank.comm->failure() ? rank.comm->failure() : std::make_shared<Failure>();
}

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
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
    EXPECT(error.failure()->kind == kind);
    return error.what();
  }
  EXPECT(!"a PipeCommException was expected");
  return "";
}

inline void meet(Rank& me) { me.comm->wait(*me.comm->barrier(), Clock::now() + 20s, kNothing); }

template <class Condition>
bool comes_true(Condition&& condition) {
  for (int attempt = 0; attempt < 10000 && !condition(); ++attempt)
    std::this_thread::sleep_for(1ms);
  return condition();
}
