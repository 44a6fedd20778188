// A vector whose elements lie in the object itself, without an allocation. More than N elements lie in a
// std::vector.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <initializer_list>
#include <iterator>
#include <utility>
#include <vector>

namespace pipecomm {

// T has a default value, which unused places hold.
template <class T, size_t N>
class InlineVector {
 public:
  using value_type = T;
  using iterator = T*;
  using const_iterator = const T*;

  InlineVector() = default;
  InlineVector(std::initializer_list<T> values) { assign(values.begin(), values.end()); }
  InlineVector(const std::vector<T>& values) { assign(values.begin(), values.end()); }
  explicit InlineVector(size_t number) { resize(number); }
  InlineVector(const InlineVector& other) { assign(other.begin(), other.end()); }
  InlineVector(InlineVector&& other) noexcept { take(other); }
  InlineVector& operator=(const InlineVector& other) {
    if (this != &other) assign(other.begin(), other.end());
    return *this;
  }
  InlineVector& operator=(InlineVector&& other) noexcept {
    if (this != &other) {
      clear();
      take(other);
    }
    return *this;
  }

  T* data() { return many_.empty() ? few_.data() : many_.data(); }
  const T* data() const { return many_.empty() ? few_.data() : many_.data(); }
  size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  T* begin() { return data(); }
  T* end() { return data() + size_; }
  const T* begin() const { return data(); }
  const T* end() const { return data() + size_; }
  T& operator[](size_t idx) { return data()[idx]; }
  const T& operator[](size_t idx) const { return data()[idx]; }
  T& front() { return data()[0]; }
  const T& front() const { return data()[0]; }
  T& back() { return data()[size_ - 1]; }
  const T& back() const { return data()[size_ - 1]; }

  void push_back(T value) {
    if (size_ < N && many_.empty()) {
      few_[size_++] = std::move(value);
      return;
    }
    if (many_.empty()) spill();
    many_.push_back(std::move(value));
    ++size_;
  }
  template <class... Args>
  T& emplace_back(Args&&... args) {
    push_back(T{std::forward<Args>(args)...});
    return back();
  }
  template <class Iterator>
  void assign(Iterator first, Iterator last) {
    clear();
    const auto number = static_cast<size_t>(std::distance(first, last));
    if (number > N)
      many_.assign(first, last);
    else
      std::copy(first, last, few_.begin());
    size_ = number;
  }
  template <class Iterator>
  void append(Iterator first, Iterator last) {
    for (; first != last; ++first) push_back(*first);
  }
  void resize(size_t number) {
    while (size_ > number) pop_back();
    while (size_ < number) push_back(T());
  }
  void pop_back() {
    back() = T();
    --size_;
    if (!many_.empty()) many_.pop_back();
  }
  void clear() {
    if (many_.empty()) std::fill_n(few_.begin(), size_, T());
    many_.clear();
    size_ = 0;
  }

  bool operator==(const InlineVector& other) const {
    return std::equal(begin(), end(), other.begin(), other.end());
  }
  bool operator==(const std::vector<T>& other) const {
    return std::equal(begin(), end(), other.begin(), other.end());
  }
  operator std::vector<T>() const { return {begin(), end()}; }

 private:
  void spill() {
    many_.reserve(2 * N);
    std::move(few_.begin(), few_.begin() + size_, std::back_inserter(many_));
    std::fill_n(few_.begin(), size_, T());
  }
  // Only into an empty vector.
  void take(InlineVector& other) noexcept {
    if (other.many_.empty()) {
      std::move(other.few_.begin(), other.few_.begin() + other.size_, few_.begin());
      std::fill_n(other.few_.begin(), other.size_, T());
    }
    many_ = std::exchange(other.many_, {});
    size_ = std::exchange(other.size_, 0);
  }

  size_t size_ = 0;
  std::array<T, N> few_{};
  std::vector<T> many_;  // all elements, if there are or have been more than N
};

}  // namespace pipecomm
