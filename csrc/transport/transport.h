// The one interface between the engine and whatever moves bytes between the ranks of a host-memory
// communicator.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "engine/descriptor.h"
#include "engine/failure.h"
#include "engine/operation.h"

namespace pipecomm {

inline constexpr int kMaxUserChannels = 15;
inline constexpr int kCollectiveChannel =
    kMaxUserChannels;  // channel of broadcast, barrier, exchanges
inline constexpr int kNumChannels = kMaxUserChannels + 1;

// What a transport tells its owner. Called from transport threads, never with a transport lock
// held.
class TransportEvents {
 public:
  virtual ~TransportEvents() = default;
  virtual void on_peer_lost(int peer, const std::string& why) = 0;
  virtual void on_remote_failure(
      const Failure& failure) = 0;  // a peer announced that its communicator failed
  virtual void on_broken(const std::string& why) = 0;  // an error of the transport itself
  // What a peer believes of a message between it and us (see HostTransport::claim).
  virtual void on_claim(int /*peer*/, Direction /*direction*/, const Descriptor& /*descriptor*/) {}
};

class HostTransport {
 public:
  virtual ~HostTransport() = default;

  // Whether requests may carry a `copy` instead of contiguous data: packing and unpacking are then
  // part of the transfer.
  virtual bool copies_on_the_way() const { return false; }

  // Memory for results of `num_bytes` into which peers can write directly, or null: use any. It
  // goes back to the transport with the last reference, and may outlive it.
  virtual std::shared_ptr<std::byte> allocate_result(int64_t /*num_bytes*/) { return nullptr; }

  // Takes the whole batch in order and never waits for a peer. Settles each request's operation
  // exactly once. `is_async` false: the calling thread waits for the operation next, and need not
  // be relieved.
  virtual void post(std::vector<RequestPtr> batch, bool is_async) = 0;

  // Tells a peer what this end believes of a message that travels by other means; `direction` as
  // seen from here. Neither matched nor answered, and in no order with the messages. For transports
  // that serve as the control plane of another one.
  virtual void claim(int /*peer*/, Direction /*direction*/, const Descriptor& /*descriptor*/) {
    throw std::logic_error("this transport carries no claims");
  }

  // Lends the waiting thread to the transport. True: nothing is left that this thread could help
  // with. False: cut short (see tick), call again after a look at the clock.
  virtual bool assist(Operation& /*operation*/) { return true; }

  // Called every few milliseconds by the owner's watchdog: look for dead peers, free threads that
  // assist.
  virtual void tick() = 0;

  // Tells every live peer that this communicator failed, and stops all transfers: requests in
  // flight are dropped, not settled (the owner fails their operations itself). Idempotent.
  virtual void abort(const Failure& failure) = 0;

  // Tells every peer that this rank posts nothing more: what can no longer match fails on both
  // ends. Idempotent.
  virtual void begin_close() = 0;

  // Orderly goodbye within the deadline, then releases threads, connections and memory. Idempotent.
  virtual void close(Deadline deadline) = 0;

  // What is known of a peer, for error texts: "connection open, 2 messages waiting unmatched".
  virtual std::string describe_peer(int peer) const = 0;
};

}  // namespace pipecomm
