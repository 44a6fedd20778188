// The few things that a communicator asks of a device: streams, events, memory, copies. The real
// one is CUDA; tests put a fake behind it.
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

  // First on a thread that belongs to the library, whose calls then do no harm to captures on others.
  virtual void adopt_thread() {}
  virtual StreamHandle current_stream() = 0;  // of the calling thread
  // Of high priority. Serves this object alone as long as it lives, and is never destroyed.
  virtual StreamHandle new_stream() = 0;
  // Which capture of a graph the stream takes part in, 0: none. One that an error has broken, and
  // that is not ended yet, is kBrokenCapture.
  virtual uint64_t capture_of(StreamHandle stream) = 0;
  bool is_capturing(StreamHandle stream) { return capture_of(stream) != 0; }

  virtual EventPtr record(StreamHandle stream) = 0;
  virtual void wait(StreamHandle stream, const EventPtr& event) = 0;
  // Whether the work before the event is done. Harmless to captures on other threads.
  virtual bool is_done(const EventPtr& event) = 0;

  // Memory for work on `stream` only; may be dropped as soon as that work is enqueued.
  virtual std::shared_ptr<std::byte> allocate(int64_t num_bytes, StreamHandle stream) = 0;

  // Of the device, whoever uses the rest.
  virtual int64_t free_bytes() { return 0; }
  virtual int num_multiprocessors() { return 128; }

  // Memory of the host that the device reads and writes, too. Harmless to captures on other threads.
  virtual std::shared_ptr<std::byte> allocate_host(int64_t num_bytes) = 0;

  // A number that `count` adds 1 to, and that is read at any time: 0 at first, and there for good,
  // since a graph may outlive everything else. Null if the device cannot count.
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
