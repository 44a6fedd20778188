// Reductions and gathers by NCCL's own functions, with several ranks as threads over a simulated device.
#include "copy/float_formats.h"
#include "device_exchanges.h"

namespace {

constexpr OpCode kOps[] = {OpCode::all_reduce, OpCode::reduce, OpCode::reduce_scatter,
                           OpCode::all_gather};
constexpr Reduction kReductions[] = {Reduction::kSum, Reduction::kProduct, Reduction::kMin,
                                     Reduction::kMax, Reduction::kMean};

constexpr DType kDTypes[] = {dtypes::kInt8,    dtypes::kUInt8,  dtypes::kInt32,   dtypes::kUInt32,
                             dtypes::kInt64,   dtypes::kUInt64, dtypes::kFloat16, dtypes::kBFloat16,
                             dtypes::kFloat32, dtypes::kFloat64};

// Small whole numbers in memory of any dtype.
class Numbers {
 public:
  Numbers(DType dtype, int64_t count)
      : dtype_(dtype),
        bytes_(std::make_shared<std::vector<std::byte>>(size_t(count * dtype.itemsize))) {}

  void set(int64_t idx, int value) const {
    if (dtype_ == dtypes::kFloat16) return put(idx, Float16::store(float(value)));
    if (dtype_ == dtypes::kBFloat16) return put(idx, BFloat16::store(float(value)));
    if (dtype_ == dtypes::kFloat32) return put(idx, float(value));
    if (dtype_ == dtypes::kFloat64) return put(idx, double(value));
    if (dtype_.itemsize == 1) return put(idx, int8_t(value));
    if (dtype_.itemsize == 4) return put(idx, int32_t(value));
    put(idx, int64_t{value});
  }
  bool is(int64_t idx, int value) const {
    const Numbers expected(dtype_, 1);
    expected.set(0, value);
    return std::memcmp(expected.at(0), at(idx), dtype_.itemsize) == 0;
  }
  TensorRef part(int64_t begin, int64_t length) const {
    return {at(begin), dtype_, {length}, {1}, bytes_};
  }

 private:
  std::byte* at(int64_t idx) const { return bytes_->data() + idx * dtype_.itemsize; }
  template <class T>
  void put(int64_t idx, T value) const {
    std::memcpy(at(idx), &value, sizeof value);
  }

  const DType dtype_;
  const std::shared_ptr<std::vector<std::byte>> bytes_;
};

int reduced(Reduction reduction, std::span<const int> values) {
  int total = values[0];
  for (const int value : values.subspan(1)) {
    if (reduction == Reduction::kProduct)
      total *= value;
    else if (reduction == Reduction::kMin)
      total = std::min(total, value);
    else if (reduction == Reduction::kMax)
      total = std::max(total, value);
    else
      total += value;
  }
  return reduction == Reduction::kMean ? total / int(values.size()) : total;
}

// A call, and all memory that it must change or leave as it is: input and output one after the other,
// or in place, where the smaller one is this rank's piece of the larger one.
struct Case {
  Case(const Rank& me, OpCode the_op, DType dtype, Reduction the_reduction, int64_t the_length,
       bool is_in_place, int the_root = 0)
      : op(the_op),
        reduction(the_reduction),
        rank(me.rank),
        size(me.size),
        root(the_root),
        length(the_length),
        num_in(length * (op == OpCode::reduce_scatter ? size : 1)),
        num_out(length * (op == OpCode::all_gather ? size : 1)),
        num(is_in_place ? std::max(num_in, num_out) : num_in + num_out),
        source(is_in_place && op == OpCode::all_gather ? rank * length : 0),
        target(!is_in_place                   ? num_in
               : op == OpCode::reduce_scatter ? rank * length
                                              : 0),
        memory(dtype, num),
        input(memory.part(source, num_in)),
        output(memory.part(target, num_out)) {}

