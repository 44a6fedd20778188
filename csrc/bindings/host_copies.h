// Host memory for tensors that a host transport cannot read or write in place: non-contiguous ones,
// and those in device memory, which are staged through pinned buffers.
#pragma once

#include <ATen/ops/empty.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <functional>
#include <utility>
#include <vector>

#include "bindings/python_args.h"

namespace pipecomm {

inline at::Tensor empty_on_host(const at::Tensor& like) {
  return at::empty(like.sizes(),
                   like.options().device(at::kCPU).pinned_memory(like.device().is_cuda()));
}

// The elements of `tensor`, contiguous in host memory.
inline at::Tensor on_host(const at::Tensor& tensor) {
  at::NoGradGuard no_grad;
  return tensor.device().is_cpu() ? tensor.contiguous() : empty_on_host(tensor).copy_(tensor);
}

// Stands in for what is received: contiguous on the host, copied over at the end.
class StandIns {
 public:
  at::Tensor for_tensor(const at::Tensor& tensor) {
    if (tensor.device().is_cpu() && tensor.is_contiguous()) return tensor;
    at::AutoDispatchBelowADInplaceOrView guard;
    if (!tensor.device().is_cpu()) {
      // The copy at the end runs on a thread of the transport; what uses the tensor now comes
      // first.
      const c10::impl::VirtualGuardImpl device(tensor.device().type());
      device.synchronizeStream(device.getStream(tensor.device()));
    }
    pairs_.emplace_back(tensor, empty_on_host(tensor));
    return pairs_.back().second;
  }
  std::function<void()> copy_back() && {
    if (pairs_.empty()) return nullptr;
    return [pairs = std::move(pairs_)] {
      at::AutoDispatchBelowADInplaceOrView guard;
      for (const auto& [tensor, stand_in] : pairs) tensor.copy_(stand_in);
    };
  }

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs_;  // tensor of the user, stand-in
};

}  // namespace pipecomm
