// The extension module `pipecomm_ext._C`: nothing but bindings.
#include "bindings/module.h"
#include "bindings/communicator.h"
#include "bindings/connections.h"
#include "bindings/cuda.h"
#include "bindings/flight.h"
#include "bindings/interpreter_use.h"
#include "bindings/point_to_point_args.h"
#include "bindings/python_args.h"
#include "bindings/storage_fields.h"
#include "bindings/torch_types.h"
#include "bindings/work.h"

namespace pipecomm {

PYBIND11_MODULE(_C, m) {
  m.doc() = "C++ core of pipecomm_ext; use the Python package instead.";

  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const PipeCommException& error) {
      raise_failure(*error.failure());
    }
  });

  load_torch_names();
  find_storage_fields();
  bind_build_info(m);
  bind_plan(m);
  bind_reduce(m);
  bind_left_behind(m);
  bind_interpreter_use(m);
  bind_connections(m);
  bind_point_to_point_args(m);
  bind_work(m);
  bind_flight(m);
  bind_cuda(m);
  auto communicator = bind_communicator(m);
  bind_nccl_communicator(m, communicator);
}

}  // namespace pipecomm
