#include "plan/reshard.h"

#include <algorithm>
#include <initializer_list>
#include <stdexcept>
#include <string_view>

#include "plan/signature.h"
#include "plan/split.h"

namespace pipecomm {

namespace {

[[noreturn]] void reject_reshard(const std::string& what) {
  throw std::invalid_argument("reshard: " + what);
}

// A slice [begin, end) of every dim of the whole tensor.
struct Region {
  Dims begin, end;

  bool empty() const {
    return !std::equal(begin.begin(), begin.end(), end.begin(),
                       [](int64_t from, int64_t to) { return from < to; });
  }
};

Region everything(const Dims& shape) { return {Dims(shape.size(), 0), shape}; }

Region nothing(const Dims& shape) { return {Dims(shape.size(), 0), Dims(shape.size(), 0)}; }

Region intersection(const Region& a, const Region& b) {
  Region common = a;
  for (size_t d = 0; d < a.begin.size(); ++d) {
    common.begin[d] = std::max(a.begin[d], b.begin[d]);
    common.end[d] = std::max(common.begin[d], std::min(a.end[d], b.end[d]));
  }
  return common;
}

// A checked layout with explicit sizes.
class ResolvedLayout {
 public:
  ResolvedLayout(const ShardLayout& layout, const Dims& shape, int group_size, const char* name)
      : ranks_(layout.ranks), dim_(layout.dim), replicated_(layout.replicated), shape_(shape) {
    if (dim_ < 0 || dim_ >= std::ssize(shape)) {
      reject_reshard(std::string(name) + " dim " + std::to_string(dim_) +
                     " is out of range for shape " + to_string(shape));
    }
    if (ranks_.empty()) reject_reshard(std::string(name) + " has no ranks");
    std::vector<int> sorted = ranks_;
    std::sort(sorted.begin(), sorted.end());
    if (sorted.front() < 0 || sorted.back() >= group_size ||
        std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end()) {
      reject_reshard(std::string(name) + " ranks must be distinct ranks in a group of " +
                     std::to_string(group_size) + ", got " +
                     to_string(std::vector<int64_t>(ranks_.begin(), ranks_.end())));
    }
    const int64_t length = shape[dim_];
    sizes_ = layout.sizes.empty() ? remainder_first(length, static_cast<int>(ranks_.size()))
                                  : layout.sizes;
    if (sizes_.size() != ranks_.size()) {
      reject_reshard(std::string(name) + " has " + std::to_string(ranks_.size()) + " ranks but " +
                     std::to_string(sizes_.size()) + " sizes");
    }
    if (std::any_of(sizes_.begin(), sizes_.end(), [](int64_t size) { return size < 0; })) {
      reject_reshard(std::string(name) + " sizes must not be negative, got " + to_string(sizes_));
    }
    offsets_ = offsets_of(sizes_);
    if (offsets_.back() != length) {
      reject_reshard(std::string(name) + " sizes " + to_string(sizes_) +
                     " must sum to the length " + std::to_string(length));
    }
  }

  int num_ranks() const { return static_cast<int>(ranks_.size()); }
  int rank(int i) const { return ranks_[i]; }
  bool replicated() const { return replicated_; }
  // The position of `rank` in the list, or -1.
  int find(int rank) const {
    const auto it = std::find(ranks_.begin(), ranks_.end(), rank);
    return it == ranks_.end() ? -1 : static_cast<int>(it - ranks_.begin());
  }
  Region piece(int i) const {
    Region region = everything(shape_);
    region.begin[dim_] = offsets_[i];
    region.end[dim_] = offsets_[i + 1];
    return region;
  }
  Region held(int i) const { return replicated_ ? everything(shape_) : piece(i); }

  void add_to(Signature& signature) const {
    signature.add(std::vector<int64_t>(ranks_.begin(), ranks_.end()));
    signature.add(sizes_).add(int64_t{dim_}).add(int64_t{replicated_});
  }

