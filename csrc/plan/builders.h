// Pure functions that turn the arguments of an operation into this rank's exchange plan. Dims are
// already normalised (0 <= dim < ndim). Every argument is checked; std::invalid_argument says what
// was expected and what came.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "plan/exchange_plan.h"
#include "plan/split.h"

namespace pipecomm {

// Who builds the plan: the rank's number in its group and the group's size.
struct Member {
  int rank = 0;
  int size = 1;
};

// One tensor of an all-to-all. `input` is this rank's: its length along the gather dim is
// gather_sizes[rank], along the scatter dim sum(scatter_sizes). The output has sum(gather_sizes)
// along the gather dim and scatter_sizes[rank] along the scatter dim.
struct AllToAllTensor {
  TensorSpec input;
  Sizes scatter_sizes;
  Sizes gather_sizes;
};

ExchangePlan all_to_all_plan(Member me, const std::vector<AllToAllTensor>& tensors, int scatter_dim,
                             int gather_dim, Scale scale = {});

// Rank-order concatenation along `dim`; sizes[rank] is the length of each rank's tensor.
ExchangePlan gather_plan(Member me, const TensorSpec& local, int dim, const Sizes& sizes,
                         Scale scale = {});
// Piece `rank` of a tensor that every rank holds: a copy to myself, nothing is sent.
ExchangePlan split_plan(Member me, const TensorSpec& full, int dim, const Sizes& sizes,
                        Scale scale = {});

// Zigzag order: the dim is cut in 2 * size equal chunks, rank r holds chunks r and 2 * size - 1 -
// r.
ExchangePlan zigzag_gather_plan(Member me, const TensorSpec& local, int dim, Scale scale = {});
ExchangePlan zigzag_split_plan(Member me, const TensorSpec& full, int dim, Scale scale = {});
// A tensor that holds all ranks' zigzag shards in rank order, put in natural order; no
// communication.
ExchangePlan zigzag_reorder_plan(Member me, const TensorSpec& full, int dim, int num_shards);

// Packed sequences: rows[rank][sequence] is the length that `rank` holds of each sequence. The full
// tensor holds each sequence whole, in order; a local one holds the rank's pieces in that order.
ExchangePlan packed_gather_plan(Member me, const TensorSpec& local, int dim,
                                const std::vector<Sizes>& rows, Scale scale = {});
ExchangePlan packed_split_plan(Member me, const TensorSpec& full, int dim,
                               const std::vector<Sizes>& rows, Scale scale = {});

// torch.distributed's forms. Split sizes along dim 0, and the tensors of lists, are known to one
// rank only, so they are no part of the signature: the message headers compare the bytes and dtypes
// of every pair.
ExchangePlan all_to_all_single_plan(Member me, const TensorSpec& input, const TensorSpec& output,
                                    const Sizes& input_splits, const Sizes& output_splits);
ExchangePlan all_to_all_list_plan(Member me, const std::vector<TensorSpec>& inputs,
                                  const std::vector<TensorSpec>& outputs);
ExchangePlan all_gather_list_plan(Member me, const TensorSpec& input,
                                  const std::vector<TensorSpec>& outputs);
// The root has one input and no output, the others one output and no input.
ExchangePlan broadcast_plan(Member me, const TensorSpec& tensor, int root);

// How a set of ranks holds a tensor. Sharded: ranks[i] holds the piece sizes[i] along `dim`.
// Replicated: each holds the whole; as a source, ranks[i] sends only the piece sizes[i].
struct ShardLayout {
  std::vector<int> ranks;
  Sizes sizes;  // empty: remainder_first over the ranks
  bool replicated = false;
  int dim = 0;
};

struct ReshardOptions {
  Scale scale = {};
  // What a rank would send to itself lies in its output already: leave it there.
  bool own_in_place = false;
  std::string tag = {};                  // further arguments on which all ranks must agree
  std::optional<TensorSpec> shown = {};  // in errors, if `whole` is a form of another tensor
};

// Moves a tensor of shape `whole` from one layout to another; the sets of ranks may overlap, the
// dims may differ. A rank outside `source` has no input, a rank outside `destination` no output.
ExchangePlan reshard_plan(Member me, const TensorSpec& whole, const ShardLayout& source,
                          const ShardLayout& destination, const ReshardOptions& options = {});

// Every rank of the layout holds a whole tensor of its own, and collects its piece of each: one
// input, one output per rank of the layout. What a reduce-scatter adds up.
ExchangePlan collect_pieces_plan(Member me, const TensorSpec& whole, const ShardLayout& pieces,
                                 const ReshardOptions& options = {});

}  // namespace pipecomm
