// The fields of a torch storage that describe its memory, read where this torch was found to keep them:
// without a call into Python, on any thread.
#pragma once

#include <atomic>
#include <cstdint>

#include "bindings/python.h"

namespace pipecomm {

// A part of c10::StorageImpl, the same in every torch so far. For memory of the CPU allocator,
// `context` is the memory once more.
struct StorageFields {
  std::atomic<void*> memory;
  std::atomic<void (*)(void* context)> free;
  void* context;
  uint64_t device;
  int64_t num_bytes;
};

// Null if this torch keeps them elsewhere; with the GIL. It lives as long as the storage.
StorageFields* fields_of(py::handle storage);
// What frees memory of torch's CPU allocator; null like the fields.
void (*free_of_torch())(void*);

// Looks for them once: two storages of the allocator must agree, and one of other memory must not
// look like them.
void find_storage_fields();

}  // namespace pipecomm
