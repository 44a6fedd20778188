// Operations under many threads that settle, wait, fail and drop handles at any moment. Most of
// these tests are meant to run under ThreadSanitizer and AddressSanitizer.

#include "check.h"
#include "message/operation.h"

constexpr int kNumThreads = 4;

Deadline soon() { return Clock::now() + 20s; }

FailurePtr failure_of(const std::string& message) {
  return std::make_shared<const Failure>(Failure{.message = message});
}

OperationPtr make_operation() { return std::make_shared<Operation>(OpCode::p2p, Deadline::max()); }

// As the communicator posts: from here on a pending operation owns itself through its requests.
RequestList seal(const OperationPtr& operation) {
  RequestList requests = operation->seal();
  for (const RequestPtr& request : requests) request->operation = operation;
  return requests;
}

void add_requests(Operation& operation, int num_requests) {
  for (int idx = 0; idx < num_requests; ++idx) {
    Descriptor descriptor;
    descriptor.seq = uint64_t(idx);
    operation.add_request(idx % 3 == 0 ? Direction::send : Direction::recv, idx, descriptor,
                          nullptr);
  }
}

TEST(order_of_the_end) {
  auto resource = std::make_shared<int>(1);
  std::weak_ptr<int> kept = resource;
  const OperationPtr operation = make_operation();
  add_requests(*operation, 2);
  operation->keep(std::move(resource));
  int num_epilogues = 0;
  operation->on_success([&] {
    ++num_epilogues;
    CHECK(!operation->done());
    CHECK(!kept.expired());
    CHECK(operation->pending_text() == "0 send, 0 recv pending");  // not under the lock
  });
  const auto requests = seal(operation);
  CHECK(operation->requests().empty());  // no thread helps before the transport has them
  operation->note_posted();
  CHECK_EQ(operation->requests().size(), 2u);
  CHECK(operation->pending_text() == "1 send, 1 recv pending");
  CHECK(operation->first_pending() == requests[0]);
  CHECK(!operation->wait_until(Clock::now() + 1ms));
  Operation::settle(*requests[0], nullptr);
  Operation::settle(*requests[0], failure_of("late"));  // the first call counts
  CHECK(operation->first_pending() == requests[1]);
  CHECK(!operation->done());
  Operation::settle(*requests[1], nullptr);
  CHECK(operation->done() && operation->wait_until(Clock::now()));
  CHECK(operation->failure() == nullptr);
  CHECK_EQ(num_epilogues, 1);
  CHECK(kept.expired());
  CHECK(operation->requests().empty() && operation->first_pending() == nullptr);
}

// Requests that are added to a pending operation: it is not done before release(), and waiters are
// woken once the transport has the requests.
TEST(held_operation) {
  const auto request_to = [](const OperationPtr& operation, int peer) {
    const RequestPtr request = make_request(Direction::recv, peer, Descriptor(), nullptr);
    request->operation = operation;
    return request;
  };
  const OperationPtr operation = make_operation();
  operation->hold();
  CHECK(operation->waits_to_start());
  const RequestPtr first = request_to(operation, 1);
  first->on_settled = [&](FailurePtr failure) {
    CHECK_EQ(failure->message, "unheard");
    CHECK(!operation->done());
    operation->add(request_to(operation, 2));
    return nullptr;  // no failure of the operation
  };
  operation->add(first);
  CHECK(!operation->waits_to_start());
  CHECK(operation->requests().empty());
  CHECK(operation->first_pending() == first);
  operation->note_posted();
  CHECK_EQ(operation->requests().size(), 1u);
  CHECK(!operation->wait_until(Clock::now() + 1h));  // returns at once, and only once
  CHECK(!operation->wait_until(Clock::now() + 1ms));
  Operation::settle(*first, failure_of("unheard"));
  const RequestPtr second = operation->first_pending();
  CHECK_EQ(second->peer, 2);
  operation->release();
  CHECK(!operation->done());
  Operation::settle(*second, nullptr);
  CHECK(operation->done() && operation->failure() == nullptr);

  const OperationPtr failed = make_operation();
  failed->hold();
  failed->fail(failure_of("communicator"));
  const RequestPtr late = request_to(failed, 1);
  failed->add(late);
  failed->note_posted();
  CHECK(failed->requests().empty());
  Operation::settle(*late, nullptr);
  failed->release();
  CHECK_EQ(failed->failure()->message, "communicator");
}

TEST(failures_count_once) {
  const OperationPtr operation = make_operation();
  add_requests(*operation, 3);
  operation->on_success([] { CHECK(false); });
  const auto requests = seal(operation);
  Operation::settle(*requests[1], failure_of("first"));
  Operation::settle(*requests[2], failure_of("second"));
  CHECK(!operation->done());  // the third still owns its memory
  operation->fail(failure_of("communicator"));
  CHECK(operation->done());
  CHECK_EQ(operation->failure()->message, "first");
  Operation::settle(*requests[0], nullptr);
  operation->fail(failure_of("again"));
  CHECK_EQ(operation->failure()->message, "first");
  CHECK(!operation->failure_seen());
  operation->note_failure_seen();
  CHECK(operation->failure_seen());

  const OperationPtr empty = make_operation();
  bool ran = false;
  empty->on_success([&] { ran = true; });
  CHECK(seal(empty).empty() && empty->done() && ran);

  const OperationPtr broken = make_operation();
  broken->on_success([] { throw std::runtime_error("no room"); });
  CHECK(seal(broken).empty() && broken->done());
  CHECK_EQ(broken->failure()->message, "unpack failed: no room");
}

