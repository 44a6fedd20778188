#include "bindings/prepared_collectives.h"

#include <utility>

namespace pipecomm {

size_t PreparedCollectives::Hash::operator()(const Key& key) const {
  constexpr uint64_t kSpread = 0x9e3779b97f4a7c15;
  uint64_t hash = reinterpret_cast<uintptr_t>(key.make);
  hash = hash * kSpread + reinterpret_cast<uintptr_t>(key.op);
  for (const int64_t length : key.shape) hash = hash * kSpread + static_cast<uint64_t>(length);
  return static_cast<size_t>((hash * kSpread + key.dtype) >> 7);
}

std::shared_ptr<const PreparedCollective> PreparedCollectives::find(
    const Communicator& communicator, py::handle object, const py::object& op,
    const TensorRef& tensor, const py::object& make) {
  if (!tensor.is_contiguous()) return nullptr;
  const Key key{make.ptr(), op.ptr(), tensor.shape, tensor.dtype.code};
  if (const auto found = entries_.find(key); found != entries_.end()) return found->second.prepared;
  const py::object made = make(communicator.rank(), communicator.size(), object.attr("shape"),
                               object.attr("dtype"), op);
  if (made.is_none()) return nullptr;
  const auto [name, plans] =
      made.cast<std::pair<std::optional<std::string>, std::vector<PreparedExchangePtr>>>();
  auto prepared = std::make_shared<PreparedCollective>();
  if (name) prepared->reduction = reduction_argument(*name);
  prepared->plans = plans;
  if (entries_.size() == kMaxEntries) entries_.clear();
  entries_[key] = {make, op, prepared};
  return prepared;
}

}  // namespace pipecomm
