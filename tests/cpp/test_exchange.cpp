// Every plan builder, lowered and executed for all ranks of a group, against the positions model.

#include "cases.h"
#include "copy/thread_pool.h"
#include "scaling.h"

using cases::Random;
using world::Options;
using world::Rank;

void run(const std::vector<Rank>& ranks, const Options& options, Random& random) {
  world::Simulation(ranks, options, random).run();
}

// All ordered pairs of dims of 2- to 6-d tensors, for 1 to 8 ranks.
TEST(all_to_all_dim_pairs) {
  for (int size : {1, 2, 3, 4, 5, 8}) {
    for (int num_dims = 2; num_dims <= 6; ++num_dims) {
      for (int scatter_dim = 0; scatter_dim < num_dims; ++scatter_dim) {
        for (int gather_dim = 0; gather_dim < num_dims; ++gather_dim) {
          if (scatter_dim == gather_dim) continue;
          const uint64_t seed = ((size * 10 + num_dims) * 10 + scatter_dim) * 10 + gather_dim;
          check::context = "all_to_all pair, seed " + std::to_string(seed);
          Random random(seed);
          const auto ranks = cases::all_to_all(random, size, num_dims, scatter_dim, gather_dim, {});
          Options options;
          options.dense = random.chance(0.5);
          run(ranks, options, random);
        }
      }
    }
  }
}

void random_cases(const char* name, Options options, bool scaled) {
  for (int seed = 0; seed < check::rounds(500); ++seed) {
    check::context = std::string(name) + ", seed " + std::to_string(seed);
    Random random(1000003 * uint64_t(seed) + 17);
    const int size = int(random.between(1, 8));
    Scale scale;
    if (scaled) scale = random.chance(0.5) ? Scale::divide(size + 2) : Scale::multiply(size + 0.5);
    const auto ranks = cases::any(random, size, scale);
    options.dense = random.chance(0.3);
    options.transform = scaling::transform_of(scale);
    run(ranks, options, random);
  }
}

TEST(torch_forms) {
  for (int seed = 0; seed < check::rounds(100); ++seed) {
    check::context = "torch forms, seed " + std::to_string(seed);
    Random random(seed);
    const int size = int(random.between(1, 5));
    const DType dtype = cases::random_dtype(random, {});
    const int64_t width = random.between(0, 4);
    // rows[i][j] rows go from rank i to rank j; the global tensor has them in that order.
    std::vector<Sizes> rows(size, Sizes(size));
    int64_t num_rows = 0;
    for (Sizes& row : rows) {
      for (int64_t& count : row) num_rows += count = random.between(0, 4);
    }
    std::vector<std::vector<Dims>> positions(size, std::vector<Dims>(size));
    int64_t position = 0;
    for (int i = 0; i < size; ++i) {
      for (int j = 0; j < size; ++j) {
        for (int64_t k = 0; k < rows[i][j]; ++k) positions[i][j].push_back(position++);
      }
    }
    const Dims global{num_rows, width};
    const auto concatenated = [&](const auto& parts) {
      Dims all;
      for (const Dims& part : parts) all.insert(all.end(), part.begin(), part.end());
      return world::Held::along(global, 0, all);
    };
    std::vector<Rank> single, list, gathered;
    for (int r = 0; r < size; ++r) {
      std::vector<Dims> received;
      Sizes receive_rows;
      for (int i = 0; i < size; ++i) {
        received.push_back(positions[i][r]);
        receive_rows.push_back(rows[i][r]);
      }
      const world::Held in = concatenated(positions[r]), out = concatenated(received);
      const TensorSpec input{in.shape(), dtype}, output{out.shape(), dtype};
      single.push_back(
          {all_to_all_single_plan({r, size}, input, output, rows[r], receive_rows), {in}, {out}});

      Rank list_rank, gather_rank{{}, {in}, {}};
      std::vector<TensorSpec> inputs, outputs, gather_outputs;
      for (int peer = 0; peer < size; ++peer) {
        list_rank.inputs.push_back(world::Held::along(global, 0, positions[r][peer]));
        list_rank.outputs.push_back(world::Held::along(global, 0, positions[peer][r]));
        inputs.push_back({list_rank.inputs[peer].shape(), dtype});
        outputs.push_back({list_rank.outputs[peer].shape(), dtype});
        gather_rank.outputs.push_back(concatenated(positions[peer]));
        gather_outputs.push_back({gather_rank.outputs[peer].shape(), dtype});
      }
      list_rank.plan = all_to_all_list_plan({r, size}, inputs, outputs);
      list.push_back(list_rank);
      gather_rank.plan = all_gather_list_plan({r, size}, input, gather_outputs);
      gathered.push_back(gather_rank);
    }
    for (const auto* ranks : {&single, &list, &gathered}) {
      for (const Rank& rank : *ranks) CHECK_EQ(rank.plan.signature, (*ranks)[0].plan.signature);
      run(*ranks, {}, random);
    }
  }
}

TEST(random_cases) {
  Options in_ranges;
  in_ranges.in_ranges = true;
  random_cases("plain", {}, false);
  random_cases("scaled", {}, true);
  random_cases("in ranges", in_ranges, false);
  random_cases("in ranges, scaled", in_ranges, true);
}
