// Split rules, plan contents, signatures, validation and lowering decisions.

#include "check.h"
#include "plan/builders.h"
#include "plan/dtype.h"
#include "plan/lower.h"
#include "plan/reshard.h"
#include "plan/split.h"

const TensorSpec kTensor{{2, 6, 4}, dtypes::kFloat32};

ExchangePlan valid(ExchangePlan plan) {
  plan.validate();
  return plan;
}

LoweredExchange lowered(const ExchangePlan& plan) {
  std::vector<StridedLayout> inputs, outputs;
  for (const TensorSpec& tensor : plan.inputs) inputs.push_back(StridedLayout::contiguous(tensor));
  for (const TensorSpec& tensor : plan.outputs)
    outputs.push_back(StridedLayout::contiguous(tensor));
  return lower(plan, inputs, outputs);
}

TEST(dtypes) {
  CHECK_EQ(std::string(dtype_name(15)), "bfloat16");
  CHECK_EQ(std::string(dtype_name(24)), "float8_e4m3fn");
  CHECK_EQ(std::string(dtype_name(11)), "bool");
  CHECK_EQ(std::string(dtype_name(45)), "float4_e2m1fn_x2");
  CHECK_EQ(std::string(dtype_name(46)), "bcomplex32");
  CHECK_EQ(std::string(dtype_name(47)), "unknown dtype");
  CHECK(arithmetic_of(dtypes::kBFloat16) == Arithmetic::kBFloat16);
  CHECK(arithmetic_of({8, 4}) == Arithmetic::kBytes);  // complex32
}

TEST(split_rules) {
  CHECK(remainder_first(10, 4) == (Sizes{3, 3, 2, 2}));
  CHECK(remainder_first(2, 4) == (Sizes{1, 1, 0, 0}));
  CHECK(remainder_first(0, 2) == (Sizes{0, 0}));
  CHECK(offsets_of({3, 2}) == (Sizes{0, 3, 5}));
  CHECK_INVALID("at least 1, got 0", remainder_first(4, 0));
  CHECK_INVALID("negative, got -1", remainder_first(-1, 2));
  constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();
  CHECK_INVALID("size overflow", offsets_of({kHuge, 1}));
  CHECK_INVALID("size overflow", checked_product({kHuge, 2}));
  CHECK_EQ(checked_product({kHuge, 2, 0}), 0);
}

// Boxes of a message follow each other, another tensor begins at the next 16 bytes, and an empty
// box takes no place.
TEST(message_cursor) {
  MessageCursor cursor;
  CHECK_EQ(cursor.place(0, 5), 0);
  CHECK_EQ(cursor.place(0, 2), 5);
  CHECK_EQ(cursor.place(2, 0), 7);
  CHECK_EQ(cursor.place(0, 1), 7);
  CHECK_EQ(cursor.place(1, 3), 16);
  CHECK_EQ(cursor.message_bytes(), 19);
}

TEST(signatures) {
  const auto plan = [](int rank, Sizes scatter, Sizes gather, DType dtype) {
    const TensorSpec input{{3, gather[rank], checked_sum(scatter)}, dtype};
    return all_to_all_plan({rank, 2}, {{input, scatter, gather}}, 2, 1);
  };
  const uint64_t signature = plan(0, {2, 1}, {5, 4}, dtypes::kFloat32).signature;
  CHECK_EQ(plan(1, {2, 1}, {5, 4}, dtypes::kFloat32).signature, signature);
  CHECK(plan(1, {1, 2}, {5, 4}, dtypes::kFloat32).signature != signature);
  CHECK(plan(1, {2, 1}, {4, 4}, dtypes::kFloat32).signature != signature);
  CHECK(plan(1, {2, 1}, {5, 4}, dtypes::kInt32).signature != signature);
  // Without a gather size ranks assume equal lengths; unequal ones show in the signature.
  CHECK(plan(0, {2, 1}, {5, 5}, dtypes::kFloat32).signature !=
        plan(1, {2, 1}, {4, 4}, dtypes::kFloat32).signature);
  const TensorSpec local{{4, 3}, dtypes::kFloat32};
  CHECK(gather_plan({0, 2}, local, 0, {{{0, 4}}, {{4, 4}}}).signature !=
        gather_plan({0, 2}, local, 0, {{{0, 4}}, {{4, 4}}}, Scale::divide(2)).signature);
}

