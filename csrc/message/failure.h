// A failure as data: the same record is sent between ranks, thrown in C++ and converted to the
// exception in Python.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

namespace pipecomm {

enum class FailureKind : uint8_t { error, timeout, peer_lost, mismatch, aborted };

// One end's description of a message.
struct MessageDescription {
  std::string op = {}, dtype = {};  // the dtype as torch prints it, without "torch."
  std::vector<int64_t> shape = {};  // of the tensor that the rank passed in
  int64_t num_bytes = 0;            // of the message
  bool operator==(const MessageDescription&) const = default;
};

struct Failure {
  FailureKind kind = FailureKind::error;
  std::string message = {};  // without the prefix "rank 1: " of the final text
  std::string op = {};
  int rank = -1;           // that reports
  int peer = -1;           // the other end of the message, -1 if none
  int channel = -1;        // -1 if none
  int64_t seq = -1;        // number of the message within (peer, channel, direction), -1 if none
  std::string dtype = {};  // as torch prints it, without "torch."
  std::vector<int64_t> shape = {};
  int origin_rank = -1;  // the rank where the failure began
  // Both descriptions of a message, if its ends disagree; `ours` is from the end that found it.
  std::optional<MessageDescription> ours = {}, theirs = {};
  bool operator==(const Failure&) const = default;
};

using FailurePtr = std::shared_ptr<const Failure>;

class PipeCommException : public std::runtime_error {
 public:
  explicit PipeCommException(FailurePtr failure)
      : std::runtime_error(failure->message), failure_(std::move(failure)) {}
  explicit PipeCommException(Failure failure)
      : PipeCommException(std::make_shared<const Failure>(std::move(failure))) {}
  const FailurePtr& failure() const { return failure_; }

 private:
  FailurePtr failure_;
};

// Bytes on the wire for a failure: fixed little-endian layout, no pickle. `decode_failure` throws
// std::runtime_error on any invalid length or value.
std::vector<std::byte> encode_failure(const Failure& failure);
Failure decode_failure(std::span<const std::byte> bytes);

}  // namespace pipecomm
