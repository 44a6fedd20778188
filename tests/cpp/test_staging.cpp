// Tensors of a device over a transport of the host: each program must have the same result as in
// host memory. It runs twice, and all memory of all ranks is compared.

#include "plan/builders.h"
#include "plan/reshard.h"
#include "plan/split.h"
#include "staging_device.h"
#include "thread_ranks.h"

using staging_device::Device;
using staging_device::Stream;

using threads::failure_of;
using threads::kLong;
using threads::wait;
using Bytes = std::vector<std::byte>;

// The memory of one rank, on a device or on the host, and the stream that its thread works on.
class Memory {
 public:
  explicit Memory(int rank, std::shared_ptr<Device> device) : device_(std::move(device)) {
    if (!device_) host_.resize(Device::kNumBytes);
    for (size_t idx = 0; idx < Device::kNumBytes; ++idx)
      here(0)[idx] = static_cast<std::byte>(rank * 91 + idx * 7 + idx / 251);
    if (device_) Device::current = device_->make_stream();
  }

  // A new tensor, with `gap` elements between the rows of the last dim.
  TensorRef tensor(const Dims& shape, DType dtype, int64_t gap) {
    TensorRef ref{nullptr, dtype, shape, Dims(shape.size()), nullptr};
    int64_t stride = 1;
    for (size_t dim = shape.size(); dim-- > 0;) {
      ref.strides[dim] = stride;
      stride = stride * shape[dim] + (dim + 1 == shape.size() ? gap : 0);
    }
    const int64_t end = next_ + stride * dtype.itemsize;
    if (end > int64_t(Device::kNumBytes)) throw std::runtime_error("memory is used up");
    ref.data = (device_ ? device_->address() : host_.data()) + next_;
    next_ = end + dtype.itemsize;
    return ref;
  }
  // Writes as a kernel does, some time later if this is a device.
  void fill(const TensorRef& tensor, uint64_t seed) {
    const auto write = [this, tensor, seed] {
      std::byte* const data = device_ ? device_->behind(tensor.data) : tensor.data;
      const int64_t span = tensor.shape[0] * tensor.strides[0] * tensor.dtype.itemsize;
      for (int64_t idx = 0; idx < span; ++idx)
        data[idx] = static_cast<std::byte>(seed * 131 + idx * 5 + idx / 253);
    };
    if (!device_) return write();
    Device::current->delay(300us);
    Device::current->add(write);
  }
  // Reads immediately, without ordering with any stream.
  Bytes now() { return {here(0), here(0) + Device::kNumBytes}; }
  Device* device() const { return device_.get(); }

 private:
  std::byte* here(size_t offset) {
    return (device_ ? device_->behind(device_->address()) : host_.data()) + offset;
  }
  const std::shared_ptr<Device> device_;
  Bytes host_;
  int64_t next_ = 64;
};

using Program = std::function<void(Communicator&, Memory&, int rank)>;

// The contents of all memory at the end, per rank.
std::vector<Bytes> run(int size, bool on_device, const Program& program,
                       std::chrono::nanoseconds timeout_of_rank_0 = kLong) {
  const auto hub = std::make_shared<local::Hub>(size);
  std::vector<Bytes> ends(size);
  check::in_threads(size, [&](int rank) {
    try {
      Memory memory(rank, on_device ? std::make_shared<Device>() : nullptr);
      CommunicatorOptions options{.rank = rank,
                                  .size = size,
                                  .num_channels = 4,
                                  .timeout = rank == 0 ? timeout_of_rank_0 : kLong};
      if (on_device)
        options.device = {std::make_shared<int>(), memory.device()};  // owned by `memory`
      const auto comm = threads::join(hub, options);
      program(*comm, memory, rank);
      ends[rank] = memory.now();
      if (!comm->failure()) comm->close(nullptr);
    } catch (const std::exception& error) {
      check::fail(__FILE__, __LINE__, "rank " + std::to_string(rank) + ": " + error.what());
    }
  });
  return ends;
}

void compare(int size, const Program& program) {
  const std::vector<Bytes> expected = run(size, false, program), actual = run(size, true, program);
  for (int rank = 0; rank < size; ++rank) {
    const bool is_equal = expected[rank] == actual[rank];
    CHECK(is_equal);
  }
}

TensorRef rows(TensorRef tensor, int64_t start, int64_t length) {
  tensor.data += start * tensor.strides[0] * tensor.dtype.itemsize;
  tensor.shape[0] = length;
  return tensor;
}

PreparedExchangePtr prepared(ExchangePlan plan) {
  return std::make_shared<PreparedExchange>(std::move(plan));
}

struct Relay {
  std::vector<int> source, destination;
  int64_t length, width, gap;
  int channel;
  bool is_async;
};