// The epilogue writes tensors, which waiters use once the operation is done.
TEST(a_failure_while_the_epilogue_runs) {
  const OperationPtr operation = make_operation();
  add_requests(*operation, 1);
  std::latch runs(1), may_end(1);
  bool has_ended = false;
  operation->on_success([&] {
    runs.count_down();
    may_end.wait();
    has_ended = true;
  });
  const auto requests = seal(operation);
  std::thread transport([&] { Operation::settle(*requests[0], nullptr); });
  runs.wait();
  std::thread failing([&] {
    operation->fail(failure_of("communicator"));
    CHECK(has_ended);  // whoever fails or closes a communicator may use its tensors afterwards
  });
  std::this_thread::sleep_for(20ms);
  CHECK(!operation->done());
  may_end.count_down();
  CHECK(operation->wait_until(soon()) && operation->failure() == nullptr);
  CHECK(has_ended);
  transport.join();
  failing.join();
}

// The destructor of a kept resource or of an epilogue may need the operation's lock: through
// another thread that has it, here directly.
TEST(resources_end_without_the_lock) {
  struct Probe {
    std::weak_ptr<Operation> operation;
    std::atomic<int>* num_ended;
    ~Probe() {
      if (const OperationPtr alive = operation.lock()) alive->pending_text();
      ++*num_ended;
    }
  };
  for (const bool fails : {false, true}) {
    for (const bool by_request : {false, true}) {
      check::context = std::string(fails ? "failing" : "succeeding") + " end of resources";
      std::atomic<int> num_ended{0};
      const OperationPtr operation = make_operation();
      add_requests(*operation, 1);
      operation->keep(std::make_shared<Probe>(operation, &num_ended));
      operation->on_success(
          [probe = std::make_shared<Probe>(operation, &num_ended)] { (void)probe; });
      const auto requests = seal(operation);
      if (fails && !by_request) {
        operation->fail(failure_of("stop"));
        CHECK_EQ(num_ended.load(), 1);  // the transport may still use what is kept
      } else {
        Operation::settle(*requests[0], fails ? failure_of("stop") : nullptr);
        CHECK_EQ(num_ended.load(), 2);
      }
      CHECK(operation->done());
    }
  }
}

// A pending operation without handles lives until its requests have settled, and not longer.
TEST(dropped_handles) {
  for (const bool by_failure : {false, true}) {
    OperationPtr operation = make_operation();
    add_requests(*operation, 2);
    auto resource = std::make_shared<int>(1);
    const std::weak_ptr<int> kept = resource;
    operation->keep(std::move(resource));
    bool ran = false;
    operation->on_success([&] { ran = true; });
    RequestList requests = seal(operation);
    const std::weak_ptr<Operation> watched = operation;
    operation.reset();
    CHECK(!watched.expired() && !kept.expired());
    if (by_failure) {
      watched.lock()->fail(failure_of("stop"));
      CHECK(!kept.expired());
    } else {
      for (const RequestPtr& request : requests) Operation::settle(*request, nullptr);
      CHECK(kept.expired());
    }
    CHECK_EQ(ran, !by_failure);
    requests.clear();
    CHECK(watched.expired() && kept.expired());
  }
}

// Several threads settle the same requests, with and without failures, while others wait, look,
// fail the whole and drop their handles.
TEST(races) {
  for (int round = 0; round < 400; ++round) {
    check::context = "race " + std::to_string(round);
    std::mt19937 random(round);
    const int num_requests = 1 + int(random() % 20);
    const bool some_fail = random() % 3 == 0;
    const bool all_fail = random() % 4 == 0;
    std::atomic<int> num_epilogues{0};
    int output =
        0;  // written by the epilogue, read by waiters: a race if the end is seen too early
    OperationPtr operation = make_operation();
    add_requests(*operation, num_requests);
    const auto resource = std::make_shared<int>(1);
    operation->keep(resource);
    operation->on_success([&, resource] {
      output = *resource;
      ++num_epilogues;
    });
    RequestList requests = seal(operation);
    const std::weak_ptr<Operation> watched = operation;
    std::latch start(2 * kNumThreads + 1);
    std::vector<std::thread> threads;
    for (int idx = 0; idx < kNumThreads; ++idx) {
      threads.emplace_back([&, requests, seed = random()] {  // a transport's thread
        std::mt19937 own(seed);
        RequestList mine = requests;
        std::shuffle(mine.begin(), mine.end(), own);
        start.arrive_and_wait();
        for (const RequestPtr& request : mine)
          Operation::settle(*request,
                            some_fail && request->peer == 0 ? failure_of("one") : nullptr);
      });
      threads.emplace_back([&, handle = operation] {  // a user's thread
        start.arrive_and_wait();
        while (!handle->wait_until(Clock::now() + 1ms)) {
          const RequestPtr pending = handle->first_pending();
          CHECK(!pending || pending->peer < num_requests);
          handle->pending_text();
          handle->requests();
        }
        const FailurePtr failure = handle->failure();
        if (failure)
          handle->note_failure_seen();
        else
          CHECK_EQ(output, 1);
      });
    }
    requests.clear();
    OperationPtr last = std::move(operation);
    start.arrive_and_wait();
    if (all_fail) last->fail(failure_of("all"));
    CHECK(last->wait_until(soon()));
    const FailurePtr failure = last->failure();
    CHECK_EQ(failure == nullptr, last->failure() == nullptr);
    if (failure)
      CHECK(failure->message == (some_fail ? "one" : "all") || all_fail);
    else
      CHECK(!some_fail || all_fail);
    last.reset();
    for (std::thread& thread : threads) thread.join();
    CHECK(watched.expired());
    CHECK_EQ(resource.use_count(), 1);
    if (!some_fail && !all_fail) CHECK_EQ(num_epilogues.load(), 1);
    if (some_fail && !all_fail) CHECK_EQ(num_epilogues.load(), 0);
    CHECK(num_epilogues <= 1);
  }
}
