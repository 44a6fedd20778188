#include "transport/shm/window.h"

#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <exception>
#include <set>
#include <stdexcept>

namespace pipecomm::shm {
namespace {

// How much unused memory may stay backed by pages.
constexpr int64_t kMaxIdleBytes = int64_t{1} << 30;
constexpr int64_t kScratchBytes = 64 << 10;

// Bytes from the first to the last byte of a part, or nothing if a field is invalid.
std::optional<int64_t> span_bytes(const StridedCopy& copy) {
  if (copy.run_bytes < 1 || copy.num_dims < 0 || copy.num_dims > kMaxCopyDims) return {};
  int64_t span = copy.run_bytes;
  int64_t volume = copy.run_bytes;
  for (int dim = 0; dim < copy.num_dims; ++dim) {
    int64_t extent;
    if (copy.count[dim] < 1 || copy.dst_stride_bytes[dim] < 0 ||
        __builtin_mul_overflow(copy.count[dim] - 1, copy.dst_stride_bytes[dim], &extent) ||
        __builtin_add_overflow(span, extent, &span) ||
        __builtin_mul_overflow(volume, copy.count[dim], &volume))
      return {};
  }
  return span;
}

}  // namespace

WindowPool::WindowPool(SegmentPtr segment)
    : base_(segment->window()),
      num_bytes_(segment->window_bytes()),
      state_(std::make_shared<State>(std::move(segment))) {}

std::shared_ptr<std::byte> WindowPool::allocate(int64_t num_bytes) {
  if (num_bytes <= 0 || num_bytes > num_bytes_) return nullptr;
  constexpr int64_t kPage = kPageBytes;
  num_bytes = (num_bytes + kPage - 1) / kPage * kPage;
  std::lock_guard lock(state_->mutex);
  if (state_->is_over) return nullptr;
  const auto range = std::find_if(state_->free.begin(), state_->free.end(),
                                  [&](const auto& entry) { return entry.second >= num_bytes; });
  if (range == state_->free.end()) return nullptr;
  const auto [offset, range_bytes] = *range;
  state_->free.erase(range);
  if (range_bytes > num_bytes) state_->free.emplace(offset + num_bytes, range_bytes - num_bytes);
  state_->idle_bytes = std::max<int64_t>(0, state_->idle_bytes - num_bytes);
  return {base_ + offset,
          [state = state_, offset, num_bytes](std::byte*) { state->release(offset, num_bytes); }};
}

void WindowPool::end(std::span<const RequestPtr> granted) {
  std::lock_guard lock(state_->mutex);
  if (std::exchange(state_->is_over, true)) return;
  constexpr int64_t kPage = kPageBytes;
  std::vector<std::pair<int64_t, int64_t>> ranges;  // whole pages: no two results share one
  for (const RequestPtr& recv : granted) {
    const auto grant = find(*recv);
    for (uint32_t idx = 0; grant && idx < grant->num_parts; ++idx) {
      const auto& [position, begin, copy] = grant->parts[idx];
      const int64_t end = begin + *span_bytes(copy);
      ranges.emplace_back(begin / kPage * kPage, (end + kPage - 1) / kPage * kPage);
    }
  }
  std::ranges::sort(ranges);
  int64_t done = 0;  // a second time, a page would get back the content that it had in the file
  for (auto [begin, end] : ranges) {
    begin = std::max(begin, done);
    if (end <= begin) continue;
    state_->segment->make_private(begin, end - begin);
    state_->made_private.emplace_back(begin, end);
    done = end;
  }
}

void WindowPool::State::release(int64_t offset, int64_t num_bytes) {
  std::lock_guard lock(mutex);
  if (is_over) {  // nobody uses it again
    const auto advise = [this](int64_t begin, int64_t end, int advice) {
      if (begin < end) madvise(segment->window() + begin, static_cast<size_t>(end - begin), advice);
    };
    int64_t shared = offset;  // MADV_REMOVE fails where a private page lies between shared ones
    for (const auto& [begin, end] : made_private) {
      advise(shared, std::min(begin, offset + num_bytes), MADV_REMOVE);
      shared = std::max(shared, end);
    }
    advise(shared, offset + num_bytes, MADV_REMOVE);
    advise(offset, offset + num_bytes, MADV_DONTNEED);
  } else {
    idle_bytes += num_bytes;
  }
  auto next = free.lower_bound(offset);
  if (next != free.end() && offset + num_bytes == next->first) {
    num_bytes += next->second;
    next = free.erase(next);
  }
  if (next != free.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == offset) {
      before->second += num_bytes;
      num_bytes = 0;
    }
  }
  if (num_bytes > 0) free.emplace(offset, num_bytes);
  if (idle_bytes <= kMaxIdleBytes) return;
  for (const auto& [begin, bytes] : free)
    madvise(segment->window() + begin, static_cast<size_t>(bytes), MADV_REMOVE);
  idle_bytes = 0;
}

