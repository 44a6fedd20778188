// Memory of a tensor that an operation in flight uses, while its storage may get other memory.
#pragma once

#include "bindings/storage_fields.h"

namespace pipecomm {

// Memory of torch's CPU allocator is not freed before its last pin is destroyed, whatever happens to
// the storage (share_memory_(), resize_()). Other memory is not pinned.
class Pin {
 public:
  Pin() = default;
  explicit Pin(StorageFields& storage);
  Pin(Pin&& other) noexcept;
  ~Pin();  // on any thread
  Pin& operator=(Pin&&) = delete;

  explicit operator bool() const { return memory_ != nullptr; }

 private:
  void link();
  void unlink();

  friend void free_unless_pinned(void* memory);
  void* memory_ = nullptr;
  bool is_freed_ = false;
  Pin* next_ = nullptr;  // of memory with the same place in the table
  Pin* previous_ = nullptr;
};

}  // namespace pipecomm
