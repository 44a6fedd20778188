// Peer lookup: each rank publishes its addresses, and a thread reads a peer's record on first use; the peer
// may not have made its communicator yet. A rank that closes before every peer has met it adds a farewell
// to its record, with the failure that it knows of. So a peer that no longer finds the rank can distinguish a
// close from a death, and learns the first cause.
#pragma once

#include <sys/types.h>

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "message/operation.h"
#include "transport/cores.h"

namespace pipecomm {

// How to reach one peer.
struct Introduction {
  CoreSet cores;  // on which it may run, if it is on this host
  pid_t pid = 0;  // of a process that this one can watch, else 0
  // Where it listens for connections, most promising host first.
  std::vector<std::string> hosts;
  uint16_t port = 0;
  // Its shared memory, which `pid` holds open under `memory_fd`; -1: the two share none, for `reason`.
  int memory_fd = -1;
  uint64_t memory_inode = 0;
  int64_t window_bytes = 0;
  std::string reason;
  // Not empty: the peer has refused to make the communicator.
  std::string refusal;
  // Set once the peer has closed its communicator: its failure (encoded), or empty.
  std::optional<std::string> farewell;
};

class Directory {
 public:
  // The peer's record, or nothing if it has not published one yet. May throw, and takes a second at most.
  using Lookup = std::function<std::optional<Introduction>(int peer)>;
  // Called on the directory's thread.
  struct Events {
    // Called for each wanted peer until it returns "". Otherwise it returns as a predicate what keeps this
    // rank from reaching the peer for now, and is called again after a pause.
    std::function<std::string(int peer, const Introduction& introduction)> on_found;
    // Called for a missed peer; without a farewell it has not closed its communicator.
    std::function<void(int peer, const std::optional<std::string>& farewell,
                       const std::string& why)>
        on_gone;
  };

  Directory(int rank, Lookup lookup, Events events);
  ~Directory();
  void start();       // throws PipeCommException if no thread can be started
  void begin_stop();  // nothing more is looked up
  void stop();        // idempotent; nothing is called afterwards

  void want(int peer);
  // A peer that was found does not respond: looks up again whether it has closed. A rank publishes that
  // before it stops listening, so one look-up is enough, if the store answers.
  void miss(int peer, const std::string& why);
  // Why a wanted peer is not known yet, as a predicate; empty if it is known, or was not wanted.
  std::string problem(int peer) const;

 private:
  void run();
  bool look_up(int peer);
  std::optional<std::string> farewell_of(int peer) const;

  const int rank_;
  const Lookup lookup_;
  const Events events_;

  mutable std::mutex mutex_;  // down to the line
  std::condition_variable changed_;
  std::vector<int> wanted_;  // since the last round
  std::map<int, std::string> missed_;
  std::map<int, std::string> problems_;
  bool stopping_ = false;
  // ---

  std::set<int> missing_;  // of the thread
  std::set<int> found_;
  std::thread thread_;
};

}  // namespace pipecomm