// Hop 1: each piece to one rank of the destination, into its rows of the result. Hop 2: these
// collect the other pieces; their own one stays where it is.
std::vector<OperationPtr> relay(Communicator& comm, Memory& memory, int rank, int size,
                                const Relay& given, int round) {
  const auto holds = [rank](const std::vector<int>& ranks) {
    return std::find(ranks.begin(), ranks.end(), rank) - ranks.begin();
  };
  const bool sends = holds(given.source) < ssize(given.source);
  const int64_t place = holds(given.destination);
  const TensorSpec whole{{given.length, given.width}, dtypes::kBFloat16};
  const TensorRef tensor = memory.tensor(whole.shape, whole.dtype, given.gap);
  if (sends) memory.fill(tensor, round);
  std::vector<OperationPtr> hops;
  const auto post = [&](ExchangePlan plan, std::vector<TensorRef> inputs,
                        std::vector<TensorRef> outputs, std::vector<int> members,
                        const OperationPtr& after) {
    hops.push_back(comm.exchange(OpCode::relay, prepared(std::move(plan)), inputs, outputs,
                                 {.is_async = given.is_async}, {members, given.channel}, after));
    if (!given.is_async) wait(comm, hops.back());
  };
  const ShardLayout pieces{given.destination, {}, false, 0};
  std::vector<int> members = given.source;
  members.insert(members.end(), given.destination.begin(), given.destination.end());
  std::sort(members.begin(), members.end());
  const auto lengths = remainder_first(given.length, int(given.destination.size()));
  const auto own = [&] {
    int64_t start = 0;
    for (int64_t idx = 0; idx < place; ++idx) start += lengths[idx];
    return rows(tensor, start, lengths[place]);
  };
  if (sends)
    post(reshard_plan({rank, size}, whole, {given.source, {}, true, 0}, pieces), {tensor}, {},
         members, nullptr);
  else
    post(reshard_plan({rank, size}, whole, {given.source, {}, true, 0}, pieces), {}, {own()},
         members, nullptr);
  if (!sends && given.destination.size() > 1)
    post(reshard_plan({rank, size}, whole, pieces, {given.destination, {}, true, 0},
                      {.own_in_place = true}),
         {own()}, {tensor}, given.destination, given.is_async ? hops.back() : nullptr);
  return hops;
}

TEST(relays) {
  for (int seed = 0; seed < check::rounds(12); ++seed) {
    std::mt19937 draw(seed);
    const int size = 3 + seed % 2;
    const bool is_async = seed % 3 != 0;
    check::context = "relays, seed " + std::to_string(seed);
    std::vector<Relay> relays;
    for (int round = 0; round < 12; ++round) {
      const auto below = [&](int limit) { return int(draw() % limit); };
      Relay one{{0}, {1, 2}, 1 + below(9), 1 + below(300), below(3), below(4), is_async};
      if (size == 4) one = {{0, 1}, {2, 3}, one.length, one.width, one.gap, one.channel, is_async};
      if (draw() % 3 == 0) std::swap(one.source, one.destination);
      one.length = std::max<int64_t>(one.length, 2);
      relays.push_back(one);
    }
    compare(size, [&](Communicator& comm, Memory& memory, int rank) {
      std::vector<OperationPtr> in_flight;
      for (size_t round = 0; round < relays.size(); ++round)
        for (const OperationPtr& hop : relay(comm, memory, rank, size, relays[round], int(round)))
          in_flight.push_back(hop);
      for (const OperationPtr& hop : in_flight) wait(comm, hop);
    });
  }
}

// On the collectives' channel, with strides on both sides and a factor; the sender's stream is
// late.
TEST(exchanges) {
  constexpr int kSize = 3;
  for (const Scale& scale : {Scale::none(), Scale::multiply(3), Scale::divide(3)}) {
    check::context = "exchanges";
    compare(kSize, [&](Communicator& comm, Memory& memory, int rank) {
      std::vector<OperationPtr> in_flight;
      for (int round = 0; round < 10; ++round) {
        const Dims shape{2, 2 + rank, 3 * kSize}, gathered{2, 9, 3};
        const TensorRef input = memory.tensor(shape, dtypes::kFloat32, round % 2);
        const TensorRef output = memory.tensor(gathered, dtypes::kFloat32, round % 3);
        memory.fill(input, rank);
        const auto plan = prepared(all_to_all_plan(
            {rank, kSize}, {{{shape, dtypes::kFloat32}, {3, 3, 3}, {2, 3, 4}}}, 2, 1, scale));
        const bool is_async = round % 2;
        in_flight.push_back(comm.exchange(OpCode::all_to_all, plan, {&input, 1}, {&output, 1},
                                          {.is_async = is_async}));
        if (!is_async) wait(comm, in_flight.back());
      }
      for (const OperationPtr& operation : in_flight) wait(comm, operation);
    });
  }
}

