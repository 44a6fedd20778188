#include "transport/tcp/socket.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <exception>
#include <memory>
#include <set>
#include <sstream>
#include <stdexcept>
#include <system_error>

namespace pipecomm::tcp {
namespace {

constexpr int kFlags = SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC;
constexpr int kBacklog = 1024;
constexpr int kPortAttempts = 16;

[[noreturn]] void throw_errno(const std::string& what) {
  throw std::system_error(errno, std::generic_category(), what);
}

void set_option(const Socket& socket, int level, int option, int value) {
  // A missing option only costs speed, or the early detection of a silent peer.
  (void)setsockopt(socket.fd(), level, option, &value, sizeof value);
}

std::string digits_of(const sockaddr* address, socklen_t num_bytes) {
  std::array<char, NI_MAXHOST> host{};
  const int error =
      getnameinfo(address, num_bytes, host.data(), host.size(), nullptr, 0, NI_NUMERICHOST);
  return error == 0 ? host.data() : "";
}

using Resolved = std::unique_ptr<addrinfo, void (*)(addrinfo*)>;

Resolved resolve(const Address& address) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const std::string port = std::to_string(address.port);
  if (const int error = getaddrinfo(address.host.c_str(), port.c_str(), &hints, &found))
    throw std::system_error(std::make_error_code(std::errc::address_not_available),
                            address.host + ": " + gai_strerror(error));
  return {found, freeaddrinfo};
}

Socket listen_on(const Address& address, bool is_v6_only) {
  const Resolved resolved = resolve(address);
  Socket socket(::socket(resolved->ai_family, kFlags, 0));
  if (!socket) throw_errno("cannot make a socket");
  if (resolved->ai_family == AF_INET6) set_option(socket, IPPROTO_IPV6, IPV6_V6ONLY, is_v6_only);
  if (bind(socket.fd(), resolved->ai_addr, resolved->ai_addrlen) != 0)
    throw_errno("cannot bind a socket to " + address.text());
  if (listen(socket.fd(), kBacklog) != 0) throw_errno("cannot listen on a socket");
  return socket;
}

sockaddr_storage address_of(const Socket& listener) {
  sockaddr_storage bound{};
  socklen_t num_bytes = sizeof bound;
  if (getsockname(listener.fd(), reinterpret_cast<sockaddr*>(&bound), &num_bytes) != 0)
    throw_errno("cannot read the address of a socket");
  return bound;
}

uint16_t port_of(const Socket& listener) {
  const sockaddr_storage bound = address_of(listener);
  return ntohs(bound.ss_family == AF_INET6
                   ? reinterpret_cast<const sockaddr_in6*>(&bound)->sin6_port
                   : reinterpret_cast<const sockaddr_in*>(&bound)->sin_port);
}

}  // namespace

Socket::~Socket() {
  if (fd_ >= 0) ::close(fd_);
}

std::string Address::text() const {
  const bool is_v6 = host.find(':') != std::string::npos;
  return (is_v6 ? "[" + host + "]" : host) + ":" + std::to_string(port);
}

std::vector<std::string> local_hosts(const std::string& interfaces) {
  std::set<std::string> missing;
  std::istringstream names(interfaces);
  for (std::string name; std::getline(names, name, ',');)
    if (!name.empty()) missing.insert(name);
  const std::set<std::string> wanted = missing;
  ifaddrs* first = nullptr;
  if (getifaddrs(&first) != 0) throw_errno("cannot list the network interfaces");
  const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> all(first, freeifaddrs);
  std::vector<std::string> v4, v6;
  for (const ifaddrs* each = first; each; each = each->ifa_next) {
    if (!each->ifa_addr || !(each->ifa_flags & IFF_UP)) continue;
    if (wanted.empty() ? (each->ifa_flags & IFF_LOOPBACK) != 0 : !wanted.contains(each->ifa_name))
      continue;
    const int family = each->ifa_addr->sa_family;
    if (family == AF_INET) {
      v4.push_back(digits_of(each->ifa_addr, sizeof(sockaddr_in)));
    } else if (family == AF_INET6) {
      const auto* address = reinterpret_cast<const sockaddr_in6*>(each->ifa_addr);
      if (IN6_IS_ADDR_LINKLOCAL(&address->sin6_addr)) continue;  // meaningless on other hosts
      v6.push_back(digits_of(each->ifa_addr, sizeof(sockaddr_in6)));
    } else {
      continue;
    }
    missing.erase(each->ifa_name);
  }
  if (!missing.empty())
    throw std::invalid_argument("the network interface " + *missing.begin() +
                                " does not exist here, or has no address");
  v4.insert(v4.end(), v6.begin(), v6.end());
  std::erase(v4, "");
  return v4;
}