// The states of this process, for its forks.
struct WindowPool::AllStates {
  AllStates() {
    pthread_atfork(
        [] {
          get().mutex.lock();
          for (State* state : get().states) state->before_fork();
        },
        [] {
          for (State* state : get().states) state->after_fork_in_parent();
          get().mutex.unlock();
        },
        [] {
          for (State* state : get().states) state->after_fork_in_child();
          get().states.clear();  // a fork of the child copies its memory like any other
          get().mutex.unlock();
        });
  }
  static AllStates& get() {
    static auto* const only = new AllStates;  // results may outlive everything else
    return *only;
  }

  std::mutex mutex;
  std::set<State*> states;
};

WindowPool::State::State(SegmentPtr its_segment) : segment(std::move(its_segment)) {
  free.emplace(0, segment->window_bytes());
  std::lock_guard lock(AllStates::get().mutex);
  AllStates::get().states.insert(this);
}

WindowPool::State::~State() {
  std::lock_guard lock(AllStates::get().mutex);
  AllStates::get().states.erase(this);
}

// What other threads write meanwhile may be missing in the copies.
void WindowPool::State::before_fork() {
  mutex.lock();
  int64_t begin = 0;
  const auto copy_until = [&](int64_t end) {
    if (begin == end) return;
    const auto num_bytes = static_cast<size_t>(end - begin);
    void* const memory = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) return;  // the child does without
    segment->read_window(begin, end, static_cast<std::byte*>(memory));
    copies.push_back({memory, begin, end - begin});
  };
  for (const auto& [offset, num_bytes] : free) {
    copy_until(offset);
    begin = offset + num_bytes;
  }
  copy_until(segment->window_bytes());
}

void WindowPool::State::after_fork_in_parent() {
  for (const Copy& copy : copies) munmap(copy.memory, static_cast<size_t>(copy.num_bytes));
  copies.clear();
  mutex.unlock();
}

// What could not be copied must not stay shared: a child that uses it ends by SIGSEGV.
void WindowPool::State::after_fork_in_child() {
  if (mmap(segment->window(), static_cast<size_t>(segment->window_bytes()), PROT_NONE,
           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) == MAP_FAILED)
    std::terminate();
  for (const auto& [memory, offset, num_bytes] : copies)
    mremap(memory, static_cast<size_t>(num_bytes), static_cast<size_t>(num_bytes),
           MREMAP_MAYMOVE | MREMAP_FIXED, segment->window() + offset);
  copies.clear();
  is_over = true;
  mutex.unlock();
}

