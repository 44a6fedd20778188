// Copies of whole tensors, all of them in one launch.
#pragma once

#include <vector>

#include "copy/copy_buffers.h"
#include "engine/point_to_point.h"

namespace pipecomm {

class WholeCopies {
 public:
  // Tensors of one shape and dtype, with any strides.
  void add(const TensorRef& from, const TensorRef& to);
  // The other side is contiguous, at this address.
  void add(const std::byte* from, const TensorRef& to);
  void add(const TensorRef& from, std::byte* to);

  bool empty() const { return tasks_.empty(); }
  std::span<const CopyTask> tasks() const { return tasks_; }
  CopyBuffers buffers() const { return {sources_, destinations_, nullptr, nullptr}; }

 private:
  void add(const TensorSpec& spec, const std::byte* from, const StridedLayout& from_layout,
           std::byte* to, const StridedLayout& to_layout);

  std::vector<CopyTask> tasks_;
  std::vector<const void*> sources_;
  std::vector<void*> destinations_;
};

}  // namespace pipecomm
