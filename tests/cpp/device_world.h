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
  void finish(const OperationPtr& posted);
  OperationPtr p2p(const std::vector<PointToPoint>& batch, bool is_async = false) {
    return comm->batch_p2p(batch, {.is_async = is_async});
  }
  // Makes the current stream wait.
  void follow(const OperationPtr& operation) { comm->follow(*operation, kNothing); }
};

// Every rank on a thread.
void run(const Options& options, const std::function<void(Rank&)>& body);

// Waits until the communicator has failed, at most 15 s: its failure.
FailurePtr failure_of(Rank& rank);

struct Tensor {
  Tensor(Dims the_shape, float first = -1);
  Dims shape;
  std::shared_ptr<std::vector<float>> data;

  TensorRef ref() const;
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
void finish_stuck(Rank& me, const std::function<void()>& finish);

inline void meet(Rank& me) { me.comm->wait(*me.comm->barrier(), Clock::now() + 20s, kNothing); }

// Whether `condition` holds at some time of the next 10 s; it may be one that passes again.
template <class Condition>
bool comes_true(Condition&& condition) {
  for (int attempt = 0; attempt < 10000; ++attempt) {
    if (condition()) return true;
    std::this_thread::sleep_for(1ms);
  }
  return false;
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
