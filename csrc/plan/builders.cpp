#include "plan/builders.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "plan/signature.h"
#include "plan/split.h"

namespace pipecomm {

namespace {

[[noreturn]] void reject(const std::string& what) { throw std::invalid_argument(what); }

void require_member(Member me, const char* op) {
  if (me.size < 1 || me.rank < 0 || me.rank >= me.size) {
    reject(std::string(op) + ": rank " + std::to_string(me.rank) + " is not a rank in a group of " +
           std::to_string(me.size));
  }
}

void require_dim(const Dims& shape, int dim, const char* op, const char* name) {
  if (dim < 0 || dim >= std::ssize(shape)) {
    reject(std::string(op) + ": " + name + " " + std::to_string(dim) +
           " is out of range for shape " + to_string(shape));
  }
}

// A list with one non-negative length per rank.
void require_sizes(const Sizes& sizes, int size, const char* op, const char* name) {
  if (std::ssize(sizes) != size) {
    reject(std::string(op) + ": " + name + " needs one entry for each of the " +
           std::to_string(size) + " ranks, got " + std::to_string(sizes.size()) + ": " +
           to_string(sizes));
  }
  for (int64_t length : sizes) {
    if (length < 0) {
      reject(std::string(op) + ": " + name + " must not be negative, got " + to_string(sizes));
    }
  }
}

void require_length(int64_t length, int64_t expected, const char* op, const std::string& what) {
  if (length != expected) {
    reject(std::string(op) + ": " + what + " is " + std::to_string(expected) +
           ", but the tensor has length " + std::to_string(length));
  }
}

// Where the piece of each rank begins: as given, or one after the other so that they fill `length`.
Sizes starts_of(const Sizes& given, const Sizes& sizes, int64_t length, const char* op,
                const std::string& name) {
  if (given.empty()) {
    Sizes starts = offsets_of(sizes);
    require_length(length, starts.back(), op, "sum of " + name + "_sizes " + to_string(sizes));
    return starts;
  }
  require_sizes(given, static_cast<int>(sizes.size()), op, (name + "_starts").c_str());
  return given;
}

TensorSpec with_length(TensorSpec tensor, int dim, int64_t length) {
  tensor.shape[dim] = length;
  return tensor;
}

Box whole(const TensorSpec& tensor, int tensor_idx = 0) {
  return {tensor_idx, Dims(tensor.shape.size(), 0), tensor.shape};
}

// The part [start, start + length) of `dim`.
Box piece(const TensorSpec& tensor, int dim, int64_t start, int64_t length, int tensor_idx = 0) {
  Box box = whole(tensor, tensor_idx);
  box.start[dim] = start;
  box.extent[dim] = length;
  return box;
}

ExchangePlan make_plan(const char* op, Member me, std::vector<TensorSpec> inputs,
                       std::vector<TensorSpec> outputs, Scale scale = {}) {
  ExchangePlan plan;
  plan.op = op;
  plan.rank = me.rank;
  plan.size = me.size;
  plan.inputs = std::move(inputs);
  plan.outputs = std::move(outputs);
  plan.scale = scale;
  return plan;
}

ExchangePlan finished(ExchangePlan plan, const Signature& signature) {
  plan.signature = signature.value();
  return plan;
}

}  // namespace

ExchangePlan all_to_all_plan(Member me, const std::vector<AllToAllTensor>& tensors, int scatter_dim,
                             int gather_dim, Scale scale, const std::string& tag) {
  constexpr const char* kOp = "all_to_all";
  require_member(me, kOp);
  if (tensors.empty()) reject("all_to_all: there must be at least one tensor");
  if (scatter_dim == gather_dim) {
    reject("all_to_all: scatter_dim and gather_dim must differ, both are " +
           std::to_string(scatter_dim));
  }
  Signature signature(kOp);
  signature.add(int64_t{me.size}).add(int64_t{scatter_dim}).add(int64_t{gather_dim}).add(scale);
  if (!tag.empty()) signature.add(tag);
  ExchangePlan plan = make_plan(kOp, me, {}, {}, scale);
  for (int peer = 0; peer < me.size; ++peer) {
    plan.sends.push_back({peer, {}});
    plan.recvs.push_back({peer, {}});
  }
  for (int tensor_idx = 0; tensor_idx < std::ssize(tensors); ++tensor_idx) {
    const AllToAllTensor& tensor = tensors[tensor_idx];
    const auto& [input, scatter_sizes, gather_sizes, scatter_starts, gather_starts, length] =
        tensor;
    require_dim(input.shape, scatter_dim, kOp, "scatter_dim");
    require_dim(input.shape, gather_dim, kOp, "gather_dim");
    require_sizes(scatter_sizes, me.size, kOp, "scatter_sizes");
    require_sizes(gather_sizes, me.size, kOp, "gather_sizes");
    const Sizes scatter_offsets =
        starts_of(scatter_starts, scatter_sizes, input.shape[scatter_dim], kOp, "scatter");
    const int64_t gathered = gather_starts.empty() ? checked_sum(gather_sizes) : length;
    const Sizes gather_offsets = starts_of(gather_starts, gather_sizes, gathered, kOp, "gather");
    require_length(
        input.shape[gather_dim], gather_sizes[me.rank], kOp,
        "entry " + std::to_string(me.rank) + " of gather_sizes " + to_string(gather_sizes));
    const TensorSpec global = with_length(input, gather_dim, gathered);
    const TensorSpec output = with_length(global, scatter_dim, scatter_sizes[me.rank]);
    for (int peer = 0; peer < me.size; ++peer) {
      plan.sends[peer].boxes.push_back(
          piece(input, scatter_dim, scatter_offsets[peer], scatter_sizes[peer], tensor_idx));
      plan.recvs[peer].boxes.push_back(
          piece(output, gather_dim, gather_offsets[peer], gather_sizes[peer], tensor_idx));
    }
    plan.inputs.push_back(input);
    plan.outputs.push_back(output);
    signature.add(global.shape).add(global.dtype).add(scatter_sizes).add(gather_sizes);
    for (const Sizes& starts : {scatter_starts, gather_starts})
      if (!starts.empty()) signature.add(starts);
  }
  return finished(std::move(plan), signature);
}

ExchangePlan gather_plan(Member me, const TensorSpec& local, int dim,
                         const std::vector<Segments>& segments, Scale scale) {
  constexpr const char* kOp = "gather";
  require_member(me, kOp);
  require_dim(local.shape, dim, kOp, "dim");
  if (std::ssize(segments) != me.size) {
    reject("gather: there are segments of " + std::to_string(segments.size()) + " ranks, not of " +
           std::to_string(me.size));
  }
  Signature signature(kOp);
  std::vector<Box> mine;
  int64_t held = 0, full_length = 0;
  for (const auto& [_, length] : segments[me.rank]) {
    mine.push_back(piece(local, dim, held, length));
    held = checked_add(held, length);
  }
  require_length(local.shape[dim], held, kOp, "sum of the segments");
  for (const Segments& of_rank : segments) {
    signature.add(std::ssize(of_rank));
    for (const auto& [start, length] : of_rank) {
      full_length = checked_add(full_length, length);
      signature.add(start).add(length);
    }
  }
  const TensorSpec full = with_length(local, dim, full_length);
  ExchangePlan plan = make_plan(kOp, me, {local}, {full}, scale);
  for (int peer = 0; peer < me.size; ++peer) {
    std::vector<Box> theirs;
    for (const auto& [start, length] : segments[peer]) {
      theirs.push_back(piece(full, dim, start, length));
    }
    plan.sends.push_back({peer, mine});
    plan.recvs.push_back({peer, std::move(theirs)});
  }
  signature.add(full.shape).add(full.dtype).add(int64_t{dim}).add(scale);
  return finished(std::move(plan), signature);
}

ExchangePlan all_to_all_single_plan(Member me, const TensorSpec& input, const TensorSpec& output,
                                    const Sizes& input_splits, const Sizes& output_splits) {
  constexpr const char* kOp = "all_to_all_single";
  require_member(me, kOp);
  require_dim(input.shape, 0, kOp, "dim");
  require_dim(output.shape, 0, kOp, "dim");
  require_sizes(input_splits, me.size, kOp, "input_split_sizes");
  require_sizes(output_splits, me.size, kOp, "output_split_sizes");
  if (input.dtype != output.dtype) {
    reject(std::string(kOp) + ": input " + to_string(input) + " and output " + to_string(output) +
           " must agree in dtype");
  }
  const Sizes input_offsets = offsets_of(input_splits);
  const Sizes output_offsets = offsets_of(output_splits);
  require_length(input.shape[0], input_offsets.back(), kOp,
                 "sum of input_split_sizes " + to_string(input_splits));
  require_length(output.shape[0], output_offsets.back(), kOp,
                 "sum of output_split_sizes " + to_string(output_splits));
  ExchangePlan plan = make_plan(kOp, me, {input}, {output});
  for (int peer = 0; peer < me.size; ++peer) {
    plan.sends.push_back({peer, {piece(input, 0, input_offsets[peer], input_splits[peer])}});
    plan.recvs.push_back({peer, {piece(output, 0, output_offsets[peer], output_splits[peer])}});
  }
  const Dims row(input.shape.begin() + 1, input.shape.end());  // the output may have any
  return finished(std::move(plan), Signature(kOp).add(int64_t{me.size}).add(input.dtype).add(row));
}

ExchangePlan all_to_all_list_plan(Member me, const std::vector<TensorSpec>& inputs,
                                  const std::vector<TensorSpec>& outputs, const std::string& tag,
                                  std::optional<TensorSpec> shown) {
  constexpr const char* kOp = "all_to_all_list";
  require_member(me, kOp);
  if (std::ssize(inputs) != me.size || std::ssize(outputs) != me.size) {
    reject(std::string(kOp) + ": needs one input and one output for each of the " +
           std::to_string(me.size) + " ranks, got " + std::to_string(inputs.size()) +
           " inputs and " + std::to_string(outputs.size()) + " outputs");
  }
  if (inputs[me.rank].dtype != outputs[me.rank].dtype) {
    reject(std::string(kOp) + ": rank " + std::to_string(me.rank) + " keeps its own input " +
           to_string(inputs[me.rank]) + ", but output " + std::to_string(me.rank) + " is " +
           to_string(outputs[me.rank]));
  }
  ExchangePlan plan = make_plan(kOp, me, inputs, outputs);
  for (int peer = 0; peer < me.size; ++peer) {
    plan.sends.push_back({peer, {whole(inputs[peer], peer)}});
    plan.recvs.push_back({peer, {whole(outputs[peer], peer)}});
  }
  plan.shown = std::move(shown);
  Signature signature(kOp);
  signature.add(int64_t{me.size});
  if (!tag.empty()) signature.add(tag);
  return finished(std::move(plan), signature);
}

ExchangePlan all_gather_list_plan(Member me, const TensorSpec& input,
                                  const std::vector<TensorSpec>& outputs) {
  constexpr const char* kOp = "all_gather_list";
  require_member(me, kOp);
  if (std::ssize(outputs) != me.size) {
    reject(std::string(kOp) + ": needs one output for each of the " + std::to_string(me.size) +
           " ranks, got " + std::to_string(outputs.size()));
  }
  if (outputs[me.rank] != input) {
    reject(std::string(kOp) + ": output " + std::to_string(me.rank) + " is " +
           to_string(outputs[me.rank]) + ", but this rank's input is " + to_string(input));
  }
  ExchangePlan plan = make_plan(kOp, me, {input}, outputs);
  Signature signature(kOp);
  signature.add(int64_t{me.size});
  for (int peer = 0; peer < me.size; ++peer) {
    plan.sends.push_back({peer, {whole(input)}});
    plan.recvs.push_back({peer, {whole(outputs[peer], peer)}});
    signature.add(outputs[peer].shape).add(outputs[peer].dtype);
  }
  return finished(std::move(plan), signature);
}

}  // namespace pipecomm
