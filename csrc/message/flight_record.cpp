#include "message/flight_record.h"

#include <unordered_set>
#include <utility>

namespace pipecomm {

FlightRecord::FlightRecord(std::function<void()> on_failure)
    : on_failure_(std::move(on_failure)), operations_(kNumOperations), messages_(kNumMessages) {}

std::vector<Flight> FlightRecord::ended() const {
  std::vector<Flight> flights;
  std::lock_guard lock(mutex_);
  const uint64_t begin = num_operations_ - std::min<uint64_t>(num_operations_, kNumOperations);
  const uint64_t oldest_message = num_messages_ - std::min<uint64_t>(num_messages_, kNumMessages);
  flights.reserve(num_operations_ - begin);
  for (uint64_t idx = begin; idx < num_operations_; ++idx) {
    const Slot& slot = operations_[idx % kNumOperations];
    Flight& flight = flights.emplace_back(Flight{slot.operation, {}});
    for (uint64_t message = std::max(slot.first_message, oldest_message);
         message < slot.first_message + slot.num_kept; ++message)
      flight.messages.push_back(messages_[message % kNumMessages]);
  }
  return flights;
}

std::vector<Flight> merge_flights(std::vector<Flight> pending, std::vector<Flight> ended) {
  std::unordered_set<uint64_t> ended_numbers;
  for (const Flight& flight : ended) ended_numbers.insert(flight.operation.number);
  for (Flight& flight : pending)
    if (!ended_numbers.contains(flight.operation.number)) ended.push_back(std::move(flight));
  std::sort(ended.begin(), ended.end(), [](const Flight& a, const Flight& b) {
    return a.operation.number < b.operation.number;
  });
  return ended;
}

}  // namespace pipecomm
