// All ranks of a group in one process: tensors with position-coded elements, and an exchange that
// moves messages by memcpy. The expected elements of a tensor are computed one by one from lists of
// global positions, without code of the library.
#pragma once

#include "check.h"
#include "copy/copy_buffers.h"
#include "copy/copy_cpu.h"
#include "plan/exchange_plan.h"
#include "plan/lower.h"

namespace world {

class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}
  int64_t between(int64_t low, int64_t high) {  // both included
    return std::uniform_int_distribution<int64_t>(low, high)(engine_);
  }
  bool chance(double probability) {
    return std::uniform_real_distribution<double>(0, 1)(engine_) < probability;
  }

 private:
  std::mt19937_64 engine_;
};

inline constexpr uint8_t kPoison = 0xA5;
inline constexpr int64_t kGuardBytes = 64;

// A tensor in memory of its own, exactly as large as its strides need, between guard bands.
class HostTensor {
 public:
  HostTensor(const TensorSpec& spec, Dims strides, int64_t misalignment_bytes)
      : layout_{spec.shape, std::move(strides), spec.dtype.itemsize},
        front_bytes_(kGuardBytes + misalignment_bytes) {
    int64_t last = 0;
    for (size_t d = 0; d < spec.shape.size(); ++d) {
      last += (spec.shape[d] - 1) * layout_.strides[d];
    }
    const int64_t bytes = spec.num_elements() == 0 ? 0 : (last + 1) * layout_.itemsize;
    memory_.assign(front_bytes_ + bytes + kGuardBytes, kPoison);
    is_element_.assign(memory_.size(), false);
    for_each([&](const Dims&, uint8_t* element) {
      std::fill_n(is_element_.begin() + (element - memory_.data()), layout_.itemsize, true);
    });
  }

  const StridedLayout& layout() const { return layout_; }
  uint8_t* data() { return memory_.data() + front_bytes_; }

  // Calls visit(index, address) for every element in row-major order.
  template <typename Visit>
  void for_each(const Visit& visit) {
    const size_t num_dims = layout_.shape.size();
    for (int64_t length : layout_.shape) {
      if (length == 0) return;
    }
    Dims index(num_dims, 0);
    while (true) {
      int64_t offset = 0;
      for (size_t d = 0; d < num_dims; ++d) offset += index[d] * layout_.strides[d];
      visit(index, data() + offset * layout_.itemsize);
      size_t d = num_dims;
      while (d > 0 && ++index[d - 1] == layout_.shape[d - 1]) index[--d] = 0;
      if (d == 0) return;
    }
  }

  // Every byte that belongs to no element is as it was.
  bool surroundings_are_intact() const {
    for (size_t i = 0; i < memory_.size(); ++i) {
      if (!is_element_[i] && memory_[i] != kPoison) return false;
    }
    return true;
  }

 private:
  StridedLayout layout_;
  int64_t front_bytes_;
  std::vector<uint8_t> memory_;
  std::vector<bool> is_element_;
};

// The strides of a tensor that is a random slice of a permuted dense one.
inline Dims random_strides(const Dims& shape, Random& random) {
  std::vector<size_t> order(shape.size());
  for (size_t d = 0; d < order.size(); ++d) order[d] = d;
  if (random.chance(0.5)) {
    for (size_t d = order.size(); d > 1; --d)
      std::swap(order[d - 1], order[random.between(0, d - 1)]);
  }
  Dims strides(shape.size());
  int64_t stride = random.chance(0.2) ? random.between(1, 3) : 1;
  for (size_t i = order.size(); i > 0; --i) {
    strides[order[i - 1]] = stride;
    const int64_t padding = random.chance(0.3) ? random.between(1, 3) : 0;
    stride *= std::max<int64_t>(shape[order[i - 1]] + padding, 1);
  }
  return strides;
}

// The bytes of the element at a global position, different for nearly all positions and tensors.
inline void element_at(int64_t position, int tensor, int64_t itemsize, uint8_t* bytes) {
  uint64_t words[2];
  uint64_t x = uint64_t(position) * 0x9e3779b97f4a7c15u + tensor * 77 + 1;
  for (uint64_t& word : words) {
    x = (x ^ (x >> 31)) * 0xbf58476d1ce4e5b9u;
    word = x ^ (x >> 29);
  }
  std::memcpy(bytes, words, itemsize);
}

// The positions of a global tensor that a rank's tensor holds: positions[d][i] at index i of dim d.
struct Held {
  Dims global_shape;
  std::vector<Dims> positions;
  int tensor = 0;

