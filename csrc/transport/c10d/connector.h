// Makes the connections of a rank in the background, each when one of its two ends wants it.
//
// Whoever connects says hello, with a secret that only ranks of this communicator know, and the other
// end welcomes it: an address may lead to another host, or a port to another program. If both ends
// try at once, the lower rank's attempt counts: it tells the higher rank that it is busy, and the
// higher rank takes what comes from the lower one.
#pragma once

#include <sys/types.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "message/operation.h"
#include "transport/c10d/socket.h"

namespace pipecomm::tcp {

using Token = std::array<std::byte, 16>;

// Where a rank listens, most promising host first.
struct Contact {
  std::vector<std::string> hosts;
  uint16_t port = 0;
};

class Connector {
 public:
  // Called on the connector's thread, at most once for each peer.
  struct Events {
    std::function<void(int peer, Socket socket)> on_connected;
    // Nobody listens for that rank any more.
    std::function<void(int peer, const std::string& why)> on_unreachable;
  };

  // `bell`: an eventfd for its own use.
  Connector(int rank, int size, const Token& token, Socket listener, Socket bell, Events events);
  ~Connector();
  void start();  // throws PipeCommException if there is no thread for it
  void stop();   // idempotent; nothing is called afterwards

  // Connects to a peer that listens there, unless the two are connected.
  void connect(int peer, Contact contact);
  // Why there is no connection to a wanted peer yet: "connecting to 10.0.0.1:4242: Network is
  // unreachable"; empty if nothing is known.
  std::string problem(int peer) const;

 private:
  enum class Kind : uint16_t { hello = 1, welcome = 2, busy = 3 };
  struct Hello {
    uint32_t magic;
    uint16_t version;
    Kind kind;
    uint32_t from, to;
    Token token;
  };
  static_assert(sizeof(Hello) == 32);
  // A hello on its way in.
  struct Incoming {
    std::array<std::byte, sizeof(Hello)> bytes;
    size_t num_read = 0;
  };
  enum class Stage : uint8_t { resting, connecting, greeting };
  struct Attempt {
    Contact contact;
    Stage stage = Stage::resting;
    size_t host_idx = 0;
    size_t num_refused = 0;  // hosts of this round where nobody of ours listens
    Socket socket;
    Incoming reply;
    Deadline until{};
  };
  struct Guest {
    Socket socket;
    Incoming hello;
    Deadline until;
  };
  enum class Read : uint8_t { not_yet, whole, broken };

  void run();
  void take_wanted();
  Deadline next_deadline() const;
  void try_next_host(int peer, Attempt& attempt);
  void host_failed(int peer, Attempt& attempt, const std::string& why, bool is_refusal);
  void rest(Attempt& attempt);
  bool advance(int peer, Attempt& attempt, bool is_ready);  // false: the attempt is over
  bool advance(Guest& guest, bool is_ready);                // false: gone
  void meet(Guest& guest, const Hello& hello);
  Read read(const Socket& socket, Incoming& incoming) const;
  bool is_ours(const Hello& hello) const;
  bool say(const Socket& socket, Kind kind, int to) const;
  void note_problem(int peer, const std::string& text);
  void wake();

  const int rank_, size_;
  const Token token_;
  Socket listener_;
  const Events events_;
  const Socket bell_;

  mutable std::mutex mutex_;  // down to the line
  std::vector<std::pair<int, Contact>> wanted_;
  std::map<int, std::string> problems_;
  bool stopping_ = false;
  // ---

  std::map<int, Attempt> attempts_;  // by peer
  std::list<Guest> guests_;
  std::set<int> connected_;
  std::thread thread_;
};

}  // namespace pipecomm::tcp
