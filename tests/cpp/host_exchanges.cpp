#include "host_exchanges.h"

namespace meeting {

void exchange_with_all(Communicator& comm, int64_t num_bytes, int round, bool is_async) {
  const auto key = [round](int source, int destination) {
    return uint64_t((round * 64 + source) * 64 + destination);
  };
  std::vector<Bytes> mine(comm.size());
  std::vector<std::shared_ptr<std::byte>> theirs(comm.size());
  std::vector<PointToPoint> batch;
  for (int peer = 0; peer < comm.size(); ++peer) {
    if (peer == comm.rank()) continue;
    const int channel = (comm.rank() + peer + round) % 2;
    mine[peer] = coded_bytes(key(comm.rank(), peer), num_bytes);
    theirs[peer] = comm.transport().allocate_result(num_bytes);
    if (!theirs[peer]) {
      const auto ordinary = std::make_shared<Bytes>(num_bytes);
      theirs[peer] = {ordinary, ordinary->data()};
    }
    const TensorRef result{theirs[peer].get(), kByte, {num_bytes}, {1}, theirs[peer]};
    batch.push_back({Direction::recv, peer, channel, result});
    batch.push_back({Direction::send, peer, channel, tensor(mine[peer])});
  }
  wait(comm, comm.batch_p2p(batch, {.is_async = is_async}));
  for (int peer = 0; peer < comm.size(); ++peer) {
    if (peer == comm.rank()) continue;
    const Bytes expected = coded_bytes(key(peer, comm.rank()), num_bytes);
    CHECK(std::equal(expected.begin(), expected.end(), theirs[peer].get()));
  }
}

Bytes elements_of(const world::Held& held) {
  const TensorSpec spec{held.shape(), kByte};
  world::HostTensor piece(spec, StridedLayout::contiguous(spec).strides, 0);
  Bytes bytes;
  piece.for_each([&](const Dims& index, uint8_t* element) {
    world::element_at(held.global_position(index), 0, 1, element);
    bytes.push_back(std::byte{*element});
  });
  return bytes;
}

void all_to_all(Communicator& comm, const Dims& global, int scatter_dim, int gather_dim) {
  const Sizes scatter = cases::dealt_sizes(global[scatter_dim], comm.size());
  const Sizes gather = cases::dealt_sizes(global[gather_dim], comm.size());
  const auto piece = [&](int dim, const Sizes& sizes) {
    return world::Held::along(global, dim, cases::positions_of_piece(sizes, comm.rank()));
  };
  const world::Held in = piece(gather_dim, gather), out = piece(scatter_dim, scatter);
  const auto plan = std::make_shared<PreparedExchange>(
      all_to_all_plan({comm.rank(), comm.size()}, {{{in.shape(), kByte}, scatter, gather}},
                      scatter_dim, gather_dim));
  const auto view = [](std::byte* data, const Dims& shape, const auto& storage) {
    return TensorRef{data, kByte, shape, StridedLayout::contiguous({shape, kByte}).strides,
                     storage};
  };
  Bytes input = elements_of(in);
  const Bytes expected = elements_of(out);
  for (int turn = 0; turn < 3; ++turn) {
    const auto window = comm.transport().allocate_result(std::ssize(expected));
    Bytes ordinary(expected.size());
    std::byte* const data = window ? window.get() : ordinary.data();
    std::memset(data, 0xa5, expected.size());
    const TensorRef from = view(input.data(), in.shape(), nullptr),
                    to = view(data, out.shape(), window);
    wait(comm, comm.exchange(OpCode::all_to_all, plan, {&from, 1}, {&to, 1}));
    CHECK(std::equal(expected.begin(), expected.end(), data));
  }
}

Program::Program(int its_seed, int most_ranks, int most_channels, int64_t most_bytes,
                 int most_steps)
    : seed(its_seed) {
  world::Random random(seed);
  const auto below = [&](int64_t end) { return int(random.between(0, end - 1)); };
  size = 2 + below(most_ranks - 1);
  num_channels = 1 + below(most_channels);
  static constexpr int64_t kSizes[] = {0,
                                       1,
                                       127,
                                       128,
                                       129,
                                       1000,
                                       4096,
                                       8192,
                                       16384,
                                       16385,
                                       65536,
                                       65536 + 64,
                                       kMaxInlineBytes,
                                       kMaxInlineBytes + 1};
  for (int left = 1 + below(most_steps); left > 0; --left) {
    const int kind = below(10);
    steps.push_back({kind == 0   ? OpCode::barrier
                     : kind == 1 ? OpCode::broadcast
                                 : OpCode::p2p,
                     below(size), below(size), below(num_channels),
                     below(3) > 0 ? kSizes[below(std::size(kSizes))] : below(most_bytes + 1)});
  }
}

void play(const Program& program, Communicator& comm) {
  std::mt19937_64 random(program.seed * 31 + comm.rank());
  std::vector<std::pair<size_t, std::shared_ptr<Bytes>>> received;  // by step
  std::vector<OperationPtr> operations;
  std::vector<PointToPoint> batch;
  const auto keep = [&](const OperationPtr& operation) {
    if (random() % 4 > 0) operations.push_back(operation);
  };
  const auto post_batch = [&] {
    if (!batch.empty()) keep(comm.batch_p2p(batch, {.is_async = random() % 3 > 0}));
    batch.clear();
  };
  for (size_t idx = 0; idx < program.steps.size(); ++idx) {
    const auto& [op, source, destination, channel, num_bytes] = program.steps[idx];
    const auto memory = [&](bool has_data) {
      const auto bytes =
          std::make_shared<Bytes>(has_data ? coded_bytes(idx, num_bytes) : Bytes(num_bytes));
      if (!has_data) received.emplace_back(idx, bytes);
      TensorRef ref = tensor(*bytes);
      ref.storage = bytes;
      return ref;
    };
    if (op == OpCode::barrier) {
      post_batch();
      keep(comm.barrier());
    } else if (op == OpCode::broadcast) {
      keep(comm.broadcast(memory(source == comm.rank()), source));
    } else {
      if (source == comm.rank())
        batch.push_back({Direction::send, destination, channel, memory(true)});
      if (destination == comm.rank())
        batch.push_back({Direction::recv, source, channel, memory(false)});
    }
    if (random() % 3 == 0) post_batch();
    if (random() % 16 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 200));
  }
  post_batch();
  std::shuffle(operations.begin(), operations.end(), random);
  check::in_threads(2, [&](int) {
    for (const OperationPtr& operation : operations) wait(comm, operation);
  });
  comm.close(nullptr);  // messages without a waiter arrive all the same
  for (const auto& [idx, bytes] : received)
    CHECK(*bytes == coded_bytes(idx, program.steps[idx].num_bytes));
}

}  // namespace meeting
