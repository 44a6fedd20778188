// A queue that keeps its memory: it allocates only when it grows beyond its greatest length so far.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

namespace pipecomm {

// Unused places hold a default value of T.
template <class T>
class Queue {
 public:
  bool empty() const { return size_ == 0; }
  size_t size() const { return size_; }
  T& operator[](size_t idx) { return places_[place(idx)]; }
  const T& operator[](size_t idx) const { return places_[place(idx)]; }
  T& front() { return (*this)[0]; }
  const T& front() const { return (*this)[0]; }
  T& back() { return (*this)[size_ - 1]; }
  const T& back() const { return (*this)[size_ - 1]; }

  void push_back(T value) {
    if (size_ == places_.size()) grow();
    places_[place(size_++)] = std::move(value);
  }
  void pop_front() {
    front() = T();
    first_ = place(1);
    --size_;
  }
  void pop_back() {
    back() = T();
    --size_;
  }
  // The remaining elements stay in order.
  template <class Predicate>
  void erase_if(Predicate predicate) {
    size_t num_kept = 0;
    for (size_t idx = 0; idx < size_; ++idx) {
      if (predicate((*this)[idx])) continue;
      if (num_kept != idx) (*this)[num_kept] = std::move((*this)[idx]);
      ++num_kept;
    }
    while (size_ > num_kept) pop_back();
  }
  void clear() {
    while (!empty()) pop_back();
  }

 private:
  size_t place(size_t idx) const { return (first_ + idx) & (places_.size() - 1); }
  void grow() {
    std::vector<T> more(places_.empty() ? kFewest : 2 * places_.size());
    for (size_t idx = 0; idx < size_; ++idx) more[idx] = std::move((*this)[idx]);
    places_.swap(more);
    first_ = 0;
  }

  static constexpr size_t kFewest = 8;  // a power of two, as all sizes are
  std::vector<T> places_;
  size_t first_ = 0;
  size_t size_ = 0;
};

}  // namespace pipecomm
