// Random cases of every plan builder, for all ranks of a group, with the positions that each rank
// holds before and after. The positions are computed by dealing out single elements.
#pragma once

#include "plan/builders.h"
#include "plan/reshard.h"
#include "world.h"

namespace cases {

using world::Held;
using world::Random;
using world::Rank;

inline const std::vector<DType> kAllDTypes = {dtypes::kUInt8, dtypes::kBFloat16, dtypes::kFloat32,
                                              dtypes::kInt64, dtypes::kComplex128};
inline const std::vector<DType> kFloatDTypes = {dtypes::kFloat16, dtypes::kBFloat16,
                                                dtypes::kFloat32, dtypes::kFloat64};

inline DType random_dtype(Random& random, const Scale& scale) {
  const auto& dtypes = scale.is_none() ? kAllDTypes : kFloatDTypes;
  return dtypes[random.between(0, int64_t(dtypes.size()) - 1)];
}

inline Dims random_shape(Random& random, int num_dims) {
  Dims shape(num_dims);
  const int64_t longest = num_dims <= 3 ? 9 : num_dims == 4 ? 6 : 4;
  for (int64_t& length : shape) length = random.between(random.chance(0.05) ? 0 : 1, longest);
  return shape;
}

// Lengths of `size` pieces, by dealing out one element after another.
inline Sizes dealt_sizes(int64_t length, int size) {
  Sizes sizes(size, 0);
  for (int64_t i = 0; i < length; ++i) ++sizes[i % size];
  return sizes;
}

// Remainder first, or any lengths with that sum.
inline Sizes random_sizes(Random& random, int64_t length, int size) {
  if (random.chance(0.4)) return dealt_sizes(length, size);
  Sizes sizes(size, 0);
  for (int64_t i = 0; i < length; ++i) ++sizes[random.between(0, size - 1)];
  return sizes;
}

inline Dims positions_of_piece(const Sizes& sizes, int rank) {
  Dims positions;
  int64_t position = 0;
  for (int r = 0; r < int(sizes.size()); ++r) {
    for (int64_t i = 0; i < sizes[r]; ++i, ++position) {
      if (r == rank) positions.push_back(position);
    }
  }
  return positions;
}

inline Dims zigzag_positions(int64_t length, int rank, int size) {
  const int64_t chunk = length / (2 * size);
  Dims positions;
  for (int64_t i = 0; i < chunk; ++i) positions.push_back(rank * chunk + i);
  for (int64_t i = 0; i < chunk; ++i) positions.push_back((2 * size - 1 - rank) * chunk + i);
  return positions;
}

inline Dims packed_positions(const std::vector<Sizes>& rows, int rank) {
  Dims positions;
  int64_t position = 0;
  for (size_t sequence = 0; sequence < rows[0].size(); ++sequence) {
    for (int r = 0; r < int(rows.size()); ++r) {
      for (int64_t i = 0; i < rows[r][sequence]; ++i, ++position) {
        if (r == rank) positions.push_back(position);
      }
    }
  }
  return positions;
}

inline std::vector<Rank> all_to_all(Random& random, int size, int num_dims, int scatter_dim,
                                    int gather_dim, const Scale& scale) {
  const int num_tensors = int(random.between(1, 3));
  std::vector<Rank> ranks(size);
  std::vector<std::vector<AllToAllTensor>> tensors(size);
  for (int t = 0; t < num_tensors; ++t) {
    const Dims global = random_shape(random, num_dims);
    const DType dtype = random_dtype(random, scale);
    const Sizes scatter = random_sizes(random, global[scatter_dim], size);
    const Sizes gather = random_sizes(random, global[gather_dim], size);
    for (int r = 0; r < size; ++r) {
      ranks[r].inputs.push_back(Held::along(global, gather_dim, positions_of_piece(gather, r), t));
      ranks[r].outputs.push_back(
          Held::along(global, scatter_dim, positions_of_piece(scatter, r), t));
      tensors[r].push_back({{ranks[r].inputs[t].shape(), dtype}, scatter, gather});
    }
  }
  for (int r = 0; r < size; ++r) {
    ranks[r].plan = all_to_all_plan({r, size}, tensors[r], scatter_dim, gather_dim, scale);
  }
  return ranks;
}

// Sequence pieces of a tensor [batch, tokens, heads, width] become pieces of heads.
inline std::vector<Rank> tokens_to_heads(const Dims& global, DType dtype, const Sizes& tokens,
                                         const Sizes& heads, const Scale& scale) {
  const int size = int(tokens.size());
  std::vector<Rank> ranks(size);
  for (int r = 0; r < size; ++r) {
    ranks[r].inputs = {Held::along(global, 1, positions_of_piece(tokens, r))};
    ranks[r].outputs = {Held::along(global, 2, positions_of_piece(heads, r))};
    const TensorSpec input{ranks[r].inputs[0].shape(), dtype};
    ranks[r].plan = all_to_all_plan({r, size}, {{input, heads, tokens}}, 2, 1, scale);
  }
  return ranks;
}

// Runs of positions, cut at random.
inline Segments random_segments(Random& random, const Dims& positions) {
  Segments segments;
  for (int64_t position : positions) {
    const bool follows =
        !segments.empty() && segments.back().first + segments.back().second == position;
    if (!follows || random.chance(0.1)) segments.push_back({position, 0});
    ++segments.back().second;
  }
  return segments;
}

// A gather of one tensor along one dim: of pieces, of zigzag chunks, of packed sequences.
inline std::vector<Rank> gather(Random& random, int kind, int size, int num_dims,
                                const Scale& scale) {
  const int dim = int(random.between(0, num_dims - 1));
  TensorSpec full{random_shape(random, num_dims), random_dtype(random, scale)};
  int64_t& length = full.shape[dim];
  std::vector<Dims> positions;  // that each rank holds
  if (kind == 0) {
    const Sizes sizes = random_sizes(random, length, size);
    for (int r = 0; r < size; ++r) positions.push_back(positions_of_piece(sizes, r));
  } else if (kind == 1) {
    length = 2 * size * random.between(0, 3);
    for (int r = 0; r < size; ++r) positions.push_back(zigzag_positions(length, r, size));
  } else {
    std::vector<Sizes> rows(size);
    length = 0;
    for (int64_t sequence = random.between(1, 5); sequence > 0; --sequence) {
      const int64_t sequence_length = random.between(0, 7);
      length += sequence_length;
      const Sizes sizes = random_sizes(random, sequence_length, size);
      for (int r = 0; r < size; ++r) rows[r].push_back(sizes[r]);
    }
    for (int r = 0; r < size; ++r) positions.push_back(packed_positions(rows, r));
  }
  std::vector<Segments> segments;
  for (const Dims& held : positions) segments.push_back(random_segments(random, held));
  std::vector<Rank> ranks;
  for (int r = 0; r < size; ++r) {
    const Held local = Held::along(full.shape, dim, positions[r]);
    const TensorSpec spec{local.shape(), full.dtype};
    ranks.push_back(
        {gather_plan({r, size}, spec, dim, segments, scale), {local}, {Held::all(full.shape)}});
  }
  return ranks;
}
inline constexpr int kNumGatherKinds = 3;

inline ShardLayout random_layout(Random& random, const Dims& shape, int size) {
  ShardLayout layout;
  layout.dim = int(random.between(0, std::ssize(shape) - 1));
  for (int r = 0; r < size; ++r) {
    if (random.chance(0.6)) layout.ranks.push_back(r);
  }
  if (layout.ranks.empty()) layout.ranks.push_back(int(random.between(0, size - 1)));
  if (random.chance(0.5)) std::reverse(layout.ranks.begin(), layout.ranks.end());
  layout.replicated = random.chance(0.5);
  if (random.chance(0.5)) {
    layout.sizes = random_sizes(random, shape[layout.dim], int(layout.ranks.size()));
  }
  return layout;
}

inline std::vector<Held> held_in(const ShardLayout& layout, const Dims& shape, int rank) {
  const auto it = std::find(layout.ranks.begin(), layout.ranks.end(), rank);
  if (it == layout.ranks.end()) return {};
  if (layout.replicated) return {Held::all(shape)};
  const Sizes sizes = layout.sizes.empty()
                          ? dealt_sizes(shape[layout.dim], int(layout.ranks.size()))
                          : layout.sizes;
  return {
      Held::along(shape, layout.dim, positions_of_piece(sizes, int(it - layout.ranks.begin())))};
}

inline std::vector<Rank> reshard(Random& random, int size, int num_dims, const Scale& scale) {
  const TensorSpec whole{random_shape(random, num_dims), random_dtype(random, scale)};
  const ShardLayout source = random_layout(random, whole.shape, size);
  const ShardLayout destination = random_layout(random, whole.shape, size);
  std::vector<Rank> ranks;
  for (int r = 0; r < size; ++r) {
    ranks.push_back({reshard_plan({r, size}, whole, source, destination, {.scale = scale}),
                     held_in(source, whole.shape, r), held_in(destination, whole.shape, r)});
  }
  return ranks;
}

// A random case of any kind.
inline std::vector<Rank> any(Random& random, int size, const Scale& scale) {
  const int num_dims = int(random.between(2, 6));
  const int kind = int(random.between(0, kNumGatherKinds + 3));
  if (kind < kNumGatherKinds) return gather(random, kind, size, num_dims, scale);
  if (kind == kNumGatherKinds) return reshard(random, size, num_dims, scale);
  const int scatter_dim = int(random.between(0, num_dims - 1));
  const int gather_dim = int((scatter_dim + random.between(1, num_dims - 1)) % num_dims);
  return all_to_all(random, size, num_dims, scatter_dim, gather_dim, scale);
}

}  // namespace cases
