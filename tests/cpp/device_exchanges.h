// Exchanges that the tests of communicators over a DeviceExecution share.
#pragma once

#include "device_world.h"
#include "plan/builders.h"

// An all-to-all whose sizes only the two ends of each pair know: sizes[a][b] floats go from a to b,
// in one tensor or in a list.
struct Uneven {
  std::vector<Sizes> sizes;
  bool is_list = false;
  DType recv_dtype = dtypes::kFloat32;  // of lists
  Scope scope = {};
  bool is_compared_first = false;  // a mismatch leaves the outputs as they are
};

// Runs it with values that encode their origin; false if a received value is wrong.
bool run_uneven(Rank& me, const Uneven& uneven);

// `agreed` with another size from `from` to `to`.
inline Uneven with_size(Uneven agreed, int from, int to, int64_t size) {
  agreed.sizes[from][to] = size;
  return agreed;
}

inline Uneven dense(int size) {
  Uneven uneven;
  for (int rank = 0; rank < size; ++rank) {
    Sizes& row = uneven.sizes.emplace_back();
    for (int peer = 0; peer < size; ++peer) row.push_back(1 + (rank * size + peer) % 5);
  }
  return uneven;
}

// Each rank sends to the next one.
inline Uneven ring(int size) {
  Uneven uneven{std::vector<Sizes>(size, Sizes(size, 0))};
  for (int rank = 0; rank < size; ++rank) uneven.sizes[rank][(rank + 1) % size] = 1 + rank;
  return uneven;
}

void broadcast_from(Rank& me, int source, int64_t length = 4);

// An all-to-all of these ranks, this one among them.
struct Within {
  std::vector<int> members;
  Tensor input, output;
  OperationPtr operation;

  void finish(Rank& me) const;
};
Within post_within(Rank& me, const std::vector<int>& members, int channel = kCollectiveChannel,
                   bool is_async = true);

inline void exchange_within(Rank& me, const std::vector<int>& members) {
  if (std::ranges::find(members, me.rank) == members.end()) return;
  post_within(me, members, kCollectiveChannel, false).finish(me);
}

// Two ranks send each other a tensor by an exchange.
OperationPtr exchange_swap(Rank& me, const Tensor& sent, const Tensor& received, int channel,
                           bool is_async = true, const OperationPtr& after = nullptr);
