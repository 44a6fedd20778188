// Who wakes a rank that waits over shared memory, and on which core it waits.

#include "host_exchanges.h"
#include "listener.h"
#include "transport/cores.h"

using namespace meeting;

// The transports of two ranks without a Communicator, and so without a tick that would cover up a wake-up
// that is missing.
struct TwoRanks {
  ~TwoRanks() {
    for (const auto& transport : {receiver.get(), sender.get()}) transport->begin_close();
    for (const auto& transport : {receiver.get(), sender.get()})
      transport->close(Clock::now() + kLimit);
  }
  shm::Bell& bell_of_receiver() const { return memory.segments[0]->status().bell; }

  Listener events;
  const SameMemory memory{shape_of(2)};
  const std::unique_ptr<HostTransport> receiver = over_same_memory(memory.segments, 0, events);
  const std::unique_ptr<HostTransport> sender = over_same_memory(memory.segments, 1, events);
};

// Without a wake-up a thread of a transport sleeps for a second, so all rounds are late or every other one.
// On a busy machine some are.
class Rounds {
 public:
  void end_one() {
    const Clock::time_point now = Clock::now();
    num_late_ += now - begin_ > std::chrono::milliseconds(900);
    ++num_;
    begin_ = now;
  }
  bool are_in_time() const { return 4 * num_late_ <= num_; }

 private:
  Clock::time_point begin_ = Clock::now();
  int num_ = 0, num_late_ = 0;
};

struct Message {
  explicit Message(uint64_t code, int64_t num_bytes = 100)
      : sent(coded_bytes(code, num_bytes)), received(size_t(num_bytes)) {
    const Descriptor descriptor = describe(OpCode::p2p, 0, tensor(sent), 0, num_bytes);
    recv->add_request(Direction::recv, 1, descriptor, received.data());
    send->add_request(Direction::send, 0, descriptor, sent.data());
  }
  bool has_come() const { return recv->done() && received == sent; }

  Bytes sent, received;
  const OperationPtr recv = std::make_shared<Operation>(OpCode::p2p, Deadline::max());
  const OperationPtr send = std::make_shared<Operation>(OpCode::p2p, Deadline::max());
};

void post(HostTransport& transport, const OperationPtr& operation) {
  const RequestList requests = operation->seal();
  for (const RequestPtr& request : requests) request->operation = operation;
  transport.post(requests, true);
  operation->note_posted();
}
// Waits like a Communicator, but does not poll: a thread that does not assist must be woken.
void wait_for(HostTransport& transport, const OperationPtr& operation) {
  while (!operation->done())
    if (transport.assist(*operation)) CHECK(operation->wait_until(Clock::now() + kLimit));
}

// Another thread may post the operation that a thread waits for later: when its route is made, or
// its turn in a sequence has come. The peer must wake the thread then.
TEST(a_thread_that_waits_hears_of_later_posts) {
  const TwoRanks ranks;
  int num_woken = 0;
  constexpr int kRounds = 20;
  for (int round = 0; round < kRounds; ++round) {
    const Message message{uint64_t(round)};
    std::thread others([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      post(*ranks.receiver, message.recv);
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      post(*ranks.sender, message.send);
    });
    num_woken += ranks.receiver->assist(*message.recv);
    others.join();
    wait_for(*ranks.receiver, message.recv);
    CHECK(message.has_come());
    wait_for(*ranks.sender, message.send);  // nothing else would end it
  }
  CHECK(num_woken >= kRounds / 2);  // not all: threads may be late
}

