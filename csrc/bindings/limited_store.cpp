#include "bindings/limited_store.h"

#include <c10/util/Exception.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <utility>

#include "bindings/python_args.h"
#include "message/start_thread.h"

namespace pipecomm {
namespace {

using Seconds = std::chrono::duration<double>;

// A caller looks for signals this often. A process that is stopped for longer, or gets no processor,
// has waited for no more than two of these: what has come meanwhile still counts.
constexpr double kSliceS = 0.05;

}  // namespace

struct LimitedStore::Line {
  std::mutex mutex;  // down to the line
  std::condition_variable changed;
  bool is_busy = false;  // a call is being made
  Clock::time_point called_at;
  // ---

  c10::intrusive_ptr<c10d::Store> store;  // of the call
  bool needs_clone = false;
};

LimitedStore::LimitedStore(c10::intrusive_ptr<c10d::Store> store, int rank, bool in_background)
    : rank_(rank), in_background_(in_background), line_(std::make_shared<Line>()) {
  line_->store = std::move(store);
  line_->needs_clone = in_background;
}

template <class Ready>
void LimitedStore::wait(std::unique_lock<std::mutex>& lock, double& left_s, Ready ready) const {
  while (!ready()) {
    if (left_s <= 0) throw StoreIsSilent("the store does not answer");
    const auto began_at = Clock::now();
    if (line_->changed.wait_for(lock, Seconds(std::min(left_s, kSliceS)), ready)) return;
    left_s -= std::min(Seconds(Clock::now() - began_at).count(), 2 * kSliceS);
    if (in_background_) continue;
    lock.unlock();
    check_signals();
    lock.lock();
  }
}

template <class Call>
auto LimitedStore::ask(double limit_s, Call call) {
  struct Answer {
    bool is_there = false;
    decltype(call(*line_->store)) result{};
    std::optional<std::string> error;
  };
  const auto answer = std::make_shared<Answer>();
  auto make_call = [answer, call = std::move(call), line = line_, in_background = in_background_] {
    try {
      if (line->needs_clone) line->store = line->store->clone();
      line->needs_clone = false;
      answer->result = call(*line->store);
    } catch (const c10::Error& error) {
      answer->error = error.what_without_backtrace();
    } catch (const std::exception& error) {
      answer->error = error.what();
    }
    if (answer->error) line->needs_clone = in_background;  // its connection may be broken
    std::lock_guard lock(line->mutex);
    line->is_busy = false;
    answer->is_there = true;
    line->changed.notify_all();
  };
  std::unique_lock lock(line_->mutex);
  double left_s = limit_s;
  // In the background, a store that has been silent for that long is not waited for once more: many
  // communicators may close.
  if (in_background_ && line_->is_busy) left_s -= Seconds(Clock::now() - line_->called_at).count();
  wait(lock, left_s, [this] { return !line_->is_busy; });
  std::thread caller = start_thread(std::move(make_call), rank_);
  line_->is_busy = true;
  line_->called_at = Clock::now();
  try {
    wait(lock, left_s, [&] { return answer->is_there; });
  } catch (...) {
    caller.detach();
    throw;
  }
  lock.unlock();
  caller.join();
  if (answer->error) throw std::runtime_error(*answer->error);
  return std::move(answer->result);
}

namespace {

std::vector<uint8_t> bytes_of(const std::string& text) { return {text.begin(), text.end()}; }
std::string text_of(const std::vector<uint8_t>& bytes) { return {bytes.begin(), bytes.end()}; }

}  // namespace

std::optional<std::string> LimitedStore::find(const std::string& key, double limit_s) {
  return ask(limit_s, [key](c10d::Store& store) -> std::optional<std::string> {
    if (!store.check({key})) return std::nullopt;
    return text_of(store.get(key));
  });
}

void LimitedStore::set(const std::string& key, const std::string& value, double limit_s) {
  ask(limit_s, [key, value](c10d::Store& store) {
    store.set(key, bytes_of(value));
    return store.check({key});  // a TCPStore does not wait until it is there
  });
}

std::string LimitedStore::compare_set(const std::string& key, const std::string& expected,
                                      const std::string& desired, double limit_s) {
  return ask(limit_s, [key, expected, desired](c10d::Store& store) {
    return text_of(store.compareSet(key, bytes_of(expected), bytes_of(desired)));
  });
}

int64_t LimitedStore::add(const std::string& key, int64_t amount, double limit_s) {
  return ask(limit_s, [key, amount](c10d::Store& store) { return store.add(key, amount); });
}

void bind_limited_store(py::module_& m) {
  const auto without_gil = [](auto&& call) {
    py::gil_scoped_release no_gil;
    return call();
  };
  py::class_<LimitedStore>(m, "LimitedStore",
                           "A store whose calls raise TimeoutError when `limit_s` has passed, and "
                           "RuntimeError with what "
                           "the store raises. in_background: over a connection of its own.")
      .def(py::init<c10::intrusive_ptr<c10d::Store>, int, bool>(), py::arg("store"),
           py::arg("rank"), py::arg("in_background") = false)
      .def(
          "find",
          [=](LimitedStore& self, const std::string& key, double limit_s) {
            const auto found = without_gil([&] { return self.find(key, limit_s); });
            return found ? std::optional<py::bytes>(*found) : std::nullopt;
          },
          py::arg("key"), py::arg("limit_s"), "None: there is no such key.")
      .def(
          "set",
          [=](LimitedStore& self, const std::string& key, const py::bytes& value, double limit_s) {
            const std::string text = value;
            without_gil([&] { self.set(key, text, limit_s); });
          },
          py::arg("key"), py::arg("value"), py::arg("limit_s"))
      .def(
          "compare_set",
          [=](LimitedStore& self, const std::string& key, const py::bytes& expected,
              const py::bytes& desired, double limit_s) {
            const std::string before = expected, after = desired;
            return py::bytes(
                without_gil([&] { return self.compare_set(key, before, after, limit_s); }));
          },
          py::arg("key"), py::arg("expected"), py::arg("desired"), py::arg("limit_s"))
      .def("add", &LimitedStore::add, py::arg("key"), py::arg("amount"), py::arg("limit_s"),
           py::call_guard<py::gil_scoped_release>());
}

}  // namespace pipecomm
