// Intersection of two layouts of one tensor along a dim.
#include <algorithm>
#include <stdexcept>
#include <string>

#include "plan/builders.h"
#include "plan/signature.h"

namespace pipecomm {

namespace {

constexpr const char* kOp = "reshard";

[[noreturn]] void reject(const std::string& what) {
  throw std::invalid_argument("reshard: " + what);
}

// A checked layout with explicit sizes.
class ResolvedLayout {
 public:
  ResolvedLayout(const ShardLayout& layout, int64_t length, int group_size, const char* name)
      : ranks_(layout.ranks), replicated_(layout.replicated) {
    if (ranks_.empty()) reject(std::string(name) + " has no ranks");
    std::vector<int> sorted = ranks_;
    std::sort(sorted.begin(), sorted.end());
    if (sorted.front() < 0 || sorted.back() >= group_size ||
        std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end()) {
      reject(std::string(name) + " ranks must be different ranks of a group of " +
             std::to_string(group_size) + ", got " +
             to_string(std::vector<int64_t>(ranks_.begin(), ranks_.end())));
    }
    sizes_ = layout.sizes.empty() ? remainder_first(length, static_cast<int>(ranks_.size()))
                                  : layout.sizes;
    if (sizes_.size() != ranks_.size()) {
      reject(std::string(name) + " has " + std::to_string(ranks_.size()) + " ranks but " +
             std::to_string(sizes_.size()) + " sizes");
    }
    if (std::any_of(sizes_.begin(), sizes_.end(), [](int64_t size) { return size < 0; })) {
      reject(std::string(name) + " sizes must not be negative, got " + to_string(sizes_));
    }
    offsets_ = offsets_of(sizes_);
    if (offsets_.back() != length) {
      reject(std::string(name) + " sizes " + to_string(sizes_) + " must sum to the length " +
             std::to_string(length));
    }
  }

  int num_ranks() const { return static_cast<int>(ranks_.size()); }
  int rank(int i) const { return ranks_[i]; }
  bool replicated() const { return replicated_; }
  // My position in the list, -1 if I am not in it.
  int find(int rank) const {
    const auto it = std::find(ranks_.begin(), ranks_.end(), rank);
    return it == ranks_.end() ? -1 : static_cast<int>(it - ranks_.begin());
  }
  // [begin, end) of my piece.
  int64_t piece_begin(int i) const { return offsets_[i]; }
  int64_t piece_end(int i) const { return offsets_[i + 1]; }
  // [begin, end) of what I hold.
  int64_t held_begin(int i) const { return replicated_ ? 0 : offsets_[i]; }
  int64_t held_end(int i) const { return replicated_ ? offsets_.back() : offsets_[i + 1]; }

  void add_to(Signature& signature) const {
    signature.add(std::vector<int64_t>(ranks_.begin(), ranks_.end()));
    signature.add(sizes_).add(int64_t{replicated_});
  }

 private:
  std::vector<int> ranks_;
  bool replicated_;
  Sizes sizes_, offsets_;
};

struct Range {
  int64_t begin, end;
};

// What source i sends to destination j. A destination that already holds the whole as a replicated
// source takes everything from itself.
Range transfer_range(const ResolvedLayout& source, int i, const ResolvedLayout& destination,
                     int j) {
  Range sent{source.piece_begin(i), source.piece_end(i)};
  if (source.replicated() && source.find(destination.rank(j)) >= 0) {
    const bool is_self = source.rank(i) == destination.rank(j);
    sent = is_self ? Range{source.held_begin(i), source.held_end(i)} : Range{0, 0};
  }
  const int64_t begin = std::max(sent.begin, destination.held_begin(j));
  const int64_t end = std::min(sent.end, destination.held_end(j));
  return begin < end ? Range{begin, end} : Range{0, 0};
}

Transfer transfer(int peer, const TensorSpec& held, int dim, int64_t held_begin, Range range) {
  Box box{0, Dims(held.shape.size(), 0), held.shape};
  box.start[dim] = range.begin - held_begin;
  box.extent[dim] = range.end - range.begin;
  return {peer, {box}};
}

void sort_by_peer(std::vector<Transfer>& transfers) {
  std::sort(transfers.begin(), transfers.end(),
            [](const Transfer& a, const Transfer& b) { return a.peer < b.peer; });
}

}  // namespace

ExchangePlan reshard_plan(Member me, const TensorSpec& whole, int dim, const ShardLayout& source,
                          const ShardLayout& destination, Scale scale) {
  if (dim < 0 || dim >= std::ssize(whole.shape)) {
    reject("dim " + std::to_string(dim) + " is out of range for shape " + to_string(whole.shape));
  }
  const ResolvedLayout from(source, whole.shape[dim], me.size, "source");
  const ResolvedLayout to(destination, whole.shape[dim], me.size, "destination");

  ExchangePlan plan;
  plan.op = kOp;
  plan.rank = me.rank;
  plan.size = me.size;
  plan.scale = scale;
  if (const int i = from.find(me.rank); i >= 0) {
    TensorSpec held = whole;
    held.shape[dim] = from.held_end(i) - from.held_begin(i);
    plan.inputs = {held};
    for (int j = 0; j < to.num_ranks(); ++j) {
      const Range range = transfer_range(from, i, to, j);
      if (range.begin == range.end) continue;
      plan.sends.push_back(transfer(to.rank(j), held, dim, from.held_begin(i), range));
    }
    sort_by_peer(plan.sends);
  }
  if (const int j = to.find(me.rank); j >= 0) {
    TensorSpec held = whole;
    held.shape[dim] = to.held_end(j) - to.held_begin(j);
    plan.outputs = {held};
    for (int i = 0; i < from.num_ranks(); ++i) {
      const Range range = transfer_range(from, i, to, j);
      if (range.begin == range.end) continue;
      plan.recvs.push_back(transfer(from.rank(i), held, dim, to.held_begin(j), range));
    }
    sort_by_peer(plan.recvs);
  }
  Signature signature(kOp);
  signature.add(int64_t{me.size}).add(whole.shape).add(whole.dtype).add(int64_t{dim}).add(scale);
  from.add_to(signature);
  to.add_to(signature);
  plan.signature = signature.value();
  plan.validate();
  return plan;
}

}  // namespace pipecomm
