#include "transport/shm/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "transport/shm/ring.h"

namespace pipecomm::shm {
namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

[[noreturn]] void fail(const std::string& what) {
  throw std::system_error(errno, std::generic_category(), what);
}

}  // namespace

int64_t SegmentShape::control_bytes() const {
  return Segment::multicast_offset(*this) + static_cast<int64_t>(sizeof(Multicast)) + ring_bytes;
}

int64_t Segment::multicast_offset(const SegmentShape& shape) {
  constexpr int64_t kStatusPages = (sizeof(Status) + kPageBytes - 1) / kPageBytes;
  return (1 + kStatusPages) * static_cast<int64_t>(kPageBytes) +
         int64_t{shape.size} * shape.num_lanes() *
             (static_cast<int64_t>(sizeof(Lane)) + shape.ring_bytes);
}

int64_t Segment::lane_offset(int source, int lane_idx) const {
  const int64_t lane_bytes = static_cast<int64_t>(sizeof(Lane)) + shape_.ring_bytes;
  const int64_t first =
      multicast_offset(shape_) - int64_t{shape_.size} * shape_.num_lanes() * lane_bytes;
  return first + (int64_t{source} * shape_.num_lanes() + lane_idx) * lane_bytes;
}

SegmentHeader Segment::header() const {
  return {.magic = kSegmentMagic,
          .version = kLayoutVersion,
          .epoch = shape_.epoch,
          .rank = static_cast<uint32_t>(rank_),
          .size = static_cast<uint32_t>(shape_.size),
          .num_lanes = static_cast<uint32_t>(shape_.num_lanes()),
          .reserved = 0,
          .ring_bytes = static_cast<uint64_t>(shape_.ring_bytes),
          .window_bytes = static_cast<uint64_t>(shape_.window_bytes),
          .segment_bytes = static_cast<uint64_t>(segment_bytes_)};
}