// A small message does not wake a rank without a waiting thread. A peer that waits for the answer
// does, and so does a message of another kind.
TEST(small_messages_do_not_wake_a_rank_that_does_not_wait) {
  const TwoRanks ranks;
  Rounds rounds;
  const shm::Bell& bell = ranks.bell_of_receiver();
  constexpr int kRounds = 50;
  int num_not_woken = 0;
  for (int round = 0; round < kRounds; ++round) {
    check::context = "round " + std::to_string(round);
    const Message small{uint64_t(round)}, large{uint64_t(round), 200'000};
    post(*ranks.receiver, small.recv);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));  // until its thread sleeps again
    const uint32_t count = bell.count;
    post(*ranks.sender, small.send);
    num_not_woken += bell.count == count && !small.recv->done();
    if (round % 2 == 0)
      wait_for(*ranks.sender, small.send);
    else
      ranks.receiver->advance();
    CHECK(small.recv->wait_until(Clock::now() + kLimit) && small.has_come());
    post(*ranks.receiver, large.recv);
    post(*ranks.sender, large.send);
    CHECK(large.recv->wait_until(Clock::now() + kLimit) && large.has_come());
    CHECK(large.send->wait_until(Clock::now() + kLimit));
    wait_for(*ranks.sender, small.send);
    rounds.end_one();
  }
  CHECK(num_not_woken >= kRounds / 2);  // not all: threads may be late
  CHECK(rounds.are_in_time());
}

// A sender whose messages fill the ring of such a rank also wakes it.
TEST(a_full_ring_wakes_a_rank_that_does_not_wait) {
  const TwoRanks ranks;
  Rounds rounds;
  for (int round = 0; round < 20; ++round) {
    std::vector<std::unique_ptr<Message>> messages;
    for (int number = 0; number < 40; ++number)
      post(*ranks.receiver,
           messages.emplace_back(std::make_unique<Message>(number, 12 << 10))->recv);
    for (const auto& message : messages) post(*ranks.sender, message->send);
    CHECK(messages.front()->recv->wait_until(Clock::now() + kLimit));
    wait_for(*ranks.sender, messages.back()->send);
    for (const auto& message : messages)
      CHECK(message->recv->wait_until(Clock::now() + kLimit) && message->has_come());
    rounds.end_one();
  }
  CHECK(rounds.are_in_time());
}

// One of two waiting threads makes progress for both; the other may still wait when it is done.
TEST(a_second_thread_that_waits) {
  const TwoRanks ranks;
  Rounds rounds;
  for (int round = 0; round < 50 && check::num_failures == 0; ++round) {
    check::context = "round " + std::to_string(round);
    const Message first(1), second(2);
    post(*ranks.receiver, first.recv);
    post(*ranks.receiver, second.recv);
    std::thread assists([&] { wait_for(*ranks.receiver, first.recv); });
    std::thread waits([&] {
      if (round % 2) std::this_thread::sleep_for(std::chrono::microseconds(20 * round));
      wait_for(*ranks.receiver, second.recv);
    });
    if (round % 3) std::this_thread::sleep_for(std::chrono::microseconds(100 * round));
    post(*ranks.sender, first.send);
    assists.join();
    post(*ranks.sender, second.send);
    waits.join();
    CHECK(first.has_come() && second.has_come());
    wait_for(*ranks.sender, second.send);
    rounds.end_one();
  }
  CHECK(rounds.are_in_time());
}

// Two ranks that wait for each other must not stay on one core while another one is idle. The lower one moves
// only if it finds the core shared again and again.
TEST(a_rank_leaves_a_core_on_which_another_one_waits) {
  const CoreSet all = usable_cores();
  if (all.count() < 2) return;
  for (const int rank : {0, 1}) {
    constexpr int kRounds = 4;
    int num_left = 0;
    for (int round = 0; round < kRounds; ++round) {
      const TwoRanks ranks;
      HostTransport& transport = rank == 0 ? *ranks.receiver : *ranks.sender;
      const OperationPtr recv = std::make_shared<Operation>(OpCode::p2p, Deadline::max());
      Bytes bytes(8);
      recv->add_request(Direction::recv, 1 - rank, describe(OpCode::p2p, 0, tensor(bytes), 0, 8),
                        bytes.data());
      post(transport, recv);
      const int core = current_core();
      ranks.memory.segments[1 - rank]->status().core = uint32_t(core + 1);
      for (int wait = 0; wait < (rank == 0 ? 4 : 1); ++wait) transport.assist(*recv);
      const uint32_t now = ranks.memory.segments[rank]->status().core;
      num_left += now != 0 && now != uint32_t(core + 1);
      CHECK(usable_cores() == all);
      recv->fail(std::make_shared<Failure>());
    }
    CHECK(num_left >= kRounds * 3 / 4);  // not all: the kernel may have moved the thread before
  }
}
