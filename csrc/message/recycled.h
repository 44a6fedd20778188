// Recycles the memory of objects that every call makes and drops: the next call reuses it, so
// repeated calls allocate nothing.
#pragma once

#include <atomic>
#include <cstddef>
#include <new>

namespace pipecomm {

#if defined(__SANITIZE_ADDRESS__)
#define PIPECOMM_RECYCLES false
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define PIPECOMM_RECYCLES false
#endif
#endif
#ifndef PIPECOMM_RECYCLES
#define PIPECOMM_RECYCLES true
#endif
// Off under AddressSanitizer, so that it sees each object freed.
inline constexpr bool kRecycles = PIPECOMM_RECYCLES;
#undef PIPECOMM_RECYCLES

// Blocks of one size. Thread-safe; a thread that finds the list in use calls the system allocator.
template <size_t kNumBytes>
class RecycledBlocks {
 public:
  static void* take() {
    State& state = shared();
    if (kRecycles && !state.is_taken.test_and_set(std::memory_order_acquire)) {
      Block* const block = state.first;
      if (block) {
        state.first = block->next;
        --state.num_blocks;
      }
      state.is_taken.clear(std::memory_order_release);
      if (block) return block;
    }
    return ::operator new(kSize);
  }
  static void give_back(void* memory) {
    State& state = shared();
    if (kRecycles && !state.is_taken.test_and_set(std::memory_order_acquire)) {
      const bool is_kept = state.num_blocks < kMaxKept;
      if (is_kept) {
        state.first = new (memory) Block{state.first};
        ++state.num_blocks;
      }
      state.is_taken.clear(std::memory_order_release);
      if (is_kept) return;
    }
    ::operator delete(memory);
  }

 private:
  struct Block {
    Block* next;
  };
  // Blocks outlive everything else, since threads may end operations while the process exits. In a
  // fork, `is_taken` may stay set: the child then uses the system allocator.
  struct State {
    std::atomic_flag is_taken;
    Block* first = nullptr;
    size_t num_blocks = 0;
  };
  static State& shared() {
    static State state;
    return state;
  }

  static constexpr size_t kSize = kNumBytes < sizeof(Block) ? sizeof(Block) : kNumBytes;
  static constexpr size_t kMaxKept = 256;
};

// An allocator of single objects, for std::allocate_shared.
template <class T>
struct Recycled {
  using value_type = T;

  Recycled() = default;
  template <class Other>
  Recycled(const Recycled<Other>&) {}

  T* allocate(size_t number) {
    static_assert(alignof(T) <= __STDCPP_DEFAULT_NEW_ALIGNMENT__);
    return static_cast<T*>(number == 1 ? RecycledBlocks<sizeof(T)>::take()
                                       : ::operator new(number * sizeof(T)));
  }
  void deallocate(T* memory, size_t number) {
    if (number == 1)
      RecycledBlocks<sizeof(T)>::give_back(memory);
    else
      ::operator delete(memory);
  }
  template <class Other>
  bool operator==(const Recycled<Other>&) const {
    return true;
  }
};

}  // namespace pipecomm