std::shared_ptr<Segment> Segment::create(int rank, const SegmentShape& shape) {
  if (shape.size < 1 || shape.size > kMaxRanks || rank < 0 || rank >= shape.size)
    throw std::invalid_argument("shared memory supports 1 to " + std::to_string(kMaxRanks) +
                                " ranks, not " + std::to_string(shape.size));
  if (shape.ring_bytes < kMinRingBytes || shape.ring_bytes > kMaxRingBytes ||
      shape.ring_bytes % static_cast<int64_t>(kPageBytes) != 0)
    throw std::invalid_argument("ring bytes must be a multiple of " + std::to_string(kPageBytes) +
                                " from " + std::to_string(kMinRingBytes) + " to " +
                                std::to_string(kMaxRingBytes) + ", not " +
                                std::to_string(shape.ring_bytes));
  std::shared_ptr<Segment> segment(new Segment(rank, shape));
  segment->fd_ = memfd_create("pipecomm", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (segment->fd_ < 0) fail("memfd_create");
  if (fchmod(segment->fd_, 0600) != 0) fail("fchmod of shared memory");
  if (ftruncate(segment->fd_, segment->segment_bytes_) != 0)
    fail("shared memory of " + bytes_text(segment->segment_bytes_));
  if (fcntl(segment->fd_, F_ADD_SEALS, kSeals) != 0) fail("sealing shared memory");
  segment->map();
  // Fresh pages are zero, which is right for every word.
  *segment->at<SegmentHeader>(0) = segment->header();
  return segment;
}

std::shared_ptr<Segment> Segment::open(const SegmentName& name, int rank,
                                       const SegmentShape& shape) {
  std::shared_ptr<Segment> segment(new Segment(rank, shape));
  const auto path_of = [](const std::string& process, int fd) {
    return "/proc/" + process + "/fd/" + std::to_string(fd);
  };
  const std::string opening = "opening the shared memory of rank " + std::to_string(rank);
  auto wrong = [&](const char* what) {
    return std::runtime_error("the shared memory of rank " + std::to_string(rank) + " " + what);
  };
  // Once the rank has closed its memory, the number may stand for any file, which may not be opened
  // at all. O_PATH identifies it first.
  segment->fd_ = ::open(path_of(std::to_string(name.pid), name.fd).c_str(), O_PATH | O_CLOEXEC);
  if (segment->fd_ < 0) fail(opening);
  struct stat facts{};
  if (fstat(segment->fd_, &facts) != 0) fail("stat of shared memory");
  if (facts.st_ino != name.inode)
    throw std::system_error(std::make_error_code(std::errc::no_such_file_or_directory), opening);
  if (!S_ISREG(facts.st_mode) || facts.st_uid != geteuid()) throw wrong("belongs to another user");
  const int fd = ::open(path_of("self", segment->fd_).c_str(), O_RDWR | O_CLOEXEC | O_NOCTTY);
  if (fd < 0) fail(opening);
  segment->close_fd();
  segment->fd_ = fd;
  const int seals = fcntl(segment->fd_, F_GET_SEALS);
  if (seals < 0 || (seals & kSeals) != kSeals) throw wrong("is not sealed");
  if (facts.st_size != segment->segment_bytes_) throw wrong("has the wrong size");
  segment->map();
  segment->close_fd();
  if (*segment->at<SegmentHeader>(0) != segment->header()) throw wrong("has the wrong header");
  return segment;
}

void Segment::map() {
  void* base = mmap(nullptr, static_cast<size_t>(segment_bytes_), PROT_READ | PROT_WRITE,
                    MAP_SHARED | MAP_NORESERVE, fd_, 0);
  if (base == MAP_FAILED) fail("mapping shared memory of " + bytes_text(segment_bytes_));
  base_ = static_cast<std::byte*>(base);
  madvise(base_, static_cast<size_t>(segment_bytes_), MADV_DONTDUMP);
}

uint64_t Segment::inode() const {
  struct stat facts{};
  if (fstat(fd_, &facts) != 0) fail("stat of shared memory");
  return facts.st_ino;
}

void Segment::close_fd() {
  if (fd_ >= 0) ::close(std::exchange(fd_, -1));
}

void Segment::release_rings(std::span<const int> sources) {
  const auto release = [this](std::byte* ring) {
    madvise(ring, static_cast<size_t>(shape_.ring_bytes), MADV_REMOVE);
  };
  for (const int source : sources)
    for (int lane_idx = 0; lane_idx < shape_.num_lanes(); ++lane_idx)
      release(ring(source, lane_idx));
  const uint64_t head = multicast().head.load();
  const bool is_read = std::all_of(sources.begin(), sources.end(), [&](int reader) {
    return !is_before(multicast().tail_of_rank[reader].value.load(), head);
  });
  if (is_read) release(multicast_ring());  // else its pages last as long as a peer maps them
}

// In tests, peers are threads that write to this very mapping.
__attribute__((no_sanitize("thread"))) void Segment::make_private(int64_t offset,
                                                                  int64_t num_bytes) {
  const auto size = static_cast<size_t>(num_bytes);
  std::byte* const at = window() + offset;
  void* const view = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, fd_,
                          shape_.control_bytes() + offset);
  if (view == MAP_FAILED) return;
  if (mremap(view, size, size, MREMAP_MAYMOVE | MREMAP_FIXED, at) == MAP_FAILED) {
    munmap(view, size);
    return;
  }
  for (size_t page = 0; page < size; page += kPageBytes)  // each page is copied when it is written
    __atomic_fetch_or(reinterpret_cast<volatile uint8_t*>(at + page), 0, __ATOMIC_RELAXED);
  fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, shape_.control_bytes() + offset,
            num_bytes);  // the shared pages; if that fails, they last as long as the segment
}

void Segment::read_window(int64_t begin, int64_t end, std::byte* into) const {
  const int64_t window = shape_.control_bytes();
  const auto next = [&](int whence, int64_t from, int64_t otherwise) {
    const off_t found = fd_ < 0 ? -1 : lseek(fd_, window + from, whence);
    return found >= 0 ? found - window : fd_ >= 0 && errno == ENXIO ? end : otherwise;
  };
  for (int64_t at = begin; (at = next(SEEK_DATA, at, at)) < end;) {
    const int64_t hole = std::min(next(SEEK_HOLE, at, end), end);
    std::memcpy(into + (at - begin), base_ + window + at, static_cast<size_t>(hole - at));
    at = hole;
  }
}

Segment::~Segment() {
  if (base_) munmap(base_, static_cast<size_t>(segment_bytes_));
  close_fd();
}

}  // namespace pipecomm::shm
