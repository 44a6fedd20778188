"""Reductions and gathers of tensors of any form: checks, copies, and the choice of the exchanges."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.copyable import copyable
from ..core.extension import _C
from ..core.levels import MIN_RANKS, Levels
from . import level_steps
from . import reduction_steps as steps_of
from .continuation import Line, begin
from .plans import MAX_WHOLE_BYTES, Shape, all_reduce_plans, scatter_plan, whole_plan
from .reduce_operators import Operator, operator_for, same_object
from .reduction_steps import Exchanges
from .refusal import refuse_for

# `comm` is a Communicator, and `engine` that of the extension. `waits`: the thread that posts an operation
# waits for it at once. `find` returns the levels of the ranks' hosts, if there is no line that does. It waits
# for all ranks, so only calls that wait pass it.
FindLevels = Callable[[], Levels | None]

# ---- tensors of any form -----------------------------------------------------------------------------------


def flattened(tensor: Tensor) -> Tensor:
    """The elements of a dense tensor as one dim: its own memory if it is contiguous, else a copy."""
    if _is_plain(tensor):
        return _as_one_dim(tensor)
    tensor = tensor.detach().resolve_conj().resolve_neg()
    return copyable(tensor).contiguous().view(-1).view(tensor.dtype)


def buffer_for(tensor: Tensor) -> Tensor:
    """`flattened` for a tensor that will be overwritten: its contents are not copied."""
    if _is_plain(tensor):
        return _as_one_dim(tensor)
    return torch.empty(tensor.numel(), dtype=tensor.dtype, device=tensor.device)


def _is_plain(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _as_one_dim(tensor: Tensor) -> Tensor:
    if tensor.requires_grad:
        tensor = tensor.detach()
    return tensor if tensor.dim() == 1 else tensor.view(-1)


def _as_shape(tensor: Tensor, shape: Shape) -> Tensor:
    return tensor if len(shape) == 1 else tensor.view(shape)


def with_copies(
    steps: Iterator[_C.Work], sources: Sequence[Tensor], targets: Sequence[Tensor]
) -> Iterator[_C.Work]:
    """Runs `steps`, then copies each source to its target unless they share memory."""
    yield from steps
    for source, target in zip(sources, targets, strict=True):
        copy_into(source, target)


def copy_into(source: Tensor, target: Tensor) -> None:
    if source.data_ptr() != target.data_ptr():
        with torch.inference_mode(target.is_inference()), torch.no_grad():
            copyable(target).copy_(copyable(source).view(target.shape))


def _joined(tensors: Sequence[Tensor]) -> tuple[Tensor, Sequence[Tensor]]:
    """The elements of all tensors as one dim, and each tensor's part of it."""
    if len(tensors) == 1:
        flat = flattened(tensors[0])
        return flat, [flat]
    flat = torch.cat([flattened(tensor) for tensor in tensors])
    return flat, flat.split([tensor.numel() for tensor in tensors])


def _check(comm: Any, tensor: Any, name: str, is_received: bool = False) -> None:
    """Checks a tensor before anything is sent, as for a message."""
    _C.check_tensor(tensor, name, str(comm.device), is_received)


def _check_targets(comm: Any, tensors: Sequence[Tensor], name: str) -> None:
    for idx, tensor in enumerate(tensors):
        _check(comm, tensor, name if len(tensors) == 1 else f"{name}s[{idx}]", is_received=True)


def _levels(comm: Any, num_bytes: int, line: Line | None, find: FindLevels | None) -> Levels | None:
    """The levels of an operation of that size; None: it takes one. Waits until all ranks are known."""
    find = find if line is None else line.levels
    if find is None or num_bytes <= MAX_WHOLE_BYTES or comm.size < MIN_RANKS:
        return None
    return find()


def _num_bytes(tensor: Any) -> int:
    """Of an argument that is not checked yet."""
    return tensor.numel() * tensor.element_size() if isinstance(tensor, Tensor) else 0


# ---- what C++ needs for one call ---------------------------------------------------------------------------

InOneCall = tuple[str | None, list[Any]] | None  # None: C++ cannot do it


def _all_reduce_in_one_call(rank: int, size: int, shape: Shape, dtype: torch.dtype, op: Any) -> InOneCall:
    operator_ = operator_for(op, dtype, torch.device("cpu"))
    if size == 1 or not operator_.is_native or operator_.factor is not None:
        return None
    return operator_.reduction, all_reduce_plans(rank, size, shape, dtype, operator_.name, True)


