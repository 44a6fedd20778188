// Tensors of any strides that share memory, against the sets of their bytes.
#include "engine/overlap.h"
#include "world.h"

using world::Random;

std::set<const std::byte*> bytes_of(const TensorRef& tensor) {
  std::set<const std::byte*> places{tensor.data}, bytes;
  for (size_t dim = 0; dim < tensor.shape.size(); ++dim) {
    std::set<const std::byte*> next;
    for (const std::byte* place : places)
      for (int64_t idx = 0; idx < tensor.shape[dim]; ++idx)
        next.insert(place + idx * tensor.strides[dim] * tensor.dtype.itemsize);
    places = std::move(next);
  }
  for (const std::byte* place : places)
    for (int byte = 0; byte < tensor.dtype.itemsize; ++byte) bytes.insert(place + byte);
  return bytes;
}

TEST(random_strides) {
  Random random(1);
  std::vector<std::byte> memory(1 << 16);
  const auto tensor = [&] {
    TensorRef ref;
    ref.dtype = random.chance(0.5) ? dtypes::kFloat32 : dtypes::kUInt8;
    ref.data = memory.data() + random.between(0, 40) * (random.chance(0.5) ? 1 : 4);
    const bool is_slice = random.chance(0.7);
    int64_t pitch = 1;
    for (int64_t dim = random.between(0, 4); dim > 0; --dim) {
      ref.shape.push_back(random.between(random.chance(0.02) ? 0 : 1, 4));
      ref.strides.push_back(is_slice ? pitch : random.between(0, 12));
      pitch *= random.chance(0.5) ? ref.shape.back() : 4;
    }
    if (is_slice) {
      std::reverse(ref.shape.begin(), ref.shape.end());
      std::reverse(ref.strides.begin(), ref.strides.end());
    }
    return ref;
  };
  int num_shared = 0, num_apart = 0;
  for (int round = 0; round < 20'000; ++round) {
    const TensorRef a = tensor(), b = tensor();
    const auto of_a = bytes_of(a), of_b = bytes_of(b);
    const bool shares = std::ranges::any_of(of_a, [&](auto* byte) { return of_b.contains(byte); });
    CHECK_EQ(overlap(a, b), shares);
    CHECK_EQ(overlap(b, a), shares);
    (shares ? num_shared : num_apart) += 1;
  }
  CHECK(num_shared > 2000 && num_apart > 2000);
}

// The time of an answer does not depend on how many rows two tensors have.
TEST(many_rows) {
  const auto columns = [](int64_t first, int64_t number, int64_t pitch) {
    return TensorRef{reinterpret_cast<std::byte*>(4096) + 4 * first,
                     dtypes::kFloat32,
                     {1 << 20, 1 << 10, number},
                     {pitch << 10, pitch, 1},
                     {}};
  };
  CHECK(overlap(columns(0, 20, 64), columns(19, 20, 64)));
  CHECK(!overlap(columns(0, 20, 64), columns(20, 20, 64)));
  CHECK(!overlap(columns(0, 20, 64), columns(44, 20, 64)));
  CHECK(overlap(columns(0, 20, 64), columns(45, 20, 64)));
  CHECK(overlap(columns(0, 20, 64), columns(0, 20, 100)));
  overlap(columns(0, 1, 64), columns(1, 1, 62));  // never; it ends all the same
}
