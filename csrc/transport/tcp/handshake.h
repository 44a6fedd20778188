// The rules by which a rank and one peer settle on one connection, whichever of them connects: pure
// logic, without sockets, clocks and threads. Connector carries them out, and
// tests/cpp/test_handshake.cpp explores all their states, within bounds.
//
// A guest has its connection once its listener has taken it, and may send immediately. A listener
// that has taken one sends nothing before the guest speaks: the guest may have abandoned the
// attempt, and then makes a newer one, which replaces the older. A connection on which the peer has
// spoken is never replaced. Attempts are numbered, since words of one attempt may arrive after
// words of the next. If both ends are ready on connections that they opened themselves, that of the
// lower rank counts.
//
// An attempt that breaks is repeated, for any cause. A peer is missed only if each of its addresses
// refuses or belongs to a process without the key, if it answers `gone`, or if a connection that it
// had taken ends before its first packet.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace pipecomm::tcp {

struct AttemptId {
  bool is_own = false;  // else of the peer, which numbers its own
  uint32_t number = 0;
  auto operator<=>(const AttemptId&) const = default;
};

class Handshake {
 public:
  explicit Handshake(bool is_lower) : is_lower_(is_lower) {}

  // --- what happens ---
  void want(size_t num_addresses);  // the number of known addresses of the peer
  void time_is_up();                // the time of the last `dial` or `rest`
  // Events of an attempt of this rank.
  void connected(uint32_t number);
  void welcomed(uint32_t number);
  void taken(uint32_t number);
  void turned_away();  // the peer answers `gone`
  void failed(uint32_t number, bool is_refusal);
  // Events of the connection that was handed over.
  void spoke(AttemptId id);  // the peer, for the first time
  void ended(AttemptId id);  // before the peer spoke
  void end();                // the two will not connect any more

  // --- answers to a guest ---
  enum class Answer : uint8_t { none, welcome, gone };
  // To hello, which any program may send: changes no state.
  Answer answer() const;
  // To ready: whether the connection is now the one of this pair, replacing an older one.
  bool take(uint32_t number);

  // --- what is to be done, in this order ---
  enum class Deed : uint8_t { dial, say_hello, say_ready, drop, hand_over, rest, miss };
  struct Step {
    Deed deed;
    uint32_t number = 0;  // of the attempt
    size_t address = 0;   // to be dialed
  };
  std::optional<Step> next_step();

 private:
  friend class Normal;  // of the test, which merges states that behave the same
  enum class State : uint8_t { idle, resting, trying, attached, over };
  enum class Stage : uint8_t { connecting, greeting, ready };
  struct Try {
    uint32_t number;
    Stage stage = Stage::connecting;
  };

  void begin_round();
  void dial_next();
  void rest();
  void drop_all();
  bool is_final() const { return state_ == State::attached && (id_.is_own || has_spoken_); }
  bool is_ready() const { return tries_.size() == 1 && tries_[0].stage == Stage::ready; }
  std::vector<Try>::iterator find(uint32_t number);
  void note(Deed deed, uint32_t number = 0, size_t address = 0);

  bool is_lower_;
  State state_ = State::idle;
  std::optional<size_t> num_addresses_;
  size_t next_address_ = 0;    // of this round
  size_t num_refused_ = 0;     // in this round
  uint32_t num_tries_ = 0;     // in total
  uint32_t newest_taken_ = 0;  // of the peer's attempts
  std::vector<Try> tries_;     // in parallel; a ready one is the only one
  AttemptId id_;               // of the connection, if it is attached
  bool has_spoken_ = false;
  std::vector<Step> steps_;
};

}  // namespace pipecomm::tcp
