#include "bindings/pin.h"

#include <pthread.h>

#include <array>
#include <mutex>
#include <utility>

namespace pipecomm {
namespace {

// Lives as long as the process: tensors may outlive everything else.
struct Table {
  Table() {
    // A forked child frees tensors, too.
    pthread_atfork([] { table().mutex.lock(); }, [] { table().mutex.unlock(); },
                   [] { table().mutex.unlock(); });
  }
  static Table& table() {
    static auto* const only = new Table;
    return *only;
  }
  Pin*& first(void* memory) {
    return pins[reinterpret_cast<uintptr_t>(memory) / kAlignment % pins.size()];
  }

  static constexpr uintptr_t kAlignment = 64;  // of torch's memory
  std::mutex mutex;
  std::array<Pin*, 1021> pins{};
};

}  // namespace

// Replaces the allocator's own deleter, in storages that have been pinned once.
void free_unless_pinned(void* memory) {
  Table& table = Table::table();
  {
    std::lock_guard lock(table.mutex);
    bool is_pinned = false;
    for (Pin* pin = table.first(memory); pin; pin = pin->next_)
      if (pin->memory_ == memory) is_pinned = pin->is_freed_ = true;
    if (is_pinned) return;
  }
  free_of_torch()(memory);
}

Pin::Pin(StorageFields& storage) {
  auto expected = free_of_torch();
  if (!storage.memory || storage.memory != storage.context) return;
  // Readers of a tensor never look at its deleter.
  if (storage.free != &free_unless_pinned &&
      !storage.free.compare_exchange_strong(expected, &free_unless_pinned))
    return;
  memory_ = storage.memory;
  std::lock_guard lock(Table::table().mutex);
  link();
}

Pin::Pin(Pin&& other) noexcept {
  if (!other.memory_) return;
  std::lock_guard lock(Table::table().mutex);
  other.unlink();
  memory_ = std::exchange(other.memory_, nullptr);
  is_freed_ = other.is_freed_;
  link();
}

Pin::~Pin() {
  if (!memory_) return;
  Table& table = Table::table();
  {
    std::lock_guard lock(table.mutex);
    unlink();
    if (!is_freed_) return;
    for (Pin* pin = table.first(memory_); pin; pin = pin->next_)
      if (pin->memory_ == memory_) return;  // the last one frees it
  }
  free_of_torch()(memory_);
}

void Pin::link() {
  Pin*& first = Table::table().first(memory_);
  next_ = first;
  previous_ = nullptr;
  if (first) first->previous_ = this;
  first = this;
}

void Pin::unlink() {
  (previous_ ? previous_->next_ : Table::table().first(memory_)) = next_;
  if (next_) next_->previous_ = previous_;
}

}  // namespace pipecomm
