// The neighbours of a rank in a group of any size: in the tree along which its collectives run, and
// those that inform each other of a failure. A rank computes only its own place, from its number and
// the size of the group.
#pragma once

#include <vector>

namespace pipecomm {

// A place in the binomial tree of `size` members, whose root is member 0. The parent of a member is
// its number without the lowest bit that is set, so edges span distances 2^k, a member and all below
// it are consecutive, and on hosts of 2^k ranks only one edge of a host leaves it upwards.
struct TreePlace {
  int member = 0;
  int parent = -1;            // -1: the root
  std::vector<int> children;  // those with the most members below them come first

  bool is_root() const { return parent < 0; }
};
TreePlace tree_place(int member, int size);
// The parent, if any, and the children, increasing.
std::vector<int> tree_neighbours(int member, int size);

// How the payload of a broadcast travels along that tree. A source that is not the root sends it
// whole to the root, without waiting for other ranks; from the root it goes down in pieces, once all
// agree. -1 means no rank.
struct BroadcastRoute {
  int whole_from = -1, whole_to = -1;
  int pieces_from = -1;
  std::vector<int> pieces_to;
};
BroadcastRoute broadcast_route(const TreePlace& place, int source);

// The ranks at distances 2^k of `rank`, in both directions around the ring of all ranks. Each of them
// forwards to its own: what one rank knows, all know within ceil(log2(size)) rounds, even if some are
// gone.
std::vector<int> control_neighbours(int rank, int size);

}  // namespace pipecomm