  Dims shape() const {
    Dims shape;
    for (const Dims& dim : positions) shape.push_back(int64_t(dim.size()));
    return shape;
  }
  int64_t global_position(const Dims& index) const {
    int64_t position = 0;
    for (size_t d = 0; d < index.size(); ++d) {
      position = position * global_shape[d] + positions[d][index[d]];
    }
    return position;
  }
  static Held all(const Dims& shape, int tensor = 0) {
    Held held{shape, {}, tensor};
    for (int64_t length : shape) {
      held.positions.emplace_back();
      for (int64_t i = 0; i < length; ++i) held.positions.back().push_back(i);
    }
    return held;
  }
  static Held along(const Dims& shape, int dim, const Dims& positions, int tensor = 0) {
    Held held = all(shape, tensor);
    held.positions[dim] = positions;
    return held;
  }
};

// Changes an element as its transfer does; null for plain copies.
using Transform = std::function<void(uint8_t* element, DType dtype)>;

// Arithmetic may produce any NaN, so all count as equal.
inline bool both_are_nan(const uint8_t* a, const uint8_t* b, DType dtype) {
  const auto is_nan = [dtype](const uint8_t* element) {
    uint64_t bits = 0;
    std::memcpy(&bits, element, dtype.itemsize);
    switch (arithmetic_of(dtype)) {
      case Arithmetic::kFloat16:
        return (bits & 0x7fffu) > 0x7c00u;
      case Arithmetic::kBFloat16:
        return (bits & 0x7fffu) > 0x7f80u;
      case Arithmetic::kFloat32:
        return (bits & 0x7fffffffu) > 0x7f800000u;
      case Arithmetic::kFloat64:
        return (bits & 0x7fffffffffffffffu) > 0x7ff0000000000000u;
      case Arithmetic::kBytes:
        break;
    }
    return false;
  };
  return is_nan(a) && is_nan(b);
}

// One rank of an exchange: its plan and what its tensors hold.
struct Rank {
  ExchangePlan plan;
  std::vector<Held> inputs, outputs;
};

struct Options {
  bool dense = false;      // otherwise random strides and misaligned starts
  bool in_ranges = false;  // messages by pack_range and unpack_range, without staging
  Transform transform;     // expected effect of the plan's scale
  std::function<void(std::span<const CopyTask>, const CopyBuffers&, const Scale&)> execute =
      [](std::span<const CopyTask> tasks, const CopyBuffers& buffers, const Scale& scale) {
        execute_cpu(tasks, buffers, scale);
      };
};

class Simulation {
 public:
  Simulation(const std::vector<Rank>& ranks, const Options& options, Random& random)
      : options_(options), random_(random) {
    for (const Rank& rank : ranks) sides_.push_back(std::make_unique<Side>(rank, options, random));
  }

  void run() {
    for (auto& side : sides_) options_.execute(before(*side), side->buffers, side->lowered.scale);
    for (auto& receiver : sides_) {
      for (const LoweredMessage& recv : receiver->lowered.recvs) {
        Side& sender = *sides_.at(recv.peer);
        const LoweredMessage* send = sender.message_to(receiver->plan.rank);
        CHECK(send != nullptr);
        if (send == nullptr) continue;
        CHECK_EQ(send->bytes, recv.bytes);
        if (send->bytes == recv.bytes) deliver(sender, *send, *receiver, recv);
      }
    }
    for (auto& side : sides_) {
      CHECK_EQ(side->lowered.sends.size(), num_receivers_of(side->plan.rank));
      if (!options_.in_ranges) {
        options_.execute(side->lowered.unpack(), side->buffers, side->lowered.scale);
      }
      side->verify(options_);
    }
  }

 private:
  struct Side {
    ExchangePlan plan;
    LoweredExchange lowered;
    std::vector<std::unique_ptr<HostTensor>> inputs, outputs;
    std::vector<Held> held_outputs;
    std::vector<const void*> input_ptrs;
    std::vector<void*> output_ptrs;
    std::vector<uint8_t> send_memory, recv_memory;
    CopyBuffers buffers;

    Side(const Rank& rank, const Options& options, Random& random)
        : plan(rank.plan), held_outputs(rank.outputs) {
      inputs = allocate(plan.inputs, rank.inputs, options, random);
      outputs = allocate(plan.outputs, rank.outputs, options, random);
      std::vector<StridedLayout> input_layouts, output_layouts;
      for (size_t t = 0; t < inputs.size(); ++t) {
        const Held& held = rank.inputs[t];
        inputs[t]->for_each([&](const Dims& index, uint8_t* element) {
          element_at(held.global_position(index), held.tensor, plan.inputs[t].dtype.itemsize,
                     element);
        });
        input_ptrs.push_back(inputs[t]->data());
        input_layouts.push_back(inputs[t]->layout());
      }
      for (auto& output : outputs) {
        output_ptrs.push_back(output->data());
        output_layouts.push_back(output->layout());
      }
      lowered = lower(plan, input_layouts, output_layouts);
      const bool staged = !options.in_ranges;
      send_memory.assign(staged ? lowered.send_staging_bytes + 64 : 64, kPoison);
      recv_memory.assign(staged ? lowered.recv_staging_bytes + 64 : 64, kPoison);
      buffers = {input_ptrs, output_ptrs, aligned(send_memory), aligned(recv_memory)};
    }

