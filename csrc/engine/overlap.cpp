#include "engine/overlap.h"

#include <algorithm>

namespace pipecomm {
namespace {

// Multiples of a stride: `least` to `most` times.
struct Steps {
  int64_t stride = 1;
  int64_t least = 0, most = 0;
};
using AllSteps = InlineVector<Steps, 12>;

int64_t floor_div(int64_t a, int64_t b) { return a / b - (a % b < 0); }

// Adds the offsets in bytes of what a tensor holds, or, with sign -1, subtracts them.
void add_steps(AllSteps& all, const TensorRef& tensor, int sign) {
  const auto add = [&](int64_t stride, int64_t length) {
    if (stride == 0 || length == 1) return;
    auto* const same = std::ranges::find(all, stride, &Steps::stride);
    Steps& steps = same == all.end() ? (all.push_back({stride}), all.back()) : *same;
    (sign > 0 ? steps.most : steps.least) += sign * (length - 1);
  };
  int64_t stride = 1, length = tensor.dtype.itemsize;  // of adjacent dims without gaps between them
  for (size_t dim = tensor.shape.size(); dim-- > 0;) {
    if (tensor.shape[dim] == 1) continue;
    const int64_t pitch = tensor.strides[dim] * tensor.dtype.itemsize;
    if (pitch == stride * length) {
      length *= tensor.shape[dim];
      continue;
    }
    add(stride, length);
    stride = pitch;
    length = tensor.shape[dim];
  }
  add(stride, length);
}

// Whether some steps, from the idx-th on, add up to `sum`.
bool reach(const AllSteps& all, size_t idx, int64_t sum, int& num_tries) {
  if (idx == all.size()) return sum == 0;
  int64_t least = 0, most = 0;  // of the sum of the later ones
  for (size_t later = idx + 1; later < all.size(); ++later) {
    least += all[later].stride * all[later].least;
    most += all[later].stride * all[later].most;
  }
  const Steps& steps = all[idx];
  const int64_t first = std::max(steps.least, -floor_div(most - sum, steps.stride));
  const int64_t last = std::min(steps.most, floor_div(sum - least, steps.stride));
  for (int64_t number = first; number <= last && num_tries-- > 0; ++number)
    if (reach(all, idx + 1, sum - number * steps.stride, num_tries)) return true;
  return false;
}

}  // namespace

const std::byte* end_of(const TensorRef& tensor) {
  int64_t last = 0;
  for (size_t dim = 0; dim < tensor.shape.size(); ++dim) {
    if (tensor.shape[dim] == 0) return tensor.data;
    last += (tensor.shape[dim] - 1) * tensor.strides[dim];
  }
  return tensor.data + (last + 1) * tensor.dtype.itemsize;
}

bool overlap(const TensorRef& a, const TensorRef& b) {
  const std::byte *const a_end = end_of(a), *const b_end = end_of(b);
  if (a_end == a.data || b_end == b.data || a_end <= b.data || b_end <= a.data) return false;
  // An offset in `a` minus one in `b` is the distance of their beginnings.
  AllSteps all;
  add_steps(all, a, 1);
  add_steps(all, b, -1);
  std::ranges::sort(all, std::ranges::greater(), &Steps::stride);
  int num_tries = 10'000;
  return reach(all, 0, b.data - a.data, num_tries);
}

}  // namespace pipecomm
