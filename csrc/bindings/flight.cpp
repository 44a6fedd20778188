#include "bindings/flight.h"

#include <semaphore.h>
#include <signal.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "bindings/python_args.h"
#include "plan/dtype.h"

namespace pipecomm {
namespace {

// ----------------------------------------------------------------------------------------------
// call sites

// Lines of Python code that have made operations, by number. Holds a reference to each code object,
// so that two of them never have one address; only under the GIL.
class CallSites {
 public:
  // Frames of files that begin with this are the library's own. Empty: no call sites are recorded.
  std::string library_prefix;

  // Finding the line takes longer than everything else here, so places are cached.
  uint32_t number_of(PyFrameObject* frame, PyCodeObject* code) {
#if PY_VERSION_HEX >= 0x030b0000
    const Key place{code, PyFrame_GetLasti(frame)};
    const auto found = numbers_of_places_.find(place);
    if (found != numbers_of_places_.end()) return found->second;
    const uint32_t number = number_of_line(code, PyFrame_GetLineNumber(frame));
    if (number != 0 && numbers_of_places_.size() < kMaxSites) numbers_of_places_[place] = number;
    return number;
#else
    return number_of_line(code, PyFrame_GetLineNumber(frame));
#endif
  }

  // "train.py:42 in step"
  py::object text_of(uint32_t number) const {
    if (number == 0 || number > sites_.size()) return py::none();
    const Site& site = sites_[number - 1];
    return py::str("{}:{} in {}")
        .format(site.code.attr("co_filename"), site.line, site.code.attr("co_name"));
  }

 private:
  uint32_t number_of_line(PyCodeObject* code, int line) {
    const auto found = numbers_.find({code, line});
    if (found != numbers_.end()) return found->second;
    if (sites_.size() == kMaxSites) return 0;
    sites_.push_back({py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(code)), line});
    return numbers_[{code, line}] = static_cast<uint32_t>(sites_.size());
  }

  static constexpr size_t kMaxSites = 4096;
  struct Site {
    py::object code;
    int line;
  };
  using Key = std::pair<PyCodeObject*, int>;  // a line, or a place in the code
  struct Hash {
    size_t operator()(const Key& key) const {
      return std::hash<PyCodeObject*>()(key.first) * 31 + static_cast<size_t>(key.second);
    }
  };
  std::vector<Site> sites_;
  std::unordered_map<Key, uint32_t, Hash> numbers_, numbers_of_places_;
};

CallSites& call_sites() {
  static auto* const sites = new CallSites();  // outlives the interpreter
  return *sites;
}

bool starts_with(PyObject* text, const std::string& prefix) {
  Py_ssize_t num_bytes = 0;
  const char* const bytes = PyUnicode_AsUTF8AndSize(text, &num_bytes);
  if (!bytes) {
    PyErr_Clear();
    return false;
  }
  return std::string_view(bytes, static_cast<size_t>(num_bytes)).starts_with(prefix);
}

void record_call_sites(const std::string& library_prefix) {
  call_sites().library_prefix = library_prefix;
}

// ----------------------------------------------------------------------------------------------
// alarm

struct Alarm {
  Alarm() { sem_init(&raised, 0, 0); }
  sem_t raised;
  std::atomic<uint64_t> num_signals{0};
};
Alarm alarm_of_process;

void on_signal(int) {
  const int error = errno;
  alarm_of_process.num_signals.fetch_add(1);
  raise_flight_alarm();
  errno = error;
}

// Whether `number` had no handler and now raises the alarm.
bool catch_signal(int number) {
  struct sigaction before{};
  if (sigaction(number, nullptr, &before) != 0)
    throw py::value_error(std::string("signal ") + std::to_string(number) + ": " +
                          std::strerror(errno));
  if (before.sa_handler == on_signal) return true;
  if ((before.sa_flags & SA_SIGINFO) != 0 || before.sa_handler != SIG_DFL) return false;
  struct sigaction ours{};
  ours.sa_handler = on_signal;
  ours.sa_flags = SA_RESTART;
  sigemptyset(&ours.sa_mask);
  return sigaction(number, &ours, nullptr) == 0;
}

// Blocks until the alarm has been raised since the last call; returns the number of signals so far.
uint64_t wait_for_alarm() {
  py::gil_scoped_release no_gil;
  while (sem_wait(&alarm_of_process.raised) != 0) {
  }
  while (sem_trywait(&alarm_of_process.raised) == 0) {
  }
  return alarm_of_process.num_signals.load();
}

// ----------------------------------------------------------------------------------------------
// records as Python objects

const char* state_name(const FlightOperation& operation) {
  if (operation.failure) return "failed";
  if (operation.is_captured) return "captured";
  return operation.ended ? "done" : "pending";
}

const char* state_name(MessageState state) {
  switch (state) {
    case MessageState::posted:
      return "posted";
    case MessageState::started:
      return "started";
    case MessageState::done:
      return "done";
  }
  return "";
}

py::dict message_dict(const FlightMessage& message) {
  const Descriptor& descriptor = message.descriptor;
  const size_t num_dims = std::min<size_t>(descriptor.num_dims, kMaxDescriptorDims);
  py::dict dict;
  dict["direction"] = message.direction == Direction::send ? "send" : "recv";
  dict["peer"] = message.peer;
  dict["channel"] = int{descriptor.channel};
  dict["seq"] = descriptor.seq;
  dict["state"] = state_name(message.state);
  dict["bytes"] = descriptor.num_bytes;
  dict["dtype"] = dtype_name(descriptor.dtype);
  dict["shape"] = std::vector<int64_t>(descriptor.shape.begin(),
                                       descriptor.shape.begin() + static_cast<long>(num_dims));
  dict["signature"] = descriptor.signature;
  dict["refuses"] = message.refuses;
  return dict;
}

// Converts times of the operations' clock to seconds since 1970.
class WallClock {
 public:
  py::object seconds(Clock::time_point time) const {
    if (time == Clock::time_point()) return py::none();
    return py::float_(std::chrono::duration<double>(wall_now_ + (time - now_)).count());
  }

