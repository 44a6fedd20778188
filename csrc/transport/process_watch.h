// Notices the end of another process of this host, even if others still hold its connections.
#pragma once

#include <sys/types.h>

namespace pipecomm {

// A process that has already ended is not watched. Takes one file descriptor.
class ProcessWatch {
 public:
  explicit ProcessWatch(pid_t pid);  // throws std::system_error
  ~ProcessWatch();
  ProcessWatch(const ProcessWatch&) = delete;
  ProcessWatch& operator=(const ProcessWatch&) = delete;
  bool has_ended() const;

 private:
  int fd_ = -1;  // none: it had ended before
};

// Whether a process has ended or is exiting. An exiting process has released its memory, and /proc
// denies its files to every user but root, before a ProcessWatch notices the end.
bool is_ending(pid_t pid);

}  // namespace pipecomm
