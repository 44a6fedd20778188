#include "device_exchanges.h"

bool run_uneven(Rank& me, const Uneven& uneven) {
  Sizes sends = uneven.sizes[me.rank], recvs;
  for (const Sizes& row : uneven.sizes) recvs.push_back(row[me.rank]);
  std::vector<Tensor> inputs, outputs;
  if (uneven.is_list) {
    for (int64_t length : sends) inputs.emplace_back(Dims{length}, float(10 * me.rank));
    for (int64_t length : recvs) outputs.emplace_back(Dims{length});
  } else {
    inputs.emplace_back(Dims{std::accumulate(sends.begin(), sends.end(), int64_t{0})},
                        float(10 * me.rank));
    outputs.emplace_back(Dims{std::accumulate(recvs.begin(), recvs.end(), int64_t{0})});
  }
  std::vector<TensorRef> input_refs, output_refs;
  std::vector<TensorSpec> input_specs, output_specs;
  for (const Tensor& tensor : inputs) input_refs.push_back(tensor.ref());
  for (const Tensor& tensor : outputs) output_refs.push_back(tensor.ref());
  for (size_t peer = 0; uneven.is_list && peer < output_refs.size(); ++peer)
    if (int(peer) != me.rank) output_refs[peer].dtype = uneven.recv_dtype;
  for (const TensorRef& ref : input_refs) input_specs.push_back({ref.shape, ref.dtype});
  for (const TensorRef& ref : output_refs) output_specs.push_back({ref.shape, ref.dtype});
  const Member member{me.rank, me.size};
  auto plan = uneven.is_list
                  ? all_to_all_list_plan(member, input_specs, output_specs)
                  : all_to_all_single_plan(member, input_specs[0], output_specs[0], sends, recvs);
  const auto untouched = [&] {
    return std::all_of(outputs.begin(), outputs.end(),
                       [](const Tensor& tensor) { return tensor.counts_from(-1); });
  };
  try {
    me.finish(me.comm->exchange(OpCode::all_to_all,
                                std::make_shared<PreparedExchange>(std::move(plan)), input_refs,
                                output_refs, {.is_async = false}, uneven.scope));
  } catch (const PipeCommException&) {
    CHECK(!uneven.is_compared_first || untouched());
    throw;
  }
  std::vector<float> values, got;
  for (int peer = 0; peer < me.size; ++peer) {
    const Sizes& row = uneven.sizes[peer];
    const int64_t before =
        uneven.is_list ? 0 : std::accumulate(row.begin(), row.begin() + me.rank, int64_t{0});
    for (int64_t idx = 0; idx < row[me.rank]; ++idx)
      values.push_back(float(10 * peer) + float(before + idx));
  }
  for (const Tensor& tensor : outputs)
    got.insert(got.end(), tensor.data->begin(), tensor.data->end());
  return got == values;
}

void broadcast_from(Rank& me, int source, int64_t length) {
  Tensor tensor({length}, me.rank == source ? 50.0f : -1.0f);
  me.finish(me.comm->broadcast(tensor.ref(), source, {.is_async = source % 2 == 1}));
  CHECK(tensor.counts_from(50));
}

void Within::finish(Rank& me) const {
  me.finish(operation);
  const int place = int(std::ranges::find(members, me.rank) - members.begin());
  for (size_t idx = 0; idx < members.size(); ++idx)
    CHECK((*output.data)[6 * idx] == float(10 * members[idx] + 3 * place));
}

Within post_within(Rank& me, const std::vector<int>& members, int channel, bool is_async) {
  const int size = int(members.size());
  const Member member{int(std::ranges::find(members, me.rank) - members.begin()), size};
  Within within{members, Tensor({2, 3 * size}, float(10 * me.rank)), Tensor({2 * size, 3}),
                nullptr};
  const TensorSpec spec{within.input.shape, dtypes::kFloat32};
  ExchangePlan plan = all_to_all_plan(
      member, {{spec, Sizes(size_t(size), 3), Sizes(size_t(size), 2)}}, 1, 0, Scale::multiply(1));
  for (auto* transfers : {&plan.sends, &plan.recvs})
    for (Transfer& transfer : *transfers) transfer.peer = members[size_t(transfer.peer)];
  plan.rank = me.rank;
  plan.size = me.size;
  within.operation =
      me.comm->exchange(OpCode::all_to_all, std::make_shared<PreparedExchange>(std::move(plan)),
                        std::vector{within.input.ref()}, std::vector{within.output.ref()},
                        {.is_async = is_async}, Scope{members, channel});
  return within;
}

OperationPtr exchange_swap(Rank& me, const Tensor& sent, const Tensor& received, int channel,
                           bool is_async, const OperationPtr& after) {
  const int64_t size = checked_product(sent.shape);
  const Sizes sizes = me.rank == 0 ? Sizes{0, size} : Sizes{size, 0};
  const TensorSpec spec{sent.shape, dtypes::kFloat32};
  auto plan = all_to_all_single_plan({me.rank, 2}, spec, spec, sizes, sizes);
  return me.comm->exchange(OpCode::exchange, std::make_shared<PreparedExchange>(std::move(plan)),
                           std::vector{sent.ref()}, std::vector{received.ref()},
                           {.is_async = is_async}, Scope{{}, channel}, after);
}