  int brought(int64_t idx, int by) const {
    const int unit = reduction == Reduction::kMean ? size : 1;  // means are whole
    return unit * (1 + int((7 * idx + by + turn) % 3));
  }
  void fill(int the_turn = 0) {
    turn = the_turn;
    for (int64_t idx = 0; idx < num; ++idx) memory.set(idx, 9);
    for (int64_t idx = 0; idx < num_in; ++idx) memory.set(source + idx, brought(idx, rank));
  }
  OperationPtr post(Rank& me, bool is_async) const {
    return me.comm->reduce({op, input, output, reduction, root}, {.is_async = is_async});
  }
  int result(int64_t idx) const {
    if (op == OpCode::all_gather) return brought(idx % length, int(idx / length));
    std::vector<int> values;
    for (int by = 0; by < size; ++by)
      values.push_back(brought(idx + (op == OpCode::reduce_scatter ? rank * length : 0), by));
    return reduced(reduction, values);
  }
  bool is_right() const {
    const bool has_result = op != OpCode::reduce || rank == root;
    for (int64_t idx = 0; idx < num; ++idx) {
      int expected = 9;
      if (has_result && idx >= target && idx < target + num_out)
        expected = result(idx - target);
      else if (idx >= source && idx < source + num_in)
        expected = brought(idx - source, rank);
      if (!memory.is(idx, expected)) return false;
    }
    return true;
  }

  const OpCode op;
  const Reduction reduction;
  const int rank, size, root;
  const int64_t length, num_in, num_out, num, source, target;  // in elements
  const Numbers memory;
  const TensorRef input, output;
  int turn = 0;
};

// Of a tensor of all ranks, in place.
OperationPtr all_reduce(Rank& me, const Tensor& tensor, Reduction reduction = Reduction::kSum,
                        bool is_async = false) {
  const TensorRef ref = tensor.ref();
  return me.comm->reduce({OpCode::all_reduce, ref, ref, reduction}, {.is_async = is_async});
}

// Some call of an operation.
void call(Rank& me, OpCode op, bool is_async = false, int64_t length = 4,
          DType dtype = dtypes::kFloat32, Reduction reduction = Reduction::kSum, int root = 0) {
  static std::mutex mutex;
  static auto* const kept = new std::deque<Case>;  // kernels of a failed communicator may use it
  std::unique_lock lock(mutex);
  Case& each = kept->emplace_back(me, op, dtype, reduction, length, true, root);
  lock.unlock();
  each.fill();
  me.finish(each.post(me, is_async));
  CHECK(each.is_right());
}

}  // namespace

TEST(all_operations) {
  for (const int size : {1, 2, 3, 4})
    for (const Check check : {Check::first_use, Check::full})
      run(options_of(size, check), [](Rank& me) {
        int turn = 0;
        for (const OpCode op : kOps)
          for (const DType dtype : kDTypes)
            for (const Reduction reduction : kReductions) {
              if (!me.comm->execution().can_reduce(op, reduction, dtype)) continue;
              ++turn;
              Case each(me, op, dtype, reduction, 1 + turn % 5, turn % 2 == 0, turn % me.size);
              each.fill(turn);
              const OperationPtr operation = each.post(me, turn % 3 == 0);
              me.follow(operation);
              me.finish(operation);
              if (!each.is_right())
                check::fail(__FILE__, __LINE__,
                            op_name(op) + std::string(" of ") + dtype_name(dtype.code) + ", turn " +
                                std::to_string(turn));
            }
        CHECK_EQ(turn, 3 * 10 * 4 + 3 * 4 + 10 * 5);
        CHECK(me.size > 1 || fake::world->comms.empty());
        meet(me);
      });
}

TEST(what_nccl_reduces) {
  run(options_of(1), [](Rank& me) {
    const Communicator& comm = *me.comm;
    for (const DType dtype : {dtypes::kBool, dtypes::kInt16, dtypes::kUInt16, dtypes::kComplex128})
      for (const Reduction reduction : kReductions) {
        CHECK(!comm.execution().can_reduce(OpCode::all_reduce, reduction, dtype));
        CHECK(comm.execution().can_reduce(OpCode::all_gather, reduction, dtype));
      }
    for (const Reduction reduction :
         {Reduction::kBitAnd, Reduction::kBitOr, Reduction::kBitXor, Reduction::kMean})
      CHECK(!comm.execution().can_reduce(OpCode::reduce, reduction, dtypes::kInt32));
    CHECK(comm.execution().can_reduce(OpCode::reduce_scatter, Reduction::kMean, dtypes::kBFloat16));
    const Numbers numbers(dtypes::kBool, 4);
    const TensorRef ref = numbers.part(0, 4);
    CHECK_THROWS(std::logic_error, "does not reduce tensors in one operation",
                 me.comm->reduce({OpCode::all_reduce, ref, ref}));
  });
}

