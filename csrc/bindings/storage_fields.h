// The fields of a torch storage that describe its memory, at the place that was found for this torch: read
// without a call into Python, on any thread.
#pragma once

#include <atomic>
#include <cstdint>

#include "bindings/python.h"

namespace pipecomm {

// A part of c10::StorageImpl, the same in every torch so far. For memory of the CPU allocator,
// `context` equals `memory`.
struct StorageFields {
  std::atomic<void*> memory;
  std::atomic<void (*)(void* context)> free;
  void* context;
  uint64_t device;
  int64_t num_bytes;
};

// Null if this torch keeps them elsewhere; with the GIL. It lives as long as the storage.
StorageFields* fields_of(py::handle storage);
// The function that frees memory of torch's CPU allocator; null if fields_of returns null.
void (*free_of_torch())(void*);

// Finds the place once: two storages of the allocator must agree on it, and one of other memory must
// not match.
void find_storage_fields();

}  // namespace pipecomm
