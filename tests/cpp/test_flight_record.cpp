// The flight record: what it keeps, in which order, and that it can be read while it is written.

#include "check.h"
#include "message/connection_events.h"
#include "message/flight_record.h"

FlightMessage message_of(uint64_t number, size_t idx) {
  FlightMessage message;
  message.peer = int(idx);
  message.descriptor.seq = number;
  message.descriptor.num_bytes = int64_t(number * 1000 + idx);
  return message;
}

void add(FlightRecord& record, uint64_t number, size_t num_messages, FailurePtr failure = nullptr) {
  FlightOperation operation;
  operation.number = number;
  operation.ended = true;
  operation.num_messages = num_messages;
  operation.failure = std::move(failure);
  record.add(operation, [&](size_t idx) { return message_of(number, idx); });
}

bool is_whole(const Flight& flight) {
  for (size_t idx = 0; idx < flight.messages.size(); ++idx) {
    // If not all messages are kept, the last ones are.
    const size_t first =
        std::min(flight.operation.num_messages, FlightRecord::kMaxMessagesPerOperation) -
        flight.messages.size();
    const FlightMessage expected = message_of(flight.operation.number, first + idx);
    if (flight.messages[idx].descriptor.num_bytes != expected.descriptor.num_bytes) return false;
  }
  return true;
}

TEST(the_latest_are_kept) {
  FlightRecord record;
  CHECK(record.ended().empty());
  constexpr uint64_t kNumAdded = 3 * FlightRecord::kNumOperations + 17;
  for (uint64_t number = 0; number < kNumAdded; ++number) add(record, number, 1);
  const std::vector<Flight> flights = record.ended();
  CHECK_EQ(flights.size(), FlightRecord::kNumOperations);
  for (size_t idx = 0; idx < flights.size(); ++idx) {
    CHECK_EQ(flights[idx].operation.number, kNumAdded - flights.size() + idx);
    CHECK_EQ(flights[idx].messages.size(), 1u);
    CHECK(is_whole(flights[idx]));
  }
}

TEST(messages_are_bounded) {
  FlightRecord record;
  for (uint64_t number = 0; number < 100; ++number) add(record, number, 3 * number);
  size_t num_kept = 0;
  for (const Flight& flight : record.ended()) {
    CHECK(is_whole(flight));
    CHECK_EQ(flight.operation.num_messages, 3 * flight.operation.number);
    CHECK(flight.messages.size() <= FlightRecord::kMaxMessagesPerOperation);
    num_kept += flight.messages.size();
  }
  CHECK_EQ(num_kept, FlightRecord::kNumMessages);
}

TEST(failures_are_heard_of) {
  int num_heard = 0;
  FlightRecord record([&] { ++num_heard; });
  add(record, 0, 1);
  CHECK_EQ(num_heard, 0);
  add(record, 1, 1, std::make_shared<Failure>());
  record.note_failure();
  CHECK_EQ(num_heard, 2);
}

TEST(what_ends_meanwhile_counts_once) {
  auto flight = [](uint64_t number, bool ended) {
    Flight made;
    made.operation.number = number;
    made.operation.ended = ended;
    return made;
  };
  const auto merged = merge_flights({flight(1, false), flight(4, false)},
                                    {flight(2, true), flight(0, true), flight(1, true)});
  CHECK_EQ(merged.size(), 4u);
  for (size_t idx = 0; idx < 3; ++idx) {
    CHECK_EQ(merged[idx].operation.number, idx);
    CHECK(merged[idx].operation.ended);
  }
  CHECK(merged[3].operation.number == 4 && !merged[3].operation.ended);
}

TEST(reading_while_threads_write) {
  FlightRecord record;
  constexpr int kNumThreads = 3, kNumEach = 20'000;
  std::atomic<int> num_running{kNumThreads};
  check::in_threads(kNumThreads + 1, [&](int thread) {
    while (thread == kNumThreads && num_running > 0)
      for (const Flight& flight : record.ended()) CHECK(is_whole(flight));
    if (thread == kNumThreads) return;
    for (int idx = 0; idx < kNumEach; ++idx)
      add(record, uint64_t(thread) * kNumEach + idx, idx % 4);
    --num_running;
  });
  std::set<uint64_t> numbers;
  for (const Flight& flight : record.ended()) numbers.insert(flight.operation.number);
  CHECK_EQ(numbers.size(), FlightRecord::kNumOperations);
}

