// A device whose memory the host cannot access: its addresses are mapped without permissions, and
// only the device's streams know where the bytes really are. Streams are threads, which run with
// delays.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include "check.h"
#include "copy/copy_cpu.h"
#include "copy/device_runtime.h"

namespace staging_device {

class Stream {
 public:
  explicit Stream(uint64_t seed) : random_(seed), thread_([this] { run(); }) {}
  ~Stream() {
    add(nullptr);
    thread_.join();
  }
  void add(std::function<void()> work) {
    std::lock_guard lock(mutex_);
    queue_.push_back(std::move(work));
    changed_.notify_all();
  }
  // Waits after the queued work.
  void delay(std::chrono::microseconds time) {
    add([time] { std::this_thread::sleep_for(time); });
  }
  std::atomic<bool> is_captured{false};

 private:
  void run() {
    while (true) {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return !queue_.empty(); });
      const auto work = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      if (!work) return;
      std::this_thread::sleep_for(std::chrono::microseconds(random_() % 200));
      work();
    }
  }
  std::mt19937_64 random_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  std::thread thread_;  // last: it uses the rest
};

class Device final : public DeviceRuntime {
 public:
  static constexpr size_t kNumBytes = size_t{1} << 20;

  Device() {
    const int file = memfd_create("device", 0);
    CHECK_EQ(ftruncate(file, kNumBytes), 0);
    memory_ = map(file, PROT_READ | PROT_WRITE);
    addresses_ = map(file, PROT_NONE);
    close(file);
  }
  ~Device() override {
    streams_.clear();
    munmap(memory_, kNumBytes);
    munmap(addresses_, kNumBytes);
  }

  std::byte* address() const { return addresses_; }  // of all memory of the device
  std::byte* behind(const void* address) const {
    const auto offset = static_cast<const std::byte*>(address) - addresses_;
    return offset >= 0 && offset < ptrdiff_t(kNumBytes) ? memory_ + offset : nullptr;
  }
  Stream* make_stream() {
    std::lock_guard lock(mutex_);
    return streams_.emplace_back(std::make_unique<Stream>(streams_.size())).get();
  }
  inline static thread_local Stream* current = nullptr;
  std::atomic<int> num_events{0}, num_launches{0};
  std::atomic<bool> is_broken{false};  // every launch fails

  StreamHandle current_stream() override { return current; }
  StreamHandle new_stream() override { return make_stream(); }
  uint64_t capture_of(StreamHandle stream) override { return of(stream)->is_captured; }
  EventPtr record(StreamHandle stream) override {
    auto event = std::make_shared<std::atomic<bool>>(false);
    if (of(stream)->is_captured) throw std::runtime_error("an event of a capture");
    of(stream)->add([event] { *event = true; });
    return event;
  }
  void wait(StreamHandle, const EventPtr&) override { throw std::logic_error("not used"); }
  bool is_done(const EventPtr& event) override {
    return *static_cast<const std::atomic<bool>*>(event.get());
  }
  std::shared_ptr<std::byte> allocate(int64_t, StreamHandle) override {
    throw std::logic_error("not used");
  }
  void copy(void*, const void*, int64_t, StreamHandle) override {
    throw std::logic_error("not used");
  }

  std::mutex& launch_mutex() override { return launch_mutex_; }
  std::shared_ptr<std::byte> allocate_host(int64_t num_bytes) override {
    auto* const data = static_cast<std::byte*>(std::malloc(num_bytes));
    std::lock_guard lock(mutex_);
    pinned_[data] = num_bytes;
    return {data, [this](std::byte* memory) {
              {
                std::lock_guard lock_again(mutex_);
                pinned_.erase(memory);
              }
              std::free(memory);
            }};
  }

  void execute(std::span<const CopyTask> tasks, const CopyBuffers& buffers, const Scale& scale,
               StreamHandle stream) override {
    ++num_launches;
    if (is_broken) throw std::runtime_error("CUDA: it is broken");
    std::vector<const void*> inputs;
    std::vector<void*> outputs;
    for (const void* input : buffers.inputs) inputs.push_back(reachable(input));
    for (void* output : buffers.outputs) outputs.push_back(reachable(output));
    void* const send_staging = reachable(buffers.send_staging);
    const void* const recv_staging = reachable(buffers.recv_staging);
    of(stream)->add([=, tasks = std::vector(tasks.begin(), tasks.end())] {
      execute_cpu(tasks, {inputs, outputs, send_staging, recv_staging}, scale);
    });
  }

 private:
  std::mutex launch_mutex_;
  static Stream* of(StreamHandle stream) { return static_cast<Stream*>(stream); }
  static std::byte* map(int file, int protection) {
    return static_cast<std::byte*>(mmap(nullptr, kNumBytes, protection, MAP_SHARED, file, 0));
  }
  void* reachable(const void* address) {
    if (address == nullptr) return nullptr;
    if (std::byte* memory = behind(address)) return memory;
    std::lock_guard lock(mutex_);
    const auto* const wanted = static_cast<const std::byte*>(address);
    auto next = pinned_.upper_bound(const_cast<std::byte*>(wanted));
    const bool is_pinned = next != pinned_.begin() && wanted < (--next)->first + next->second;
    CHECK(is_pinned);  // a device cannot reach ordinary memory
    return const_cast<void*>(address);
  }

  std::byte *memory_, *addresses_;
  std::mutex mutex_;
  std::map<std::byte*, int64_t> pinned_;
  std::vector<std::unique_ptr<Stream>> streams_;
};

}  // namespace staging_device
