// Posts operations one after the other, each when the operation that it depends on is done, without
// blocking the caller: the second hop of a relay starts when the first has arrived.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

#include "message/operation.h"

namespace pipecomm {

class Sequencer {
 public:
  using Post = std::function<void()>;
  // Waits for the operation; returns its failure, or null.
  using Await = std::function<FailurePtr(Operation&)>;
  explicit Sequencer(Await await) : await_(std::move(await)) {}
  // The operations that queued steps wait for must be done or have failed.
  ~Sequencer();

  // Calls `post` once everything submitted before has been posted and `after` (or null) has
  // succeeded: in this call, or later on the sequencer's thread. If `after` or `post` fails, so
  // does `operation`; in this call, an exception is thrown.
  void submit(OperationPtr after, const OperationPtr& operation, Post post);

  // Whether everything submitted is posted or has failed; waits for that until `until`.
  bool wait_until_idle(Deadline until);

 private:
  struct Step {
    OperationPtr after, operation;
    Post post;
  };
  void run();
  void execute(Step step);

  const Await await_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Step> steps_;  // the first one is being executed
  bool finishing_ = false;
  std::thread thread_;  // started by the first step that cannot be posted at once
};

}  // namespace pipecomm