// Pieces that begin where they are told to: with gaps and twice in the input, with gaps in the output.
TEST(all_to_all_with_starts) {
  const TensorSpec input{{3, 6}, dtypes::kFloat32};
  const AllToAllTensor forward{input, {2, 3}, {3, 4}, {1, 2}};
  const ExchangePlan plan = all_to_all_plan({0, 2}, {forward}, 1, 0);
  CHECK(plan.sends[0].boxes[0] == (Box{0, {0, 1}, {3, 2}}));
  CHECK(plan.sends[1].boxes[0] == (Box{0, {0, 2}, {3, 3}}));
  CHECK(plan.outputs[0].shape == (Dims{7, 2}));

  const TensorSpec gradient{{7, 2}, dtypes::kFloat32};
  const AllToAllTensor backward{gradient, {3, 4}, {2, 3}, {}, {0, 4}, 9};
  const ExchangePlan back = all_to_all_plan({0, 2}, {backward}, 0, 1);
  CHECK(back.recvs[0].boxes[0] == (Box{0, {0, 0}, {3, 2}}));
  CHECK(back.recvs[1].boxes[0] == (Box{0, {0, 4}, {3, 3}}));
  CHECK(back.outputs[0].shape == (Dims{3, 9}));

  AllToAllTensor elsewhere = forward;
  elsewhere.scatter_starts = {1, 3};
  CHECK(all_to_all_plan({0, 2}, {elsewhere}, 1, 0).signature != plan.signature);
  CHECK(all_to_all_plan({0, 2}, {forward}, 1, 0, {}, "tag").signature != plan.signature);
  elsewhere.scatter_starts = {1, 4};
  CHECK_INVALID("", valid(all_to_all_plan({0, 2}, {elsewhere}, 1, 0)));
  elsewhere.scatter_starts = {1};
  CHECK_INVALID("scatter_starts needs one entry", all_to_all_plan({0, 2}, {elsewhere}, 1, 0));
  AllToAllTensor twice = backward;
  twice.gather_starts = {0, 1};
  CHECK_INVALID("", valid(all_to_all_plan({0, 2}, {twice}, 0, 1)));
}

