#include "bindings/cuda.h"

#include <stdexcept>
#include <string>

#include "copy/device_runtime_cuda.h"

namespace pipecomm {
namespace {

constexpr const char* kNoCuda = "this build of pipecomm_ext has no CUDA support";

}  // namespace

#ifdef PIPECOMM_WITH_CUDA
std::shared_ptr<DeviceRuntime> device_runtime(int device_idx, int num_sms) {
  return make_cuda_runtime(device_idx, num_sms);
}
#else
std::shared_ptr<DeviceRuntime> device_runtime(int, int) { throw std::runtime_error(kNoCuda); }
std::string cuda_kernel_problem(int) { return kNoCuda; }
void relax_captures() { throw std::runtime_error(kNoCuda); }
#endif

void bind_cuda(py::module_& m) {
  m.def("relax_captures", &relax_captures,
        "From now on, CUDA calls of this thread do not disturb captures on other threads.");
  m.def("cuda_kernel_problem", &cuda_kernel_problem, py::arg("device_idx"),
        "Why the copy kernels of this build cannot run on a device, or ''.");
}

}  // namespace pipecomm