// Before NCCL 2.28.7 nothing could end a reduction that waits in NCCL for other ranks.
TEST(an_older_nccl) {
  fake::world_has_revoke = false;
  run(options_of(2), [](Rank& me) {
    for (const OpCode op : kOps)
      CHECK(!me.comm->execution().can_reduce(op, Reduction::kSum, dtypes::kFloat32));
    meet(me);
  });
  fake::world_has_revoke = true;
}

// A gather moves bytes of any dtype.
TEST(gathers_of_other_dtypes) {
  run(options_of(3), [](Rank& me) {
    for (const DType dtype : {dtypes::kComplex128, dtypes::kBool}) {
      const Numbers memory(dtype, 3);
      for (int rank = 0; rank < 3; ++rank)
        std::memset(memory.part(rank, 1).data, rank == me.rank ? 1 + rank : 0, dtype.itemsize);
      const TensorRef input = memory.part(me.rank, 1), output = memory.part(0, 3);
      me.finish(me.comm->reduce({OpCode::all_gather, input, output}));
      for (int idx = 0; idx < 3 * dtype.itemsize; ++idx)
        CHECK(output.data[idx] == std::byte(1 + idx / dtype.itemsize));
    }
  });
}

TEST(wrong_arguments) {
  run(options_of(2), [](Rank& me) {
    const Numbers floats(dtypes::kFloat32, 16), integers(dtypes::kInt32, 16);
    TensorRef with_gaps = floats.part(0, 4);
    with_gaps.strides = {2};
    const TensorRef one = floats.part(0, 4), next = floats.part(2, 4), far = floats.part(8, 4),
                    integer = integers.part(0, 4), both = floats.part(0, 8),
                    shifted = floats.part(me.rank == 0 ? 4 : 0, 4);
    const auto expect = [&](const std::string& text, OpCode op, const TensorRef& input,
                            const TensorRef& output, int root = 0) {
      CHECK_INVALID(text, me.comm->reduce({op, input, output, Reduction::kSum, root}));
    };
    expect("root rank 2 is not in 0..1", OpCode::reduce, one, one, 2);
    expect("all_reduce: input and output must be contiguous", OpCode::all_reduce, with_gaps, far);
    expect("all_reduce: input and output must be contiguous", OpCode::all_reduce, one, integer);
    expect("all_reduce: input and output must be contiguous", OpCode::all_reduce, one, both);
    expect("for each rank", OpCode::reduce_scatter, one, far);
    expect("for each rank", OpCode::all_gather, one, far);
    expect("all_reduce: input and output share memory", OpCode::all_reduce, one, next);
    expect("reduce_scatter: input and output share memory", OpCode::reduce_scatter, both, shifted);
    expect("all_gather: input and output share memory", OpCode::all_gather, shifted, both);
    for (const OpCode op : kOps) call(me, op);
  });
}

TEST(nothing_to_reduce) {
  run(options_of(3), [](Rank& me) {
    for (const bool is_async : {false, true})
      for (const OpCode op : kOps) call(me, op, is_async, 0);
    meet(me);
    CHECK(fake::world->num_kernels == 0 && fake::world->comms.empty());
  });
}

// On the streams of callers and on that of the collectives, among other collectives, also if NCCL
// enqueues them on threads of its own.
TEST(order) {
  for (const bool is_blocking : {true, false}) {
    Options options = options_of(3);
    options.prepare = [=](fake::World& world) { world.is_blocking = is_blocking; };
    run(options, [](Rank& me) {
      for (int turn = 0; turn < 4; ++turn) {
        const Tensor tensor({4}, 1);
        const OperationPtr first = all_reduce(me, tensor, Reduction::kSum, true);
        const OperationPtr second = me.comm->broadcast(tensor.ref(), 1, {.is_async = true});
        me.follow(second);
        me.finish(all_reduce(me, tensor));
        me.finish(first);
        for (int idx = 0; idx < 4; ++idx) CHECK((*tensor.data)[idx] == 9 * float(1 + idx));
        exchange_within(me, {0, 1, 2});
      }
    });
  }
}