def _scatter_in_one_call(rank: int, size: int, shape: Shape, dtype: torch.dtype, op: Any) -> InOneCall:
    """For pieces of that shape."""
    operator_ = operator_for(op, dtype, torch.device("cpu"))
    if size == 1 or not operator_.is_native or operator_.factor is not None:
        return None
    tag = steps_of.tag_of_reduce_scatter(operator_)
    return operator_.reduction, [scatter_plan(rank, size, (shape,) * size, dtype, tag)]


def _gather_in_one_call(rank: int, size: int, shape: Shape, dtype: torch.dtype, op: None) -> InOneCall:
    return None if size == 1 else (None, [_all_gather_plan(rank, size, shape, dtype)])


def _all_gather_plan(rank: int, size: int, shape: Shape, dtype: torch.dtype) -> Any:
    return whole_plan(rank, size, shape, dtype, -1, f"all_gather {dtype}", own_in_place=False)


def _of_any_shape(make: Callable[..., InOneCall]) -> Callable[..., InOneCall]:
    """`make` for ranks that compare numbers of elements only."""
    return lambda rank, size, shape, *args: make(rank, size, (math.prod(shape),), *args)


# Made once, as C++ keeps the plans for each of these functions.
_OF_ANY_SHAPE = {
    make: _of_any_shape(make) for make in (_all_reduce_in_one_call, _scatter_in_one_call, _gather_in_one_call)
}


def _make_for(line: Line | None, make: Callable[..., InOneCall]) -> Callable[..., InOneCall]:
    return make if line is None or line.compares_shapes else _OF_ANY_SHAPE[make]


def _compared(line: Line | None, tensor: Tensor) -> Shape:
    """What the ranks compare of the tensor's shape."""
    return tensor.shape if line is None or line.compares_shapes else (tensor.numel(),)


# ---- in one operation of the engine, which NCCL does ------------------------------------------------------


def _engine_reduces(engine: _C.Communicator, name: str, op: Operator) -> bool:
    dtype = op.dtype.to_real() if _is_complex_sum(op) else op.dtype
    return engine.can_reduce(name, op.reduction, dtype)


def _is_complex_sum(op: Operator) -> bool:
    return op.dtype.is_complex and op.reduction in ("SUM", "AVG")


def _begin_in_engine(
    comm: Any,
    engine: _C.Communicator,
    name: str,
    output: Tensor | None,
    tensor: Tensor,
    op: Operator | None,
    waits: bool,
    sources: Sequence[Tensor],
    targets: Sequence[Tensor],
    root: int = 0,
) -> Any:
    """Begins it, and copies each source, a part of `output`, to its target unless they share memory."""
    results = [] if output is None else [output]
    if op is not None and _is_complex_sum(op):
        tensor, *results = (torch.view_as_real(each) for each in (tensor, *results))
    with comm.collective(name):
        reduction = None if op is None else op.reduction
        work = engine.reduce(name, results[0] if results else None, tensor, reduction, root, not waits)
    if all(source.data_ptr() == target.data_ptr() for source, target in zip(sources, targets, strict=True)):
        return work
    steps = with_copies(iter([work]), sources, targets)
    return begin(comm, steps, [*sources, *targets], waits)


# ---- the calls --------------------------------------------------------------------------------------------


def all_reduce(
    comm: Any,
    engine: _C.Communicator,
    tensor: Tensor,
    op: Any,
    line: Line | None = None,
    find: FindLevels | None = None,
) -> None:
    """Reduces one tensor in place and waits; in host memory by one call of C++, unless there are two levels
    or operations in the line still have to post their later exchanges."""
    try:
        op = same_object(op)
        num_bytes, make = _num_bytes(tensor), _make_for(line, _all_reduce_in_one_call)
        if _levels(comm, num_bytes, line, find) is not None:
            is_done = False
        elif line is None:
            is_done = engine.all_reduce(tensor, op, make, None)
        else:
            with line.lock:
                is_done = line.has_posted_all() and engine.all_reduce(tensor, op, make, line.channel)
    except Exception as error:
        refuse_for(comm, "all_reduce", error)
        raise
    if not is_done:
        begin_all_reduce(comm, engine, [tensor], op, True, line, find).wait()


