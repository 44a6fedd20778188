// Device copies of host buffers, each as large as the tasks need it, for one execution.
#pragma once

#include <map>
#include <memory>

#include "parts.h"

namespace parts {

class Mirror {
 public:
  // Every buffer has guard bytes or none, by chance, and the host's residue modulo 16.
  Mirror(std::span<const CopyTask> tasks, const CopyBuffers& host, Random& random) {
    std::map<const void*, int64_t> sources, destinations;  // host addresses, bytes in use
    for (const CopyTask& task : tasks) {
      if (task.copy.bytes() == 0) continue;
      const void* from =
          task.src_tensor_idx < 0 ? host.recv_staging : host.inputs[task.src_tensor_idx];
      const void* to =
          task.dst_tensor_idx < 0 ? host.send_staging : host.outputs[task.dst_tensor_idx];
      grow(sources[from], task.src_offset_bytes, task.copy, task.copy.src_stride_bytes);
      grow(destinations[to], task.dst_offset_bytes, task.copy, task.copy.dst_stride_bytes);
    }
    const auto allocate = [&](const auto& used, auto& copies) {
      for (const auto& [address, bytes] : used) {
        const auto residue = static_cast<int64_t>(reinterpret_cast<uintptr_t>(address) % 16);
        const int64_t guard_bytes = random.chance(0.5) ? 64 : 0;
        copies[address] = std::make_unique<device::Memory>(bytes, residue, guard_bytes);
        copies[address]->upload(address);
      }
    };
    allocate(sources, sources_);
    allocate(destinations, destinations_);
    for (const void* input : host.inputs) inputs_.push_back(copy_of(sources_, input));
    for (void* output : host.outputs) outputs_.push_back(copy_of(destinations_, output));
    buffers_ = {inputs_, outputs_, copy_of(destinations_, host.send_staging),
                copy_of(sources_, host.recv_staging)};
  }

  const CopyBuffers& buffers() const { return buffers_; }

  // Copies the results to the host.
  void finish() {
    for (const auto& [address, copy] : sources_) {
      const std::vector<uint8_t> bytes = copy->download();
      if (device::plant == device::Plant::kNothing)
        CHECK(std::memcmp(bytes.data(), address, bytes.size()) == 0);
      CHECK(copy->surroundings_are_intact());
    }
    for (const auto& [address, copy] : destinations_) {
      copy->download(const_cast<void*>(address), 0, copy->size());
      CHECK(copy->surroundings_are_intact());
    }
  }

 private:
  using Copies = std::map<const void*, std::unique_ptr<device::Memory>>;

  static void grow(int64_t& bytes, int64_t offset, const StridedCopy& copy,
                   const int64_t* strides) {
    int64_t end = offset + copy.run_bytes;
    for (int d = 0; d < copy.num_dims; ++d) end += (copy.count[d] - 1) * strides[d];
    bytes = std::max(bytes, end);
  }
  static char* copy_of(const Copies& copies, const void* address) {
    const auto it = copies.find(address);
    return it == copies.end() ? nullptr : it->second->data();
  }

  Copies sources_, destinations_;
  std::vector<const void*> inputs_;
  std::vector<void*> outputs_;
  CopyBuffers buffers_;
};

}  // namespace parts