TEST(captured) {
  for (const OpCode op : kOps)
    for (const bool is_async : {false, true})
      run(options_of(2), [&](Rank& me) {
        Case each(me, op, dtypes::kBFloat16, Reduction::kSum, 3, true);
        Case larger(me, op, dtypes::kBFloat16, Reduction::kSum, 5, true);
        each.fill();
        me.finish(each.post(me, is_async));
        meet(me);
        const fake::GraphPtr graph = capture(me, [&] {
          me.follow(each.post(me, is_async));
          CHECK_INVALID("first " + std::string(op_name(op)) +
                            " with these arguments inside a CUDA graph capture",
                        larger.post(me, is_async));
        });
        CHECK(each.is_right());  // nothing has run since
        for (int turn = 1; turn < 4; ++turn) {
          each.fill(turn);
          play(me, graph);
          CHECK(each.is_right());
        }
        meet(me);
        CHECK(!me.comm->failure());
      });
}

TEST(steady_state_has_no_host_traffic) {
  run(options_of(2), [](Rank& me) {
    for (const OpCode op : kOps) call(me, op);
    meet(me);
    const int num_claims = me.hub.num_control();
    meet(me);
    for (int turn = 0; turn < 5; ++turn)
      for (const OpCode op : kOps) call(me, op, turn % 2 == 1);
    CHECK_EQ(me.hub.num_control(), num_claims);
    meet(me);
  });
}

// Of each kind of disagreement one call, which rank `other` makes in place of the first.
TEST(mismatches) {
  const auto all_reduce_of = [](int64_t length, DType dtype, Reduction reduction) {
    return [=](Rank& me) { call(me, OpCode::all_reduce, false, length, dtype, reduction); };
  };
  const auto reduce_to = [](int root) {
    return [=](Rank& me) {
      call(me, OpCode::reduce, false, 4, dtypes::kFloat32, Reduction::kSum, root);
    };
  };
  const auto any = [](OpCode op) { return [op](Rank& me) { call(me, op, true); }; };
  // These may end before the disagreement is known.
  const auto all_reduce_in = [](const Dims& shape) {
    return [=](Rank& me) { me.finish(all_reduce(me, Tensor(shape, 1))); };
  };
  const auto broadcast = [](Rank& me) {
    const Tensor tensor({4});
    me.finish(me.comm->broadcast(tensor.ref(), 0, {.is_async = false}));
  };
  using Call = std::function<void(Rank&)>;
  const Call sum = all_reduce_of(4, dtypes::kFloat32, Reduction::kSum);
  const std::vector<std::tuple<Call, Call, std::string, std::string>> pairs{
      {sum, all_reduce_of(4, dtypes::kFloat64, Reduction::kSum), "all_reduce of float32[4]",
       "all_reduce of float64[4]"},
      {sum, all_reduce_of(4, dtypes::kInt32, Reduction::kSum), "all_reduce of float32[4]",
       "all_reduce of int32[4]"},
      {sum, all_reduce_of(5, dtypes::kFloat32, Reduction::kSum), "all_reduce of float32[4]",
       "all_reduce of float32[5]"},
      {sum, all_reduce_of(0, dtypes::kFloat32, Reduction::kSum), "all_reduce of float32[4]",
       "all_reduce of float32[0]"},
      {sum, all_reduce_of(4, dtypes::kFloat32, Reduction::kMax), "all_reduce of float32[4]",
       "with other arguments (sizes, dims, dtypes, operator, source or root differ)"},
      {reduce_to(0), reduce_to(1), "reduce of float32[4]",
       "with other arguments (sizes, dims, dtypes, operator, source or root differ)"},
      {all_reduce_in({4}), all_reduce_in({2, 2}), "all_reduce of float32[4]",
       "all_reduce of float32[2, 2]"},
      {sum, reduce_to(0), "calls all_reduce of", "calls reduce of"},
      {sum, any(OpCode::all_gather), "calls all_reduce of", "calls all_gather of"},
      {any(OpCode::reduce_scatter), any(OpCode::all_gather), "reduce_scatter of", "all_gather of"},
      {sum, broadcast, "all_reduce of float32[4]", "broadcast of "},
      {sum, [](Rank& me) { run_uneven(me, ring(me.size)); }, "all_reduce of", "all_to_all of "}};
  for (const Check check : {Check::first_use, Check::full})
    for (const int size : {2, 5})
      for (const auto& [first, second, mine, theirs] : pairs) {
        check::context = mine + " against " + theirs;
        Options options = options_of(size, check);
        options.end_limit = 300ms;
        run(options, [&](Rank& me) {
          try {
            (me.rank == size - 1 ? second : first)(me);
          } catch (const PipeCommException& error) {
            CHECK(error.failure()->kind == FailureKind::mismatch);
          }
          const FailurePtr failure = failure_of(me);
          CHECK(failure->kind == FailureKind::mismatch);
          CHECK_CONTAINS(failure->message, mine);
          CHECK_CONTAINS(failure->message, theirs);
        });
      }
  check::context = "";
}

