// One rank's shared memory: an anonymous file that its owner creates and its peers map.
#pragma once

#include <sys/types.h>

#include <memory>
#include <span>

#include "transport/shm/layout.h"

namespace pipecomm::shm {

struct SegmentShape {
  int size = 1;
  int num_channels = 1;  // of the user; two lanes more carry the collectives and their agreements
  int64_t ring_bytes = 0;
  int64_t window_bytes = 0;
  uint32_t epoch = 0;

  int num_lanes() const { return num_channels + 2; }
  int64_t control_bytes() const;  // all but the window
};

// Where a process holds a segment open. The inode distinguishes it from a later file with this number.
struct SegmentName {
  pid_t pid = 0;
  int fd = -1;
  uint64_t inode = 0;
};

class Segment {
 public:
  // Creates a memfd: no name, mode 0600, sealed against shrinking, gone with the last process that
  // maps it.
  // Throws std::system_error.
  static std::shared_ptr<Segment> create(int rank, const SegmentShape& shape);
  // Maps the segment of another process. Throws std::system_error (no such file: that process has
  // closed it or ended), or std::runtime_error if it does not have this shape.
  static std::shared_ptr<Segment> open(const SegmentName& name, int rank,
                                       const SegmentShape& shape);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  int rank() const { return rank_; }
  const SegmentShape& shape() const { return shape_; }
  int fd() const { return fd_; }
  uint64_t inode() const;
  // After this, no process can map it any more.
  void close_fd();
  // Returns the pages of the rings from `sources` to the system. The status stays readable.
  void release_rings(std::span<const int> sources);

  Status& status() { return *at<Status>(kPageBytes); }
  Lane& lane(int source, int lane_idx) { return *at<Lane>(lane_offset(source, lane_idx)); }
  std::byte* ring(int source, int lane_idx) {
    return base_ + lane_offset(source, lane_idx) + sizeof(Lane);
  }
  Multicast& multicast() { return *at<Multicast>(multicast_offset(shape_)); }
  std::byte* multicast_ring() { return base_ + multicast_offset(shape_) + sizeof(Multicast); }
  std::byte* window() { return base_ + shape_.control_bytes(); }
  int64_t window_bytes() const { return shape_.window_bytes; }
  // Copies a part of the window to zeroed memory. Pages that nobody has written stay without memory as long as
  // the descriptor is open.
  void read_window(int64_t begin, int64_t end, std::byte* into) const;
  // Gives the owner pages of its own for whole pages of the window, with their content, and loses no write
  // of its threads meanwhile. The peers keep the shared ones, as does the owner if the system has no room
  // for another mapping.
  void make_private(int64_t offset, int64_t num_bytes);

  static int64_t multicast_offset(const SegmentShape& shape);

 private:
  Segment(int rank, const SegmentShape& shape)
      : rank_(rank), shape_(shape), segment_bytes_(shape.control_bytes() + shape.window_bytes) {}
  SegmentHeader header() const;
  void map();
  int64_t lane_offset(int source, int lane_idx) const;
  template <class T>
  T* at(int64_t offset) {
    return reinterpret_cast<T*>(base_ + offset);
  }

  const int rank_;
  const SegmentShape shape_;
  const int64_t segment_bytes_;
  int fd_ = -1;
  std::byte* base_ = nullptr;
};

using SegmentPtr = std::shared_ptr<Segment>;

}  // namespace pipecomm::shm
