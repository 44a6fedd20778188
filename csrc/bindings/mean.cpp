#include "bindings/mean.h"

#include <vector>

#include "bindings/python_args.h"
#include "copy/copy_cpu.h"
#ifdef PIPECOMM_WITH_CUDA
#include "copy/device_runtime_cuda.h"
#endif

namespace pipecomm {
namespace {

// The mean of tensors, written over the first of them. On a device it is enqueued on the current
// stream.
void mean_into_first(const std::vector<at::Tensor>& tensors) {
  if (tensors.empty()) throw py::value_error("the mean of no tensors is not defined");
  const at::Tensor& first = tensors[0];
  std::vector<const void*> srcs;
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.is_contiguous() || tensor.sizes() != first.sizes() ||
        tensor.scalar_type() != first.scalar_type() || tensor.device() != first.device())
      throw py::value_error(
          "tensors to be averaged must be contiguous and agree in shape, dtype and device");
    srcs.push_back(tensor.const_data_ptr());
  }
  const DType dtype = tensor_ref(first).dtype;
  void* const dst = first.mutable_data_ptr();
  const int64_t count = first.numel();
  if (first.device().is_cpu()) {
    const py::gil_scoped_release no_gil;
    return mean_cpu(dst, srcs, count, dtype);
  }
#ifdef PIPECOMM_WITH_CUDA
  mean_on_current_stream(first.device().index(), dst, srcs, count, dtype);
#else
  throw py::value_error("this build of pipecomm_ext averages tensors in host memory only");
#endif
}

}  // namespace

void bind_mean(py::module_& m) { m.def("mean_into_first", &mean_into_first, py::arg("tensors")); }

}  // namespace pipecomm
