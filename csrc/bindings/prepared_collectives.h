// The plans of collectives of contiguous tensors, which C++ runs in one call: Python makes them once.
#pragma once

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "bindings/python_args.h"
#include "engine/communicator.h"

namespace pipecomm {

struct PreparedCollective {
  Reduction reduction = Reduction::kSum;  // unused if nothing is reduced
  std::vector<PreparedExchangePtr> plans;
};

// Used with the GIL.
class PreparedCollectives {
 public:
  // The plans for tensors like this one (`object` in Python) and an operator (None: no reduction). For
  // new ones, make(rank, size, shape, dtype, op) returns (name of the reduction or None, list of
  // plans), or None if C++ cannot run it. Null: it cannot, or the tensor has gaps.
  std::shared_ptr<const PreparedCollective> find(const Communicator& communicator,
                                                 py::handle object, const py::object& op,
                                                 const TensorRef& tensor, const py::object& make);

 private:
  struct Key {
    const void* make;
    const void* op;
    decltype(TensorRef::shape) shape;
    uint8_t dtype;
    bool operator==(const Key&) const = default;
  };
  struct Hash {
    size_t operator()(const Key& key) const;
  };
  struct Entry {
    py::object make, op;  // keeps their addresses from being reused
    std::shared_ptr<const PreparedCollective> prepared;
  };
  static constexpr size_t kMaxEntries = 256;

  std::unordered_map<Key, Entry, Hash> entries_;
};

}  // namespace pipecomm