std::vector<Socket> listen_at(const std::vector<std::string>& hosts, uint16_t& port) {
  if (hosts.empty()) {
    // One socket for both address families, if the system has both.
    std::vector<Socket> listeners;
    try {
      listeners.push_back(listen_on({"::", 0}, false));
    } catch (const std::system_error&) {
      listeners.push_back(listen_on({"0.0.0.0", 0}, false));
    }
    port = port_of(listeners[0]);
    return listeners;
  }
  for (int num_left = kPortAttempts;; --num_left) {
    std::vector<Socket> listeners;
    std::exception_ptr unusable;
    port = 0;
    try {
      for (auto host = hosts.begin(); host != hosts.end(); ++host) {
        if (std::find(hosts.begin(), host, *host) != host) continue;  // of two interfaces
        try {
          listeners.push_back(listen_on({*host, port}, true));
          port = port_of(listeners[0]);
        } catch (const std::system_error& error) {
          // The other addresses may work even if this one is not usable now.
          if (error.code() != std::errc::address_not_available) throw;
          unusable = std::current_exception();
        }
      }
      if (listeners.empty()) std::rethrow_exception(unusable);
      return listeners;
    } catch (const std::system_error& error) {
      // Another program may have the port that was chosen for the first address.
      if (error.code() != std::errc::address_in_use || num_left == 1) throw;
    }
  }
}

std::string host_of(const Socket& listener) {
  const sockaddr_storage bound = address_of(listener);
  return digits_of(reinterpret_cast<const sockaddr*>(&bound),
                   bound.ss_family == AF_INET6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in));
}

Socket accept_from(const Socket& listener) {
  Socket socket(accept4(listener.fd(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
  if (socket) set_option(socket, IPPROTO_TCP, TCP_NODELAY, 1);
  const bool is_passing = errno == EAGAIN || errno == EINTR || errno == ECONNABORTED;
  if (!socket && !is_passing) throw_errno("cannot accept a connection");
  return socket;
}

Socket start_connecting(const Address& address) {
  const Resolved resolved = resolve(address);
  Socket socket(::socket(resolved->ai_family, kFlags, 0));
  if (!socket) throw_errno("cannot make a socket");
  set_option(socket, IPPROTO_TCP, TCP_NODELAY, 1);
  if (connect(socket.fd(), resolved->ai_addr, resolved->ai_addrlen) != 0 && errno != EINPROGRESS)
    throw_errno("connect");
  return socket;
}

int error_of(const Socket& socket) {
  int error = 0;
  socklen_t num_bytes = sizeof error;
  return getsockopt(socket.fd(), SOL_SOCKET, SO_ERROR, &error, &num_bytes) == 0 ? error : errno;
}

std::string error_text(int error) { return std::generic_category().message(error); }

bool is_unconfirmed(const Socket& socket) {
  constexpr int kTwice = 2;  // retransmissions: more than one lost packet needs
  tcp_info info{};
  socklen_t num_bytes = sizeof info;
  return getsockopt(socket.fd(), IPPROTO_TCP, TCP_INFO, &info, &num_bytes) == 0 &&
         info.tcpi_unacked > 0 && info.tcpi_retransmits >= kTwice;
}

void keep_alive(const Socket& socket, std::chrono::seconds interval, std::chrono::seconds limit) {
  const int interval_s = std::max(1, static_cast<int>(interval.count()));
  const int limit_s = std::max(interval_s, static_cast<int>(limit.count()));
  set_option(socket, SOL_SOCKET, SO_KEEPALIVE, 1);
  set_option(socket, IPPROTO_TCP, TCP_KEEPIDLE, interval_s);
  set_option(socket, IPPROTO_TCP, TCP_KEEPINTVL, interval_s);
  // The first probe comes after an interval of silence. TCP_USER_TIMEOUT would be stricter, but
  // also end the connection to a process that a debugger has stopped.
  set_option(socket, IPPROTO_TCP, TCP_KEEPCNT, std::max(1, limit_s / interval_s - 1));
}

}  // namespace pipecomm::tcp