TEST(builder_errors) {
  const Member me{0, 2};
  const Sizes two{2, 2}, three{3, 3};
  const auto all_to_all = [&](int scatter_dim, int gather_dim, Sizes scatter, Sizes gather) {
    return all_to_all_plan(me, {{kTensor, scatter, gather}}, scatter_dim, gather_dim);
  };
  CHECK_INVALID("must differ, both are 1", all_to_all(1, 1, three, three));
  CHECK_INVALID("scatter_dim 3 is out of range for shape [2, 6, 4]", all_to_all(3, 1, two, {6, 6}));
  CHECK_INVALID("gather_dim -1 is out of range", all_to_all(2, -1, two, {6, 6}));
  CHECK_INVALID("scatter_sizes needs one entry for each of the 2 ranks, got 3: [2, 1, 1]",
                all_to_all(2, 1, {2, 1, 1}, {6, 6}));
  CHECK_INVALID("scatter_sizes must not be negative, got [5, -1]",
                all_to_all(2, 1, {5, -1}, {6, 6}));
  CHECK_INVALID("sum of scatter_sizes [2, 1] is 3, but the tensor has length 4",
                all_to_all(2, 1, {2, 1}, {6, 6}));
  CHECK_INVALID("entry 0 of gather_sizes [5, 6] is 5, but the tensor has length 6",
                all_to_all(2, 1, two, {5, 6}));
  CHECK_INVALID("at least one tensor", all_to_all_plan(me, {}, 0, 1));
  const std::vector<Segments> halves{{{0, 2}}, {{2, 2}}};
  CHECK_INVALID("rank 2 is not a rank in a group of 2", gather_plan({2, 2}, kTensor, 0, halves));
  CHECK_INVALID("sum of the segments is 3, but the tensor has length 2",
                gather_plan(me, kTensor, 0, {{{0, 1}, {3, 2}}, {{1, 2}}}));
  CHECK_INVALID("segments of 0 ranks, not of 2", gather_plan(me, kTensor, 0, {}));
  CHECK_INVALID("two receives write the same elements",
                valid(gather_plan(me, kTensor, 0, {{{0, 2}}, {{1, 2}}})));
  for (const Segments& theirs : {Segments{{3, 2}}, Segments{{2, -1}}})
    CHECK_INVALID("leaves the output tensor",
                  valid(gather_plan(me, kTensor, 0, {{{0, 2}}, theirs})));
  CHECK_INVALID("must agree in dtype", all_to_all_single_plan(me, {{4, 3}, dtypes::kInt32},
                                                              {{4, 3}, dtypes::kInt64}, two, two));
  CHECK_INVALID("sends 24 bytes to itself but receives 16",
                valid(all_to_all_single_plan(me, {{4, 3}, dtypes::kInt32}, {{4, 2}, dtypes::kInt32},
                                             two, two)));
  CHECK_INVALID(
      "sum of output_split_sizes [3, 3] is 6",
      all_to_all_single_plan(me, {{4}, dtypes::kInt32}, {{4}, dtypes::kInt32}, two, three));
  CHECK_INVALID("dim 0 is out of range for shape []",
                all_to_all_single_plan(me, {{}, dtypes::kInt32}, {{}, dtypes::kInt32}, two, two));
  CHECK_INVALID("got 1 inputs and 2 outputs",
                all_to_all_list_plan(me, {kTensor}, {kTensor, kTensor}));
  CHECK_INVALID(
      "sends 192 bytes to itself but receives 4",
      valid(all_to_all_list_plan(me, {kTensor, kTensor}, {{{1}, kTensor.dtype}, kTensor})));
  CHECK_INVALID(
      "rank 0 keeps its own input [2, 6, 4] float32, but output 0 is [2, 6, 4] int32",
      all_to_all_list_plan(me, {kTensor, kTensor}, {{kTensor.shape, dtypes::kInt32}, kTensor}));
  CHECK_INVALID("one output for each of the 2 ranks", all_gather_list_plan(me, kTensor, {kTensor}));
  CHECK_INVALID("this rank's input is [2, 6, 4] float32",
                all_gather_list_plan(me, kTensor, {{{2}, dtypes::kInt32}, kTensor}));
  CHECK_INVALID("source has no ranks", reshard_plan(me, kTensor, {}, {{0}, {}, false, 1}));
  CHECK_INVALID("distinct ranks in a group of 2, got [0, 0]",
                reshard_plan(me, kTensor, {{0, 0}, {}, false, 1}, {{1}, {}, false, 1}));
  CHECK_INVALID("has 1 ranks but 2 sizes",
                reshard_plan(me, kTensor, {{0}, {3, 3}, false, 1}, {{1}, {}, false, 1}));
  CHECK_INVALID("destination sizes [5] must sum to the length 6",
                reshard_plan(me, kTensor, {{0}, {}, false, 1}, {{1}, {5}, false, 1}));
  CHECK_INVALID("sizes must not be negative",
                reshard_plan(me, kTensor, {{0, 1}, {7, -1}, false, 1}, {{1}, {}, false, 1}));
  CHECK_INVALID("source dim 3 is out of range",
                reshard_plan(me, kTensor, {{0}, {}, false, 3}, {{1}, {}, false, 1}));
  CHECK_INVALID("destination dim -1 is out of range",
                reshard_plan(me, kTensor, {{0}, {}, false, 1}, {{1}, {}, false, -1}));
  CHECK_INVALID("float64 can be scaled, got int32",
                valid(gather_plan(me, {{2}, dtypes::kInt32}, 0, halves, Scale::divide(2))));
  CHECK_INVALID("finite and not zero",
                valid(gather_plan(me, kTensor, 0, halves, Scale::divide(0))));
}

// Each rank of the layout gets its piece of every other one's tensor; an own piece that lies in
// its place stays there.
TEST(pieces) {
  const ShardLayout layout{{2, 0}, {4, 2}, false, 1};
  const ExchangePlan plan = collect_pieces_plan({0, 3}, kTensor, layout);
  CHECK_EQ(plan.inputs.size(), size_t{1});
  CHECK_EQ(plan.outputs.size(), size_t{2});
  CHECK(plan.outputs[0].shape == (Dims{2, 2, 4}) && plan.outputs[1].shape == (Dims{2, 2, 4}));
  CHECK(plan.recvs == (std::vector<Transfer>{{0, {{1, {0, 0, 0}, {2, 2, 4}}}},
                                             {2, {{0, {0, 0, 0}, {2, 2, 4}}}}}));
  CHECK(plan.sends == (std::vector<Transfer>{{0, {{0, {0, 4, 0}, {2, 2, 4}}}},
                                             {2, {{0, {0, 0, 0}, {2, 4, 4}}}}}));
  CHECK_INVALID("this rank is not in the layout", collect_pieces_plan({1, 3}, kTensor, layout));

  const ShardLayout everywhere{{2, 0}, {}, true, 1};
  const ExchangePlan gather =
      reshard_plan({0, 3}, kTensor, layout, everywhere, {.own_in_place = true});
  CHECK_EQ(gather.sends.size(), size_t{1});
  CHECK_EQ(gather.recvs.size(), size_t{1});
  CHECK_EQ(gather.recvs[0].peer, 2);
  const auto tagged = [&](const char* tag) {
    return reshard_plan({0, 3}, kTensor, layout, everywhere, {.tag = tag}).signature;
  };
  CHECK(tagged("a") == tagged("a") && tagged("a") != tagged("b"));
}

