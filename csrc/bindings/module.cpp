// The extension module `pipecomm_ext._C`: nothing but bindings.
#include "bindings/communicator.h"
#include "bindings/connections.h"
#include "bindings/cuda.h"
#include "bindings/flight.h"
#include "bindings/limited_store.h"
#include "bindings/mean.h"
#include "bindings/plan.h"
#include "bindings/point_to_point_args.h"
#include "bindings/python_args.h"
#include "bindings/work.h"

namespace pipecomm {

PYBIND11_MODULE(_C, m) {
  m.doc() = "C++ core of pipecomm_ext; use the Python package instead.";

  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const PipeCommException& error) {
      raise_failure(*error.failure());
    } catch (const StoreIsSilent& error) {
      PyErr_SetString(PyExc_TimeoutError, error.what());
    }
  });

  bind_plan(m);
  bind_mean(m);
  bind_limited_store(m);
  bind_connections(m);
  bind_point_to_point_args(m);
  bind_work(m);
  bind_flight(m);
  bind_cuda(m);
  auto communicator = bind_communicator(m);
  bind_nccl_communicator(m, communicator);
}

}  // namespace pipecomm
