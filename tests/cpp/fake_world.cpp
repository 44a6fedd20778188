#include "fake_world.h"

namespace fake {

World::World() : launcher_([this] { launch_loop(); }) {}

World::~World() { finish(); }

bool World::finish() {
  {
    std::lock_guard lock(mutex);
    finished_ = true;
  }
  bool all_ended = false;
  for (int attempt = 0; attempt < 10000 && !all_ended; ++attempt) {
    if (attempt > 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    std::lock_guard lock(mutex);
    all_ended = num_calls_ == 0;
    for (const auto& comm : comms) all_ended &= comm->ended;
  }
  stopping_ = true;
  if (launcher_.joinable()) launcher_.join();
  return all_ended;
}

void World::block(const std::function<bool()>& done) {
  ++num_calls_;
  while (true) {
    {
      std::lock_guard lock(mutex);
      advance();
      if (finished_ || done()) break;
    }
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  --num_calls_;
}

void World::end_process(int rank) {
  std::lock_guard lock(mutex);
  for (const auto& comm : comms) {
    if (rank_of_device.at(comm->device) != rank) continue;
    for (auto& [key, pipe] : pipes) {
      if (std::get<0>(key) != comm->id || std::get<1>(key) != comm->rank) continue;
      for (const auto& other : comms)
        if (other->id == comm->id && other->rank == std::get<2>(key) &&
            host_of(other->device) != host_of(comm->device)) {
          pipe.lose_buffered();
          touch(pipe);
        }
    }
  }
}

int World::max_slots() {
  std::lock_guard lock(mutex);
  std::map<std::pair<int, int>, int> num_devices;  // by host and communicator
  for (const auto& comm : comms) ++num_devices[{host_of(comm->device), comm->id}];
  std::map<int, int> num_slots;
  for (const auto& [key, number] : num_devices) num_slots[key.first] += number > 1;
  int most = 0;
  for (const auto& [host, number] : num_slots) most = std::max(most, number);
  return most;
}

void World::advance() {
  if (std::exchange(advances_, true)) return;
  while (!launches_.empty() && launches_.front().due <= FakeClock::now()) {
    const auto launch = std::move(launches_.front().launch);
    launches_.pop_front();
    launch();
  }
  for (uint64_t before = progress_ - 1; before != progress_;) {
    before = progress_;
    for (size_t idx = 0; idx < busy_queues_.size(); ++idx) run_hardware_queue(*busy_queues_[idx]);
    std::erase_if(busy_queues_, [](const auto* queue) { return queue->empty(); });
    for (Pipe* pipe : std::exchange(touched_pipes_, {})) progress_ += pipe->advance(fifo_bytes);
  }
  advances_ = false;
}

Stream* World::new_stream(const void* device) {
  Stream& stream = *streams.emplace_back(std::make_unique<Stream>());
  stream.device = device;
  auto& of_device = queues[device];
  const size_t number = num_streams[device]++ % num_queues;
  if (number == of_device.size()) of_device.emplace_back();
  stream.queue = &of_device[number];
  return &stream;
}

void World::run_hardware_queue(std::deque<Stream*>& queue) {
  for (Stream* stream : queue) stream->num_passed = 0;
  for (size_t idx = 0; idx < queue.size();) {
    Stream& stream = *queue[idx];
    Task& task = stream.tasks[stream.num_passed];
    if (stream.num_passed == 0) {
      has_started = task.started;
      if (task.work()) {
        const Task ended = std::move(task);
        stream.tasks.pop_front();
        queue.erase(queue.begin() + std::ptrdiff_t(idx));
        ++progress_;
        continue;
      }
      task.started = has_started;
    }
    if (!task.started && !task.is_record) return;
    ++stream.num_passed;
    ++idx;
  }
}

bool World::is_stuck(int* num_stuck) {
  std::lock_guard lock(mutex);
  if (!nothing_moves())
    *num_stuck = 0;
  else
    ++*num_stuck;
  if (*num_stuck < (expects_stuck ? 1 : 400)) return false;
  return found_stuck = true;
}

bool World::nothing_moves() {
  if (!launches_.empty()) return false;
  advance();
  if (int(waiting_.size()) + num_ended_hosts_ < num_hosts) return false;
  for (const auto& [rank, ends] : waiting_) {
    bool done = true;
    for (const EventPtr& end : ends) done &= static_cast<Event*>(end.get())->done;
    if (done) return false;
  }
  return true;
}

}  // namespace fake
