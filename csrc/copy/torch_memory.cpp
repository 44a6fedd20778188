#include "copy/torch_memory.h"

#include <dlfcn.h>

#include <stdexcept>
#include <string>

namespace pipecomm {
namespace {

const dlpack::ExchangeApi* api_of_process = nullptr;

// Functions of torch/csrc/inductor/aoti_torch/c/shim.h: they return 0, or another number after
// they have printed the reason.
struct StreamGuards {
  using Guard = struct TorchStreamGuard;
  int (*create)(void* stream, int32_t device_idx, Guard** out);
  int (*destroy)(Guard* guard);

  static const StreamGuards& get() {
    static const StreamGuards guards = load();
    return guards;
  }

 private:
  static StreamGuards load() {
    void* const library = dlopen("libtorch_cuda.so", RTLD_NOLOAD | RTLD_NOW);
    if (!library) throw std::runtime_error("this torch is a CPU build: it has no libtorch_cuda.so");
    StreamGuards guards{};
    fill(library, "aoti_torch_create_cuda_stream_guard", guards.create);
    fill(library, "aoti_torch_delete_cuda_stream_guard", guards.destroy);
    return guards;
  }
  template <class Function>
  static void fill(void* library, const char* name, Function& slot) {
    slot = reinterpret_cast<Function>(dlsym(library, name));
    if (!slot) throw std::runtime_error(std::string("libtorch_cuda.so has no ") + name);
  }
};

// Makes a stream torch's current one on this thread.
class StreamGuard {
 public:
  StreamGuard(int device_idx, StreamHandle stream) : guards_(StreamGuards::get()) {
    if (guards_.create(stream, device_idx, &guard_) != 0)
      throw std::runtime_error("torch could not make a stream the current one");
  }
  ~StreamGuard() { guards_.destroy(guard_); }
  StreamGuard(const StreamGuard&) = delete;
  StreamGuard& operator=(const StreamGuard&) = delete;

 private:
  const StreamGuards& guards_;
  StreamGuards::Guard* guard_ = nullptr;
};

}  // namespace

void set_exchange_api(const dlpack::ExchangeApi& api) { api_of_process = &api; }

const dlpack::ExchangeApi& exchange_api() {
  if (!api_of_process) throw std::logic_error("the module has not met torch yet");
  return *api_of_process;
}

StreamHandle current_torch_stream(int device_idx) {
  void* stream = nullptr;
  if (exchange_api().current_stream(dlpack::kCuda, device_idx, &stream) != 0)
    throw std::runtime_error("torch has no current stream on CUDA device " +
                             std::to_string(device_idx));
  return stream;
}

std::shared_ptr<std::byte> allocate_on_stream(int64_t num_bytes, int device_idx,
                                              StreamHandle stream) {
  if (num_bytes == 0) return nullptr;
  const StreamGuard guard(device_idx, stream);
  dlpack::Tensor prototype{};
  prototype.device = {dlpack::kCuda, device_idx};
  prototype.num_dims = 1;
  prototype.dtype = {dlpack::kUInt, 8, 1};
  prototype.shape = &num_bytes;
  dlpack::ManagedTensor* memory = nullptr;
  std::string problem = "allocating memory of the device";
  const auto note = [](void* text, const char* /*kind*/, const char* message) {
    static_cast<std::string*>(text)->append(": ").append(message);
  };
  if (exchange_api().allocate(&prototype, &memory, &problem, note) != 0)
    throw std::runtime_error(problem);
  return {static_cast<std::byte*>(memory->tensor.data),
          [memory](std::byte*) { memory->deleter(memory); }};
}

}  // namespace pipecomm
