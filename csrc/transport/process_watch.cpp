#include "transport/process_watch.h"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <string>
#include <system_error>

namespace pipecomm {

ProcessWatch::ProcessWatch(pid_t pid) {
  fd_ = static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
  if (fd_ < 0 && errno != ESRCH)
    throw std::system_error(errno, std::generic_category(),
                            "pidfd_open of process " + std::to_string(pid));
}

ProcessWatch::~ProcessWatch() {
  if (fd_ >= 0) ::close(fd_);
}

bool ProcessWatch::has_ended() const {
  pollfd events{.fd = fd_, .events = POLLIN, .revents = 0};
  return fd_ < 0 || poll(&events, 1, 0) == 1;
}

}  // namespace pipecomm
