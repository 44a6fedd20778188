// Event queues of sockets, and bells, which wake a thread that waits on such a queue.
#pragma once

#include <sys/epoll.h>
#include <unistd.h>

#include <cstdint>

#include "transport/tcp/socket.h"

namespace pipecomm::tcp {

// False, with errno, if the kernel has no memory for it: the next tick tries again.
inline bool try_watch(const Socket& epoll, int operation, const Socket& socket, uint32_t events,
                      uint32_t tag) {
  epoll_event event{};
  event.events = events;
  event.data.u32 = tag;
  return epoll_ctl(epoll.fd(), operation, socket.fd(), &event) == 0;
}

inline void ring(const Socket& bell) {
  const uint64_t one = 1;
  (void)!::write(bell.fd(), &one, sizeof one);  // fails only when its count is full
}

inline void silence(const Socket& bell) {
  uint64_t count;
  (void)!::read(bell.fd(), &count, sizeof count);
}

}  // namespace pipecomm::tcp
