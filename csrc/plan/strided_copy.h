// One regular copy: equal contiguous runs at fixed pitches on both sides.
#pragma once

#include <cstdint>

namespace pipecomm {

// Outer loops of one copy. A box of a dense tensor needs one; a box that needs more than four (in
// sliced and permuted tensors of six and more dims) is cut into several copies.
inline constexpr int kMaxCopyDims = 4;

// Copies run_bytes for every index of the loop nest count[0] x ... x count[num_dims - 1], the last
// loop fastest. The order of the runs is the order of the bytes in a message.
struct StridedCopy {
  int64_t run_bytes = 0;
  int32_t num_dims = 0;
  int64_t count[kMaxCopyDims] = {};
  int64_t src_stride_bytes[kMaxCopyDims] = {};
  int64_t dst_stride_bytes[kMaxCopyDims] = {};

  constexpr int64_t num_runs() const {
    int64_t runs = 1;
    for (int d = 0; d < num_dims; ++d) runs *= count[d];
    return runs;
  }
  constexpr int64_t bytes() const { return run_bytes * num_runs(); }
};

}  // namespace pipecomm
