#include "bindings/module.h"

#include <vector>

#include "bindings/torch_types.h"
#include "copy/copy_cpu.h"
#include "copy/torch_memory.h"
#include "engine/point_to_point.h"
#ifdef PIPECOMM_WITH_CUDA
#include "copy/device_runtime_cuda.h"
#endif

namespace pipecomm {
namespace {

// The mean of tensors, written over the first of them. On a device it is enqueued on the current
// stream.
void mean_into_first(const py::sequence& tensors) {
  if (py::len(tensors) == 0) throw py::value_error("the mean of no tensors is not defined");
  std::vector<dlpack::Tensor> views;
  std::vector<const void*> srcs;
  for (const py::handle tensor : tensors) {
    dlpack::Tensor& view = views.emplace_back();
    if (exchange_api().tensor_from_python(tensor.ptr(), &view) != 0) throw py::error_already_set();
    srcs.push_back(view.data);
  }
  const auto ref_of = [](const dlpack::Tensor& view) {
    TensorRef ref;
    ref.shape.assign(view.shape, view.shape + view.num_dims);
    ref.strides.assign(view.strides, view.strides + view.num_dims);
    return ref;
  };
  const dlpack::Tensor& first = views[0];
  const TensorRef whole = ref_of(first);
  for (const dlpack::Tensor& view : views) {
    const TensorRef ref = ref_of(view);
    if (!ref.is_contiguous() || ref.shape != whole.shape || view.dtype != first.dtype ||
        view.device.type != first.device.type || view.device.id != first.device.id)
      throw py::value_error(
          "tensors to be averaged must be contiguous and agree in shape, dtype and device");
  }
  const DType dtype = dtype_of(tensors[0], first.dtype);
  const int64_t count = TensorSpec{whole.shape, dtype}.bytes() / dtype.itemsize;
  if (first.device.type == dlpack::kCpu) {
    const py::gil_scoped_release no_gil;
    return mean_cpu(first.data, srcs, count, dtype);
  }
#ifdef PIPECOMM_WITH_CUDA
  mean_on_current_stream(first.device.id, first.data, srcs, count, dtype);
#else
  throw py::value_error("this build of pipecomm_ext averages tensors in host memory only");
#endif
}

}  // namespace

void bind_mean(py::module_& m) { m.def("mean_into_first", &mean_into_first, py::arg("tensors")); }

}  // namespace pipecomm
