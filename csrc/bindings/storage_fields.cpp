#include "bindings/storage_fields.h"

#include <dlfcn.h>

#include <cstring>

#include "bindings/tensor_argument.h"
#include "bindings/torch_types.h"

namespace pipecomm {
namespace {

constexpr size_t kMaxOffset = 7;  // words; a storage has more than twelve

size_t offset = 0;  // 0: not found
void (*deleter)(void*) = nullptr;

StorageFields* fields_at(size_t word, py::handle storage) {
  auto* const begin = static_cast<void**>(PyLong_AsVoidPtr(torch_names().cdata(storage).ptr()));
  return reinterpret_cast<StorageFields*>(begin + word);
}

bool is_of_torch(void (*function)(void*)) {
  Dl_info found{};
  return dladdr(reinterpret_cast<void*>(function), &found) != 0 &&
         std::strstr(found.dli_fname, "libc10") != nullptr;
}

}  // namespace

StorageFields* fields_of(py::handle storage) {
  return offset == 0 ? nullptr : fields_at(offset, storage);
}

void (*free_of_torch())(void*) { return deleter; }

void find_storage_fields() {
  const TorchNames& names = torch_names();
  const auto storage_of = [&](int num_bytes) {
    return names.untyped_storage(
        names.torch.attr("empty")(num_bytes, py::arg("dtype") = names.torch.attr("uint8")));
  };
  static std::byte own[64];
  const py::object small = storage_of(64), large = storage_of(4096);
  const py::object other =
      names.untyped_storage(tensor_in({own, [](std::byte*) {}}, {64}, {dlpack::kUInt, 8, 1}));
  const auto fits = [&](size_t word, py::handle storage, int64_t num_bytes) {
    const StorageFields& fields = *fields_at(word, storage);
    const auto memory = reinterpret_cast<void*>(names.data_ptr.number(storage));
    return fields.memory == memory && fields.num_bytes == num_bytes;
  };
  size_t num_found = 0;
  for (size_t word = 1; word <= kMaxOffset; ++word) {
    const StorageFields &first = *fields_at(word, small), &second = *fields_at(word, large);
    if (!fits(word, small, 64) || !fits(word, large, 4096) || !fits(word, other, 64) ||
        first.context != first.memory || second.context != second.memory ||
        first.free != second.free || first.free == fields_at(word, other)->free ||
        !is_of_torch(first.free))
      continue;
    ++num_found;
    offset = word;
    deleter = first.free;
  }
  if (num_found == 1) return;
  offset = 0;  // not found, or ambiguous
  deleter = nullptr;
}

}  // namespace pipecomm
