// Pure functions that turn the arguments of an operation into this rank's exchange plan. Dims are
// already normalised (0 <= dim < ndim). std::invalid_argument states what was expected and what was
// passed; ExchangePlan::validate() finds the rest.
#pragma once

#include <utility>
#include <vector>

#include "plan/exchange_plan.h"

namespace pipecomm {

// One tensor of an all-to-all. `input` is this rank's: its length along the gather dim is
// gather_sizes[rank], along the scatter dim sum(scatter_sizes). The output has sum(gather_sizes)
// along the gather dim and scatter_sizes[rank] along the scatter dim.
//
// With starts, pieces need not follow each other: that of rank r begins at starts[r]. Pieces of the
// input may have gaps and share elements; those of the output may have gaps, which stay unchanged in
// an output of `gather_length`.
struct AllToAllTensor {
  TensorSpec input;
  Sizes scatter_sizes;
  Sizes gather_sizes;
  Sizes scatter_starts = {};
  Sizes gather_starts = {};
  int64_t gather_length = 0;
};

// `tag` is compared with the arguments.
ExchangePlan all_to_all_plan(Member me, const std::vector<AllToAllTensor>& tensors, int scatter_dim,
                             int gather_dim, Scale scale = {}, const std::string& tag = "");

// (start, length) of the parts of a dim of a full tensor that a rank holds, in the order it does.
using Segments = std::vector<std::pair<int64_t, int64_t>>;

// Every rank sends its tensor to all ranks, which put it where segments[rank] says.
ExchangePlan gather_plan(Member me, const TensorSpec& local, int dim,
                         const std::vector<Segments>& segments, Scale scale = {});

// The collectives of torch.distributed. Only the rank itself knows its split sizes along dim 0 and
// the tensors of its lists, so the signature leaves them out. The engine compares the bytes and
// dtypes of each pair. `tag` and `shown`, if given, are what all ranks must have alike: see
// ReshardOptions.
ExchangePlan all_to_all_single_plan(Member me, const TensorSpec& input, const TensorSpec& output,
                                    const Sizes& input_splits, const Sizes& output_splits);
ExchangePlan all_to_all_list_plan(Member me, const std::vector<TensorSpec>& inputs,
                                  const std::vector<TensorSpec>& outputs,
                                  const std::string& tag = {},
                                  std::optional<TensorSpec> shown = {});
ExchangePlan all_gather_list_plan(Member me, const TensorSpec& input,
                                  const std::vector<TensorSpec>& outputs);

}  // namespace pipecomm