 private:
  std::vector<int> ranks_;
  int dim_;
  bool replicated_;
  Dims shape_;
  Sizes sizes_, offsets_;
};

// The region that source i sends to destination j. A destination that is also a replicated source
// holds the whole already, and takes everything from itself.
Region transferred(const ResolvedLayout& source, int i, const ResolvedLayout& destination, int j,
                   const Dims& shape) {
  Region sent = source.piece(i);
  if (source.replicated() && source.find(destination.rank(j)) >= 0) {
    const bool is_self = source.rank(i) == destination.rank(j);
    sent = is_self ? source.held(i) : nothing(shape);
  }
  return intersection(sent, destination.held(j));
}

Transfer transfer(int peer, const Region& held, const Region& region) {
  Box box{0, region.begin, region.end};
  for (size_t d = 0; d < box.start.size(); ++d) {
    box.extent[d] -= box.start[d];
    box.start[d] -= held.begin[d];
  }
  return {peer, {box}};
}

TensorSpec spec_of(const Region& held, DType dtype) {
  TensorSpec spec{held.end, dtype};
  for (size_t d = 0; d < held.begin.size(); ++d) spec.shape[d] -= held.begin[d];
  return spec;
}

ExchangePlan new_plan(const char* op, Member me, const TensorSpec& whole,
                      const ReshardOptions& options) {
  ExchangePlan plan;
  plan.op = op;
  plan.rank = me.rank;
  plan.size = me.size;
  plan.scale = options.scale;
  plan.shown = options.shown.value_or(whole);
  return plan;
}

ExchangePlan finished(ExchangePlan plan, const TensorSpec& whole, const ReshardOptions& options,
                      std::initializer_list<const ResolvedLayout*> layouts) {
  std::ranges::sort(plan.sends, {}, &Transfer::peer);
  std::ranges::sort(plan.recvs, {}, &Transfer::peer);
  Signature signature(plan.op);
  signature.add(int64_t{plan.size}).add(whole.shape).add(whole.dtype).add(options.scale);
  signature.add(int64_t{options.own_in_place}).add(std::string_view(options.tag));
  for (const ResolvedLayout* layout : layouts) layout->add_to(signature);
  plan.signature = signature.value();
  return plan;
}

}  // namespace

ExchangePlan reshard_plan(Member me, const TensorSpec& whole, const ShardLayout& source,
                          const ShardLayout& destination, const ReshardOptions& options) {
  const ResolvedLayout from(source, whole.shape, me.size, "source");
  const ResolvedLayout to(destination, whole.shape, me.size, "destination");
  ExchangePlan plan = new_plan("reshard", me, whole, options);
  const auto is_moved = [&](int sender, int receiver, const Region& region) {
    return !region.empty() && !(options.own_in_place && sender == receiver);
  };
  if (const int i = from.find(me.rank); i >= 0) {
    const Region held = from.held(i);
    plan.inputs = {spec_of(held, whole.dtype)};
    for (int j = 0; j < to.num_ranks(); ++j) {
      const Region region = transferred(from, i, to, j, whole.shape);
      if (!is_moved(me.rank, to.rank(j), region)) continue;
      plan.sends.push_back(transfer(to.rank(j), held, region));
    }
  }
  if (const int j = to.find(me.rank); j >= 0) {
    const Region held = to.held(j);
    plan.outputs = {spec_of(held, whole.dtype)};
    for (int i = 0; i < from.num_ranks(); ++i) {
      const Region region = transferred(from, i, to, j, whole.shape);
      if (!is_moved(from.rank(i), me.rank, region)) continue;
      plan.recvs.push_back(transfer(from.rank(i), held, region));
    }
  }
  return finished(std::move(plan), whole, options, {&from, &to});
}

ExchangePlan collect_pieces_plan(Member me, const TensorSpec& whole, const ShardLayout& pieces,
                                 const ReshardOptions& options) {
  const ResolvedLayout layout(pieces, whole.shape, me.size, "piece");
  ExchangePlan plan = new_plan("collect_pieces", me, whole, options);
  const int mine = layout.find(me.rank);
  if (mine < 0) throw std::invalid_argument("collect_pieces: this rank is not in the layout");
  plan.inputs = {whole};
  for (int j = 0; j < layout.num_ranks(); ++j) {
    if (options.own_in_place && j == mine) continue;
    const Region sent = layout.piece(j), kept = layout.piece(mine);
    plan.outputs.push_back(spec_of(kept, whole.dtype));
    if (!sent.empty()) {
      plan.sends.push_back(transfer(layout.rank(j), everything(whole.shape), sent));
    }
    if (kept.empty()) continue;
    plan.recvs.push_back(transfer(layout.rank(j), kept, kept));
    plan.recvs.back().boxes[0].tensor_idx = static_cast<int>(plan.outputs.size()) - 1;
  }
  return finished(std::move(plan), whole, options, {&layout});
}

}  // namespace pipecomm
