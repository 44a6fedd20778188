#include "bindings/module.h"

#include <string>
#include <vector>

#include "bindings/python_args.h"
#include "bindings/torch_types.h"
#include "copy/torch_memory.h"
#include "engine/point_to_point.h"
#ifdef PIPECOMM_WITH_CUDA
#include "copy/device_runtime_cuda.h"
#endif

namespace pipecomm {
namespace {

bool reduces(const std::string& name, py::handle dtype) {
  return can_reduce(reduction_argument(name), dtype_argument(dtype));
}

// On a device, which supports means only, it is enqueued on the current stream.
void reduce(const py::object& output, const py::sequence& tensors, const std::string& name) {
  const Reduction reduction = reduction_argument(name);
  std::vector<dlpack::Tensor> views;
  const auto view_of = [&views](py::handle tensor) {
    if (exchange_api().tensor_from_python(tensor.ptr(), &views.emplace_back()) != 0)
      throw py::error_already_set();
  };
  view_of(output);
  for (const py::handle tensor : tensors) view_of(tensor);
  const auto ref_of = [](const dlpack::Tensor& view) {
    TensorRef ref;
    ref.shape.assign(view.shape, view.shape + view.num_dims);
    ref.strides.assign(view.strides, view.strides + view.num_dims);
    return ref;
  };
  const dlpack::Tensor& first = views[0];
  const TensorRef whole = ref_of(first);
  const DType dtype = dtype_of(output, first.dtype);
  const int64_t count = TensorSpec{whole.shape, dtype}.bytes() / dtype.itemsize;
  std::vector<const void*> srcs;
  for (const dlpack::Tensor& view : views) {
    const TensorRef ref = ref_of(view);
    if ((count > 0 && !ref.is_contiguous()) || ref.shape != whole.shape ||
        view.dtype != first.dtype || view.device.type != first.device.type ||
        view.device.id != first.device.id)
      throw py::value_error(
          "tensors to be reduced must be contiguous and agree in shape, dtype and device");
    if (&view != &first) srcs.push_back(view.data);
  }
  if (first.device.type == dlpack::kCpu) {
    const py::gil_scoped_release no_gil;
    reduce_cpu(reduction, first.data, srcs, count, dtype);
  } else {
#ifdef PIPECOMM_WITH_CUDA
    if (reduction != Reduction::kMean) throw py::value_error("on a device there are means only");
    mean_on_current_stream(first.device.id, first.data, srcs, count, dtype);
#else
    throw py::value_error("this build of pipecomm_ext reduces tensors in host memory only");
#endif
  }
  mark_written({&output, 1});
}

}  // namespace

Reduction reduction_argument(const std::string& name) {
  static constexpr std::pair<const char*, Reduction> kNames[] = {
      {"SUM", Reduction::kSum},   {"AVG", Reduction::kMean},   {"PRODUCT", Reduction::kProduct},
      {"MIN", Reduction::kMin},   {"MAX", Reduction::kMax},    {"BAND", Reduction::kBitAnd},
      {"BOR", Reduction::kBitOr}, {"BXOR", Reduction::kBitXor}};
  for (const auto& [known, reduction] : kNames)
    if (name == known) return reduction;
  throw py::value_error("no reduction is called " + name);
}

void bind_reduce(py::module_& m) {
  m.def("reduces", &reduces, py::arg("name"), py::arg("dtype"));
  m.def("reduce", &reduce, py::arg("output"), py::arg("tensors"), py::arg("name"));
}

}  // namespace pipecomm
