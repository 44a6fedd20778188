// torch's current stream on a device, and memory of its allocator: through C functions only, whose
// ABI torch keeps.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "copy/device_runtime.h"
#include "copy/dlpack.h"

namespace pipecomm {

// Once, when the module is loaded.
void set_exchange_api(const dlpack::ExchangeApi& api);
const dlpack::ExchangeApi& exchange_api();

// Of the calling thread, on a CUDA device. Throws std::runtime_error.
StreamHandle current_torch_stream(int device_idx);

// From torch's caching allocator, for work on `stream` only: it goes back there, in the order of
// that stream, when the last reference is dropped. Throws std::runtime_error.
std::shared_ptr<std::byte> allocate_on_stream(int64_t num_bytes, int device_idx,
                                              StreamHandle stream);

}  // namespace pipecomm
