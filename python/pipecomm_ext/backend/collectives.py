"""The collectives of torch's process groups, with the names and arguments that torch calls them with."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)

from ..communicator.communicator import engine_of
from ..communicator.continuation import Continuation, begin
from ..communicator.plans import all_gather_list_plan, all_to_all_single_plan, list_plan, split_lengths
from ..communicator.reductions import (
    all_gather,
    all_reduce,
    begin_all_gather,
    begin_all_reduce,
    begin_reduce,
    begin_reduce_scatter,
    buffer_for,
    flattened,
    reduce_scatter,
    with_copies,
)
from ..communicator.traced import done_work
from ..core.copyable import cloned
from ..core.extension import _C
from ..core.grad_mode import without_grad
from ..core.tensor_specs import plain, spec_of, specs_of
from ..errors import PipeCommError
from .arguments import operator_name, single, tensor_list
from .calls import collective
from .endpoint import Connection, Endpoint
from .messages import Messages
from .sparse import begin_sparse_all_reduce
from .work import BackendWork, Together, explained

_CPU = torch.device("cpu")
_NONE = timedelta(0)


class Collectives:
    """The collectives, which the group and the backend that is registered on it have in common."""

    endpoint: Endpoint
    messages: Messages

    # ---- details

    def _connection(self, device: torch.device) -> Connection:
        self.endpoint.num_collectives += 1
        return self.endpoint.connection(device)

    def _waits(self, opts: Any) -> bool:
        """Whether the caller waits for the call at once, for as long as the communicators do."""
        return not opts.asyncOp and self.endpoint.changed_timeout is None and opts.timeout <= _NONE

    def _begun(self, handle: Any, outputs: list[Tensor], opts: Any, what: str) -> BackendWork:
        endpoint = self.endpoint
        limit = endpoint.limit(opts.timeout)
        work = BackendWork(handle, outputs, limit, endpoint.rank, what, endpoint.num_collectives)
        for part in handle if isinstance(handle, list) else [handle]:
            if isinstance(part, Continuation) and not self._waits(opts):
                endpoint.finish(part)
        return work

    def _explaining(self, what: str, begin: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Begins a call, and names it in its errors."""
        try:
            with without_grad():
                return begin(*args, **kwargs)
        except PipeCommError as error:
            raise explained(error, self.endpoint.rank, what) from None

    def _waited(
        self, what: str, op: Any, outputs: list[Tensor], call: Callable[..., Any], *args: Any
    ) -> BackendWork:
        """Makes a call that waits by itself. Only its errors name the operator (None: it has none)."""
        try:
            with without_grad():
                call(*args)
        except PipeCommError as error:
            name = f"{what} with {operator_name(op)}" if op is not None else what
            raise explained(error, self.endpoint.rank, name) from None
        return self._done(outputs, what)

    def _done(self, outputs: list[Tensor], what: str) -> BackendWork:
        """The handle of a call that has waited."""
        endpoint = self.endpoint
        return BackendWork(done_work(), outputs, None, endpoint.rank, what, endpoint.num_collectives)

    def _exchange(
        self,
        connection: Connection,
        op: str,
        what: str,
        plan: Callable[[], _C.PreparedExchange],
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        opts: Any,
    ) -> Any:
        exchange, is_async = connection.communicator.exchange, not self._waits(opts)
        return self._explaining(
            what, exchange, plan, inputs, outputs, op=op, async_op=is_async, returns_work=True
        )

    def _lists(
        self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], device_of: Tensor, opts: Any, what: str
    ) -> BackendWork:
        """An all-to-all of lists; a rank that sends or receives nothing has an empty tensor there."""
        connection = self._connection(device_of.device)
        comm = connection.communicator

        def plan() -> _C.PreparedExchange:
            specs = specs_of(list(inputs), "inputs"), specs_of(list(outputs), "outputs")
            return list_plan(comm.rank, comm.size, *specs)

        handle = self._exchange(connection, "all_to_all", what, plan, list(inputs), list(outputs), opts)
        return self._begun(handle, [output for output in outputs if output is not None], opts, what)

    def _together(self, works: Sequence[BackendWork], opts: Any, what: str) -> BackendWork:
        outputs = [tensor for work in works for tensor in work.result()]
        limit = self.endpoint.limit(opts.timeout)
        return BackendWork(Together(works), outputs, limit, self.endpoint.rank, what)

    # ---- one to all, all to one

    @collective(BroadcastOptions, "tensors|tensor", instead=("root",))
    def broadcast(self, tensors: Any, opts: Any) -> BackendWork:
        tensor, root = single(tensors, "broadcast"), opts.rootRank
        comm, is_waited = self._connection(tensor.device).communicator, self._waits(opts)
        flat = flattened(tensor) if comm.rank == root else buffer_for(tensor)
        what = f"broadcast from rank {root}"
        handle = self._explaining(what, comm.broadcast, flat, root, async_op=not is_waited)
        if comm.rank != root and flat.data_ptr() != tensor.data_ptr():
            steps = with_copies(iter([handle or done_work()]), [flat], [tensor])
            handle = begin(comm, steps, [flat, tensor], is_waited)
        elif is_waited:
            return self._done([tensor], what)
        return self._begun(handle, [tensor], opts, what)

    @collective(GatherOptions, "output_tensors", "input_tensors|input_tensor", instead=("root",))
    def gather(self, outputs: Any, inputs: Any, opts: Any) -> BackendWork:
        tensor, root = single(inputs, "gather"), opts.rootRank
        rank, size = self.endpoint.rank, self.endpoint.size
        none = tensor.new_empty(0)
        targets = tensor_list(outputs) if rank == root else [none] * size
        sources = [tensor if dst == root else none for dst in range(size)]
        return self._lists(sources, targets, tensor, opts, f"gather to rank {root}")

    @collective(GatherOptions, "output", "input", instead=("root",))
    def gather_single(self, output: Any, tensor: Tensor, opts: Any) -> BackendWork:
        outputs = []
        if self.endpoint.rank == opts.rootRank:
            outputs = list(plain(output).view(self.endpoint.size, *tensor.shape).unbind(0))
        return self.gather([outputs], [tensor], opts)

    gather_into_tensor = gather_single

    @collective(ScatterOptions, "output_tensors|output_tensor", "input_tensors", instead=("root",))
    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> BackendWork:
        output, root = single(outputs, "scatter"), opts.rootRank
        rank, size = self.endpoint.rank, self.endpoint.size
        none = output.new_empty(0)
        sources = tensor_list(inputs) if rank == root else [none] * size
        targets = [output if src == root else none for src in range(size)]
        return self._lists(sources, targets, output, opts, f"scatter from rank {root}")

    # ---- all to all

    @collective(AllgatherOptions, "output_tensors", "input_tensors|input_tensor")
    def allgather(self, outputs: Any, inputs: Any, opts: Any) -> BackendWork:
        tensor, targets = single(inputs, "allgather"), tensor_list(outputs)
        connection = self._connection(tensor.device)
        comm = connection.communicator
        handle = self._exchange(
            connection,
            "all_gather",
            "all_gather",
            lambda: all_gather_list_plan(
                comm.rank, comm.size, spec_of(tensor, "tensor"), specs_of(targets, "tensor_list")
            ),
            [tensor],
            targets,
            opts,
        )
        return self._begun(handle, targets, opts, "all_gather")

    @collective(AllgatherOptions, "output_lists", "input_list")
    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any) -> BackendWork:
        """outputs[rank][i] gets inputs[i] of that rank."""
        works = [
            self.allgather([[of_rank[idx] for of_rank in outputs]], [tensor])
            for idx, tensor in enumerate(inputs)
        ]
        return self._together(works, opts, "all_gather_coalesced")

    @collective(AllgatherOptions, "output", "input")
    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any) -> BackendWork:
        output, tensor = plain(output), plain(tensor)
        connection = self._connection(tensor.device)
        comm, line, what = connection.communicator, connection.line, "all_gather_single"
        args = comm, engine_of(comm), output, tensor
        if self._waits(opts):
            return self._waited(what, None, [output], all_gather, *args, line)
        return self._begun(self._explaining(what, begin_all_gather, *args, False, line), [output], opts, what)

    _allgather_base = all_gather_single

    @collective(AllgatherOptions, "outputs|output_lists", "inputs|input_list")
    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any) -> BackendWork:
        works = [self.all_gather_single(*pair) for pair in zip(outputs, inputs, strict=True)]
        return works[0] if len(works) == 1 else self._together(works, opts, "all_gather_single_coalesced")

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    @collective(
        AllToAllOptions,
        "output|output_tensor",
        "input|input_tensor",
        "output_split_sizes",
        "input_split_sizes",
    )
    def all_to_all_single(
        self, output: Tensor, tensor: Tensor, output_splits: Any, input_splits: Any, opts: Any
    ) -> BackendWork:
        output, tensor = plain(output), plain(tensor)
        connection, what = self._connection(tensor.device), "all_to_all_single"
        comm = connection.communicator
        sources, targets = [tensor], [output]

        def plan() -> _C.PreparedExchange:
            specs = spec_of(tensor, "input"), spec_of(output, "output")
            lengths = tuple(input_splits or ()), tuple(output_splits or ())
            if tensor is output:
                sources[0] = cloned(tensor)
            if tensor.shape[1:] != output.shape[1:]:
                sent = split_lengths(specs[0], lengths[0], comm.size, "input")
                received = split_lengths(specs[1], lengths[1], comm.size, "output")
                lengths = _in_elements(sent, specs[0]), _in_elements(received, specs[1])
                sources[0], targets[0] = flattened(tensor), buffer_for(output)
                specs = spec_of(sources[0], "input"), spec_of(targets[0], "output")
            return all_to_all_single_plan(comm.rank, comm.size, *specs, *lengths)

        handle = self._exchange(connection, "all_to_all", what, plan, sources, targets, opts)
        [target] = targets
        if target.data_ptr() != output.data_ptr():
            steps = with_copies(iter([handle]), [target], [output])
            handle = begin(comm, steps, [target, output], self._waits(opts))
        return self._begun(handle, [output], opts, what)

    alltoall_base = all_to_all_single

    @collective(AllToAllOptions, "output_tensors|output_tensor|output", "input_tensors|input_tensor|input")
    def alltoall(self, outputs: Any, inputs: Any, opts: Any) -> BackendWork:
        outputs, inputs = tensor_list(outputs), tensor_list(inputs)
        return self._lists(inputs, outputs, inputs[0], opts, "all_to_all")

    # ---- reductions

    @collective(AllreduceOptions, "tensors|tensor", instead=("op",))
    def allreduce(self, tensors: Any, opts: Any) -> BackendWork:
        return self._all_reduce([single(tensors, "all_reduce")], opts, self._waits(opts), "all_reduce")

    @collective(AllreduceCoalescedOptions, "tensors")
    def allreduce_coalesced(self, tensors: Any, opts: Any) -> BackendWork:
        tensors, what = tensor_list(tensors), "all_reduce_coalesced"
        if len({tensor.dtype for tensor in tensors}) == 1:
            return self._all_reduce(tensors, opts, self._waits(opts), what)
        works = [
            self._all_reduce(some, opts, False, what)
            for some in _by_dtype(tensors, [tensor.dtype for tensor in tensors])
        ]
        work = self._together(works, opts, what)
        work.outputs = tensors
        return work

    def _all_reduce(self, tensors: list[Tensor], opts: Any, is_waited: bool, what: str) -> BackendWork:
        connection, op = self._connection(tensors[0].device), opts.reduceOp
        comm, line = connection.communicator, connection.line
        engine, is_dense = engine_of(comm), tensors[0].layout == torch.strided
        if is_waited and len(tensors) == 1 and is_dense:
            return self._waited(what, op, tensors, all_reduce, comm, engine, tensors[0], op, line)
        what = f"{what} with {operator_name(op)}"
        if len(tensors) == 1 and not is_dense:
            args = comm, tensors[0], op, is_waited, line
            handle = self._explaining(what, begin_sparse_all_reduce, *args)
        else:
            handle = self._explaining(what, begin_all_reduce, comm, engine, tensors, op, is_waited, line)
        return self._begun(handle, tensors, opts, what)

    @collective(ReduceOptions, "tensors|tensor", instead=("root", "op"))
    def reduce(self, tensors: Any, opts: Any) -> BackendWork:
        tensor, root, op = single(tensors, "reduce"), opts.rootRank, opts.reduceOp
        comm = self._connection(tensor.device).communicator
        what = f"reduce with {operator_name(op)} to rank {root}"
        handle = self._explaining(
            what, begin_reduce, comm, engine_of(comm), tensor, op, root, self._waits(opts)
        )
        return self._begun(handle, [tensor], opts, what)

    @collective(
        ReduceScatterOptions, "output_tensors|output", "input_tensors|input_tensor|input", instead=("op",)
    )
    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any) -> BackendWork:
        output, pieces = single(outputs, "reduce_scatter"), tensor_list(inputs)
        return self._reduce_scatter([output], pieces, opts, "reduce_scatter")

    @collective(ReduceScatterOptions, "outputTensor", "inputTensor", instead=("op",))
    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any) -> BackendWork:
        return self._reduce_scatter([plain(output)], plain(tensor), opts, "reduce_scatter_single")

    _reduce_scatter_base = reduce_scatter_single

    @collective(ReduceScatterOptions, "outputs|outputTensors", "inputs|inputTensors")
    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any) -> BackendWork:
        outputs, inputs = tensor_list(outputs), tensor_list(inputs)
        works, size = [], self.endpoint.size
        for idxs in _by_dtype(range(len(outputs)), [output.dtype for output in outputs]):
            some = [outputs[idx] for idx in idxs]
            pieces: Any = inputs[idxs[0]]
            if len(idxs) > 1:
                cut = [inputs[idx].reshape(size, -1).unbind(0) for idx in idxs]
                pieces = list(zip(*cut, strict=True))
            works.append(self._reduce_scatter(some, pieces, opts, "reduce_scatter_single"))
        return works[0] if len(works) == 1 else self._together(works, opts, "reduce_scatter_single_coalesced")

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _reduce_scatter(self, outputs: list[Tensor], pieces: Any, opts: Any, what: str) -> BackendWork:
        connection, op = self._connection(outputs[0].device), opts.reduceOp
        comm, line, is_waited = connection.communicator, connection.line, self._waits(opts)
        engine = engine_of(comm)
        if is_waited and len(outputs) == 1:
            args = comm, engine, outputs[0], pieces, op, line
            return self._waited(what, op, outputs, reduce_scatter, *args)
        what = f"{what} with {operator_name(op)}"
        handle = self._explaining(
            what, begin_reduce_scatter, comm, engine, outputs, pieces, op, is_waited, line
        )
        return self._begun(handle, outputs, opts, what)

    # ---- barriers

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> BackendWork:
        if opts is None or isinstance(opts, timedelta):
            opts, timeout = BarrierOptions(), opts or timeout
        if timeout is not None:
            opts.timeout = timeout
        device = opts.device
        if device is None or device.type != "cuda" or "cpu" in self._device_kinds():
            device = _CPU
        elif device.index is None:
            device = torch.empty(0, device=device).device
        comm = self._connection(device).communicator
        with comm.collective("barrier"):
            self.endpoint.wait_for_devices()
        handle = self._explaining("barrier", comm.barrier, async_op=not self._waits(opts))
        if handle is None:
            return self._done([], "barrier")
        return self._begun(handle, [], opts, "barrier")

    def _device_kinds(self) -> set[str]:
        return {"cpu", "cuda"}


def _in_elements(lengths: tuple[int, ...], spec: Any) -> tuple[int, ...]:
    """Lengths along dim 0 as numbers of elements."""
    shape, _ = spec
    return tuple(length * math.prod(shape[1:]) for length in lengths)


def _by_dtype(items: Any, dtypes: list[torch.dtype]) -> list[list[Any]]:
    """The items, in lists of one dtype each."""
    lists: dict[torch.dtype, list[Any]] = {}
    for item, dtype in zip(items, dtypes, strict=True):
        lists.setdefault(dtype, []).append(item)
    return list(lists.values())