def begin_all_reduce(
    comm: Any,
    engine: _C.Communicator,
    tensors: Sequence[Tensor],
    op: Any,
    waits: bool,
    line: Line | None,
    find: FindLevels | None = None,
) -> Any:
    """Reduces tensors of one dtype in place, as one. Returns a Work or an object with its methods."""
    with comm.collective("all_reduce"):
        _check_targets(comm, tensors, "tensor")
        operator_ = operator_for(op, tensors[0].dtype, comm.device)
        flat, parts = _joined(tensors)
        shape = _compared(line, tensors[0] if len(tensors) == 1 else flat)
        levels = _levels(comm, flat.nbytes, line, find)
        brought = operator_.before(flat)
    if _engine_reduces(engine, "all_reduce", operator_):
        output, brought = _as_shape(flat, shape), _as_shape(brought, shape)
        return _begin_in_engine(comm, engine, "all_reduce", output, brought, operator_, waits, parts, tensors)
    is_ordered = waits or line is not None
    num_exchanges = 4 if levels is not None else 2 if is_ordered and flat.nbytes > MAX_WHOLE_BYTES else 1
    line = line if num_exchanges > 1 else None
    exchanges = Exchanges(comm, engine, "all_reduce", waits, line)
    if levels is not None:
        steps = level_steps.all_reduce(exchanges, levels, shape, brought, flat, operator_)
    else:
        steps = steps_of.all_reduce(exchanges, shape, brought, flat, operator_)
    steps = with_copies(exchanges.refusing(steps, num_exchanges), parts, tensors)
    return begin(comm, steps, [flat, brought, *tensors], exchanges.waits, line, num_exchanges - 1)


def begin_reduce(comm: Any, engine: _C.Communicator, tensor: Tensor, op: Any, root: int, waits: bool) -> Any:
    """Reduces `tensor` in place on rank `root`. Returns a Work or an object with its methods."""
    with comm.collective("reduce"):
        _check_targets(comm, [tensor], "tensor")
        operator_ = operator_for(op, tensor.dtype, comm.device)
        flat = flattened(tensor)
        brought = operator_.before(flat)
    sources, targets = ([flat], [tensor]) if comm.rank == root else ([], [])
    if _engine_reduces(engine, "reduce", operator_):
        output = flat if comm.rank == root else None
        return _begin_in_engine(
            comm, engine, "reduce", output, brought, operator_, waits, sources, targets, root
        )
    exchanges = Exchanges(comm, engine, "reduce", waits)
    steps = exchanges.refusing(steps_of.reduce(exchanges, brought, flat, operator_, root), 1)
    return begin(comm, with_copies(steps, sources, targets), [flat, brought, tensor], waits)


def begin_reduce_scatter(
    comm: Any,
    engine: _C.Communicator,
    outputs: Sequence[Tensor],
    inputs: Tensor | Sequence[Any],
    op: Any,
    waits: bool,
    line: Line | None = None,
    find: FindLevels | None = None,
) -> Any:
    """Reduces piece r of all ranks into rank r's outputs, which have one dtype. Returns a Work or an object
    with its methods.

    inputs[r] is the piece for rank r, a tensor, or for several outputs a list of them; the ranks' sizes may
    differ. Or `inputs` is one tensor with the pieces one after the other, of one size for all ranks.
    """
    with comm.collective("reduce_scatter"):
        _check_targets(comm, outputs, "output")
        if isinstance(inputs, Tensor):
            _check_pieces(comm, outputs, inputs)
            flat, shapes = flattened(inputs), (_compared(line, outputs[0]),) * comm.size
        else:
            flat, shapes = _joined_inputs(comm, outputs, inputs, line)
        operator_ = operator_for(op, outputs[0].dtype, comm.device)
        buffers = [buffer_for(output) for output in outputs]
        whole = buffers[0] if len(buffers) == 1 else flat.new_empty(shapes[comm.rank])
        levels = _levels(comm, flat.nbytes, line, find)
        brought = operator_.before(flat)
    parts = whole.split([output.numel() for output in outputs])
    if len(set(shapes)) == 1 and _engine_reduces(engine, "reduce_scatter", operator_):
        output = _as_shape(whole, shapes[0])
        return _begin_in_engine(
            comm, engine, "reduce_scatter", output, brought, operator_, waits, parts, outputs
        )
    if levels is None or not level_steps.saves_traffic(levels, operator_):
        levels = line = None
    exchanges = Exchanges(comm, engine, "reduce_scatter", waits, line)
    if levels is not None:
        steps = level_steps.reduce_scatter(exchanges, levels, shapes, brought, operator_, whole)
    else:
        steps = steps_of.reduce_scatter(exchanges, shapes, brought, operator_, whole)
    steps = exchanges.refusing(steps, 1 if levels is None else 2)
    steps = with_copies(steps, parts, outputs)
    return begin(comm, steps, [brought, whole, *outputs], exchanges.waits, line)


def reduce_scatter(
    comm: Any,
    engine: _C.Communicator,
    output: Tensor,
    input: Any,
    op: Any,
    line: Line | None = None,
    find: FindLevels | None = None,
) -> None:
    """`begin_reduce_scatter` into one tensor, and waits; for one tensor in host memory and one level by one
    call of C++."""
    if isinstance(input, Tensor):
        try:
            is_done = _levels(comm, _num_bytes(input), line, find) is None and engine.reduce_scatter(
                output, input, same_object(op), _make_for(line, _scatter_in_one_call)
            )
        except Exception as error:
            refuse_for(comm, "reduce_scatter", error)
            raise
        if is_done:
            return
    begin_reduce_scatter(comm, engine, [output], input, op, True, line, find).wait()