// Around a ring, with gaps between the rows on the device, to oneself too.
TEST(messages) {
  constexpr int kSize = 3;
  check::context = "messages";
  run(kSize, true, [](Communicator& comm, Memory& memory, int rank) {
    for (int round = 0; round < 20; ++round) {
      const int64_t length = round % 5 ? round : 3000;
      const auto tensor = [&] { return memory.tensor({length, 1}, dtypes::kBFloat16, round % 3); };
      const TensorRef sent = tensor(), received = tensor(), to_myself = tensor();
      const Bytes before = memory.now();  // while no stream writes
      if (length > 0) memory.fill(sent, rank);
      if (length > 0) memory.fill(received, 50);
      const int next = (rank + 1) % kSize, previous = (rank + kSize - 1) % kSize;
      const PointToPoint batch[] = {{Direction::recv, previous, 1, received},
                                    {Direction::send, next, 1, sent},
                                    {Direction::send, rank, 0, sent},
                                    {Direction::recv, rank, 0, to_myself}};
      wait(comm, comm.batch_p2p(batch, {.is_async = round % 2 != 0}));
      const auto element = [](const Bytes& bytes, const TensorRef& view, int64_t idx, Memory& at) {
        return bytes[view.data - at.device()->address() + idx];
      };
      const Bytes after = memory.now();
      for (int64_t row = 0; row < length; ++row) {
        const int64_t pitch = sent.strides[0] * 2;
        for (int64_t idx = row * pitch; idx < (row + 1) * pitch; ++idx) {
          const bool is_element = idx < row * pitch + 2;
          const auto of = [&](uint64_t seed) {
            return static_cast<std::byte>(seed * 131 + idx * 5 + idx / 253);
          };
          CHECK(element(after, received, idx, memory) == of(is_element ? previous : 50));
          CHECK(element(after, to_myself, idx, memory) ==
                (is_element ? of(rank) : element(before, to_myself, idx, memory)));
        }
      }
    }
  });
}

TEST(broadcasts) {
  compare(3, [](Communicator& comm, Memory& memory, int rank) {
    for (int round = 0; round < 6; ++round) {
      const TensorRef tensor = memory.tensor({1000 * round}, dtypes::kUInt8, 0);
      if (round > 0 && rank == round % 3) memory.fill(tensor, round);
      wait(comm, comm.broadcast(tensor, round % 3, {.is_async = round % 2 != 0}));
    }
  });
}

// Threads with streams of their own on one communicator.
TEST(threads) {
  compare(2, [](Communicator& comm, Memory& memory, int rank) {
    std::vector<TensorRef> tensors;
    for (int idx = 0; idx < 16; ++idx) tensors.push_back(memory.tensor({500}, dtypes::kUInt8, 0));
    check::in_threads(4, [&](int channel) {
      if (memory.device()) Device::current = memory.device()->make_stream();
      for (int idx = channel; idx < 16; idx += 4) {
        const auto way = rank == idx / 4 % 2 ? Direction::send : Direction::recv;
        if (way == Direction::send) memory.fill(tensors[idx], idx);
        const PointToPoint message{way, 1 - rank, channel, tensors[idx]};
        wait(comm, comm.batch_p2p({&message, 1}));
      }
    });
  });
}

TEST(capture) {
  run(2, true, [](Communicator& comm, Memory& memory, int rank) {
    const TensorRef tensor = memory.tensor({10}, dtypes::kUInt8, 0);
    const auto plan =
        prepared(gather_plan({rank, 2}, {{10}, dtypes::kUInt8}, 0, {{{0, 10}}, {{10, 10}}}));
    const TensorRef output = memory.tensor({20}, dtypes::kUInt8, 0);
    const PointToPoint message{rank == 0 ? Direction::send : Direction::recv, 1 - rank, 0, tensor};
    Device::current->is_captured = true;
    CHECK_INVALID("p2p cannot be captured", comm.batch_p2p({&message, 1}));
    CHECK_INVALID("broadcast cannot be captured", comm.broadcast(tensor, 0));
    CHECK_INVALID("all_gather cannot be captured",
                  comm.exchange(OpCode::all_gather, plan, {&tensor, 1}, {&output, 1}));
    Device::current->is_captured = false;
    wait(comm, comm.batch_p2p({&message, 1}));  // and is usable afterwards
  });
}

// An error of the device before the messages are posted, and a stream that never reaches the call.
TEST(failures) {
  for (const bool hangs : {false, true}) {
    check::context = hangs ? "a stream that hangs" : "a broken device";
    std::atomic<bool> has_failed{false};
    const auto program = [&](Communicator& comm, Memory& memory, int rank) {
      const TensorRef tensor = memory.tensor({10}, dtypes::kUInt8, 0);
      const PointToPoint message{rank == 0 ? Direction::send : Direction::recv, 1 - rank, 0,
                                 tensor};
      if (rank == 0 && hangs)
        Device::current->add([&] {
          while (!has_failed) std::this_thread::sleep_for(1ms);
        });
      memory.device()->is_broken = rank == 0 && !hangs;
      const auto kind = hangs ? FailureKind::timeout : FailureKind::error;
      const std::string text = hangs ? "the caller's CUDA stream has not reached it"
                                     : "could not be enqueued: CUDA: it is";
      const auto expect = [&](const Failure& failure) {
        CHECK(failure.kind == kind && failure.origin_rank == 0);
        CHECK_CONTAINS(failure.message, text);
      };
      expect(failure_of([&] { wait(comm, comm.batch_p2p({&message, 1})); }));
      if (rank == 0) has_failed = true;
      expect(failure_of([&] { comm.barrier(); }));
    };
    run(2, true, program, hangs ? std::chrono::nanoseconds(300ms) : kLong);
  }
}
