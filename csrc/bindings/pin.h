// Memory of a tensor that an operation in flight uses, while its storage may be given other memory.
#pragma once

#include <c10/core/Storage.h>

namespace pipecomm {

// Memory of torch's CPU allocator is not freed before the last of its pins goes, whatever becomes of
// the storage (share_memory_(), resize_()). Other memory is only observed.
class Pin {
 public:
  explicit Pin(const c10::Storage& storage);
  ~Pin();
  Pin(const Pin&) = delete;
  Pin& operator=(const Pin&) = delete;
  // Whether the storage has less or other memory by now: what arrived here does not reach it.
  bool has_moved() const { return storage_.data() != data_ || storage_.nbytes() < num_bytes_; }

 private:
  const c10::Storage storage_;
  const void* const data_;
  const size_t num_bytes_;
  void* pinned_ = nullptr;
};

}  // namespace pipecomm
