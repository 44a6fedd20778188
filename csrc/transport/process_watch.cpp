#include "transport/process_watch.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <string>
#include <string_view>
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

bool is_ending(pid_t pid) {
  constexpr unsigned kExiting = 4;  // PF_EXITING of the kernel
  const int fd = ::open(("/proc/" + std::to_string(pid) + "/stat").c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return errno == ENOENT;
  std::array<char, 512> text{};
  const ssize_t num_bytes = ::read(fd, text.data(), text.size() - 1);
  ::close(fd);
  if (num_bytes <= 0) return true;  // its parent has reaped it
  // The name, which may hold anything, is in parentheses. The state and five numbers precede the
  // flags.
  std::string_view rest(text.data(), size_t(num_bytes));
  rest.remove_prefix(std::min(rest.size(), rest.rfind(')') + 2));
  for (int idx = 0; idx < 6; ++idx) rest.remove_prefix(std::min(rest.size(), rest.find(' ') + 1));
  unsigned flags = 0;
  std::from_chars(rest.data(), rest.data() + rest.size(), flags);
  return (flags & kExiting) != 0;
}

bool ProcessWatch::has_ended() const {
  pollfd events{.fd = fd_, .events = POLLIN, .revents = 0};
  return fd_ < 0 || poll(&events, 1, 0) == 1;
}

}  // namespace pipecomm
