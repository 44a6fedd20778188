// Makes the connections of a rank in the background, each when one of its two ends needs it:
// carries out the decisions of the Handshake of each peer, on a separate thread.
//
// Any program may connect. Few such guests are kept at a time; the next ones wait in the queue of
// the listening socket until a guest has proven that it belongs or its time has passed. So
// strangers cannot exhaust the file descriptors or the memory of this process, and many peers that
// connect at once do not displace each other.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "message/operation.h"
#include "transport/tcp/greeting.h"
#include "transport/tcp/handshake.h"
#include "transport/tcp/socket.h"

namespace pipecomm::tcp {

// The addresses on which a rank listens, most promising host first.
struct Contact {
  std::vector<std::string> hosts;
  uint16_t port = 0;
};

struct ConnectorLimits {
  std::chrono::milliseconds connecting{3000};   // for one address
  std::chrono::milliseconds greeting{5000};     // for each answer
  std::chrono::milliseconds next_address{250};  // until it is tried in parallel with earlier ones
  std::chrono::milliseconds rest{100};          // between two rounds over the addresses of a peer
  // How long a guest keeps its place while others wait: a silent one, and one that has said hello.
  std::chrono::milliseconds silent_guest{50}, guest{250};
};

class Connector {
 public:
  // Called on the connector's thread.
  struct Events {
    // Replaces an older connection to that peer, if there is one.
    std::function<void(int peer, Socket socket, AttemptId id)> on_connected;
    // No process listens for that rank, or its end of the pair is finished.
    std::function<void(int peer, const std::string& why)> on_missed;
    // No connection can be made any more: out of memory.
    std::function<void(const std::string& why)> on_broken;
  };

  // `bell`: an eventfd for its own use.
  Connector(int rank, int size, const Key& key, const ConnectorLimits& limits,
            std::vector<Socket> listeners, Socket bell, Events events);
  ~Connector();
  void start();  // throws PipeCommException if there is no thread for it
  void stop();   // idempotent; nothing is called afterwards

  // Connects to a peer that listens at `contact`, unless the two are connected.
  void connect(int peer, Contact contact);
  // Report on the connection `id`, see Handshake.
  void spoke(int peer, AttemptId id);
  void ended(int peer, AttemptId id, const std::string& why);
  void end(int peer);
  // Why there is no connection to a wanted peer yet: "10.0.0.1:4242: Network is unreachable"; empty if
  // nothing is known.
  std::string problem(int peer) const;

 private:
  // A greeting on its way in.
  struct Incoming {
    Greeting greeting{};
    size_t num_read = 0;
  };
  struct Problem {
    bool is_refusal = false;  // no process listens there
    std::string why{};
  };
  struct Try {
    uint32_t number = 0;
    Address address;
    Socket socket;
    Deadline until{};
    Nonces nonces{};
    Incoming in{};
    bool is_connected = false;
    bool has_news = false, is_due = false;  // in this turn of the thread
  };
  struct Pair {
    explicit Pair(bool is_lower) : handshake(is_lower) {}
    Handshake handshake;
    Contact contact{};
    std::list<Try> tries{};
    Deadline due = Deadline::max();  // of Handshake::time_is_up()
  };
  struct Guest {
    Socket socket;
    Clock::time_point came_at;
    Deadline until;
    Incoming in{};
    bool is_due = false;
    int peer = -1;  // once it has said hello
    uint32_t attempt = 0;
    Nonces nonces{};
  };
  enum class Read : uint8_t { not_yet, whole, broken };
  using News = std::vector<std::pair<int, std::function<void(Pair&)>>>;  // by peer

  void run();
  void tell(int peer, std::function<void(Pair&)> what);
  bool take_news();  // false: it is to stop
  void wait_for_events();
  Pair& pair_of(int peer);
  void carry_out(int peer, Pair& pair);
  void dial(int peer, Pair& pair, const Handshake::Step& step);
  void advance(int peer, Pair& pair, Try& attempt);
  void hear(int peer, Pair& pair, Try& attempt, const Greeting& greeting);
  void fail(int peer, Pair& pair, const Try& attempt, const std::string& why,
            bool is_elsewhere = false);
  void refused(int peer, Pair& pair, const Try& attempt);
  void accept_guests(const Socket& listener);
  bool is_full() const;
  Deadline may_go_at(const Guest& guest) const;
  std::list<Guest>::iterator first_to_go();
  bool advance(Guest& guest);  // false: gone
  bool welcome(Guest& guest, const Greeting& hello);
  void take(Guest& guest, const Greeting& ready);
  void connected(int peer, Socket socket, AttemptId id);
  static Read read(const Socket& socket, Incoming& incoming);
  bool say(const Socket& socket, Word word, int to, uint32_t attempt, const Nonces& nonces) const;
  void note_problem(int peer, const std::string& address, Problem problem);

  const int rank_, size_;
  const Key key_;
  const ConnectorLimits limits_;
  std::vector<Socket> listeners_;
  const Events events_;
  const Socket bell_;
  const int first_reserved_fd_;  // from here on, descriptors are left to the rest of the program

  mutable std::mutex mutex_;  // down to the line
  News news_;
  std::map<int, std::map<std::string, Problem>> problems_;  // by peer and address
  bool stopping_ = false;
  // ---

  std::map<int, Pair> pairs_;
  std::list<Guest> guests_;        // oldest first
  std::vector<bool> has_callers_;  // by listener
  std::thread thread_;
};

}  // namespace pipecomm::tcp
