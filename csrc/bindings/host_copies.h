// Memory without gaps for tensors of the host that are sent or received whole.
#pragma once

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <functional>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include "bindings/pin.h"

namespace pipecomm {

inline at::Tensor without_gaps(const at::Tensor& tensor) {
  at::NoGradGuard no_grad;
  return tensor.contiguous();
}

// Stands in for what is received: copied over at the end.
class StandIns {
 public:
  at::Tensor for_tensor(const at::Tensor& tensor) {
    if (tensor.is_contiguous()) return tensor;
    at::AutoDispatchBelowADInplaceOrView guard;
    pairs_.emplace_back(tensor, at::empty(tensor.sizes(), tensor.options()));
    return pairs_.back().second;
  }
  // A tensor that may be used before its operation is done: its version changes again at the end.
  void expect(const at::Tensor& tensor, std::shared_ptr<const Pin> pin) {
    expected_.emplace_back(tensor.unsafeGetTensorImpl()->version_counter(), std::move(pin));
  }
  // What remains to be done when everything has arrived, or null.
  std::function<void()> copy_back() && {
    if (pairs_.empty() && expected_.empty()) return nullptr;
    return [pairs = std::move(pairs_), expected = std::move(expected_)]() mutable {
      for (const auto& [version, pin] : expected)
        if (pin->has_moved())
          throw std::runtime_error(
              "the storage of a tensor that was being received was reallocated (share_memory_(), "
              "resize_()), so the message is lost; do that before or after the operation");
      at::AutoDispatchBelowADInplaceOrView guard;
      for (const auto& [tensor, stand_in] : pairs) tensor.copy_(stand_in);
      for (auto& [version, pin] : expected)
        if (version.enabled()) version.bump();
    };
  }

 private:
  std::vector<std::pair<c10::VariableVersion, std::shared_ptr<const Pin>>> expected_;
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs_;  // tensor of the user, stand-in
};

}  // namespace pipecomm
