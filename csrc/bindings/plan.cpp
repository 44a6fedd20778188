#include "bindings/module.h"

#include "bindings/torch_types.h"
#include "engine/prepared_exchange.h"
#include "plan/builders.h"
#include "plan/reshard.h"
#include "plan/split.h"

namespace pipecomm {

namespace {

// (shape, dtype) as passed by Python.
TensorSpec spec_of(const Dims& shape, const py::object& dtype) {
  return {shape, dtype_argument(dtype)};
}

using PySpec = std::pair<Dims, py::object>;

TensorSpec spec_of(const PySpec& spec) { return spec_of(spec.first, spec.second); }

std::vector<TensorSpec> specs_of(const std::vector<PySpec>& specs) {
  std::vector<TensorSpec> result;
  for (const PySpec& spec : specs) result.push_back(spec_of(spec));
  return result;
}

// "up" multiplies by the group size, "down" divides by it.
Scale scale_of(const std::optional<std::string>& direction, int size) {
  if (!direction) return Scale::none();
  if (*direction == "up") return Scale::multiply(size);
  if (*direction == "down") return Scale::divide(size);
  throw std::invalid_argument("scale must be 'up', 'down' or None, not '" + *direction + "'");
}

PreparedExchangePtr prepare(ExchangePlan plan) {
  return std::make_shared<PreparedExchange>(std::move(plan));
}

// (ranks, dim, sizes or None, replicated)
using PyLayout = std::tuple<std::vector<int>, int, std::optional<Sizes>, bool>;

ShardLayout shard_layout(const PyLayout& layout) {
  const auto& [ranks, dim, sizes, replicated] = layout;
  return {ranks, sizes.value_or(Sizes()), replicated, dim};
}

py::list transfers(const std::vector<Transfer>& transfers) {
  py::list list;
  for (const Transfer& transfer : transfers) {
    py::list boxes;
    for (const Box& box : transfer.boxes)
      boxes.append(py::make_tuple(box.tensor_idx, box.start, box.extent));
    list.append(py::make_tuple(transfer.peer, boxes));
  }
  return list;
}

}  // namespace

void bind_plan(py::module_& m) {
  py::class_<PreparedExchange, PreparedExchangePtr>(
      m, "PreparedExchange",
      "An exchange plan, which boxes go to, and come from, each peer, with its lowerings.")
      .def_property_readonly("signature",
                             [](const PreparedExchange& self) { return self.plan().signature; })
      .def_property_readonly("output_shapes",
                             [](const PreparedExchange& self) {
                               py::list shapes;
                               for (const TensorSpec& spec : self.plan().outputs)
                                 shapes.append(py::tuple(py::cast(spec.shape)));
                               return shapes;
                             })
      .def_property_readonly(
          "sends", [](const PreparedExchange& self) { return transfers(self.plan().sends); })
      .def_property_readonly(
          "recvs", [](const PreparedExchange& self) { return transfers(self.plan().recvs); });

  std::vector<const char*> names;
  for (int code = 0; code < num_dtypes(); ++code) names.push_back(dtype_name(uint8_t(code)));
  m.attr("DTYPE_NAMES") = names;
  m.def("remainder_first", &remainder_first, py::arg("dim_size"), py::arg("world_size"));
  m.def(
      "plan_all_to_all",
      [](int rank, int size, const std::vector<std::tuple<Dims, py::object, Sizes, Sizes>>& tensors,
         int scatter_dim, int gather_dim, const std::vector<Sizes>& scatter_starts,
         const std::vector<Sizes>& gather_starts, const Sizes& gather_lengths,
         const std::string& tag) {
        std::vector<AllToAllTensor> specs;
        for (const auto& [shape, dtype, scatter_sizes, gather_sizes] : tensors) {
          const size_t idx = specs.size();
          specs.push_back({spec_of(shape, dtype), scatter_sizes, gather_sizes,
                           scatter_starts.empty() ? Sizes() : scatter_starts.at(idx),
                           gather_starts.empty() ? Sizes() : gather_starts.at(idx),
                           gather_starts.empty() ? 0 : gather_lengths.at(idx)});
        }
        return prepare(all_to_all_plan({rank, size}, specs, scatter_dim, gather_dim, {}, tag));
      },
      py::arg("rank"), py::arg("size"), py::arg("tensors"), py::arg("scatter_dim"),
      py::arg("gather_dim"), py::arg("scatter_starts") = std::vector<Sizes>(),
      py::arg("gather_starts") = std::vector<Sizes>(), py::arg("gather_lengths") = Sizes(),
      py::arg("tag") = "");
  m.def(
      "plan_gather",
      [](int rank, int size, const PySpec& local, int dim, const std::vector<Segments>& segments,
         const std::optional<std::string>& scale) {
        return prepare(
            gather_plan({rank, size}, spec_of(local), dim, segments, scale_of(scale, size)));
      },
      py::arg("rank"), py::arg("size"), py::arg("local"), py::arg("dim"), py::arg("segments"),
      py::arg("scale") = py::none());
  m.def(
      "plan_all_to_all_single",
      [](int rank, int size, const PySpec& input, const PySpec& output, const Sizes& input_splits,
         const Sizes& output_splits) {
        return prepare(all_to_all_single_plan({rank, size}, spec_of(input), spec_of(output),
                                              input_splits, output_splits));
      },
      py::arg("rank"), py::arg("size"), py::arg("input"), py::arg("output"),
      py::arg("input_splits"), py::arg("output_splits"));
  m.def(
      "plan_all_to_all_list",
      [](int rank, int size, const std::vector<PySpec>& inputs, const std::vector<PySpec>& outputs,
         const std::string& tag, const std::optional<PySpec>& shown) {
        std::optional<TensorSpec> spec;
        if (shown) spec = spec_of(*shown);
        return prepare(all_to_all_list_plan({rank, size}, specs_of(inputs), specs_of(outputs), tag,
                                            std::move(spec)));
      },
      py::arg("rank"), py::arg("size"), py::arg("inputs"), py::arg("outputs"), py::arg("tag") = "",
      py::arg("shown") = py::none());
  m.def(
      "plan_reshard",
      [](int rank, int size, const PySpec& whole, const PyLayout& source,
         const PyLayout& destination, bool own_in_place, const std::string& tag,
         const std::optional<PySpec>& shown) {
        ReshardOptions options{.own_in_place = own_in_place, .tag = tag};
        if (shown) options.shown = spec_of(*shown);
        return prepare(reshard_plan({rank, size}, spec_of(whole), shard_layout(source),
                                    shard_layout(destination), options));
      },
      py::arg("rank"), py::arg("size"), py::arg("whole"), py::arg("source"), py::arg("destination"),
      py::arg("own_in_place") = false, py::arg("tag") = "", py::arg("shown") = py::none());
  m.def(
      "plan_collect_pieces",
      [](int rank, int size, const PySpec& whole, const PyLayout& pieces, bool own_in_place,
         const std::string& tag, const std::optional<PySpec>& shown) {
        ReshardOptions options{.own_in_place = own_in_place, .tag = tag};
        if (shown) options.shown = spec_of(*shown);
        return prepare(
            collect_pieces_plan({rank, size}, spec_of(whole), shard_layout(pieces), options));
      },
      py::arg("rank"), py::arg("size"), py::arg("whole"), py::arg("pieces"),
      py::arg("own_in_place") = false, py::arg("tag") = "", py::arg("shown") = py::none());
  m.def(
      "plan_all_gather_list",
      [](int rank, int size, const PySpec& input, const std::vector<PySpec>& outputs) {
        return prepare(all_gather_list_plan({rank, size}, spec_of(input), specs_of(outputs)));
      },
      py::arg("rank"), py::arg("size"), py::arg("input"), py::arg("outputs"));
}

}  // namespace pipecomm
