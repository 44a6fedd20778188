#include "engine/device/replays.h"

#include <algorithm>

namespace pipecomm {
namespace {

constexpr int kLooksPerTimeout = 10;
constexpr std::chrono::nanoseconds kLongestPause = std::chrono::seconds(1);

}  // namespace

void Replays::begin_part(DeviceOperation& operation, StreamHandle stream) {
  if (!operation.is_captured() || !timeout_) return;
  const DeviceOperation::Part part{stream, runtime_->new_counter(), runtime_->new_counter()};
  if (!part.started || !part.ended) return;
  runtime_->count(stream, *part.started);
  operation.parts.push_back(part);
}

void Replays::end_part(const DeviceOperation& operation, StreamHandle stream) {
  for (const DeviceOperation::Part& part : operation.parts)
    if (part.stream == stream) runtime_->count(stream, *part.ended);
}

void Replays::add(const DeviceOperation& operation) {
  if (operation.parts.empty()) return;
  std::lock_guard lock(mutex_);
  for (const DeviceOperation::Part& part : operation.parts) {
    Watched& watched = watched_.emplace_back(part, operation.op());
    if (!operation.messages.empty()) watched.first_message = operation.messages.front();
  }
}

std::optional<Replays::Late> Replays::late() {
  std::lock_guard lock(mutex_);
  const Clock::time_point now = Clock::now();
  if (watched_.empty() || now < next_look_) return std::nullopt;
  next_look_ = now + std::min(*timeout_ / kLooksPerTimeout, kLongestPause);
  for (Watched& watched : watched_) {
    const uint32_t ended = watched.part.ended->load(std::memory_order_relaxed);
    const uint32_t started = watched.part.started->load(std::memory_order_relaxed);
    if (started != watched.started || ended != watched.ended) {
      watched.started = started;
      watched.ended = ended;
      watched.since = now;
    } else if (started != ended && now - watched.since > *timeout_) {
      return Late{watched.op, watched.first_message, now - watched.since};
    }
  }
  return std::nullopt;
}

}  // namespace pipecomm
