// The interface between the engine and the code that moves bytes between the ranks of a
// communicator in host memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>

#include "message/connection_events.h"
#include "message/failure.h"
#include "message/operation.h"

namespace pipecomm {

inline constexpr int kMaxUserChannels = 15;
inline constexpr int kCollectiveChannel = kMaxUserChannels;  // of broadcast, barrier and exchanges
// Of the small messages by which many ranks agree on a collective. They are not answered: the receiver's
// later messages show how it understood them.
inline constexpr int kControlChannel = kCollectiveChannel + 1;
inline constexpr int kNumChannels = kControlChannel + 1;

// Events that a transport reports to its owner, from threads of the transport and never with a lock
// of the transport held.
class TransportEvents {
 public:
  virtual ~TransportEvents() = default;
  virtual void on_peer_lost(int peer, const std::string& why) = 0;
  // A peer announced that its communicator failed.
  virtual void on_remote_failure(const Failure& failure) = 0;
  // A peer takes no part in the communicator, or not in one like this: `why` states what and where.
  virtual void on_refused(int peer, const std::string& why) = 0;
  // An error of the transport itself.
  virtual void on_broken(const std::string& why) = 0;
  // A peer has sent this with HostTransport::send_control.
  virtual void on_control(int /*peer*/, std::span<const std::byte> /*message*/) {}
  // Where the transport records the states of its connections, with its locks held.
  virtual std::shared_ptr<ConnectionEvents> connection_events() {
    return std::make_shared<ConnectionEvents>();
  }
};

// On threads where an exception of `action` would be uncaught: out of memory, say.
template <class Action>
void or_break(TransportEvents& events, Action action) {
  try {
    action();
  } catch (const std::exception& error) {
    events.on_broken(error.what());
  }
}

struct Route {
  std::string transport;  // its name; empty: not decided yet
  std::string reason;     // why it is not the expected transport, or empty
};

// Results below this size come from the ordinary allocator: they do not pay for a grant.
inline constexpr int64_t kMinResultBytes = 64 << 10;

class HostTransport {
 public:
  virtual ~HostTransport() = default;

  // Whether requests may carry a `copy` instead of contiguous data: packing and unpacking are then
  // part of the transfer.
  virtual bool copies_on_the_way() const { return false; }

  // Memory for results of `num_bytes` into which peers can write directly, or null if any memory
  // will do. It goes back to the transport with the last reference, and may outlive it.
  virtual std::shared_ptr<std::byte> allocate_result(int64_t /*num_bytes*/) { return nullptr; }

  // Takes the whole batch in order and never waits for a peer. Completes each request exactly once.
  // If `is_async` is false the calling thread waits for the operation next and makes its progress.
  virtual void post(std::span<const RequestPtr> batch, bool is_async) = 0;

  // Begins to connect to a peer, if messages to it would have to do so first. Does not wait.
  virtual void connect(int /*peer*/) {}

  // Sends a short message to the owner of the peer's transport. It is neither matched nor answered, comes
  // in the order of such messages, and has no order with requests. For transports that serve as the
  // control plane of another one.
  virtual void send_control(int /*peer*/, std::span<const std::byte> /*message*/) {
    throw std::logic_error("this transport carries no control messages");
  }

  // Lets the waiting thread work for the transport. Returns true if nothing is left that this thread
  // can help with, false if it was cut short (see tick): check the clock, then call again.
  virtual bool assist(Operation& /*operation*/) { return true; }

  // Moves what can move at once, for a caller that polls whether an operation is done.
  virtual void advance() {}

  // Looks for dead peers and frees threads that assist. Called by a watchdog: every few milliseconds
  // while operations are in flight or if it returned true, else a few times a second.
  virtual bool tick() = 0;

  // Tells every live peer that this communicator failed, and stops all transfers: requests in
  // flight are dropped, not completed (the owner fails their operations itself). Idempotent.
  virtual void abort(const Failure& failure) = 0;

  // Tells every peer that this rank posts nothing more: requests that can no longer match fail on
  // both ends. Idempotent.
  virtual void begin_close() = 0;

  // Sends goodbyes within the deadline, then releases threads, connections and memory. Idempotent.
  virtual void close(Deadline deadline) = 0;

  // How messages to and from a peer travel, as far as that is decided.
  virtual Route route(int /*peer*/) const { return {}; }

  // Whether this rank knows that a peer has closed its communicator. A transport that knows that the
  // communicator had failed there reports the failure instead.
  virtual bool has_closed(int /*peer*/) const { return false; }
  // The state of a peer as a predicate, for error texts: "has closed its communicator".
  virtual std::string describe_peer(int peer) const = 0;
};

}  // namespace pipecomm
