// Programs of ranks over host transports, and their expected results.
#pragma once

#include "cases.h"
#include "meeting.h"

namespace meeting {

// Messages between all pairs, in both directions at once, into windows if the transport has them.
void exchange_with_all(Communicator& comm, int64_t num_bytes, int round, bool is_async = true);

// The elements of a rank's piece, in order.
Bytes elements_of(const world::Held& held);

// An all-to-all of a tensor of bytes, again and again, into a window if there is one.
void all_to_all(Communicator& comm, const Dims& global, int scatter_dim, int gather_dim);

// A random program of all ranks: messages, also to oneself, and collectives.
struct Program {
  struct Step {
    OpCode op = OpCode::p2p;
    int source = 0, destination = 0, channel = 0;
    int64_t num_bytes = 0;
  };
  Program(int its_seed, int most_ranks, int most_channels, int64_t most_bytes, int most_steps = 30);
  int seed, size, num_channels;
  std::vector<Step> steps;
};

// This rank's part: messages in random batches; two threads wait for the operations late, in any
// order or not at all; then closes.
void play(const Program& program, Communicator& comm);

}  // namespace meeting
