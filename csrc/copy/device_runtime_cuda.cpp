#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "copy/copy_cuda.h"
#include "copy/device_runtime_cuda.h"

namespace pipecomm {
namespace {

void require(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // reported here, and not once more by the next call of somebody else
  throw std::runtime_error(std::string("CUDA: ") + what + ": " + cudaGetErrorString(error) + " (" +
                           cudaGetErrorName(error) + ")");
}

cudaStream_t stream_of(StreamHandle stream) { return static_cast<cudaStream_t>(stream); }

// Lets this thread ask about events while it, or another thread, captures a graph: a question about
// work outside of the capture does not harm it.
class RelaxedCapture {
 public:
  RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

class CudaRuntime final : public DeviceRuntime {
 public:
  CudaRuntime(int device_idx, int num_sms)
      : device_idx_(static_cast<c10::DeviceIndex>(device_idx)), num_sms_(num_sms) {
    c10::cuda::CUDAGuard guard(device_idx_);
    int lowest = 0;
    require(cudaDeviceGetStreamPriorityRange(&lowest, &highest_priority_), "stream priorities");
    require(preload_cuda_copy(), "loading the copy kernels");
  }
  ~CudaRuntime() override {
    for (cudaStream_t stream : streams_) cudaStreamDestroy(stream);
  }

  StreamHandle current_stream() override {
    return c10::cuda::getCurrentCUDAStream(device_idx_).stream();
  }

  // Not from torch's pool, whose streams are handed out again after a while: two channels, or a
  // channel and somebody else's collective, on one stream can deadlock.
  StreamHandle new_stream() override {
    c10::cuda::CUDAGuard guard(device_idx_);
    cudaStream_t stream = nullptr;
    require(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, highest_priority_),
            "creating a stream");
    streams_.push_back(stream);
    return stream;
  }

  bool is_capturing(StreamHandle stream) override {
    c10::cuda::CUDAGuard guard(device_idx_);
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    require(cudaStreamIsCapturing(stream_of(stream), &status), "asking for a capture");
    return status != cudaStreamCaptureStatusNone;
  }

  EventPtr record(StreamHandle stream) override {
    c10::cuda::CUDAGuard guard(device_idx_);
    const EventPtr event = events_->take();
    require(cudaEventRecord(static_cast<cudaEvent_t>(event.get()), stream_of(stream)),
            "recording an event");
    return event;
  }

  void wait(StreamHandle stream, const EventPtr& event) override {
    c10::cuda::CUDAGuard guard(device_idx_);
    require(cudaStreamWaitEvent(stream_of(stream), static_cast<cudaEvent_t>(event.get()), 0),
            "waiting for an event");
  }

  bool is_done(const EventPtr& event) override {
    const RelaxedCapture relaxed;
    const cudaError_t state = cudaEventQuery(static_cast<cudaEvent_t>(event.get()));
    if (state == cudaErrorNotReady) {
      cudaGetLastError();
      return false;
    }
    require(state, "an operation on the device failed");
    return true;
  }

  std::shared_ptr<std::byte> allocate(int64_t num_bytes, StreamHandle stream) override {
    if (num_bytes == 0) return nullptr;
    c10::cuda::CUDAGuard guard(device_idx_);
    namespace allocator = c10::cuda::CUDACachingAllocator;
    void* data =
        allocator::raw_alloc_with_stream(static_cast<size_t>(num_bytes), stream_of(stream));
    return {static_cast<std::byte*>(data), [](std::byte* data) { allocator::raw_delete(data); }};
  }

  void copy(void* destination, const void* source, int64_t num_bytes,
            StreamHandle stream) override {
    c10::cuda::CUDAGuard guard(device_idx_);
    require(cudaMemcpyAsync(destination, source, static_cast<size_t>(num_bytes),
                            cudaMemcpyDeviceToDevice, stream_of(stream)),
            "copying");
  }

  void execute(std::span<const CopyTask> tasks, const CopyBuffers& buffers, const Scale& scale,
               StreamHandle stream) override {
    c10::cuda::CUDAGuard guard(device_idx_);
    require(execute_cuda(tasks, buffers, scale, {stream_of(stream), num_sms_}),
            "launching a pack kernel");
  }

 private:
  // Outlives the runtime as long as an event is out.
  class Events : public std::enable_shared_from_this<Events> {
   public:
    ~Events() {
      for (cudaEvent_t event : free_) cudaEventDestroy(event);
    }
    EventPtr take() {
      cudaEvent_t event = nullptr;
      {
        std::lock_guard lock(mutex_);
        if (!free_.empty()) {
          event = free_.back();
          free_.pop_back();
        }
      }
      if (!event)
        require(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "creating an event");
      return {event, [events = shared_from_this()](void* event) {
                std::lock_guard lock(events->mutex_);
                events->free_.push_back(static_cast<cudaEvent_t>(event));
              }};
    }

   private:
    std::mutex mutex_;
    std::vector<cudaEvent_t> free_;
  };

  const c10::DeviceIndex device_idx_;
  const int num_sms_;
  int highest_priority_ = 0;
  std::vector<cudaStream_t> streams_;
  std::shared_ptr<Events> events_ = std::make_shared<Events>();
};

}  // namespace

std::shared_ptr<DeviceRuntime> make_cuda_runtime(int device_idx, int num_sms) {
  int num_devices = 0;
  require(cudaGetDeviceCount(&num_devices), "looking for devices");
  if (device_idx < 0 || device_idx >= num_devices)
    throw std::runtime_error("there is no CUDA device " + std::to_string(device_idx) +
                             ", this process sees " + std::to_string(num_devices));
  return std::make_shared<CudaRuntime>(device_idx, num_sms);
}

void mean_on_current_stream(int device_idx, void* dst, std::span<const void* const> srcs,
                            int64_t count, DType dtype) {
  const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device_idx));
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream(device_idx).stream();
  require(mean_cuda(dst, srcs, count, dtype, {stream}), "averaging tensors");
}

}  // namespace pipecomm
