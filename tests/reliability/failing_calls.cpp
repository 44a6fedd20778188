// Makes chosen calls of the extension fail: the functions here take the places of those that it imports
// (imports.h).
//
//   g++ -std=c++20 -shared -fPIC failing_calls.cpp -o libfailing_calls.so        (loaded with ctypes)
#include <dlfcn.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <netdb.h>
#include <poll.h>
#include <sched.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>
#include <string>
#include <system_error>
#include <vector>

#include "imports.h"

namespace {

// As in failing_calls.py. Connections are made and served in the background, so their calls fail by name only.
enum Kind { kThread, kMemory, kSystemCall, kSleep, kConnection, kOneFunction, kNone };
constexpr size_t kMinBytes = 4096;  // of memory whose allocation fails

std::mutex mutex;
std::atomic<int> armed_kind{kNone};
std::atomic<bool> is_paused{true};
std::string armed_function;       // if that is armed, of whatever kind
std::atomic<int> armed_error{0};  // 0: the usual one of each function
int failing_call = 0;             // 0: all
int num_calls = 0;
int num_failures = 0;
std::string last_failure;

bool fails(Kind kind, const char* name) {
  if (is_paused || (kind != armed_kind && armed_kind != kOneFunction)) return false;
  std::lock_guard lock(mutex);
  if (armed_kind == kOneFunction && armed_function != name) return false;
  ++num_calls;
  if (failing_call != 0 && num_calls != failing_call) return false;
  ++num_failures;
  last_failure = name;
  return true;
}

int error_or(int usual) { return armed_error != 0 ? armed_error.load() : usual; }

struct Failing {
  std::string name;
  void* function;
};
std::vector<Failing> failing_functions;

template <class Function>
bool add(const char* name, Function* function) {
  failing_functions.push_back({name, reinterpret_cast<void*>(function)});
  return true;
}

// `error` and `result` are what the function reports if it fails.
#define FAILING(kind, name, error, result, parameters, ...)       \
  auto failing_##name parameters->decltype(::name(__VA_ARGS__)) { \
    if (!fails(kind, #name)) return ::name(__VA_ARGS__);          \
    errno = error_or(error);                                      \
    return result;                                                \
  }                                                               \
  const bool has_##name = add(#name, failing_##name);

FAILING(kSystemCall, memfd_create, EMFILE, -1, (const char* file, unsigned flags), file, flags)
FAILING(kSystemCall, fchmod, EPERM, -1, (int fd, mode_t mode), fd, mode)
FAILING(kSystemCall, ftruncate, ENOSPC, -1, (int fd, off_t size), fd, size)
FAILING(kSystemCall, fcntl, EPERM, -1, (int fd, int command, long argument), fd, command, argument)
FAILING(kSystemCall, open, EMFILE, -1, (const char* path, int flags, int mode), path, flags, mode)
FAILING(kSystemCall, fstat, ENOMEM, -1, (int fd, struct stat* facts), fd, facts)
FAILING(kSystemCall, mmap, ENOMEM, MAP_FAILED,
        (void* at, size_t size, int protection, int flags, int fd, off_t offset), at, size,
        protection, flags, fd, offset)
FAILING(kSystemCall, mremap, ENOMEM, MAP_FAILED,
        (void* at, size_t size, size_t new_size, int flags, void* to), at, size, new_size, flags,
        to)
FAILING(kSystemCall, madvise, EAGAIN, -1, (void* at, size_t size, int advice), at, size, advice)
FAILING(kSystemCall, fallocate, EOPNOTSUPP, -1, (int fd, int mode, off_t offset, off_t size), fd,
        mode, offset, size)
FAILING(kSystemCall, lseek, EINVAL, -1, (int fd, off_t offset, int whence), fd, offset, whence)
FAILING(kSystemCall, sched_getaffinity, EPERM, -1, (pid_t pid, size_t size, cpu_set_t* cores), pid,
        size, cores)
FAILING(kSystemCall, sched_setaffinity, EPERM, -1, (pid_t pid, size_t size, const cpu_set_t* cores),
        pid, size, cores)
FAILING(kSystemCall, sched_getcpu, ENOSYS, -1, ())
FAILING(kSystemCall, bind, EADDRINUSE, -1, (int fd, const sockaddr* address, socklen_t size), fd,
        address, size)
FAILING(kSystemCall, listen, EADDRINUSE, -1, (int fd, int backlog), fd, backlog)
FAILING(kSystemCall, getsockname, ENOBUFS, -1, (int fd, sockaddr* address, socklen_t* size), fd,
        address, size)
FAILING(kSystemCall, getifaddrs, ENOBUFS, -1, (ifaddrs * *first), first)
FAILING(kSystemCall, epoll_create1, EMFILE, -1, (int flags), flags)
FAILING(kSystemCall, eventfd, EMFILE, -1, (unsigned count, int flags), count, flags)
FAILING(kSleep, poll, EINTR, -1, (pollfd * fds, nfds_t count, int timeout), fds, count, timeout)
FAILING(kMemory, posix_memalign, ENOMEM, ENOMEM, (void** to, size_t align, size_t size), to, align,
        size)

FAILING(kConnection, socket, EMFILE, -1, (int domain, int type, int protocol), domain, type,
        protocol)
FAILING(kConnection, connect, ENETUNREACH, -1, (int fd, const sockaddr* to, socklen_t size), fd, to,
        size)
FAILING(kConnection, accept4, EMFILE, -1, (int fd, sockaddr* address, socklen_t* size, int flags),
        fd, address, size, flags)
FAILING(kConnection, send, ECONNRESET, -1, (int fd, const void* data, size_t size, int flags), fd,
        data, size, flags)
FAILING(kConnection, sendmsg, ECONNRESET, -1, (int fd, const msghdr* message, int flags), fd,
        message, flags)
FAILING(kConnection, recv, ECONNRESET, -1, (int fd, void* data, size_t size, int flags), fd, data,
        size, flags)
FAILING(kConnection, recvmsg, ECONNRESET, -1, (int fd, msghdr* message, int flags), fd, message,
        flags)
FAILING(kConnection, getsockopt, ENOBUFS, -1,
        (int fd, int level, int option, void* value, socklen_t* size), fd, level, option, value,
        size)
FAILING(kConnection, setsockopt, ENOMEM, -1,
        (int fd, int level, int option, const void* value, socklen_t size), fd, level, option,
        value, size)
FAILING(kConnection, shutdown, ENOTCONN, -1, (int fd, int how), fd, how)
FAILING(kConnection, epoll_ctl, ENOMEM, -1, (int epoll, int what, int fd, epoll_event* event),
        epoll, what, fd, event)
FAILING(kConnection, epoll_wait, EINTR, -1,
        (int epoll, epoll_event* events, int count, int timeout), epoll, events, count, timeout)
FAILING(kConnection, ppoll, EINTR, -1,
        (pollfd * fds, nfds_t count, const timespec* limit, const sigset_t* signals), fds, count,
        limit, signals)
FAILING(kConnection, getrandom, EINTR, -1, (void* data, size_t size, unsigned flags), data, size,
        flags)
FAILING(kConnection, getaddrinfo, 0, error_or(EAI_MEMORY),
        (const char* host, const char* service, const addrinfo* hints, addrinfo** found), host,
        service, hints, found)
FAILING(kConnection, getnameinfo, 0, error_or(EAI_MEMORY),
        (const sockaddr* address, socklen_t size, char* host, socklen_t host_size, char* service,
         socklen_t service_size, int flags),
        address, size, host, host_size, service, service_size, flags)

long failing_syscall(long number, long a, long b, long c, long d, long e, long f) {
  const bool sleeps = number == SYS_futex;
  const char* const name = number == SYS_pidfd_open ? "pidfd_open" : sleeps ? "futex" : "syscall";
  if (!fails(sleeps ? kSleep : kSystemCall, name)) return syscall(number, a, b, c, d, e, f);
  errno = sleeps ? EINTR : error_or(EMFILE);
  return -1;
}

void* failing_aligned_alloc(size_t alignment, size_t size) {
  return size >= kMinBytes && fails(kMemory, "aligned_alloc") ? nullptr
                                                              : aligned_alloc(alignment, size);
}

void* failing_new(size_t size) {
  if (size >= kMinBytes && fails(kMemory, "new")) throw std::bad_alloc();
  return ::operator new(size);
}

constexpr const char* kStartThread =
    "_ZNSt6thread15_M_start_threadESt10unique_ptrINS_6_StateESt14default_deleteIS1_EEPFvvE";

// std::thread's constructor hands over what to run by reference.
void failing_start_thread(void* thread, void* state, void (*depend)()) {
  if (fails(kThread, "thread")) throw std::system_error(EAGAIN, std::generic_category());
  static const auto start =
      reinterpret_cast<void (*)(void*, void*, void (*)())>(dlsym(RTLD_DEFAULT, kStartThread));
  start(thread, state, depend);
}

const bool has_others = add("syscall", failing_syscall) &&
                        add("aligned_alloc", failing_aligned_alloc) && add("_Znwm", failing_new) &&
                        add(kStartThread, failing_start_thread);

}  // namespace

extern "C" {

// Watches the calls of an object that is loaded; `only`: a single function of them. False: no object.
bool watch(const char* path, const char* only) {
  return for_each_import(path, [&](const char* name, void** place) {
    if (only && std::strcmp(only, name) != 0) return;
    for (const auto& failing : failing_functions)
      if (failing.name == name) replace_import(place, failing.function);
  });
}

// The names of all functions that an object imports, and of those that can fail here, in lines.
const char* imports(const char* path) {
  static std::string lines;
  lines.clear();
  for_each_import(path, [&](const char* name, void**) { lines += std::string(name) + '\n'; });
  return lines.c_str();
}
const char* watched() {
  static std::string lines;
  lines.clear();
  for (const auto& failing : failing_functions) lines += failing.name + '\n';
  return lines.c_str();
}

// From now on, while not paused, the `nth` call of a kind fails; 0: all do.
void arm(int kind, int nth) {
  std::lock_guard lock(mutex);
  failing_call = nth;
  num_calls = num_failures = 0;
  last_failure.clear();
  armed_error = 0;
  armed_kind = kind;
}
// The `nth` call of one function fails, with that error.
void arm_function(const char* name, int nth, int error) {
  arm(kNone, nth);
  std::lock_guard lock(mutex);
  armed_function = name;
  armed_error = error;
  armed_kind = kOneFunction;
}
void disarm() {
  is_paused = true;
  armed_kind = kNone;
}
void set_paused(bool paused) { is_paused = paused; }
bool call_fails(int kind, const char* name) { return fails(static_cast<Kind>(kind), name); }
int failures() {
  std::lock_guard lock(mutex);
  return num_failures;
}
const char* last() {
  std::lock_guard lock(mutex);
  static std::string copy;
  copy = last_failure;
  return copy.c_str();
}

}  // extern "C"
