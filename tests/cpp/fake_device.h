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
  GraphPtr end_capture(bool is_broken = false) {
    std::lock_guard lock(world->mutex);
    const GraphPtr graph = stream_of(current_)->capture;
    if (graph->is_broken != is_broken)
      world->errors.push_back("CUDA: operation failed due to a previous error during capture");
    for (const auto& [stream, parts] : graph->parts)
      if (!is_broken && stream_of(current_)->before[stream] < parts.size())
        world->errors.push_back("CUDA: a capture ends with unjoined work");
    for (const auto& stream : world->streams) {
      if (stream->capture != graph) continue;
      stream->capture = nullptr;
      stream->before.clear();
    }
    graph->capturing = false;
    return graph;
  }
  void replay(const GraphPtr& graph) {
    std::lock_guard lock(world->mutex);
    auto queues = std::make_shared<std::vector<std::deque<Work>>>();
    Replay replay;
    for (const auto& [stream, parts] : graph->parts) {
      auto& queue = queues->emplace_back();
      for (const Make& make : parts) queue.push_back(make(replay));
    }
    world->enqueue(stream_of(current_), [queues] {
      bool done = true;
      for (std::deque<Work>& queue : *queues) {
        world->run_queue(queue);
        done &= queue.empty();
      }
      world->has_started = true;
      return done;
    });
    world->advance();
  }

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

  EventPtr record(StreamHandle handle) override {
    std::lock_guard lock(world->mutex);
    Stream* const stream = stream_of(handle);
    check_free(stream);
    auto event = std::make_shared<Event>();
    make(
        stream,
        [event](Replay& replay) -> Work {
          return [own = replay.of(event)] { return own->done = true; };
        },
        event);
    if (stream->capture) {
      event->captured = true;
      event->graph = stream->capture;
      event->before = stream->before;
    }
    return event;
  }
  void wait(StreamHandle handle, const EventPtr& pointer) override {
    std::lock_guard lock(world->mutex);
    Stream* const stream = stream_of(handle);
    check_free(stream);
    const auto event = std::static_pointer_cast<Event>(pointer);
    if (stream->capture && !event->captured)
      break_capture(stream, "dependency created on uncaptured work in another stream");
    if (event->captured) {
      const GraphPtr graph = event->graph.lock();
      if (!graph || !graph->capturing)
        break_capture(stream, "wait for an event of a capture that has ended");
      if (stream->capture && stream->capture != graph)
        break_capture(stream, "merge of two captures");
      stream->capture = graph;
      for (const auto& [other, count] : event->before)
        stream->before[other] = std::max(stream->before[other], count);
    }
    make(
        stream,
        [event](Replay& replay) -> Work { return [own = replay.of(event)] { return own->done; }; },
        event);
  }
  bool is_done(const EventPtr& pointer) override {
    const auto event = std::static_pointer_cast<Event>(pointer);
    if (event->captured) throw std::runtime_error("CUDA: query of a captured event");
    while (world->driver_is_stuck) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    std::lock_guard lock(world->mutex);
    ++world->num_event_queries;
    world->advance();
    return event->done;
  }

  // Like memory of a stream-ordered allocator: overwritten once the work enqueued until it was
  // dropped is done. What is dropped after the capture that it was allocated in stays the graph's.
  std::shared_ptr<std::byte> allocate(int64_t num_bytes, StreamHandle stream) override {
    if (num_bytes == 0) return nullptr;
    if (is_out_of_memory) throw std::runtime_error("CUDA out of memory");
    auto memory = std::make_shared<std::vector<std::byte>>(num_bytes);
    std::lock_guard lock(world->mutex);
    const GraphPtr graph = stream_of(stream)->capture;
    if (graph) graph->pool.push_back(memory);
    return {memory->data(), [this, memory, stream, is_of_graph = bool(graph)](std::byte*) {
              std::lock_guard lock_again(world->mutex);
              if (is_of_graph && !stream_of(stream)->capture) return;
              make(stream_of(stream), [memory](Replay&) -> Work {
                return [memory] {
                  std::fill(memory->begin(), memory->end(), std::byte{0xEE});
                  return true;
                };
              });
            }};
  }
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
               StreamHandle stream) override {
    ++num_launches;
    enqueue(stream,
            [tasks = std::vector<CopyTask>(tasks.begin(), tasks.end()),
             inputs = std::vector<const void*>(buffers.inputs.begin(), buffers.inputs.end()),
             outputs = std::vector<void*>(buffers.outputs.begin(), buffers.outputs.end()),
             send = buffers.send_staging, recv = buffers.recv_staging, scale] {
              execute_cpu(tasks, {inputs, outputs, send, recv}, scale);
              return true;
            });
  }

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
  void make(Stream* stream, const Make& work, const std::shared_ptr<Event>& event = nullptr) {
    if (stream->capture) {
      auto& parts = stream->capture->parts[stream];
      parts.push_back(work);
      stream->before[stream] = parts.size();
      return;
    }
    Replay once;
    if (event) once.events[event.get()] = event;
    world->enqueue(stream, work(once), event != nullptr);
    world->advance();
  }

  std::mutex launch_mutex_;
  StreamHandle current_;
};

}  // namespace fake