def _check_pieces(comm: Any, outputs: Sequence[Tensor], tensor: Tensor) -> None:
    """Checks a tensor that holds the pieces of all ranks."""
    _check(comm, tensor, "input")
    [output] = outputs
    if output.dtype != tensor.dtype or output.numel() * comm.size != tensor.numel():
        raise ValueError(
            f"input of shape {list(tensor.shape)}, {tensor.dtype}, is not {comm.size} times output of shape "
            f"{list(output.shape)}, {output.dtype}"
        )


def _joined_inputs(
    comm: Any, outputs: Sequence[Tensor], inputs: Sequence[Any], line: Line | None
) -> tuple[Tensor, tuple[Shape, ...]]:
    """The elements of all pieces as one dim, and what the ranks compare of the shapes of the pieces."""
    if not isinstance(inputs, (list, tuple)):
        raise TypeError(f"input must be a tensor or a list of them, not {type(inputs).__name__}")
    if len(inputs) != comm.size:
        raise ValueError(f"one input for each of the {comm.size} ranks is needed, not {len(inputs)}")
    pieces = [[piece] for piece in inputs] if len(outputs) == 1 else inputs
    for idx, of_rank in enumerate(pieces):
        for tensor in of_rank:
            _check(comm, tensor, f"input[{idx}]")
    for output, tensor in zip(outputs, pieces[comm.rank], strict=True):
        if (output.numel(), output.dtype) != (tensor.numel(), tensor.dtype):
            raise ValueError(
                f"the output has {output.numel()} elements of {output.dtype}, what is reduced into it has "
                f"{tensor.numel()} of {tensor.dtype}"
            )
    shapes = tuple(
        _compared(line, of_rank[0]) if len(of_rank) == 1 else (sum(tensor.numel() for tensor in of_rank),)
        for of_rank in pieces
    )
    return _joined([tensor for of_rank in pieces for tensor in of_rank])[0], shapes


def all_gather(
    comm: Any,
    engine: _C.Communicator,
    output: Tensor,
    input: Tensor,
    line: Line | None = None,
    find: FindLevels | None = None,
) -> None:
    """`begin_all_gather`, and waits; for contiguous tensors in host memory and one level one call of C++."""
    try:
        is_done = _levels(comm, _num_bytes(output), line, find) is None and engine.all_gather(
            output, input, _make_for(line, _gather_in_one_call)
        )
    except Exception as error:
        refuse_for(comm, "all_gather", error)
        raise
    if not is_done:
        begin_all_gather(comm, engine, output, input, True, line, find).wait()


def begin_all_gather(
    comm: Any,
    engine: _C.Communicator,
    output: Tensor,
    tensor: Tensor,
    waits: bool,
    line: Line | None = None,
    find: FindLevels | None = None,
) -> Any:
    """Gathers the tensors of all ranks, one after the other, into `output` of any shape. Returns a Work or an
    object with its methods."""
    with comm.collective("all_gather"):
        _check(comm, tensor, "input")
        _check_targets(comm, [output], "output")
        if output.dtype != tensor.dtype or tensor.numel() * comm.size != output.numel():
            raise ValueError(
                f"output of shape {list(output.shape)}, {output.dtype}, is not {comm.size} times input of "
                f"shape {list(tensor.shape)}, {tensor.dtype}"
            )
        flat, whole, shape = flattened(tensor), buffer_for(output), _compared(line, tensor)
        levels = _levels(comm, whole.nbytes, line, find)
    if engine.can_reduce("all_gather", None, flat.dtype):
        brought = _as_shape(flat, shape)
        return _begin_in_engine(comm, engine, "all_gather", whole, brought, None, waits, [whole], [output])
    if levels is None:
        plan = _all_gather_plan(comm.rank, comm.size, shape, flat.dtype)
        options: Any = {"op": "all_gather", "async_op": not waits, "returns_work": True}
        work = comm.exchange(plan, [flat], [whole], **options)
        if whole.data_ptr() == output.data_ptr():
            return work
        return begin(comm, with_copies(iter([work]), [whole], [output]), [whole, output], waits)
    exchanges = Exchanges(comm, engine, "all_gather", waits, line)
    steps = exchanges.refusing(level_steps.all_gather(exchanges, levels, shape, flat, whole), 2)
    return begin(comm, with_copies(steps, [whole], [output]), [whole, output], exchanges.waits, line)
