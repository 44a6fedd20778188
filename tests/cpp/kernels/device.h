// Device memory, streams, graphs and times for the program that tests the copy kernels.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#define CUDA(call) device::require(call, #call)

namespace device {

inline void require(cudaError_t error, const char* what) {
  if (error != cudaSuccess)
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

// A planted error, to show that the checks can fail: in a byte of every result, or of its guards.
enum class Plant { kNothing, kResult, kGuard };
inline Plant plant = Plant::kNothing;

inline constexpr uint8_t kGuardByte = 0x5A;

// Memory in an allocation of its own, which begins at an address of the given residue modulo 16.
// With few guard bytes a sanitizer sees every access beyond it; the guards show what was written.
// Host operations on it are complete when the call returns, also for non-blocking streams.
class Memory {
 public:
  explicit Memory(int64_t bytes, int64_t residue = 0, int64_t guard_bytes = 64)
      : bytes_(bytes), front_(guard_bytes + residue), back_(guard_bytes) {
    CUDA(cudaMalloc(&allocation_, std::max<int64_t>(front_ + bytes_ + back_, 1)));
    CUDA(cudaMemset(allocation_, kGuardByte, front_ + bytes_ + back_));
    CUDA(cudaDeviceSynchronize());
  }
  ~Memory() { (void)cudaFree(allocation_); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  char* data() const { return static_cast<char*>(allocation_) + front_; }
  int64_t size() const { return bytes_; }

  void upload(const void* from, int64_t offset, int64_t bytes) {
    CUDA(cudaMemcpy(data() + offset, from, bytes, cudaMemcpyHostToDevice));
    CUDA(cudaDeviceSynchronize());
  }
  void upload(const void* from) { upload(from, 0, bytes_); }

  void download(void* to, int64_t offset, int64_t bytes) const {
    CUDA(cudaMemcpy(to, data() + offset, bytes, cudaMemcpyDeviceToHost));
    if (plant == Plant::kResult && bytes > 0) *static_cast<uint8_t*>(to) ^= 1;
  }
  std::vector<uint8_t> download() const {
    std::vector<uint8_t> bytes(bytes_);
    download(bytes.data(), 0, bytes_);
    return bytes;
  }
  void fill(int value) {
    CUDA(cudaMemset(data(), value, bytes_));
    CUDA(cudaDeviceSynchronize());
  }

  bool surroundings_are_intact() const {
    std::vector<uint8_t> guards(front_ + back_);
    CUDA(cudaMemcpy(guards.data(), allocation_, front_, cudaMemcpyDeviceToHost));
    CUDA(cudaMemcpy(guards.data() + front_, data() + bytes_, back_, cudaMemcpyDeviceToHost));
    if (plant == Plant::kGuard && !guards.empty()) guards.back() ^= 1;
    return std::all_of(guards.begin(), guards.end(),
                       [](uint8_t byte) { return byte == kGuardByte; });
  }

 private:
  void* allocation_ = nullptr;
  int64_t bytes_, front_, back_;
};

class Stream {
 public:
  Stream() { CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
  ~Stream() { (void)cudaStreamDestroy(stream_); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  operator cudaStream_t() const { return stream_; }
  void synchronize() const { CUDA(cudaStreamSynchronize(stream_)); }

 private:
  cudaStream_t stream_ = nullptr;
};

// The work that `enqueue` puts on the stream, to be launched any number of times.
class Graph {
 public:
  template <typename Enqueue>
  Graph(const Stream& stream, const Enqueue& enqueue) {
    cudaGraph_t graph = nullptr;
    CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    enqueue();
    CUDA(cudaStreamEndCapture(stream, &graph));
    CUDA(cudaGraphInstantiateWithFlags(&exec_, graph, 0));
    CUDA(cudaGraphDestroy(graph));
  }
  ~Graph() { (void)cudaGraphExecDestroy(exec_); }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  void launch(const Stream& stream) const { CUDA(cudaGraphLaunch(exec_, stream)); }

 private:
  cudaGraphExec_t exec_ = nullptr;
};

// Microseconds between events before and after the work that `enqueue` puts on the stream.
class Timer {
 public:
  Timer() {
    CUDA(cudaEventCreate(&begin_));
    CUDA(cudaEventCreate(&end_));
  }
  ~Timer() {
    (void)cudaEventDestroy(begin_);
    (void)cudaEventDestroy(end_);
  }
  Timer(const Timer&) = delete;
  Timer& operator=(const Timer&) = delete;

  template <typename Enqueue>
  double us(const Stream& stream, const Enqueue& enqueue) const {
    float milliseconds = 0;
    CUDA(cudaEventRecord(begin_, stream));
    enqueue();
    CUDA(cudaEventRecord(end_, stream));
    CUDA(cudaEventSynchronize(end_));
    CUDA(cudaEventElapsedTime(&milliseconds, begin_, end_));
    return milliseconds * 1000.0;
  }

 private:
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
};

inline std::string name() {
  cudaDeviceProp properties;
  CUDA(cudaGetDeviceProperties(&properties, 0));
  return properties.name;
}

inline double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

}  // namespace device