TEST(refused_on_one_rank) {
  for (const int size : {2, 5})
    for (const OpCode op : kOps) {
      Options options = options_of(size);
      options.end_limit = 300ms;
      run(options, [&](Rank& me) {
        if (me.rank == 1) {
          me.comm->refuse(op, "ValueError: bad here");
        } else {
          try {
            call(me, op, true);
          } catch (const PipeCommException&) {
          }
        }
        CHECK_CONTAINS(failure_of(me)->message,
                       op_name(op) + std::string(" was refused by rank 1: ValueError: bad here"));
      });
    }
}

TEST(a_failing_call_reaches_everybody) {
  const std::map<OpCode, std::string> functions{{OpCode::all_reduce, "ncclAllReduce"},
                                                {OpCode::reduce, "ncclReduce"},
                                                {OpCode::reduce_scatter, "ncclReduceScatter"},
                                                {OpCode::all_gather, "ncclAllGather"}};
  for (const auto& [op, function] : functions) {
    Options options = options_of(3);
    options.inject = [name = function](const std::string& called, int rank) {
      return called == name && rank == 1 ? NcclResult::internal_error : NcclResult::success;
    };
    run(options, [&, op = op](Rank& me) {
      const std::string text = failure_text(FailureKind::error, [&] { call(me, op, true); });
      CHECK_CONTAINS(text, op_name(op) + std::string(" could not be enqueued: ") +
                               functions.at(op) + ": some error (details of the fake)");
      CHECK_EQ(failure_of(me)->origin_rank, 1);
    });
  }
}

TEST(dead_peer) {
  std::atomic<int> num_waiting = 0;
  run(options_of(3), [&](Rank& me) {
    const Tensor tensor({4}, 1);
    me.finish(all_reduce(me, tensor));
    if (me.rank == 2) {
      CHECK(comes_true([&] { return num_waiting == 2; }));
      return me.hub.lose(2);
    }
    const auto operation = all_reduce(me, tensor, Reduction::kSum, true);
    ++num_waiting;
    failure_text(FailureKind::peer_lost, [&] { me.finish(operation); });
    CHECK_EQ(failure_of(me)->origin_rank, 2);
  });
}

// At their first reduction of a kind, before NCCL connects them.
TEST(a_rank_that_does_not_come) {
  for (const bool connects : {false, true})
    for (const bool is_async : {false, true}) {
      Options options = options_of(3);
      options.timeout = 2s;  // enough for the first call on busy cores
      options.end_limit = 300ms;
      options.prepare = [=](fake::World& world) { world.connects_at_reductions = connects; };
      std::barrier meeting(3);
      run(options, [&](Rank& me) {
        me.finish(all_reduce(me, Tensor({4}, 1)));
        if (me.rank != 1)
          CHECK_CONTAINS(
              failure_text(FailureKind::timeout, [&] { call(me, OpCode::reduce, is_async); }),
              "reduce timed out after");
        CHECK(failure_of(me)->kind == FailureKind::timeout);
        meeting.arrive_and_wait();
      });
    }
  std::barrier all(3);     // none closes, which fails the others, before all have had the first one
  std::barrier others(2);  // none of them closes before both have failed
  run(options_of(3), [&](Rank& me) {
    const Tensor tensor({4}, 1);
    me.finish(all_reduce(me, tensor));
    all.arrive_and_wait();
    if (me.rank == 1) return;  // closes
    CHECK_CONTAINS(failure_text(FailureKind::peer_lost,
                                [&] { me.finish(all_reduce(me, tensor, Reduction::kSum, true)); }),
                   "rank 1 has closed its communicator");
    others.arrive_and_wait();
  });
}

