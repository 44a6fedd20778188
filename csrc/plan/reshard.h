// Plans that move one tensor from one set of ranks to another: the intersections of two layouts.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "plan/exchange_plan.h"

namespace pipecomm {

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
  // Data of a rank for itself are not copied: they are in the output already, or, for collected pieces,
  // stay in the input, without an output.
  bool own_in_place = false;
  std::string tag = {};                  // further arguments on which all ranks must agree
  std::optional<TensorSpec> shown = {};  // in errors, if `whole` is a form of another tensor
};

// Moves a tensor of shape `whole` from one layout to another. The sets of ranks may overlap, the
// dims may differ. A rank outside `source` has no input, a rank outside `destination` no output.
ExchangePlan reshard_plan(Member me, const TensorSpec& whole, const ShardLayout& source,
                          const ShardLayout& destination, const ReshardOptions& options = {});

// Every rank of the layout holds a whole tensor of its own, and collects its piece of each: one
// input, one output per rank of the layout. A reduce-scatter sums the outputs.
ExchangePlan collect_pieces_plan(Member me, const TensorSpec& whole, const ShardLayout& pieces,
                                 const ReshardOptions& options = {});

}  // namespace pipecomm
