// Other programs that may connect to a rank, or that it may connect to: a test plays one end of a
// connection.
#pragma once

#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>

#include "host_exchanges.h"

namespace meeting {

inline size_t num_entries(const char* folder) {
  size_t count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(folder)) ++count;
  return count;
}

// A process that holds the open files of this one, as a worker of a DataLoader does.
class Child {
 public:
  explicit Child(const std::function<void()>& body = nullptr) : pid_(fork()) {
    if (pid_ == 0) {
      if (body) body();
      pause();
      _exit(0);
    }
  }
  ~Child() { end(); }
  pid_t pid() const { return pid_; }
  void end() {
    if (pid_ <= 0) return;
    kill(pid_, SIGKILL);
    waitpid(std::exchange(pid_, 0), nullptr, 0);
  }

 private:
  pid_t pid_;
};

inline sockaddr_in loopback(uint16_t port, uint8_t last_digit = 1) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK - 1 + last_digit);
  return address;
}

// One end of a connection to a rank, which sends arbitrary words.
class Stranger {
 public:
  explicit Stranger(uint16_t port) : fd_(::socket(AF_INET, SOCK_STREAM, 0)) {
    const sockaddr_in address = loopback(port);
    CHECK_EQ(connect(fd_, reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
    limit_waiting();
  }
  explicit Stranger(const tcp::Socket& listener) : fd_(accept_soon(listener)) {
    CHECK(fd_ >= 0);
    limit_waiting();
  }
  ~Stranger() { ::close(fd_); }
  void say(const void* data, size_t num_bytes) {
    CHECK_EQ(send(fd_, data, num_bytes, MSG_NOSIGNAL), static_cast<ssize_t>(num_bytes));
  }
  // Sends a word as rank `from` of `meeting` would.
  void say(const Meeting& meeting, tcp::Word word, int from, int to, uint32_t attempt = 1) {
    if (word == tcp::Word::hello) nonces.guest[0] = std::byte{7};
    said = tcp::make_greeting(word, from, to, attempt, nonces, meeting.key);
    say(&said, sizeof said);
  }
  bool hears(tcp::Word word) {
    if (recv(fd_, &heard, sizeof heard, MSG_WAITALL) != sizeof heard) return false;
    const bool is_guest = heard.word == tcp::Word::hello || heard.word == tcp::Word::ready;
    (is_guest ? nonces.guest : nonces.listener) = heard.nonce;
    return heard.word == word;
  }
  // Whether the rank has taken this connection as the one to the peer.
  bool is_taken(const Meeting& meeting, int from, int to, uint32_t attempt = 1) {
    say(meeting, tcp::Word::hello, from, to, attempt);
    if (!hears(tcp::Word::welcome)) return false;
    say(meeting, tcp::Word::ready, from, to, attempt);
    return hears(tcp::Word::taken);
  }
  bool hears_packet(Bytes& packet) {
    return recv(fd_, packet.data(), packet.size(), MSG_WAITALL) == std::ssize(packet);
  }
  void greet() {
    const Bytes packet = wire::PacketWriter().take(kEpoch, 1);
    say(packet.data(), packet.size());
  }
  bool hears_the_end() {
    std::byte byte;
    return recv(fd_, &byte, 1, 0) <= 0;
  }

  tcp::Nonces nonces;
  tcp::Greeting said, heard;

 private:
  static int accept_soon(const tcp::Socket& listener) {
    pollfd caller{listener.fd(), POLLIN, 0};
    (void)poll(&caller, 1, 20'000);
    return ::accept(listener.fd(), nullptr, nullptr);
  }
  void limit_waiting() {
    const timeval limit{.tv_sec = 20, .tv_usec = 0};
    setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
  }
  const int fd_;
};

}  // namespace meeting
