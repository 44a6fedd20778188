#include "bindings/mean.h"

#include <ATen/ops/empty_like.h>

#include <stdexcept>
#include <vector>

#include "bindings/python_args.h"
#include "copy/copy_cpu.h"
#ifdef PIPECOMM_WITH_CUDA
#include "copy/device_runtime_cuda.h"
#endif

namespace pipecomm {
namespace {

// Summed in fp32 in the order of the list. On a device it is enqueued on the current stream.
at::Tensor mean(const std::vector<at::Tensor>& given) {
  if (given.empty()) throw py::value_error("the mean of no tensors is not defined");
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> tensors;
  std::vector<const void*> srcs;
  for (const at::Tensor& tensor : given) {
    if (tensor.sizes() != given[0].sizes() || tensor.scalar_type() != given[0].scalar_type() ||
        tensor.device() != given[0].device())
      throw py::value_error("tensors to be averaged must agree in shape, dtype and device");
    tensors.push_back(tensor.contiguous());
    srcs.push_back(tensors.back().const_data_ptr());
  }
  const at::Tensor result = at::empty_like(tensors[0], at::MemoryFormat::Contiguous);
  const DType dtype = tensor_ref(result).dtype;
  if (result.device().is_cpu()) {
    const py::gil_scoped_release no_gil;
    mean_cpu(result.data_ptr(), srcs, result.numel(), dtype);
    return result;
  }
#ifdef PIPECOMM_WITH_CUDA
  mean_on_current_stream(result.device().index(), result.data_ptr(), srcs, result.numel(), dtype);
  return result;
#else
  throw py::value_error("this build of pipecomm_ext averages tensors in host memory only");
#endif
}

}  // namespace

void bind_mean(py::module_& m) { m.def("mean", &mean, py::arg("tensors")); }

}  // namespace pipecomm
