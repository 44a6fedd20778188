// Python's view of flight records, and what wakes the thread that writes them to files.
#pragma once

#include <vector>

#include "bindings/python.h"
#include "message/connection_events.h"
#include "message/flight_record.h"

namespace pipecomm {

// A list of dicts, one for each operation or event.
py::list flights_list(const std::vector<Flight>& flights);
py::list connections_list(const std::vector<ConnectionEvent>& events);
// The fields of a failure as a dict; None if there is none.
py::object failure_dict(const FailurePtr& failure);

// Records where in the user's program this thread is, for the operations that it makes; with the GIL.
void note_call_site();

// Wakes the thread in `flight_wait()`; async-signal-safe.
void raise_flight_alarm();

void bind_flight(py::module_& m);

}  // namespace pipecomm
