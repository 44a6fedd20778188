// The few things that a communicator needs of a device: streams, events, memory, copies. The real
// one is CUDA; tests replace it by a fake.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>

#include "copy/copy_buffers.h"
#include "plan/lower.h"

namespace pipecomm {

using StreamHandle = void*;              // cudaStream_t
using EventPtr = std::shared_ptr<void>;  // a recorded event; goes back to a pool when dropped

inline constexpr uint64_t kBrokenCapture = UINT64_MAX;

// All calls are for one device, whatever device is current on the calling thread. Failures are
// std::exception. Nothing waits for the device.
class DeviceRuntime {
 public:
  virtual ~DeviceRuntime() = default;

  // First call on a thread of the library: its calls then do not disturb captures on other threads.
  virtual void adopt_thread() {}
  virtual StreamHandle current_stream() = 0;  // of the calling thread
  // Of high priority. Serves only this object during its life, and is never destroyed.
  virtual StreamHandle new_stream() = 0;
  // The capture of a graph that the stream takes part in, 0: none. kBrokenCapture: an error has
  // invalidated it, and it is not ended yet.
  virtual uint64_t capture_of(StreamHandle stream) = 0;
  bool is_capturing(StreamHandle stream) { return capture_of(stream) != 0; }

  virtual EventPtr record(StreamHandle stream) = 0;
  virtual void wait(StreamHandle stream, const EventPtr& event) = 0;
  // Whether the work before the event is done. Harmless to captures on other threads.
  virtual bool is_done(const EventPtr& event) = 0;

  // Memory for work on `stream` only; may be dropped as soon as that work is enqueued.
  virtual std::shared_ptr<std::byte> allocate(int64_t num_bytes, StreamHandle stream) = 0;

  // Free memory of the device.
  virtual int64_t free_bytes() { return 0; }
  virtual int num_multiprocessors() { return 128; }

  // Memory of the host that the device reads and writes, too. Harmless to captures on other threads.
  virtual std::shared_ptr<std::byte> allocate_host(int64_t num_bytes) = 0;

  // A number to which `count` adds 1, readable at any time: 0 at first, and never freed, since a graph
  // may outlive everything else. Null if the device cannot count.
  using Counter = std::atomic<uint32_t>;
  virtual Counter* new_counter() { return nullptr; }
  virtual void count(StreamHandle, Counter&) {}

  virtual void copy(void* destination, const void* source, int64_t num_bytes,
                    StreamHandle stream) = 0;
  virtual void execute(std::span<const CopyTask> tasks, const CopyBuffers& buffers,
                       const Scale& scale, StreamHandle stream) = 0;

  // Of the device, shared by all objects of this process for it: held while NCCL is given work.
  virtual std::mutex& launch_mutex() = 0;
};

}  // namespace pipecomm
