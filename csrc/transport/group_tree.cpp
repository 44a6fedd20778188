#include "transport/group_tree.h"

#include <algorithm>

namespace pipecomm {

TreePlace tree_place(int member, int size) {
  TreePlace place;
  place.member = member;
  if (member > 0) place.parent = member & (member - 1);
  const int reach = member > 0 ? member & -member : size;  // subtree: [member, member + reach)
  for (int distance = 1; distance < reach && distance < size - member; distance *= 2)
    place.children.insert(place.children.begin(), member + distance);
  return place;
}

std::vector<int> tree_neighbours(int member, int size) {
  const TreePlace place = tree_place(member, size);
  std::vector<int> neighbours(place.children.rbegin(), place.children.rend());
  if (!place.is_root()) neighbours.insert(neighbours.begin(), place.parent);
  return neighbours;
}

BroadcastRoute broadcast_route(const TreePlace& place, int source) {
  BroadcastRoute route;
  if (source != 0 && place.is_root()) route.whole_from = source;
  if (source != 0 && place.member == source) route.whole_to = 0;
  if (!place.is_root() && place.member != source) route.pieces_from = place.parent;
  route.pieces_to = place.children;
  std::erase(route.pieces_to, source);
  return route;
}

std::vector<int> control_neighbours(int rank, int size) {
  std::vector<int> neighbours;
  for (int distance = 1; distance < size; distance *= 2) {
    neighbours.push_back((rank + distance) % size);
    neighbours.push_back((rank - distance + size) % size);
  }
  std::sort(neighbours.begin(), neighbours.end());
  neighbours.erase(std::unique(neighbours.begin(), neighbours.end()), neighbours.end());
  return neighbours;
}

}  // namespace pipecomm