std::optional<Grant> WindowPool::find(const Request& recv) const {
  const auto offset_of = [this](const void* address, int64_t bytes) -> std::optional<int64_t> {
    const auto begin = reinterpret_cast<uintptr_t>(base_);
    const auto at = reinterpret_cast<uintptr_t>(address);
    if (num_bytes_ == 0 || at < begin || at - begin > static_cast<uintptr_t>(num_bytes_)) return {};
    const auto offset = static_cast<int64_t>(at - begin);
    if (bytes > num_bytes_ - offset) return {};
    return offset;
  };
  Grant grant{};
  grant.kind = GrantKind::direct;
  if (!recv.copy) {
    const auto offset = offset_of(recv.data, recv.descriptor.num_bytes);
    if (!offset) return {};
    grant.num_parts = 1;
    grant.parts[0] = {0, *offset, {.run_bytes = recv.descriptor.num_bytes}};
    return grant;
  }
  const LoweredMessage& message = *recv.copy->message;
  const auto tasks = recv.copy->exchange->unpack().subspan(message.task_begin,
                                                           message.task_end - message.task_begin);
  if (tasks.size() > kMaxWindowParts) return {};
  for (const CopyTask& task : tasks) {
    const auto span = span_bytes(task.copy);
    if (!span || task.dst_tensor_idx < 0 || task.arithmetic != Arithmetic::kBytes) return {};
    const auto offset =
        offset_of(static_cast<const std::byte*>(recv.copy->buffers->outputs[task.dst_tensor_idx]) +
                      task.dst_offset_bytes,
                  *span);
    if (!offset) return {};
    grant.parts[grant.num_parts++] = {task.src_offset_bytes - message.offset_bytes, *offset,
                                      task.copy};
  }
  return grant;
}

WindowWriter::WindowWriter(const Grant& grant, Segment& receiver, int64_t num_message_bytes)
    : window_(receiver.window()) {
  const auto refuse = [&receiver](const std::string& what) {
    throw std::runtime_error("rank " + std::to_string(receiver.rank()) + " granted " + what);
  };
  if (grant.num_parts < 1 || grant.num_parts > kMaxWindowParts)
    refuse(std::to_string(grant.num_parts) + " parts");
  int64_t position = 0;
  for (uint32_t part_idx = 0; part_idx < grant.num_parts; ++part_idx) {
    const WindowPart& part = grant.parts[part_idx];
    const auto span = span_bytes(part.copy);
    if (!span || part.offset_bytes < 0 || *span > receiver.window_bytes() ||
        part.offset_bytes > receiver.window_bytes() - *span || part.position_bytes < position ||
        part.copy.bytes() > num_message_bytes - part.position_bytes)
      refuse("memory outside its window");
    position = part.position_bytes + part.copy.bytes();
    CopyTask& task = parts_.tasks.emplace_back();
    task.dst_tensor_idx = 0;
    task.src_offset_bytes = part.position_bytes;
    task.dst_offset_bytes = part.offset_bytes;
    task.copy = part.copy;
    const int last = task.copy.num_dims;
    for (int dim = last - 1; dim >= 0; --dim)  // the source is the message itself: no gaps
      task.copy.src_stride_bytes[dim] =
          dim == last - 1 ? task.copy.run_bytes
                          : task.copy.src_stride_bytes[dim + 1] * task.copy.count[dim + 1];
  }
  message_.bytes = num_message_bytes;
  message_.task_end = static_cast<int>(parts_.tasks.size());
  const CopyTask& first = parts_.tasks.front();
  if (first.copy.run_bytes == num_message_bytes && first.copy.num_dims == 0) {
    message_.tensor_idx = 0;
    message_.offset_bytes = first.dst_offset_bytes;
  }
}

void WindowWriter::write(const Request& send, int64_t begin, int64_t end) const {
  void* const window[] = {window_};
  const CopyBuffers to{.inputs = {}, .outputs = window};
  if (!send.copy) return unpack_range(parts_, message_, to, begin, end, send.data + begin);
  if (!message_.is_staged())
    return read_payload(send, begin, end,
                        static_cast<std::byte*>(window_) + message_.offset_bytes + begin);
  thread_local std::array<std::byte, kScratchBytes> scratch;  // between packing and unpacking
  for (int64_t at = begin; at < end; at += kScratchBytes) {
    const int64_t stop = std::min(at + kScratchBytes, end);
    read_payload(send, at, stop, scratch.data());
    unpack_range(parts_, message_, to, at, stop, scratch.data());
  }
}

}  // namespace pipecomm::shm
