#include "bindings/module.h"

#include <build_facts.h>

namespace pipecomm {
namespace {

#ifdef PIPECOMM_WITH_CUDA
constexpr bool kWithCuda = true;
#else
constexpr bool kWithCuda = false;
#endif
#ifdef PIPECOMM_FAULTS
constexpr bool kWithFaults = true;
#else
constexpr bool kWithFaults = false;
#endif

py::object text_or_none(const char* text) {
  return *text ? py::object(py::str(text)) : py::object(py::none());
}

}  // namespace

void bind_build_info(py::module_& m) {
  using namespace py::literals;
  m.attr("build_info") =
      py::dict("version"_a = PIPECOMM_VERSION, "git_revision"_a = text_or_none(kGitRevision),
               "build_type"_a = PIPECOMM_BUILD_TYPE, "compiler"_a = PIPECOMM_COMPILER,
               "with_cuda"_a = kWithCuda, "cuda_reason"_a = PIPECOMM_CUDA_REASON,
               "cuda_version"_a = text_or_none(PIPECOMM_CUDA_VERSION),
               "cuda_archs"_a = text_or_none(PIPECOMM_CUDA_ARCHS), "with_faults"_a = kWithFaults);
}

}  // namespace pipecomm
