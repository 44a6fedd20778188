// A group of thousands of ranks on one thread, in simulated time: hosts of 8 ranks, a port per rank
// that sends and receives one message at a time, latency and bandwidth per link. The decisions of
// ranks are code of the library (agreement_tree.h, group_tree.h); only the network is a model.
#pragma once

#include "check.h"

#include <queue>

#include "engine/agreement_tree.h"
#include "engine/collective_line.h"
#include "transport/group_tree.h"

namespace model {

inline constexpr int kRanksPerHost = 8;
inline constexpr int64_t kHeaderBytes = 150;  // packet, record and descriptor

// Seconds and bytes per second; about what sockets do inside a host and over 10 Gbit/s.
struct Link {
  double latency, bandwidth;
};
inline Link link_between(int a, int b) {
  return a / kRanksPerHost == b / kRanksPerHost ? Link{10e-6, 4e9} : Link{30e-6, 1.25e9};
}
inline constexpr double kMessageSeconds = 3e-6;  // of a port, for any message

class Network {
 public:
  explicit Network(int size)
      : num_sent_(size), num_bytes_(size), sending_(size), receiving_(size) {}

  void send(int from, int to, int64_t num_bytes, std::function<void()> arrive) {
    const auto [latency, bandwidth] = link_between(from, to);
    const double busy = kMessageSeconds + double(num_bytes) / bandwidth;
    sending_[from] = std::max(sending_[from], now_) + busy;
    receiving_[to] = std::max(receiving_[to] + busy, sending_[from] + latency);
    events_.push({receiving_[to], num_events_++, std::move(arrive)});
    ++num_sent_[from];
    num_bytes_[from] += num_bytes;
  }
  // Runs until nothing is in flight. Returns the time of the last arrival.
  double run() {
    while (!events_.empty()) {
      now_ = events_.top().time;
      const auto arrive = events_.top().arrive;
      events_.pop();
      arrive();
    }
    return now_;
  }
  const std::vector<int64_t>& num_sent() const { return num_sent_; }
  const std::vector<int64_t>& num_bytes() const { return num_bytes_; }

 private:
  struct Event {
    double time;
    uint64_t number;
    std::function<void()> arrive;
    bool operator<(const Event& other) const {
      return std::pair(time, number) > std::pair(other.time, other.number);
    }
  };
  double now_ = 0;
  uint64_t num_events_ = 0;
  std::priority_queue<Event> events_;
  std::vector<int64_t> num_sent_, num_bytes_;
  std::vector<double> sending_, receiving_;  // until when the port of a rank is busy
};

struct Course {
  int rounds = 0;  // the longest chain of messages
  int num_agreed = 0, num_objecting = 0, num_complete = 0;
  int64_t most_sent = 0, most_bytes = 0;
  double mean_sent = 0;
  double seconds = 0;
  size_t most_edges = 0;  // that a rank keeps of the group
};

// One collective: agreement of all, then the payload of a broadcast, if there is one.
class Group {
 public:
  Group(int size, int source = 0, int64_t num_bytes = 0)
      : network_(size),
        num_bytes_(num_bytes),
        num_pieces_((num_bytes + kPieceBytes - 1) / kPieceBytes) {
    for (int rank = 0; rank < size; ++rank)
      ranks_.push_back(std::make_unique<Rank>(rank, size, source));
  }
  Course run(const std::function<Statement(int rank)>& statement_of) {
    for (auto& rank : ranks_) {
      say(*rank, rank->tree.start(statement_of(rank->place.member)));
      if (rank->route.whole_to >= 0)
        send(*rank, rank->route.whole_to, num_bytes_, [](Rank& root, Group& group) {
          root.num_pieces_here = group.num_pieces_;
          if (root.tree.verdict().value_or(false)) group.pass_on(root);
        });
    }
    Course course;
    course.seconds = network_.run();
    for (const auto& rank : ranks_) {
      course.rounds = std::max(course.rounds, rank->round);
      if (rank->tree.verdict())
        ++(*rank->tree.verdict() ? course.num_agreed : course.num_objecting);
      course.num_complete += rank->num_pieces_here == num_pieces_;
      const size_t edges = rank->place.children.size() + (rank->place.is_root() ? 0 : 1);
      course.most_edges = std::max(course.most_edges, edges);
    }
    course.most_sent = std::ranges::max(network_.num_sent());
    course.most_bytes = std::ranges::max(network_.num_bytes());
    for (const int64_t num_sent : network_.num_sent())
      course.mean_sent += double(num_sent) / double(ranks_.size());
    return course;
  }

 private:
  struct Rank {
    Rank(int rank, int size, int source)
        : place(tree_place(rank, size)), route(broadcast_route(place, source)), tree(place) {
      has_payload = rank == source;
    }
    TreePlace place;
    BroadcastRoute route;
    AgreementTree tree;
    bool has_payload;
    int64_t num_pieces_here = 0, num_passed_on = 0;
    int round = 0;  // messages in the longest chain that led here
  };

  void send(Rank& from, int to, int64_t num_bytes, std::function<void(Rank&, Group&)> arrive) {
    Rank& receiver = *ranks_[to];
    network_.send(from.place.member, to, kHeaderBytes + num_bytes,
                  [this, &receiver, round = from.round + 1, arrive = std::move(arrive)] {
                    receiver.round = std::max(receiver.round, round);
                    arrive(receiver, *this);
                  });
  }
  void say(Rank& rank, const std::vector<AgreementTree::Message>& messages) {
    for (const auto& [to, statement] : messages)
      send(rank, to, sizeof statement,
           [from = rank.place.member, word = statement](Rank& receiver, Group& group) {
             group.hear(receiver, from, word);
           });
    if (!rank.tree.verdict().value_or(false)) return;
    if (rank.has_payload) rank.num_pieces_here = num_pieces_;
    pass_on(rank);
  }
  void hear(Rank& rank, int from, const Statement& statement) {
    say(rank, rank.tree.hear(from, statement));
  }
  void pass_on(Rank& rank) {
    for (; rank.num_passed_on < rank.num_pieces_here; ++rank.num_passed_on)
      for (const int to : rank.route.pieces_to)
        send(rank, to, std::min(kPieceBytes, num_bytes_ - rank.num_passed_on * kPieceBytes),
             [](Rank& receiver, Group& group) {
               ++receiver.num_pieces_here;
               group.pass_on(receiver);
             });
  }

  Network network_;
  const int64_t num_bytes_, num_pieces_;
  std::vector<std::unique_ptr<Rank>> ranks_;
};

// Rounds in which ranks notify their control neighbours, until all survivors know of the dead
// ranks. Neighbours of a dead rank notice it themselves, before the first round. -1: some never
// learn of it.
inline int rounds_of_failure(const std::vector<bool>& is_dead) {
  const int size = int(is_dead.size());
  std::vector<bool> knows(size);
  std::vector<int> telling;
  const auto learn = [&](int rank) {
    if (is_dead[rank] || knows[rank]) return;
    knows[rank] = true;
    telling.push_back(rank);
  };
  size_t num_left = 0;
  for (int rank = 0; rank < size; ++rank) {
    num_left += !is_dead[rank];
    if (is_dead[rank])
      for (const int peer : control_neighbours(rank, size)) learn(peer);
  }
  size_t num_knowing = telling.size();
  int rounds = 0;
  while (num_knowing < num_left) {
    if (telling.empty()) return -1;
    ++rounds;
    for (const int rank : std::exchange(telling, {}))
      for (const int peer : control_neighbours(rank, size)) learn(peer);
    num_knowing += telling.size();
  }
  return rounds;
}

}  // namespace model