 private:
  const Clock::time_point now_ = Clock::now();
  const std::chrono::nanoseconds wall_now_ = std::chrono::system_clock::now().time_since_epoch();
};

}  // namespace

py::object failure_dict(const FailurePtr& failure) {
  if (!failure) return py::none();
  static constexpr const char* kNames[] = {"error", "timeout", "peer_lost", "mismatch", "aborted"};
  py::dict dict;
  dict["kind"] = kNames[static_cast<int>(failure->kind)];
  dict["message"] = text_of(failure->message);
  dict["origin_rank"] = failure->origin_rank;
  dict["peer"] = failure->peer;
  return dict;
}

py::list flights_list(const std::vector<Flight>& flights) {
  const WallClock clock;
  py::list list;
  for (const Flight& flight : flights) {
    const FlightOperation& operation = flight.operation;
    py::list messages;
    for (const FlightMessage& message : flight.messages) messages.append(message_dict(message));
    py::dict dict;
    dict["number"] = operation.number;
    dict["op"] = op_name(operation.op);
    dict["on"] = operation.on_device ? "device" : "host";
    dict["state"] = state_name(operation);
    dict["posted_at"] = clock.seconds(operation.posted_at);
    dict["started_at"] = clock.seconds(operation.started_at);
    dict["ended_at"] = clock.seconds(operation.ended_at);
    dict["call_site"] = call_sites().text_of(operation.call_site);
    dict["num_messages"] = operation.num_messages;
    dict["messages"] = messages;
    dict["failure"] = failure_dict(operation.failure);
    list.append(dict);
  }
  return list;
}

py::list connections_list(const std::vector<ConnectionEvent>& events) {
  const WallClock clock;
  py::list list;
  for (const ConnectionEvent& event : events) {
    py::dict dict;
    dict["time"] = clock.seconds(event.at);
    dict["connection"] = event.connection;
    dict["peer"] = event.peer >= 0 ? py::object(py::int_(event.peer)) : py::none();
    dict["state"] = event.state;
    dict["detail"] = text_of(event.detail);
    dict["peer_now"] = event.peer_now.empty() ? py::none() : text_of(event.peer_now);
    list.append(dict);
  }
  return list;
}

void note_call_site() {
  CallSites& sites = call_sites();
  if (sites.library_prefix.empty()) return;
  FlightRecord::call_site = 0;
  auto frame = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(PyEval_GetFrame()));
  while (frame) {
    auto* const raw = reinterpret_cast<PyFrameObject*>(frame.ptr());
    PyCodeObject* const code = PyFrame_GetCode(raw);
    const auto owned = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(code));
    if (!starts_with(code->co_filename, sites.library_prefix)) {
      FlightRecord::call_site = sites.number_of(raw, code);
      return;
    }
    frame = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetBack(raw)));
  }
}

void raise_flight_alarm() { sem_post(&alarm_of_process.raised); }

void bind_flight(py::module_& m) {
  m.def(
      "flight_record_call_sites", &record_call_sites, py::arg("library_prefix"),
      "Operations note their call site from now on: the innermost frame whose file does not begin "
      "with this.");
  m.def(
      "flight_catch_signal", &catch_signal, py::arg("number"),
      "Has a signal without a handler end flight_wait(); False, and nothing done, if it has one.");
  m.def(
      "flight_wait", &wait_for_alarm,
      "Blocks until an operation has failed, a signal was caught or flight_wake() was called; the "
      "number of signals so far.");
  m.def("flight_wake", &raise_flight_alarm, "Ends flight_wait() of another thread.");
}

}  // namespace pipecomm
