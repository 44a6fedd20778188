#include <cuda.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <new>
#include <stdexcept>
#include <vector>

#include "copy/copy_cuda.h"
#include "copy/count_cuda.h"
#include "copy/device_runtime_cuda.h"
#include "copy/torch_memory.h"

namespace pipecomm {
namespace {

void require(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // reported here: a later call by other code must not report it again
  throw std::runtime_error(std::string("CUDA: ") + what + ": " + cudaGetErrorString(error) + " (" +
                           cudaGetErrorName(error) + ")");
}

cudaStream_t stream_of(StreamHandle stream) { return static_cast<cudaStream_t>(stream); }

// The driver's functions, obtained from the runtime: nothing links to libcuda.
template <class Function>
Function* driver_function(const char* name) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
  require(cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &found),
          name);
#else
  require(cudaGetDriverEntryPoint(name, &function, cudaEnableDefault, &found), name);
#endif
  if (!function) throw std::runtime_error(std::string("CUDA: the driver has no ") + name);
  return reinterpret_cast<Function*>(function);
}

// Sets the device of this thread while a call runs. cudaSetDevice could not be undone: on a thread that
// never chose a device, going back to device 0 would create a context there.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device_idx) {
    int current = -1;
    require(cudaGetDevice(&current), "asking for the device");
    if (current == device_idx) return;
    static auto* const push = driver_function<decltype(cuCtxPushCurrent)>("cuCtxPushCurrent");
    require(cudaError_t(push(context_of(device_idx))), "choosing the device");
    has_pushed_ = true;
  }
  ~DeviceGuard() {
    if (!has_pushed_) return;
    static auto* const pop = driver_function<decltype(cuCtxPopCurrent)>("cuCtxPopCurrent");
    CUcontext context = nullptr;
    pop(&context);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  // The primary context, which the runtime and torch use; retained for as long as the process lives.
  static CUcontext context_of(int device_idx) {
    static std::mutex mutex;
    static auto* const contexts = new std::map<int, CUcontext>;
    std::lock_guard lock(mutex);
    CUcontext& context = (*contexts)[device_idx];
    if (!context) {
      auto* const retain =
          driver_function<decltype(cuDevicePrimaryCtxRetain)>("cuDevicePrimaryCtxRetain");
      require(cudaError_t(retain(&context, device_idx)), "opening the device");
    }
    return context;
  }

  bool has_pushed_ = false;
};

// For destructors: does nothing if the driver has already shut down, as when the process ends.
template <class Body>
void at_the_end(int device_idx, Body&& body) {
  try {
    const DeviceGuard guard(device_idx);
    body();
  } catch (const std::exception&) {
  }
}

