// The part of the DLPack 1.x C ABI that we use. torch publishes it as
// torch.Tensor.__dlpack_c_exchange_api__: tensors cross without a C++ type of torch, so one build
// serves every torch that has it (2.10 and later).
//
// https://dmlc.github.io/dlpack/latest/c_api.html
#pragma once

#include <cstdint>

namespace pipecomm::dlpack {

inline constexpr uint32_t kMajorVersion = 1;
inline constexpr const char* kCapsuleName = "dlpack_exchange_api";

enum DeviceType : int32_t { kCpu = 1, kCuda = 2 };
enum DataTypeCode : uint8_t { kInt = 0, kUInt = 1, kFloat = 2, kComplex = 5, kBfloat = 4 };

struct Version {
  uint32_t major, minor;
};
struct Device {
  int32_t type, id;
};
struct DataType {
  uint8_t code, bits;
  uint16_t lanes;

  bool operator==(const DataType&) const = default;
};

struct Tensor {
  void* data;
  Device device;
  int32_t num_dims;
  DataType dtype;
  int64_t* shape;
  int64_t* strides;  // in elements
  uint64_t byte_offset;
};

struct ManagedTensor {  // DLManagedTensorVersioned
  Version version;
  void* context;
  void (*deleter)(ManagedTensor* self);
  uint64_t flags;
  Tensor tensor;
};

// All return 0, or -1 with a Python exception set.
struct ExchangeApi {
  Version version;
  void* previous;
  int (*allocate)(Tensor* prototype, ManagedTensor** out, void* error_context,
                  void (*set_error)(void* error_context, const char* kind, const char* message));
  int (*managed_from_python)(void* object, ManagedTensor** out);
  int (*managed_to_python)(ManagedTensor* tensor, void** out);
  // Valid while the object lives. May be null.
  int (*tensor_from_python)(void* object, Tensor* out);
  int (*current_stream)(int32_t device_type, int32_t device_id, void** out);
};

}  // namespace pipecomm::dlpack