// All other ranks of a small group, and of a large one those with which a call is compared.
TEST(flight_records) {
  for (const int size : {3, 10})
    run(options_of(size), [](Rank& me) {
      for (const OpCode op : kOps) call(me, op, false, 4);
      meet(me);
      std::vector<Flight> flights = me.comm->flights();
      std::erase_if(flights, [](const Flight& flight) { return !flight.operation.on_device; });
      CHECK(flights.size() == 4);
      const size_t num_peers = me.size == 3   ? 2
                               : me.rank == 0 ? 4
                               : me.rank == 9 ? 1
                               : me.rank == 8 ? 2
                                              : 0;
      for (size_t idx = 0; idx < 4; ++idx) {
        const auto& [operation, messages] = flights[idx];
        CHECK(operation.op == kOps[idx] && operation.on_device && operation.ended);
        if (num_peers > 0) CHECK_EQ(messages.size(), 2 * num_peers);
        for (const FlightMessage& message : messages) {
          CHECK(message.descriptor.num_bytes == 16 && message.descriptor.seq == idx);
          CHECK(message.descriptor.channel == kCollectiveChannel);
        }
      }
    });
}

// Tensors stay alive until the device is done with them, and not longer.
TEST(lifetimes) {
  run(options_of(2), [](Rank& me) {
    const Tensor last({4}, 1);
    me.finish(all_reduce(me, last));
    meet(me);
    std::weak_ptr<void> alive;
    if (me.rank == 0) {
      const Tensor tensor({4}, 1);
      alive = tensor.data;
      all_reduce(me, tensor, Reduction::kSum, true);  // also drops the handle
    }
    CHECK(me.rank == 1 || !alive.expired());
    meet(me);
    if (me.rank == 1) me.finish(all_reduce(me, Tensor({4}, 1)));
    CHECK(comes_true([&] {
      me.p2p({});
      return alive.expired();
    }));
  });
}

// A rank in its first reduction: its other threads can still post what another rank needs before that rank
// comes to the reduction.
TEST(first_reductions_leave_other_threads_free) {
  Options options = options_of(2);
  options.timeout = 5s;
  options.prepare = [](fake::World& world) { world.connects_at_reductions = true; };
  run(options, [](Rank& me) {
    const Tensor tensor({4}, 1);
    Uneven needed = dense(2);
    needed.scope.channel = 0;
    CHECK(run_uneven(me, needed));
    broadcast_from(me, 0);
    for (const OpCode op : kOps) {
      meet(me);
      if (me.rank == 0) {
        std::thread other([&] {
          std::this_thread::sleep_for(50ms);
          CHECK(run_uneven(me, needed));
        });
        call(me, op, true);
        other.join();
      } else {
        CHECK(run_uneven(me, needed));
        call(me, op, true);
      }
    }
    CHECK(!me.comm->failure());
  });
}

// Another thread of rank 0 captures the caller's stream while the call waits for rank 1.
TEST(captures_that_begin_during_a_first_reduction) {
  std::atomic<bool> captures{false};
  run(options_of(2), [&](Rank& me) {
    broadcast_from(me, 0);
    meet(me);
    std::thread other;
    if (me.rank == 0) {
      other = std::thread([&] {
        const auto waits = [](const Flight& each) { return !each.operation.ended; };
        CHECK(comes_true([&] { return std::ranges::any_of(me.comm->flights(), waits); }));
        me.runtime->begin_capture();
        captures = true;
      });
    } else {
      CHECK(comes_true([&] { return captures.load(); }));
    }
    CHECK_CONTAINS(failure_text(FailureKind::error, [&] { call(me, OpCode::all_reduce); }),
                   "a CUDA graph capture of its stream has begun meanwhile");
    if (me.rank != 0) return;
    other.join();
    me.runtime->end_capture();
  });
}
