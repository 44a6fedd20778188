// Many tasks of very different sizes in one call, at once and from a graph; and one very large one.
#include <memory>

#include "parts.h"

namespace parts {

namespace {

// Sizes from 16 bytes to 16 KiB, also odd ones, in separate allocations.
class Copies {
 public:
  Copies(int num_tasks, Random& random) {
    for (int idx = 0; idx < num_tasks; ++idx) {
      const int64_t bytes = (int64_t{16} << random.between(0, 10)) + random.between(-3, 3);
      sources_.push_back(std::make_unique<device::Memory>(bytes, random.between(0, 15), 16));
      targets_.push_back(std::make_unique<device::Memory>(bytes, random.between(0, 15), 16));
      CopyTask task = run_task(0, 0, bytes);
      task.src_tensor_idx = task.dst_tensor_idx = idx;
      tasks_.push_back(task);
      inputs_.push_back(sources_.back()->data());
      outputs_.push_back(targets_.back()->data());
    }
    fill(random);
  }

  void execute(const CudaLaunch& launch) const {
    parts::execute(tasks_, {inputs_, outputs_, nullptr, nullptr}, {}, launch);
  }

  // Other data in all sources, none in the targets.
  void fill(Random& random) {
    expected_.clear();
    for (size_t idx = 0; idx < sources_.size(); ++idx) {
      std::vector<uint8_t> bytes(sources_[idx]->size());
      for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random.between(0, 255));
      sources_[idx]->upload(bytes.data());
      targets_[idx]->fill(world::kPoison);
      expected_.push_back(std::move(bytes));
    }
  }

  void verify() const {
    for (size_t idx = 0; idx < targets_.size(); ++idx) {
      CHECK(targets_[idx]->download() == expected_[idx]);
      CHECK(targets_[idx]->surroundings_are_intact());
    }
  }

 private:
  std::vector<std::unique_ptr<device::Memory>> sources_, targets_;
  std::vector<std::vector<uint8_t>> expected_;
  std::vector<CopyTask> tasks_;
  std::vector<const void*> inputs_;
  std::vector<void*> outputs_;
};

}  // namespace

void many() {
  const device::Stream stream;
  Random random(3);
  for (const int num_tasks : {1, 4, 5, 24, 25, 26, 196, 197, 200, 201, 1000}) {
    for (const int num_sms : {0, 3}) {
      check::context = std::to_string(num_tasks) + " tasks, limit " + std::to_string(num_sms);
      Copies copies(num_tasks, random);
      copies.execute({stream, num_sms});
      stream.synchronize();
      copies.verify();
      const device::Graph graph(stream, [&] { copies.execute({stream, num_sms}); });
      for (int replay = 0; replay < 2; ++replay) {
        check::context += ", replayed";
        copies.fill(random);
        graph.launch(stream);
        stream.synchronize();
        copies.verify();
      }
    }
  }
}

// ---- more than 2^31 vectors ----

namespace {

constexpr int64_t kChunkRows = int64_t{1} << 25;

uint8_t byte_of(int64_t row) { return static_cast<uint8_t>(row * 2654435761 >> 13); }

// Calls visit(first row, bytes) for the table's rows in chunks; the bytes are the contents of one
// column, or, with two columns, rows of byte_of and poison.
template <typename Visit>
void in_chunks(int64_t all_rows, int num_columns, const Visit& visit) {
  std::vector<uint8_t> chunk;
  for (int64_t begin = 0; begin < all_rows; begin += kChunkRows) {
    const int64_t num_rows = std::min(kChunkRows, all_rows - begin);
    chunk.assign(num_rows * num_columns, world::kPoison);
    for (int64_t row = 0; row < num_rows; ++row) chunk[row * num_columns] = byte_of(begin + row);
    visit(begin, chunk);
  }
}

void verify(const device::Memory& memory, int num_columns) {
  std::vector<uint8_t> found;
  in_chunks(memory.size() / num_columns, num_columns,
            [&](int64_t begin, const std::vector<uint8_t>& expected) {
              found.resize(expected.size());
              memory.download(found.data(), begin * num_columns, std::ssize(found));
              CHECK(found == expected);
            });
  CHECK(memory.surroundings_are_intact());
}

void execute_one(const CopyTask& task, const device::Memory& from, const device::Memory& to) {
  const device::Stream stream;
  const void* const inputs[] = {from.data()};
  void* const outputs[] = {to.data()};
  execute({&task, 1}, {inputs, outputs, nullptr, nullptr}, {}, {stream, 0});
  stream.synchronize();
}

}  // namespace

bool large(int log2_of_rows) {
  const int64_t all_rows = (int64_t{1} << log2_of_rows) + 4099;  // of two bytes
  size_t free_bytes = 0, total_bytes = 0;
  CUDA(cudaMemGetInfo(&free_bytes, &total_bytes));
  if (static_cast<int64_t>(free_bytes) < 6 * all_rows) return false;
  device::Memory table(2 * all_rows), column(all_rows), copy(2 * all_rows, 7);
  in_chunks(all_rows, 2, [&](int64_t begin, const std::vector<uint8_t>& rows) {
    table.upload(rows.data(), 2 * begin, std::ssize(rows));
  });
  CopyTask task = run_task(0, 0, 1);
  task.copy.num_dims = 1;
  task.copy.count[0] = all_rows;
  task.copy.src_stride_bytes[0] = 2;
  task.copy.dst_stride_bytes[0] = 1;
  check::context = "more than 2^31 vectors, out of a table";
  execute_one(task, table, column);
  verify(column, 1);
  check::context = "more than 2^31 vectors, into a table";
  std::swap(task.copy.src_stride_bytes[0], task.copy.dst_stride_bytes[0]);
  copy.fill(world::kPoison);
  execute_one(task, column, copy);
  verify(copy, 2);
  check::context = "more than 4 GiB at another alignment";
  copy.fill(0);
  execute_one(run_task(0, 0, table.size()), table, copy);
  verify(copy, 2);
  return true;
}

}  // namespace parts
