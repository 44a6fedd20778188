// TCP sockets of this process: non-blocking, and closed in programs that it starts.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace pipecomm::tcp {

class Socket {
 public:
  Socket() = default;
  explicit Socket(int fd) : fd_(fd) {}
  Socket(Socket&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Socket& operator=(Socket&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Socket();
  int fd() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }

 private:
  int fd_ = -1;
};

// A numeric host, IPv4 or IPv6, and the port on which a rank listens.
struct Address {
  std::string host;
  uint16_t port = 0;
  std::string text() const;  // "10.0.0.1:4242"
};

// The addresses of this host that others may reach: those of `interfaces` (names, separated by
// commas) or, if it is empty, of all interfaces that are up except the loopback. Throws
// std::invalid_argument if a name is unknown or has no address.
std::vector<std::string> local_hosts(const std::string& interfaces);

// Listens on one port that the system chooses: at all usable ones of these addresses of this host,
// or on all interfaces if none are given. Throws std::system_error, also if none is usable.
std::vector<Socket> listen_at(const std::vector<std::string>& hosts, uint16_t& port);
// The numeric address at which a socket listens.
std::string host_of(const Socket& listener);
// The next connection, or none. Throws std::system_error.
Socket accept_from(const Socket& listener);

// Begins to connect; the socket is writable when that is done. Throws std::system_error.
Socket start_connecting(const Address& address);
// The error of the attempt, or of the connection: 0 if there is none.
int error_of(const Socket& socket);
std::string error_text(int error);
// Whether the other host has not acknowledged data, even after retransmissions.
bool is_unconfirmed(const Socket& socket);

// Sends a keepalive probe every `interval` while the other end is silent; the connection ends when
// `limit` passes without a reply.
void keep_alive(const Socket& socket, std::chrono::seconds interval, std::chrono::seconds limit);

}  // namespace pipecomm::tcp
