// A device and an NCCL without any hardware, for several ranks in one process. Captures follow
// CUDA's rules: forks and joins by events, no dependency on work outside or in another capture, no
// queries of captured events, no unjoined stream. Breaking a rule invalidates the capture.
#pragma once

#include "copy/copy_cpu.h"
#include "fake_nccl.h"
#include "fake_world.h"

namespace fake {

// The device of one rank.
class Runtime final : public DeviceRuntime {
 public:
  int num_launches = 0;  // of copy kernels
  bool can_count = true;
  bool is_out_of_memory = false;

  Runtime() : current_(new_stream()) {}

  void set_current(StreamHandle stream) { current_ = stream; }
  void adopt_thread() override { adopted = this; }
  void begin_capture() {
    std::lock_guard lock(world->mutex);
    stream_of(current_)->capture = std::make_shared<Graph>();
  }
  // NCCL's communicators in the graph live at least as long as the graph.
  GraphPtr end_capture(bool is_broken = false);
  void replay(const GraphPtr& graph);

  StreamHandle current_stream() override { return current_; }
  StreamHandle new_stream() override {
    std::lock_guard lock(world->mutex);
    return world->new_stream(this);
  }
  uint64_t capture_of(StreamHandle stream) override {
    std::lock_guard lock(world->mutex);
    const GraphPtr graph = stream_of(stream)->capture;
    if (graph && graph->is_broken) return kBrokenCapture;
    return reinterpret_cast<uintptr_t>(graph.get());
  }

  EventPtr record(StreamHandle handle) override;
  void wait(StreamHandle handle, const EventPtr& pointer) override;
  bool is_done(const EventPtr& pointer) override;

  // Like memory of a stream-ordered allocator: overwritten once the work enqueued until it was
  // dropped is done. What is dropped after the capture that it was allocated in stays the graph's.
  std::shared_ptr<std::byte> allocate(int64_t num_bytes, StreamHandle stream) override;
  std::shared_ptr<std::byte> allocate_host(int64_t) override {
    throw std::logic_error("nothing is staged here");
  }
  Counter* new_counter() override {
    std::lock_guard lock(world->mutex);
    return can_count ? &world->counters.emplace_back(0) : nullptr;
  }
  void count(StreamHandle stream, Counter& counter) override {
    enqueue(stream, [&counter] {
      ++counter;
      return true;
    });
  }
  void copy(void* destination, const void* source, int64_t num_bytes,
            StreamHandle stream) override {
    enqueue(stream, [=] {
      std::memcpy(destination, source, size_t(num_bytes));
      return true;
    });
  }
  void execute(std::span<const CopyTask> tasks, const CopyBuffers& buffers, const Scale& scale,
               StreamHandle stream) override;

  int64_t free_bytes() override {
    std::lock_guard lock(world->mutex);
    return (int64_t{80} << 30) - world->num_taken_bytes[this];
  }
  int num_multiprocessors() override { return world->num_multiprocessors; }
  std::mutex& launch_mutex() override { return launch_mutex_; }

 private:
  static Stream* stream_of(StreamHandle stream) { return static_cast<Stream*>(stream); }

  [[noreturn]] static void break_capture(Stream* stream, const std::string& reason) {
    if (stream->capture) stream->capture->is_broken = true;
    throw std::runtime_error("CUDA: " + reason);
  }
  static void check_free(Stream* stream) {
    if (stream->capture && stream->capture->is_broken)
      throw std::runtime_error("CUDA: operation failed due to a previous error during capture");
    if (stream->num_launching > 0)
      world->errors.push_back("CUDA: work on a stream while NCCL launches on it");
  }
  void enqueue(StreamHandle stream, const Work& work) {
    std::lock_guard lock(world->mutex);
    check_free(stream_of(stream));
    make(stream_of(stream), [work](Replay&) { return work; });
  }
  void make(Stream* stream, const Make& work, const std::shared_ptr<Event>& event = nullptr);

  std::mutex launch_mutex_;
  StreamHandle current_;
};

}  // namespace fake
