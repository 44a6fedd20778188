#include "fake_device.h"

namespace fake {

GraphPtr Runtime::end_capture(bool is_broken) {
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

void Runtime::replay(const GraphPtr& graph) {
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

EventPtr Runtime::record(StreamHandle handle) {
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

void Runtime::wait(StreamHandle handle, const EventPtr& pointer) {
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
    if (stream->capture && stream->capture != graph) break_capture(stream, "merge of two captures");
    stream->capture = graph;
    for (const auto& [other, count] : event->before)
      stream->before[other] = std::max(stream->before[other], count);
  }
  make(
      stream,
      [event](Replay& replay) -> Work { return [own = replay.of(event)] { return own->done; }; },
      event);
}

bool Runtime::is_done(const EventPtr& pointer) {
  const auto event = std::static_pointer_cast<Event>(pointer);
  if (event->captured) throw std::runtime_error("CUDA: query of a captured event");
  while (world->driver_is_stuck) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  std::lock_guard lock(world->mutex);
  ++world->num_event_queries;
  world->advance();
  return event->done;
}

std::shared_ptr<std::byte> Runtime::allocate(int64_t num_bytes, StreamHandle stream) {
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

void Runtime::execute(std::span<const CopyTask> tasks, const CopyBuffers& buffers,
                      const Scale& scale, StreamHandle stream) {
  ++num_launches;
  enqueue(stream, [tasks = std::vector<CopyTask>(tasks.begin(), tasks.end()),
                   inputs = std::vector<const void*>(buffers.inputs.begin(), buffers.inputs.end()),
                   outputs = std::vector<void*>(buffers.outputs.begin(), buffers.outputs.end()),
                   send = buffers.send_staging, recv = buffers.recv_staging, scale] {
    execute_cpu(tasks, {inputs, outputs, send, recv}, scale);
    return true;
  });
}

void Runtime::make(Stream* stream, const Make& work, const std::shared_ptr<Event>& event) {
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

}  // namespace fake
