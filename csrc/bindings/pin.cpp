#include "bindings/pin.h"

#include <c10/core/CPUAllocator.h>
#include <pthread.h>

#include <mutex>
#include <unordered_map>

namespace pipecomm {
namespace {

struct Pinned {
  int num_pins = 0;
  bool is_freed = false;
};

// Lives as long as the process: tensors may outlive everything else.
struct Registry {
  Registry() {
    // A forked child frees tensors, too.
    pthread_atfork([] { registry().mutex.lock(); }, [] { registry().mutex.unlock(); },
                   [] { registry().mutex.unlock(); });
  }
  static Registry& registry() {
    static auto* const only = new Registry;
    return *only;
  }
  std::mutex mutex;
  std::unordered_map<void*, Pinned> memory;
  const c10::DeleterFnPtr free = c10::GetDefaultCPUAllocator()->raw_deleter();
};

// Takes the place of the allocator's own deleter, in storages that have been pinned once.
void free_unless_pinned(void* memory) {
  Registry& registry = Registry::registry();
  {
    std::lock_guard lock(registry.mutex);
    if (const auto found = registry.memory.find(memory); found != registry.memory.end()) {
      found->second.is_freed = true;
      return;
    }
  }
  registry.free(memory);
}

}  // namespace

Pin::Pin(const c10::Storage& storage)
    : storage_(storage), data_(storage.data()), num_bytes_(storage.nbytes()) {
  Registry& registry = Registry::registry();
  const c10::DataPtr& memory = storage.data_ptr();
  if (!memory.get_context()) return;
  // Readers of a tensor never look at its deleter.
  if (memory.get_deleter() != &free_unless_pinned &&
      !(memory.get_deleter() == registry.free &&
        storage_.mutable_data_ptr().compare_exchange_deleter(registry.free, &free_unless_pinned)))
    return;
  pinned_ = memory.get_context();
  std::lock_guard lock(registry.mutex);
  ++registry.memory[pinned_].num_pins;
}

Pin::~Pin() {
  if (!pinned_) return;
  Registry& registry = Registry::registry();
  {
    std::lock_guard lock(registry.mutex);
    const auto found = registry.memory.find(pinned_);
    if (--found->second.num_pins > 0) return;
    const bool is_freed = found->second.is_freed;
    registry.memory.erase(found);
    if (!is_freed) return;
  }
  registry.free(pinned_);
}

}  // namespace pipecomm