TEST(operations_write_themselves_down) {
  FlightRecord record;
  FlightRecord::call_site = 42;
  Operation operation(OpCode::exchange, Deadline::max());
  FlightRecord::call_site = 0;
  for (int peer = 0; peer < 2; ++peer) {
    Descriptor descriptor;
    descriptor.num_bytes = 10 + peer;
    operation.add_request(Direction::send, peer, descriptor, nullptr);
  }
  operation.record_in(record, 5);
  const std::vector<RequestPtr> requests = operation.seal();
  // The operation owns itself for as long as this test needs it.
  for (const RequestPtr& request : requests)
    request->operation = OperationPtr(&operation, [](Operation*) {});
  requests[1]->note_started();
  Operation::settle(*requests[1], nullptr);

  const auto pending = operation.pending_flight();
  CHECK(pending.has_value());
  CHECK(pending->operation.number == 5 && pending->operation.call_site == 42);
  CHECK(!pending->operation.ended && pending->operation.started_at > Clock::time_point());
  // The missing message comes first.
  CHECK(pending->messages[0].peer == 0 && pending->messages[0].state == MessageState::posted);
  CHECK(pending->messages[1].peer == 1 && pending->messages[1].state == MessageState::done);
  CHECK(record.ended().empty());

  Operation::settle(*requests[0], nullptr);
  CHECK(!operation.pending_flight());
  const std::vector<Flight> ended = record.ended();
  CHECK_EQ(ended.size(), 1u);
  CHECK(ended[0].operation.ended && ended[0].operation.ended_at >= ended[0].operation.started_at);
  CHECK(ended[0].messages[1].descriptor.num_bytes == 11);
  for (const RequestPtr& request : requests) request->operation = nullptr;
}

// ------------------------------------------------------------------------------------------------
// connections

enum class DoorState : uint8_t { closed, open, locked };

constexpr StateRule rule_of(DoorState state) {
  using enum DoorState;
  switch (state) {
    case closed:
      return {"closed", after(open, locked)};
    case open:
      return {"open", after(closed)};
    case locked:
      return {"locked", after(closed)};
  }
  return {};
}

TEST(a_state_follows_only_its_predecessors) {
  ConnectionEvents events;
  DoorState door = DoorState::closed;
  events.enter(door, DoorState::open, "door", 3, "by a key");
  CHECK_THROWS(std::logic_error, "door, peer 3: no transition from open to locked",
               events.enter(door, DoorState::locked, "door", 3));
  CHECK(door == DoorState::open);
  events.enter(door, DoorState::closed, "door", 3);
  std::atomic<DoorState> other = DoorState::closed;
  events.enter(other, DoorState::locked, "door", 4);
  CHECK(other == DoorState::locked);
  const std::vector<ConnectionEvent> all = events.all();
  CHECK_EQ(all.size(), 3u);
  CHECK(all[0].state == "open" && all[0].detail == "by a key" && all[0].peer == 3);
  CHECK(all[1].state == "closed" && all[1].detail.empty() && all[1].at >= all[0].at);
  CHECK(all[2].state == "locked" && all[2].peer == 4);
}

// One connection that changes all the time displaces neither the state nor the latest events of others.
TEST(the_latest_event_of_each_connection_is_kept) {
  ConnectionEvents events;
  for (int peer = 0; peer < 100; ++peer) {
    DoorState door = DoorState::closed;
    events.enter(door, DoorState::locked, "door", peer);
  }
  DoorState door = DoorState::closed;
  const size_t num_entered = 2 * ConnectionEvents::kNumEarlier + 1;
  for (size_t idx = 0; idx < num_entered; ++idx)
    events.enter(door, idx % 2 == 0 ? DoorState::open : DoorState::closed, "door", 100);
  const std::vector<ConnectionEvent> all = events.all();
  CHECK_EQ(all.size(), ConnectionEvents::kNumEarlier + 101);
  for (int peer = 0; peer < 100; ++peer)
    CHECK(all[size_t(peer)].peer == peer && all[size_t(peer)].state == "locked");
  CHECK(all.back().peer == 100 && all.back().state == "open");
}

TEST(reading_events_while_threads_write) {
  ConnectionEvents events;
  std::atomic<int> num_running{3};
  check::in_threads(4, [&](int thread) {
    while (thread == 3 && num_running > 0)
      for (const ConnectionEvent& event : events.all()) CHECK_EQ(event.connection, "door");
    if (thread == 3) return;
    DoorState door = DoorState::closed;
    for (int idx = 0; idx < 1000; ++idx)
      events.enter(door, idx % 2 == 0 ? DoorState::open : DoorState::closed, "door", thread);
    --num_running;
  });
  CHECK_EQ(events.all().size(), ConnectionEvents::kNumEarlier + 3);
}
