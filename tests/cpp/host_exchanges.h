// What ranks over transports of hosts do with each other, and what must come of it.
#pragma once

#include "cases.h"
#include "meeting.h"

namespace meeting {

// Messages between all pairs, both ways at once, into windows where there are any.
inline void exchange_with_all(Communicator& comm, int64_t num_bytes, int round,
                              bool is_async = true) {
  const auto key = [round](int source, int destination) {
    return static_cast<uint64_t>((round * 64 + source) * 64 + destination);
  };
  std::vector<Bytes> mine(comm.size());
  std::vector<std::shared_ptr<std::byte>> theirs(comm.size());
  std::vector<PointToPoint> batch;
  for (int peer = 0; peer < comm.size(); ++peer) {
    if (peer == comm.rank()) continue;
    const int channel = (comm.rank() + peer + round) % 2;
    mine[peer] = coded_bytes(key(comm.rank(), peer), num_bytes);
    theirs[peer] = comm.allocate_result(num_bytes);
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

// The elements of a rank's piece, in order.
inline Bytes elements_of(const world::Held& held) {
  const TensorSpec spec{held.shape(), kByte};
  world::HostTensor piece(spec, StridedLayout::contiguous(spec).strides, 0);
  Bytes bytes;
  piece.for_each([&](const Dims& index, uint8_t* element) {
    world::element_at(held.global_position(index), 0, 1, element);
    bytes.push_back(std::byte{*element});
  });
  return bytes;
}

// An all-to-all of a tensor of bytes, again and again, into a window if there is one.
inline void all_to_all(Communicator& comm, const Dims& global, int scatter_dim, int gather_dim) {
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
    const auto window = comm.allocate_result(std::ssize(expected));
    Bytes ordinary(expected.size());
    std::byte* const data = window ? window.get() : ordinary.data();
    std::memset(data, 0xa5, expected.size());
    const TensorRef from = view(input.data(), in.shape(), nullptr),
                    to = view(data, out.shape(), window);
    wait(comm, comm.exchange(OpCode::all_to_all, plan, {&from, 1}, {&to, 1}));
    CHECK(std::equal(expected.begin(), expected.end(), data));
  }
}

}  // namespace meeting
