#include "device_world.h"

void Rank::finish(const OperationPtr& posted) {
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

void run(const Options& options, const std::function<void(Rank&)>& body) {
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

FailurePtr failure_of(Rank& rank) {
  for (int attempt = 0; attempt < 1500 && !rank.comm->failure(); ++attempt)
    std::this_thread::sleep_for(10ms);
  CHECK(rank.comm->failure() != nullptr);
  return rank.comm->failure() ? rank.comm->failure() : std::make_shared<Failure>();
}

Tensor::Tensor(Dims the_shape, float first) : shape(std::move(the_shape)) {
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

TensorRef Tensor::ref() const {
  TensorRef ref;
  ref.data = reinterpret_cast<std::byte*>(data->data());
  ref.dtype = dtypes::kFloat32;
  ref.shape = shape;
  ref.strides = StridedLayout::contiguous({shape, dtypes::kFloat32}).strides;
  ref.storage = data;
  return ref;
}

void finish_stuck(Rank& me, const std::function<void()>& finish) {
  try {
    finish();
  } catch (const PipeCommException& error) {
    CHECK(error.failure()->kind == FailureKind::aborted);
  }
  CHECK(failure_of(me)->kind == FailureKind::aborted);
}