TEST(validate) {
  const ExchangePlan good = all_to_all_plan({1, 2}, {{kTensor, {2, 2}, {3, 6}}}, 2, 1);
  const auto changed = [&](auto&& change) {
    ExchangePlan plan = good;
    change(plan);
    plan.validate();
  };
  changed([](ExchangePlan&) {});
  CHECK_INVALID("all_to_all: rank 5", changed([](auto& plan) { plan.rank = 5; }));
  CHECK_INVALID("peer 2 is not a rank in a group of 2",
                changed([](auto& plan) { plan.sends[1].peer = 2; }));
  CHECK_INVALID("peers must increase", changed([](auto& plan) { plan.recvs[1].peer = 0; }));
  CHECK_INVALID("there are 1 input tensors",
                changed([](auto& plan) { plan.sends[0].boxes[0].tensor_idx = 1; }));
  CHECK_INVALID("one number per dim",
                changed([](auto& plan) { plan.sends[0].boxes[0].start = {0}; }));
  CHECK_INVALID("leaves the input tensor of shape [2, 6, 4] in dim 2",
                changed([](auto& plan) { plan.sends[0].boxes[0].start[2] = 3; }));
  CHECK_INVALID("size overflow: 9223372036854775806 + 2", changed([](auto& plan) {
                  plan.recvs[0].boxes[0].start[0] = std::numeric_limits<int64_t>::max() - 1;
                }));
  CHECK_INVALID("to itself but receives", changed([](auto& plan) { plan.recvs.pop_back(); }));
  CHECK_INVALID("two receives write the same elements",
                changed([](auto& plan) { plan.recvs[0].boxes[0].start[1] = 1; }));
  CHECK_INVALID("negative length", changed([](auto& plan) { plan.inputs[0].shape[0] = -1; }));
  CHECK_INVALID("1, 2, 4, 8 or 16 bytes, got 3",
                changed([](auto& plan) { plan.inputs[0].dtype.itemsize = 3; }));
}

// Staging only where the dims before the scatter or gather dim make a box several runs.
TEST(copy_passes) {
  const auto passes = [](int64_t batch, int scatter_dim, int gather_dim) {
    const TensorSpec input{{batch, 8, 8, 4}, dtypes::kBFloat16};
    return lowered(all_to_all_plan({1, 4}, {{input, {2, 2, 2, 2}, {8, 8, 8, 8}}}, scatter_dim,
                                   gather_dim))
        .copy_passes();
  };
  CHECK_EQ(passes(1, 2, 1), 1);  // heads to sequence: pack
  CHECK_EQ(passes(1, 1, 2), 1);  // sequence to heads: unpack
  CHECK_EQ(passes(2, 2, 1), 2);
  const LoweredExchange direct =
      lowered(all_to_all_plan({1, 4}, {{kTensor, {1, 1, 0, 0}, {6, 6, 6, 6}}}, 0, 1));
  CHECK_EQ(direct.send_staging_bytes, 0);
  CHECK_EQ(direct.sends[0].tensor_idx, 0);
  CHECK_EQ(direct.sends[2].bytes, 0);
  CHECK_EQ(lowered(gather_plan({1, 2}, {{3, 4}, dtypes::kUInt8}, 0,
                               {{{0, 2}, {3, 3}}, {{2, 1}, {6, 2}}}))
               .send_staging_bytes,
           0);
}

// The send of a gather is the same for all peers: one staged copy. Scaling always needs one.
TEST(shared_staging) {
  const TensorSpec local{{2, 3}, dtypes::kFloat32};
  const std::vector<Segments> quarters{{{0, 2}}, {{2, 2}}, {{4, 2}}, {{6, 2}}};
  const LoweredExchange scaled = lowered(gather_plan({2, 4}, local, 0, quarters, Scale::divide(4)));
  CHECK_EQ(scaled.sends.size(), 3u);
  CHECK_EQ(scaled.pack().size(), 1u);
  CHECK_EQ(scaled.local().size(), 1u);
  CHECK_EQ(scaled.send_staging_bytes, 24);
  for (const LoweredMessage& send : scaled.sends) {
    CHECK(send.is_staged());
    CHECK_EQ(send.offset_bytes, 0);
    CHECK_EQ(send.task_end - send.task_begin, 1);
  }
  const LoweredExchange plain = lowered(gather_plan({2, 4}, local, 0, quarters));
  CHECK_EQ(plain.send_staging_bytes + plain.recv_staging_bytes, 0);
  CHECK_EQ(plain.copy_passes(), 0);
  CHECK(plain.unpack().empty());

  // Different messages do not share and are aligned for vector copies.
  const LoweredExchange packed =
      lowered(all_to_all_plan({0, 3}, {{{{2, 1, 5}, dtypes::kUInt8}, {2, 2, 1}, {1, 1, 1}}}, 2, 1));
  CHECK_EQ(packed.sends[0].offset_bytes, 0);
  CHECK_EQ(packed.sends[1].offset_bytes, 64);
  CHECK_EQ(packed.send_staging_bytes, 66);
}

