#include "bindings/limited_store.h"

#include <c10/util/Exception.h>
#include <pybind11/stl.h>
#include <unistd.h>

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
  std::function<void(Line&)> call;  // to be made, or being made
  Clock::time_point called_at;
  uint64_t num_called = 0, num_ended = 0;
  bool is_over = false;
  // ---

  c10::intrusive_ptr<c10d::Store> store;  // of the thread
  bool needs_clone = false;

  c10d::Store& connected_store() {
    if (needs_clone) {
      try {
        store = store->clone();
        needs_clone = false;
      } catch (const std::exception&) {
        // This call has to do without; the next one tries again.
      }
    }
    return *store;
  }
};

LimitedStore::LimitedStore(c10::intrusive_ptr<c10d::Store> store, int rank, bool in_background)
    : rank_(rank),
      in_background_(in_background),
      owner_pid_(getpid()),
      line_(std::make_shared<Line>()) {
  line_->store = std::move(store);
  line_->needs_clone = in_background;
}

LimitedStore::~LimitedStore() {
  if (!worker_.joinable()) return;
  if (getpid() != owner_pid_) {  // a fork has no such thread, and its name may be another's by now
    new std::thread(std::move(worker_));
    return;
  }
  bool is_idle = false;
  {
    std::lock_guard lock(line_->mutex);
    line_->is_over = true;
    line_->changed.notify_all();
    is_idle = !line_->call;
  }
  if (is_idle)
    worker_.join();
  else
    worker_.detach();
}

void LimitedStore::work(const std::shared_ptr<Line>& line) {
  std::unique_lock lock(line->mutex);
  while (true) {
    line->changed.wait(lock, [&] { return line->is_over || line->call; });
    if (line->is_over) return;
    const auto call = line->call;
    lock.unlock();
    call(*line);
    lock.lock();
    line->call = nullptr;
    ++line->num_ended;
    line->changed.notify_all();
  }
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
auto LimitedStore::ask(double limit_s, Repeat repeat, Call call) {
  using Result = decltype(call(*line_->store));
  struct Answer {
    Result result{};
    std::optional<std::string> error;
  };
  const auto answer = std::make_shared<Answer>();
  std::unique_lock lock(line_->mutex);
  double left_s = limit_s;
  // In the background, a store that has been silent for that long is not waited for once more: many
  // communicators may close.
  if (in_background_ && line_->call) {
    const double silent_s = Seconds(Clock::now() - line_->called_at).count();
    left_s = std::max(left_s - silent_s, 2 * kSliceS);  // this process may have been stopped
  }
  wait(lock, left_s, [this] { return !line_->call; });
  if (!worker_.joinable()) worker_ = start_thread([line = line_] { work(line); }, rank_);
  // The connection may have broken since the last call, as that of a clone that was idle for long does.
  const int num_tries = in_background_ && repeat == Repeat::if_it_fails ? 2 : 1;
  line_->call = [answer, call = std::move(call), num_tries,
                 in_background = in_background_](Line& line) {
    for (int num_left = num_tries; num_left > 0; --num_left) {
      try {
        answer->result = call(line.connected_store());
        answer->error.reset();
        return;
      } catch (const c10::Error& error) {
        answer->error = error.what_without_backtrace();
      } catch (const std::exception& error) {
        answer->error = error.what();
      }
      line.needs_clone = in_background;
    }
  };
  line_->called_at = Clock::now();
  line_->changed.notify_all();
  const uint64_t number = ++line_->num_called;
  wait(lock, left_s, [this, number] { return line_->num_ended >= number; });
  if (answer->error) throw std::runtime_error(*answer->error);
  return std::move(answer->result);
}

namespace {

std::vector<uint8_t> bytes_of(const std::string& text) { return {text.begin(), text.end()}; }
std::string text_of(const std::vector<uint8_t>& bytes) { return {bytes.begin(), bytes.end()}; }

}  // namespace

std::optional<std::string> LimitedStore::find(const std::string& key, double limit_s) {
  return ask(limit_s, Repeat::if_it_fails, [key](c10d::Store& store) -> std::optional<std::string> {
    if (!store.check({key})) return std::nullopt;
    return text_of(store.get(key));
  });
}

void LimitedStore::set(const std::string& key, const std::string& value, double limit_s) {
  ask(limit_s, Repeat::if_it_fails, [key, value](c10d::Store& store) {
    store.set(key, bytes_of(value));
    return store.check({key});  // a TCPStore does not wait until it is there
  });
}

std::string LimitedStore::compare_set(const std::string& key, const std::string& expected,
                                      const std::string& desired, double limit_s) {
  return ask(limit_s, Repeat::never, [key, expected, desired](c10d::Store& store) {
    return text_of(store.compareSet(key, bytes_of(expected), bytes_of(desired)));
  });
}

int64_t LimitedStore::add(const std::string& key, int64_t amount, double limit_s) {
  return ask(limit_s, Repeat::never,
             [key, amount](c10d::Store& store) { return store.add(key, amount); });
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
