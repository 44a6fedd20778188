#include "engine/sequencer.h"

#include <exception>
#include <utility>

#include "message/start_thread.h"

namespace pipecomm {

void Sequencer::submit(OperationPtr after, const OperationPtr& operation, Post post) {
  std::unique_lock lock(mutex_);
  if (steps_.empty() && (!after || (after->done() && !after->failure()))) {
    post();  // with the lock held: posts keep their order
    return;
  }
  if (!thread_.joinable()) {
    try {
      thread_ = start_thread([this] { run(); }, -1);
    } catch (const PipeCommException&) {  // the limit on threads is reached: the caller waits
      return execute({std::move(after), operation, std::move(post)});
    }
  }
  steps_.push_back({std::move(after), operation, std::move(post)});
  changed_.notify_all();
}

bool Sequencer::wait_until_idle(Deadline until) {
  std::unique_lock lock(mutex_);
  return changed_.wait_until(lock, until, [this] { return steps_.empty(); });
}

Sequencer::~Sequencer() {
  {
    std::lock_guard lock(mutex_);
    finishing_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void Sequencer::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return finishing_ || !steps_.empty(); });
    if (steps_.empty()) return;
    Step step = std::exchange(steps_.front(), {});  // its place stays taken while it is executed
    lock.unlock();
    execute(std::move(step));
    lock.lock();
    steps_.pop_front();
    if (steps_.empty()) changed_.notify_all();
  }
}

void Sequencer::execute(Step step) {
  FailurePtr failure = step.after ? await_(*step.after) : nullptr;
  if (!failure) {
    try {
      return step.post();
    } catch (const PipeCommException& error) {
      failure = error.failure();
    } catch (const std::exception& error) {
      failure = std::make_shared<Failure>(
          Failure{.message = std::string("could not be posted: ") + error.what(),
                  .op = op_name(step.operation->op())});
    }
  }
  step.operation->fail(std::move(failure));
}

}  // namespace pipecomm