TEST(lower_errors) {
  const ExchangePlan plan = gather_plan({0, 1}, kTensor, 1, {{{0, 6}}});
  const StridedLayout good = StridedLayout::contiguous(kTensor);
  const auto lower_with = [&](StridedLayout input, StridedLayout output) {
    return lower(plan, {input}, {output});
  };
  CHECK_EQ(lower_with(good, good).local().size(), 1u);
  CHECK_EQ(lower_with(good, good).local()[0].copy.run_bytes, 192);
  CHECK_INVALID("gather: the plan has 1 input tensors, got 0", lower(plan, {}, {good}));
  CHECK_INVALID("input 0 must be [2, 6, 4] float32, got shape [2, 6]",
                lower_with({{2, 6}, {6, 1}, 4}, good));
  CHECK_INVALID("got shape [2, 6, 4] of 8-byte", lower_with({{2, 6, 4}, {24, 4, 1}, 8}, good));
  CHECK_INVALID("but strides [1]", lower_with({{2, 6, 4}, {1}, 4}, good));
  CHECK_INVALID("negative strides [24, -4, 1]", lower_with({{2, 6, 4}, {24, -4, 1}, 4}, good));
  CHECK_INVALID("output 0 has elements that share memory",
                lower_with(good, {{2, 6, 4}, {0, 4, 1}, 4}));
  // An expanded input is read in place.
  CHECK_EQ(lower_with({{2, 6, 4}, {0, 4, 1}, 4}, good).local()[0].copy.num_dims, 1);

  // A self transfer between different shapes is a copy if both sides are runs, an error otherwise.
  const ExchangePlan reshaped =
      all_to_all_list_plan({0, 1}, {{{2, 3}, dtypes::kInt32}}, {{{3, 2}, dtypes::kInt32}});
  CHECK_EQ(lowered(reshaped).local()[0].copy.run_bytes, 24);
  CHECK_INVALID("must have the shapes of those it receives",
                lower(reshaped, {{{2, 3}, {1, 2}, 4}}, {{{3, 2}, {2, 1}, 4}}));
}

// Loops beyond the fixed maximum become several tasks.
TEST(many_dims) {
  const TensorSpec tensor{{2, 2, 2, 2, 2, 2, 2}, dtypes::kUInt8};
  StridedLayout input = StridedLayout::contiguous(tensor);
  for (int64_t& stride : input.strides) stride *= stride * 2;  // nothing merges
  const LoweredExchange exchange = lower(gather_plan({0, 1}, tensor, 0, {{{0, 2}}}), {input},
                                         {StridedLayout::contiguous(tensor)});
  CHECK_EQ(exchange.local().size(), 8u);
  for (const CopyTask& task : exchange.local()) CHECK_EQ(task.copy.num_dims, kMaxCopyDims);
}

// Sizes beyond 32 bits stay exact.
TEST(large) {
  const int64_t rows = int64_t{1} << 33;
  const ExchangePlan plan =
      all_to_all_plan({1, 2}, {{{{rows, 4}, dtypes::kFloat64}, {2, 2}, {rows, rows}}}, 1, 0);
  CHECK_EQ(message_bytes(plan.sends[0], plan.inputs), rows * 16);
  CHECK_EQ(lowered(plan).pack()[0].copy.count[0], rows);
  CHECK_EQ(lowered(plan).recvs[0].offset_bytes, 0);
  CHECK_EQ(lowered(plan).local()[0].dst_offset_bytes, rows * 16);
  CHECK_INVALID(
      "size overflow",
      valid(gather_plan({0, 2}, {{int64_t{1} << 61}, dtypes::kFloat64}, 0,
                        {{{0, int64_t{1} << 61}}, {{int64_t{1} << 61, int64_t{1} << 61}}})));
}
