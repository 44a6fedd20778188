// A store of torch's whose calls end within a limit, whether or not it answers: its process may be
// stopped, its host gone, and torch waits for it without one.
#pragma once

#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>

namespace pipecomm {

// TimeoutError in Python.
struct StoreIsSilent : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// One thread makes the calls, one after the other. If a call does not end, that thread is left
// behind: it touches neither Python (unless the store is written in Python) nor a communicator, so it may
// outlive both.
class LimitedStore {
 public:
  // `in_background`: over a connection of its own, which calls of others do not hold up, and for
  // threads that have no signals to look for. `rank` is named by errors.
  LimitedStore(c10::intrusive_ptr<c10d::Store> store, int rank, bool in_background);
  ~LimitedStore();
  LimitedStore(const LimitedStore&) = delete;
  LimitedStore& operator=(const LimitedStore&) = delete;

  // For any thread, without the GIL. All throw StoreIsSilent once `limit_s` has passed, and
  // std::runtime_error with what the store throws.
  //
  // What is under the key, or nothing if there is no such key.
  std::optional<std::string> find(const std::string& key, double limit_s);
  // Returns once it is there.
  void set(const std::string& key, const std::string& value, double limit_s);
  // What is under the key then: `desired` if it was `expected` (empty: if there was none).
  std::string compare_set(const std::string& key, const std::string& expected,
                          const std::string& desired, double limit_s);
  int64_t add(const std::string& key, int64_t amount, double limit_s);

 private:
  struct Line;
  static void work(const std::shared_ptr<Line>& line);
  enum class Repeat : uint8_t { never, if_it_fails };  // once, over a new connection
  template <class Call>
  auto ask(double limit_s, Repeat repeat, Call call);
  template <class Ready>
  void wait(std::unique_lock<std::mutex>& lock, double& left_s, Ready ready) const;

  const int rank_;
  const bool in_background_;
  const int owner_pid_;
  const std::shared_ptr<Line> line_;  // shared with the thread
  std::thread worker_;                // started by the first call
};

void bind_limited_store(pybind11::module_& m);

}  // namespace pipecomm