    static std::vector<std::unique_ptr<HostTensor>> allocate(const std::vector<TensorSpec>& specs,
                                                             const std::vector<Held>& held,
                                                             const Options& options,
                                                             Random& random) {
      CHECK_EQ(specs.size(), held.size());
      std::vector<std::unique_ptr<HostTensor>> tensors;
      for (size_t t = 0; t < specs.size(); ++t) {
        CHECK(specs[t].shape == held[t].shape());
        const int64_t itemsize = specs[t].dtype.itemsize;
        tensors.push_back(std::make_unique<HostTensor>(
            specs[t],
            options.dense ? StridedLayout::contiguous(specs[t]).strides
                          : random_strides(specs[t].shape, random),
            options.dense ? 0 : itemsize * random.between(0, 16 / itemsize)));
      }
      return tensors;
    }

    static void* aligned(std::vector<uint8_t>& memory) {
      return reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) & ~63ull);
    }

    const LoweredMessage* message_to(int peer) const {
      for (const LoweredMessage& send : lowered.sends) {
        if (send.peer == peer) return &send;
      }
      return nullptr;
    }

    void verify(const Options& options) {
      for (auto& input : inputs) CHECK(input->surroundings_are_intact());
      for (size_t t = 0; t < outputs.size(); ++t) {
        const Held& held = held_outputs[t];
        const DType dtype = plan.outputs[t].dtype;
        bool is_equal = true;
        outputs[t]->for_each([&](const Dims& index, uint8_t* element) {
          uint8_t expected[16];
          element_at(held.global_position(index), held.tensor, dtype.itemsize, expected);
          if (options.transform) options.transform(expected, dtype);
          is_equal = is_equal && (std::memcmp(expected, element, dtype.itemsize) == 0 ||
                                  (options.transform && both_are_nan(expected, element, dtype)));
        });
        CHECK(is_equal);
        CHECK(outputs[t]->surroundings_are_intact());
      }
    }
  };

  std::span<const CopyTask> before(const Side& side) const {
    return options_.in_ranges ? side.lowered.local() : side.lowered.pack_and_local();
  }

  size_t num_receivers_of(int rank) const {
    size_t count = 0;
    for (const auto& side : sides_) {
      for (const LoweredMessage& recv : side->lowered.recvs) count += recv.peer == rank;
    }
    return count;
  }

  void deliver(Side& sender, const LoweredMessage& send, Side& receiver,
               const LoweredMessage& recv) {
    if (options_.in_ranges) return deliver_in_ranges(sender, send, receiver, recv);
    if (send.bytes == 0) return;
    const void* from =
        send.is_staged() ? sender.buffers.send_staging : sender.input_ptrs[send.tensor_idx];
    const void* to =
        recv.is_staged() ? receiver.buffers.recv_staging : receiver.output_ptrs[recv.tensor_idx];
    std::memcpy(static_cast<uint8_t*>(const_cast<void*>(to)) + recv.offset_bytes,
                static_cast<const uint8_t*>(from) + send.offset_bytes, send.bytes);
  }

  // Both ends cut the message at random places.
  void deliver_in_ranges(Side& sender, const LoweredMessage& send, Side& receiver,
                         const LoweredMessage& recv) {
    std::vector<uint8_t> message(send.bytes);
    const int64_t granule = sender.lowered.scale.is_none() ? 1 : 8;
    in_random_ranges(send.bytes, granule, [&](int64_t begin, int64_t end) {
      std::vector<uint8_t> chunk(end - begin);  // exactly as large as what may be written
      pack_range(sender.lowered, send, sender.buffers, begin, end, chunk.data());
      std::copy(chunk.begin(), chunk.end(), message.begin() + begin);
    });
    in_random_ranges(recv.bytes, 1, [&](int64_t begin, int64_t end) {
      const std::vector<uint8_t> chunk(message.begin() + begin, message.begin() + end);
      unpack_range(receiver.lowered, recv, receiver.buffers, begin, end, chunk.data());
    });
  }

  template <typename Use>
  void in_random_ranges(int64_t bytes, int64_t granule, const Use& use) {
    const int64_t longest = random_.chance(0.5) ? 1 + bytes : 1 + bytes / 8;
    for (int64_t begin = 0; begin < bytes;) {
      const int64_t length = random_.between(0, longest) / granule * granule + granule;
      const int64_t end = std::min(bytes, begin + length);
      use(begin, end);
      begin = end;
    }
  }

  const Options& options_;
  Random& random_;
  std::vector<std::unique_ptr<Side>> sides_;
};

}  // namespace world
