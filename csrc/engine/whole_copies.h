// Copies of whole tensors, all of them in one launch.
#pragma once

#include <vector>

#include "copy/copy_buffers.h"
#include "engine/point_to_point.h"

namespace pipecomm {

// A contiguous tensor of this shape and dtype at an address.
TensorRef contiguous_at(std::byte* data, const TensorRef& like);

class WholeCopies {
 public:
  // Tensors of one shape and dtype, with any strides.
  void add(const TensorRef& from, const TensorRef& to);

  bool empty() const { return tasks_.empty(); }
  std::span<const CopyTask> tasks() const { return tasks_; }
  CopyBuffers buffers() const { return {sources_, destinations_, nullptr, nullptr}; }

 private:
  std::vector<CopyTask> tasks_;
  std::vector<const void*> sources_;
  std::vector<void*> destinations_;
};

}  // namespace pipecomm
