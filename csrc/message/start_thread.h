// Starts all threads of the library.
#pragma once

#include <string>
#include <system_error>
#include <thread>
#include <type_traits>
#include <utility>

#include "message/failure.h"

namespace pipecomm {

// Whether the library has started this thread. On it, Python's garbage collector or a dropped
// tensor may destroy any object, even a communicator that has to join this thread.
inline thread_local bool is_own_thread = false;

#ifdef PIPECOMM_FAULTS
// For tests: which of the next threads that this thread starts cannot be started; 0: none.
inline thread_local int failing_thread = 0;
#endif

// Throws PipeCommException of this rank, with a remedy, if the system cannot start a thread.
template <class Body>
std::thread start_thread(Body&& body, int rank) {
  try {
#ifdef PIPECOMM_FAULTS
    if (failing_thread > 0 && --failing_thread == 0)
      throw std::system_error(std::make_error_code(std::errc::resource_unavailable_try_again));
#endif
    return std::thread([body = std::decay_t<Body>(std::forward<Body>(body))]() mutable {
      is_own_thread = true;
      body();
    });
  } catch (const std::system_error& error) {
    throw PipeCommException(
        Failure{.message = std::string("cannot start a thread: ") + error.what() +
                           "; raise the limit on threads (ulimit -u, or pids.max of the control "
                           "group)",
                .rank = rank,
                .origin_rank = rank});
  }
}

}  // namespace pipecomm
