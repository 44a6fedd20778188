// Tensors of Python as the engine takes them.
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bindings/pin.h"
#include "bindings/torch_types.h"
#include "engine/point_to_point.h"
#include "message/recycled.h"

namespace pipecomm {

struct DeviceArgument {
  dlpack::DeviceType type = dlpack::kCpu;
  int index = -1;  // -1: any device of this type

  static DeviceArgument parse(const std::string& name);  // "cpu", "cuda", "cuda:1"
  bool is_cuda() const { return type == dlpack::kCuda; }
  std::string text() const;
};

enum class Access : uint8_t { read, write };

// What an error calls an argument: "tensor", "inputs[2]", "ops[0]: tensor".
struct ArgumentName {
  const char* list = nullptr;  // null: it stands alone
  size_t idx = 0;
  const char* element = "";

  std::string text() const {
    return list ? list + ("[" + std::to_string(idx) + "]") + element : element;
  }
};

struct StorageArgument {
  py::object object;
  const void* data;       // null: the tensor is empty
  StorageFields* fields;  // null: not known
};

struct TensorArgument {
  py::object tensor;  // the argument, or what takes its place: a copy of a conjugate view
  StorageArgument storage;
  TensorRef ref;  // owns nothing yet
};

// A dense tensor on `device`. For Access::write also: no expanded memory, no conjugate view, no
// autograd leaf. TypeError and ValueError call it `name`.
TensorArgument tensor_argument(py::handle object, const ArgumentName& name, Access access,
                               const DeviceArgument& device);

// The storages of an operation, which any thread may release. Without the GIL they are put aside, and
// the next thread that has it drops them.
class KeptStorages {
 public:
  // Outlives them, for the waiter of the operation; with the GIL.
  struct Watch {
    bool has_moved = false;  // what was received did not reach a tensor, or what was sent was freed
    bool is_over = false;
  };

  static std::shared_ptr<KeptStorages> make(size_t number, std::shared_ptr<Watch> watch);
  ~KeptStorages();
  static void* operator new(size_t) { return RecycledBlocks<sizeof(KeptStorages)>::take(); }
  static void operator delete(void* kept) { RecycledBlocks<sizeof(KeptStorages)>::give_back(kept); }
  // For an asynchronous operation, also pins its memory where possible.
  void add(StorageArgument storage, Access access);
  // With the GIL: records whether a message has been lost because a storage got other memory.
  void look() const;

  KeptStorages* next = nullptr;  // in the list of those put aside

 private:
  KeptStorages(size_t number, std::shared_ptr<Watch> watch) : watch_(std::move(watch)) {
    if (number > few_.size()) more_.reserve(number - few_.size());
  }

  const std::shared_ptr<Watch> watch_;  // null: not needed
  struct Kept {
    Kept(StorageArgument argument, bool is_async, Access access)
        : storage(std::move(argument)),
          pin(is_async && storage.fields ? Pin(*storage.fields) : Pin()),
          is_looked_at(is_async && (access == Access::write || !pin)) {}
    StorageArgument storage;
    Pin pin;  // constructed in place: moving one takes a lock
    bool is_looked_at;
  };
  static bool has_moved(const Kept& kept);

  size_t num_kept_ = 0;
  std::array<std::optional<Kept>, 8> few_;  // enough for most calls
  std::vector<Kept> more_;
};

// Runs the block without the GIL, and then drops what was put aside meanwhile.
class WithoutGil {
 public:
  WithoutGil();
  ~WithoutGil();
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* const state_;
};

// What must be done in Python at the end of an operation that outlives its call. It does not keep
// sent tensors alive.
class AwaitedTensors {
 public:
  AwaitedTensors() = default;
  AwaitedTensors(std::shared_ptr<KeptStorages> kept, std::shared_ptr<KeptStorages::Watch> watch,
                 std::vector<py::object> received);
  // With the GIL, once the operation has succeeded: increments the versions of received tensors again,
  // as they may have been used meanwhile. False if the storage of a tensor got other memory, so that
  // the message is lost.
  bool finish();

 private:
  std::weak_ptr<KeptStorages> kept_;
  std::shared_ptr<KeptStorages::Watch> watch_;
  std::vector<py::object> received_;
};

// An uninitialised tensor in this memory, which it owns.
py::object tensor_in(std::shared_ptr<std::byte> memory, const std::vector<int64_t>& shape,
                     dlpack::DataType type);

}  // namespace pipecomm