// Allows this thread to query events while it, or another thread, captures a graph: querying work
// outside the capture does not affect it.
class RelaxedCapture {
 public:
  RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

bool is_without_image(cudaError_t error) {
  return error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction;
}

cudaError_t load_kernels() {
  cudaError_t error = preload_cuda_copy();
  if (error == cudaSuccess) error = preload_cuda_mean();
  return error == cudaSuccess ? preload_cuda_count() : error;
}

// For GPUs without kernels in this build: the driver copies the loops of a task from `dim` on.
cudaError_t copy_with_driver(const StridedCopy& copy, const char* source, char* destination,
                             cudaStream_t stream, int dim = 0) {
  const int64_t run = copy.run_bytes;
  const bool has_loop = dim < std::min(copy.num_dims, kMaxCopyDims);
  const int64_t from = has_loop ? copy.src_stride_bytes[dim] : run;
  const int64_t to = has_loop ? copy.dst_stride_bytes[dim] : run;
  constexpr int64_t kMaxPitch = INT32_MAX;
  const bool is_table =
      copy.num_dims - dim == 1 && std::min(from, to) >= run && std::max(from, to) <= kMaxPitch;
  if (!has_loop)
    return cudaMemcpyAsync(destination, source, size_t(run), cudaMemcpyDefault, stream);
  if (is_table)
    return cudaMemcpy2DAsync(destination, size_t(to), source, size_t(from), size_t(run),
                             size_t(copy.count[dim]), cudaMemcpyDefault, stream);
  for (int64_t idx = 0; idx < copy.count[dim]; ++idx) {
    const cudaError_t error =
        copy_with_driver(copy, source + idx * from, destination + idx * to, stream, dim + 1);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

constexpr size_t kNumPinnedCounters = 1 << 14;
static_assert(sizeof(DeviceRuntime::Counter) == sizeof(uint32_t) &&
              DeviceRuntime::Counter::is_always_lock_free);

// Shared by all communicators of this process on one device; lives as long as the process.
class SharedDevice {
 public:
  static SharedDevice& get(int device_idx) {
    static std::mutex mutex;
    static auto* const devices = new std::map<int, SharedDevice>;
    std::lock_guard lock(mutex);
    return (*devices)[device_idx];
  }

  std::mutex launch_mutex;

  // Streams are reused and never destroyed: torch's allocator keeps blocks under the handle of the
  // stream for which they were made, and the handle would be invalid, or that of another stream.
  cudaStream_t take() {
    std::lock_guard lock(mutex_);
    if (free_.empty()) return nullptr;
    cudaStream_t stream = free_.back();
    free_.pop_back();
    return stream;
  }
  // Except those on which a kernel may still hang.
  void give_back(const std::vector<cudaStream_t>& streams) {
    const RelaxedCapture relaxed;
    std::lock_guard lock(mutex_);
    for (cudaStream_t stream : streams)
      if (cudaStreamQuery(stream) == cudaSuccess) free_.push_back(stream);
    cudaGetLastError();
  }

  // Pinning memory may wait for the device, and so for other ranks: the first counters are made before
  // a communicator enqueues anything.
  void reserve_counters() {
    std::lock_guard lock(counters_mutex_);
    pin_counters();
  }
  DeviceRuntime::Counter* take_counter() {
    std::lock_guard lock(counters_mutex_);
    pin_counters();
    DeviceRuntime::Counter* const counter = &counters_.front();
    counters_ = counters_.subspan(1);
    return counter;
  }

 private:
  void pin_counters() {
    if (!counters_.empty()) return;
    const RelaxedCapture relaxed;
    void* memory = nullptr;
    require(cudaHostAlloc(&memory, kNumPinnedCounters * sizeof(DeviceRuntime::Counter),
                          cudaHostAllocPortable),
            "allocating pinned memory");
    counters_ = {new (memory) DeviceRuntime::Counter[kNumPinnedCounters]{}, kNumPinnedCounters};
  }

  std::mutex mutex_;
  std::vector<cudaStream_t> free_;
  std::mutex counters_mutex_;
  std::span<DeviceRuntime::Counter> counters_;  // not handed out yet
};

class CudaRuntime final : public DeviceRuntime {
 public:
  CudaRuntime(int device_idx, int num_sms)
      : device_idx_(device_idx), num_sms_(num_sms), shared_(SharedDevice::get(device_idx)) {
    const DeviceGuard guard(device_idx_);
    int lowest = 0;
    require(cudaDeviceGetStreamPriorityRange(&lowest, &highest_priority_), "stream priorities");
    const cudaError_t loaded = load_kernels();
    has_kernels_ = !is_without_image(loaded);
    if (has_kernels_) {
      require(loaded, "loading the kernels");
      shared_.reserve_counters();
    } else {
      cudaGetLastError();
    }
  }
  ~CudaRuntime() override {
    at_the_end(device_idx_, [this] { shared_.give_back(streams_); });
  }

  void adopt_thread() override {
    require(cudaSetDevice(device_idx_), "choosing the device");
    relax_captures();
  }

  StreamHandle current_stream() override { return current_torch_stream(device_idx_); }

  // Not from torch's pool, whose streams are handed out again after a while: two channels, or a
  // channel and another library's collective, on one stream can deadlock.
  StreamHandle new_stream() override {
    const DeviceGuard guard(device_idx_);
    cudaStream_t stream = shared_.take();
    if (!stream)
      require(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, highest_priority_),
              "creating a stream");
    std::lock_guard lock(streams_mutex_);
    streams_.push_back(stream);
    return stream;
  }

  uint64_t capture_of(StreamHandle stream) override {
    const DeviceGuard guard(device_idx_);
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    unsigned long long id = 0;
    require(cudaStreamGetCaptureInfo(stream_of(stream), &status, &id), "asking for a capture");
    if (status == cudaStreamCaptureStatusNone) return 0;
    return status == cudaStreamCaptureStatusActive ? id + 1 : kBrokenCapture;
  }

  EventPtr record(StreamHandle stream) override {
    const DeviceGuard guard(device_idx_);
    const EventPtr event = events_->take();
    require(cudaEventRecord(static_cast<cudaEvent_t>(event.get()), stream_of(stream)),
            "recording an event");
    return event;
  }

  void wait(StreamHandle stream, const EventPtr& event) override {
    const DeviceGuard guard(device_idx_);
    require(cudaStreamWaitEvent(stream_of(stream), static_cast<cudaEvent_t>(event.get()), 0),
            "waiting for an event");
  }

  // Guarded, too: the first query of a thread would create a context on device 0.
  bool is_done(const EventPtr& event) override {
    const DeviceGuard guard(device_idx_);
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
    return allocate_on_stream(num_bytes, device_idx_, stream);
  }

  int64_t free_bytes() override {
    const DeviceGuard guard(device_idx_);
    size_t free = 0, total = 0;
    if (cudaMemGetInfo(&free, &total) != cudaSuccess) cudaGetLastError();
    return static_cast<int64_t>(free);
  }

  int num_multiprocessors() override {
    int number = 0;
    const auto kind = cudaDevAttrMultiProcessorCount;
    if (cudaDeviceGetAttribute(&number, kind, device_idx_) == cudaSuccess) return number;
    cudaGetLastError();
    return DeviceRuntime::num_multiprocessors();
  }

  std::shared_ptr<std::byte> allocate_host(int64_t num_bytes) override {
    const DeviceGuard guard(device_idx_);
    const RelaxedCapture relaxed;
    void* data = nullptr;
    require(cudaHostAlloc(&data, static_cast<size_t>(num_bytes), cudaHostAllocPortable),
            "allocating pinned memory");
    return {static_cast<std::byte*>(data), [device_idx = device_idx_](std::byte* memory) {
              at_the_end(device_idx, [memory] {
                const RelaxedCapture relaxed_too;
                cudaFreeHost(memory);
              });
            }};
  }

  Counter* new_counter() override {
    const DeviceGuard guard(device_idx_);
    return has_kernels_ ? shared_.take_counter() : nullptr;
  }
  void count(StreamHandle stream, Counter& counter) override {
    const DeviceGuard guard(device_idx_);
    require(count_cuda(reinterpret_cast<uint32_t*>(&counter), stream_of(stream)),
            "launching a kernel that counts");
  }

  void copy(void* destination, const void* source, int64_t num_bytes,
            StreamHandle stream) override {
    const DeviceGuard guard(device_idx_);
    require(cudaMemcpyAsync(destination, source, static_cast<size_t>(num_bytes),
                            cudaMemcpyDeviceToDevice, stream_of(stream)),
            "copying");
  }

  void execute(std::span<const CopyTask> tasks, const CopyBuffers& buffers, const Scale& scale,
               StreamHandle stream) override {
    const DeviceGuard guard(device_idx_);
    if (!has_kernels_) return execute_with_driver(tasks, buffers, stream_of(stream));
    std::lock_guard lock(recent_mutex_);
    require(execute_cuda(recent_tasks_.resolve(tasks, buffers), buffers, scale,
                         {stream_of(stream), num_sms_}),
            "launching a pack kernel");
  }

  std::mutex& launch_mutex() override { return shared_.launch_mutex; }

 private:
  static void execute_with_driver(std::span<const CopyTask> tasks, const CopyBuffers& buffers,
                                  cudaStream_t stream) {
    for (const CopyTask& task : tasks) {
      if (task.arithmetic != Arithmetic::kBytes)
        throw std::runtime_error(
            "CUDA: this build has no kernels for this GPU, and scaling takes one; install "
            "pipecomm_ext again with TORCH_CUDA_ARCH_LIST naming it");
      require(copy_with_driver(task.copy, source_of(task, buffers), destination_of(task, buffers),
                               stream),
              "copying");
    }
  }

  // Outlives the runtime while an event is in use.
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

  const int device_idx_;
  const int num_sms_;
  bool has_kernels_ = true;
  SharedDevice& shared_;
  int highest_priority_ = 0;
  std::mutex streams_mutex_;
  std::vector<cudaStream_t> streams_;
  std::mutex recent_mutex_;
  RecentTasks recent_tasks_;
  std::shared_ptr<Events> events_ = std::make_shared<Events>();
};

}  // namespace

std::shared_ptr<DeviceRuntime> make_cuda_runtime(int device_idx, int num_sms) {
  int num_devices = 0;
  require(cudaGetDeviceCount(&num_devices), "looking for devices");
  if (device_idx < 0 || device_idx >= num_devices)
    throw std::runtime_error("there is no CUDA device " + std::to_string(device_idx) +
                             ": this process sees " + std::to_string(num_devices));
  return std::make_shared<CudaRuntime>(device_idx, num_sms);
}

void relax_captures() {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  require(cudaThreadExchangeStreamCaptureMode(&mode), "choosing the mode of captures");
}

std::string cuda_kernel_problem(int device_idx) {
  const DeviceGuard guard(device_idx);
  const cudaError_t error = load_kernels();
  if (error == cudaSuccess) return "";
  cudaGetLastError();
  return cudaGetErrorString(error);
}

void mean_on_current_stream(int device_idx, void* dst, std::span<const void* const> srcs,
                            int64_t count, DType dtype) {
  const DeviceGuard guard(device_idx);
  const cudaStream_t stream = stream_of(current_torch_stream(device_idx));
  require(mean_cuda(dst, srcs, count, dtype, {stream}), "averaging tensors");
}

}  // namespace pipecomm
