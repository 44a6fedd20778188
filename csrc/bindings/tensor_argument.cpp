#include "bindings/tensor_argument.h"

#include <algorithm>
#include <atomic>
#include <thread>
#include <utility>

#include "copy/torch_memory.h"

namespace pipecomm {
namespace {

int64_t address_of(const void* data) { return reinterpret_cast<intptr_t>(data); }

std::string text_of(py::handle object) { return py::str(object).cast<std::string>(); }

// "torch.sparse_coo" -> "sparse_coo"
std::string plain_name(py::handle object) {
  const std::string text = text_of(object);
  return text.starts_with("torch.") ? text.substr(6) : text;
}

int64_t num_elements(const dlpack::Tensor& view) {
  int64_t product = 1;
  for (int dim = 0; dim < view.num_dims; ++dim) product *= view.shape[dim];
  return product;
}

// From the first element to the end of the last one.
int64_t reach_of(const dlpack::Tensor& view) {
  int64_t reach = 1;
  for (int dim = 0; dim < view.num_dims; ++dim) reach += (view.shape[dim] - 1) * view.strides[dim];
  return reach;
}

// Also true for a few layouts of interleaved dims that do not overlap; they do not occur in practice.
bool elements_share_memory(const TensorRef& tensor) {
  if (tensor.is_contiguous()) return false;
  std::vector<std::pair<int64_t, int64_t>> dims;  // stride, size
  for (size_t dim = 0; dim < tensor.shape.size(); ++dim) {
    if (tensor.shape[dim] == 0) return false;
    if (tensor.shape[dim] > 1) dims.emplace_back(tensor.strides[dim], tensor.shape[dim]);
  }
  std::sort(dims.begin(), dims.end());
  int64_t reach = 0;  // furthest offset of an element over the dims so far
  for (const auto& [stride, size] : dims) {
    if (stride <= reach) return true;
    reach += (size - 1) * stride;
  }
  return false;
}

[[noreturn]] void throw_inside_transform(const ArgumentName& name) {
  throw py::type_error(name.text() +
                       " is inside a transform (vmap, torch.func, functionalize), which "
                       "communication cannot follow; pass a plain torch.Tensor");
}

void check_device(const dlpack::Device& found, py::handle object, const ArgumentName& name,
                  const DeviceArgument& wanted) {
  if (found.type == wanted.type && (wanted.index < 0 || found.id == wanted.index)) return;
  throw py::value_error(name.text() + " is on " + text_of(torch_names().device(object)) +
                        ", but the communicator is for " + wanted.text() + " tensors");
}

// A tensor that DLPack does not describe: viewed as integers if only its dtype is the obstacle, else an
// error that states the obstacle.
py::object as_integers(py::handle object, const ArgumentName& name, const DeviceArgument& device) {
  const TorchNames& names = torch_names();
  const std::string kind = names.is_nested.is_true(object)      ? "nested"
                           : names.is_quantized.is_true(object) ? "quantized"
                                                                : plain_name(names.layout(object));
  if (kind != "strided")
    throw py::value_error(name.text() + " must be a dense tensor, not " + kind);
  const std::string place = text_of(names.device(object).attr("type"));
  if (place != (device.is_cuda() ? "cuda" : "cpu")) check_device({}, object, name, device);
  dtype_argument(names.dtype(object));  // throws unless it is known
  const int size = names.itemsize(object).cast<int>();
  const char* const integers = size == 1 ? "uint8" : size == 2 ? "int16" : "int32";
  try {
    return object.attr("detach")().attr("view")(names.torch.attr(integers));
  } catch (const py::error_already_set&) {
    throw_inside_transform(name);
  }
}

// The storage of a tensor may have been freed or shrunk, as sharded training does with parameters.
StorageArgument checked_storage(py::handle object, const dlpack::Tensor& view, int itemsize,
                                const ArgumentName& name) {
  const TorchNames& names = torch_names();
  py::object storage = names.untyped_storage(object);
  if (num_elements(view) == 0) return {std::move(storage), nullptr, nullptr};
  StorageFields* const fields = fields_of(storage);
  const int64_t has = fields ? fields->num_bytes : names.num_bytes.number(storage);
  const int64_t reach = reach_of(view) * itemsize;
  // A tensor that fills its storage begins at its start.
  const int64_t offset = has == reach ? 0 : names.storage_offset.number(object) * itemsize;
  if (offset + reach <= has && view.data)
    return {std::move(storage), static_cast<std::byte*>(view.data) - offset, fields};
  if (names.is_functional_tensor(object).cast<bool>()) throw_inside_transform(name);
  throw py::value_error(name.text() + " needs " + std::to_string(offset + reach) +
                        " bytes of its storage, which has " + std::to_string(view.data ? has : 0) +
                        "; its memory has been freed or resized");
}

// Only for a tensor that has memory. The views that torch makes of complex tensors have gaps.
bool is_conjugate_or_negative(py::handle object, const dlpack::Tensor& view) {
  const bool is_complex = view.dtype.code == dlpack::kComplex;
  const bool is_float = view.dtype.code == dlpack::kFloat || view.dtype.code == dlpack::kBfloat;
  const bool may_be_part = is_float && (reach_of(view) != num_elements(view) ||
                                        view.num_dims == 0 || num_elements(view) == 1);
  return (is_complex && torch_names().is_conj.is_true(object)) ||
         ((is_complex || may_be_part) && torch_names().is_neg.is_true(object));
}

void check_writable(py::handle object, const ArgumentName& name, const TensorRef& ref) {
  if (elements_share_memory(ref))
    throw py::value_error(name.text() +
                          " is expanded or has overlapping strides: several of its elements share "
                          "memory; receive into a tensor of its own");
  if (torch_names().requires_grad.is_true(object) && is_grad_enabled())
    throw py::value_error(
        name.text() +
        " requires grad; receive into a tensor that does not, and call requires_grad_() after, or "
        "receive under torch.no_grad()");
}

// ------------------------------------------------------------------------------------------------
// storages that are released without the GIL

std::atomic<KeptStorages*> put_aside{nullptr};  // a stack; a fork finds it whole
thread_local bool drops_when_gil_is_back = false;

int drop_what_was_put_aside(void*) {
  for (KeptStorages* kept = put_aside.exchange(nullptr); kept;)
    delete std::exchange(kept, kept->next);
  return 0;
}

void let_go(KeptStorages* kept) {
  if (!drops_when_gil_is_back && Py_IsInitialized() && PyGILState_Check()) {
    delete kept;
    return;
  }
  kept->next = put_aside.load();
  while (!put_aside.compare_exchange_weak(kept->next, kept)) {
  }
  // On a thread of the library. The main thread drops it soon, unless one of our calls does so first.
  if (!drops_when_gil_is_back && Py_IsInitialized())
    Py_AddPendingCall(drop_what_was_put_aside, nullptr);
}

}  // namespace

DeviceArgument DeviceArgument::parse(const std::string& name) {
  const size_t colon = name.find(':');
  return {name.starts_with("cuda") ? dlpack::kCuda : dlpack::kCpu,
          colon == std::string::npos ? -1 : std::stoi(name.substr(colon + 1))};
}

std::string DeviceArgument::text() const {
  return (is_cuda() ? "cuda" : "cpu") + (index < 0 ? "" : ":" + std::to_string(index));
}

std::shared_ptr<KeptStorages> KeptStorages::make(size_t number, std::shared_ptr<Watch> watch) {
  return {new KeptStorages(number, std::move(watch)), let_go, Recycled<KeptStorages>()};
}

KeptStorages::~KeptStorages() {
  if (!watch_) return;
  look();
  watch_->is_over = true;
}

void KeptStorages::add(StorageArgument storage, Access access) {
  const bool is_async = watch_ && storage.data;
  if (num_kept_ < few_.size())
    few_[num_kept_].emplace(std::move(storage), is_async, access);
  else
    more_.emplace_back(std::move(storage), is_async, access);
  ++num_kept_;
}

// Resizing or sharing a storage gives it other memory.
bool KeptStorages::has_moved(const Kept& kept) {
  const auto& [object, data, fields] = kept.storage;
  if (!kept.is_looked_at) return false;
  return fields ? fields->memory != data
                : torch_names().data_ptr.number(object) != address_of(data);
}

void KeptStorages::look() const {
  const auto few_has_moved = [](const std::optional<Kept>& kept) {
    return kept && has_moved(*kept);
  };
  if (std::any_of(few_.begin(), few_.end(), few_has_moved) ||
      std::any_of(more_.begin(), more_.end(), has_moved))
    watch_->has_moved = true;
}

WithoutGil::WithoutGil() : state_(PyEval_SaveThread()) { drops_when_gil_is_back = true; }

WithoutGil::~WithoutGil() {
  PyEval_RestoreThread(state_);
  drops_when_gil_is_back = false;
  if (put_aside.load(std::memory_order_relaxed)) drop_what_was_put_aside(nullptr);
}

TensorArgument tensor_argument(py::handle object, const ArgumentName& name, Access access,
                               const DeviceArgument& device) {
  if (!is_tensor(object))
    throw py::type_error(name.text() + " must be a torch.Tensor, not " +
                         Py_TYPE(object.ptr())->tp_name);
  if (!is_plain_tensor(object))
    throw py::type_error(name.text() + " is a " + Py_TYPE(object.ptr())->tp_name +
                         "; pass a plain torch.Tensor (its local, real data)");
  py::object integers;  // owns what the view shows
  dlpack::Tensor view;
  if (exchange_api().tensor_from_python(object.ptr(), &view) != 0) {
    PyErr_Clear();
    integers = as_integers(object, name, device);
    if (exchange_api().tensor_from_python(integers.ptr(), &view) != 0)
      throw py::error_already_set();
  }
  check_device(view.device, object, name, device);
  const bool is_empty = num_elements(view) == 0;
  if (!view.data && !is_empty && torch_names().is_zerotensor.is_true(object)) {
    if (access == Access::write)
      throw py::value_error(name.text() +
                            " stands for zeros and has no memory; receive into an ordinary tensor");
    const py::object zeros = torch_names().torch.attr("zeros")(
        object.attr("shape"), py::arg("dtype") = object.attr("dtype"),
        py::arg("device") = object.attr("device"));
    return tensor_argument(zeros, name, access, device);
  }
  if (!is_empty && is_conjugate_or_negative(object, view)) {
    if (access == Access::write)
      throw py::value_error(
          name.text() +
          " is a conjugate or negative view; receive into its base and take the view "
          "afterwards");
    checked_storage(object, view, view.dtype.bits / 8, name);
    return tensor_argument(object.attr("detach")().attr("resolve_conj")().attr("resolve_neg")(),
                           name, access, device);
  }
  TensorRef ref;
  ref.dtype = integers ? dtype_argument(torch_names().dtype(object)) : dtype_of(object, view.dtype);
  StorageArgument storage = checked_storage(object, view, ref.dtype.itemsize, name);
  ref.data = static_cast<std::byte*>(view.data);
  ref.shape.assign(view.shape, view.shape + view.num_dims);
  ref.strides.assign(view.strides, view.strides + view.num_dims);
  if (access == Access::write) check_writable(object, name, ref);
  return {py::reinterpret_borrow<py::object>(object), std::move(storage), std::move(ref)};
}

AwaitedTensors::AwaitedTensors(std::shared_ptr<KeptStorages> kept,
                               std::shared_ptr<KeptStorages::Watch> watch,
                               std::vector<py::object> received)
    : kept_(kept), watch_(std::move(watch)), received_(std::move(received)) {}

// During a call into Python, another thread may run and finish the same tensors.
bool AwaitedTensors::finish() {
  const auto watch = watch_;
  if (!watch) return true;
  if (const auto kept = kept_.lock()) {
    kept->look();
  } else {
    while (!watch->is_over) {  // a thread is about to put them aside, or to drop them
      const WithoutGil no_gil;
      std::this_thread::yield();
    }
  }
  if (watch->has_moved) return false;
  watch_.reset();
  const auto received = std::exchange(received_, {});
  if (!received.empty()) mark_written(received);
  return true;
}

py::object tensor_in(std::shared_ptr<std::byte> memory, const std::vector<int64_t>& shape,
                     dlpack::DataType type) {
  struct Owned : dlpack::ManagedTensor {
    std::shared_ptr<std::byte> memory;
    std::vector<int64_t> shape, strides;
  };
  auto* const owned = new Owned;
  owned->version = {dlpack::kMajorVersion, 0};
  owned->context = owned;
  owned->deleter = [](dlpack::ManagedTensor* self) { delete static_cast<Owned*>(self->context); };
  owned->flags = 0;
  owned->shape = shape;
  owned->strides.resize(shape.size());
  int64_t pitch = 1;
  for (size_t dim = shape.size(); dim-- > 0; pitch *= std::max<int64_t>(shape[dim], 1))
    owned->strides[dim] = pitch;
  owned->tensor = {memory.get(),
                   {dlpack::kCpu, 0},
                   static_cast<int32_t>(shape.size()),
                   type,
                   owned->shape.data(),
                   owned->strides.data(),
                   0};
  owned->memory = std::move(memory);
  void* tensor = nullptr;
  if (exchange_api().managed_to_python(owned, &tensor) != 0) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(static_cast<PyObject*>(tensor));
}

}  // namespace pipecomm
