#include "transport/tcp/handshake.h"

#include <algorithm>

namespace pipecomm::tcp {

void Handshake::note(Deed deed, uint32_t number, size_t address) {
  steps_.push_back({deed, number, address});
}

std::optional<Handshake::Step> Handshake::next_step() {
  if (steps_.empty()) return std::nullopt;
  const Step step = steps_.front();
  steps_.erase(steps_.begin());
  return step;
}

std::vector<Handshake::Try>::iterator Handshake::find(uint32_t number) {
  return std::find_if(tries_.begin(), tries_.end(),
                      [&](const Try& each) { return each.number == number; });
}

// ------------------------------------------------------------------------------------------------
// attempts of this rank

void Handshake::want(size_t num_addresses) {
  num_addresses_ = num_addresses;
  if (state_ == State::idle) begin_round();
}

void Handshake::begin_round() {
  state_ = State::trying;
  next_address_ = num_refused_ = 0;
  dial_next();
}

// Dials the next address while earlier ones have not answered yet; after the last one, acts on
// their answers.
void Handshake::dial_next() {
  if (next_address_ < *num_addresses_) {
    tries_.push_back({++num_tries_});
    return note(Deed::dial, num_tries_, next_address_++);
  }
  if (!tries_.empty()) return;
  if (num_refused_ < *num_addresses_) return rest();
  state_ = State::idle;
  note(Deed::miss);
}

void Handshake::rest() {
  state_ = num_addresses_ ? State::resting : State::idle;
  if (num_addresses_) note(Deed::rest);
}

void Handshake::time_is_up() {
  if (state_ == State::resting)
    begin_round();
  else if (state_ == State::trying)
    dial_next();
}

void Handshake::connected(uint32_t number) {
  find(number)->stage = Stage::greeting;
  note(Deed::say_hello, number);
}

void Handshake::welcomed(uint32_t number) {
  if (find(number)->stage != Stage::greeting) return failed(number, false);
  for (const Try& each : tries_)
    if (each.number != number) note(Deed::drop, each.number);
  tries_.assign({{number, Stage::ready}});
  next_address_ = *num_addresses_;
  num_refused_ = 0;
  note(Deed::say_ready, number);
}

void Handshake::taken(uint32_t number) {
  if (find(number)->stage != Stage::ready) return failed(number, false);
  tries_.clear();
  state_ = State::attached;
  id_ = {.is_own = true, .number = number};
  note(Deed::hand_over, number);
}

void Handshake::turned_away() {
  drop_all();
  state_ = State::idle;
  note(Deed::miss);
}

void Handshake::failed(uint32_t number, bool is_refusal) {
  tries_.erase(find(number));
  note(Deed::drop, number);
  num_refused_ += is_refusal;
  dial_next();
}

void Handshake::drop_all() {
  for (const Try& each : tries_) note(Deed::drop, each.number);
  tries_.clear();
}

// ------------------------------------------------------------------------------------------------
// attempts of the peer, and the connection

Handshake::Answer Handshake::answer() const {
  if (state_ == State::over) return Answer::gone;
  return is_final() ? Answer::none : Answer::welcome;
}

bool Handshake::take(uint32_t number) {
  if (state_ == State::over || is_final() || number <= newest_taken_) return false;
  if (is_lower_ && is_ready()) return false;
  drop_all();
  newest_taken_ = number;
  state_ = State::attached;
  id_ = {.is_own = false, .number = number};
  has_spoken_ = false;
  return true;
}

void Handshake::spoke(AttemptId id) { has_spoken_ |= state_ == State::attached && id == id_; }

void Handshake::ended(AttemptId id) {
  if (state_ != State::attached || id != id_) return;
  if (!id.is_own) return rest();
  state_ = State::over;  // what this rank has sent is lost
  note(Deed::miss);
}

void Handshake::end() {
  drop_all();
  state_ = State::over;
}

}  // namespace pipecomm::tcp
