"""Reductions and gathers of tensors of any form: checks, copies, and the choice of the exchanges."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.extension import _C
from ..core.levels import MIN_RANKS, Levels
from . import level_steps
from . import reduction_steps as steps_of
from .continuation import Line, begin
from .plans import MAX_WHOLE_BYTES, all_gather_plan, all_reduce_plans, scatter_plan
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
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)


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
            target.copy_(source.view(target.shape))


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


def _plans_in_one_call(
    rank: int, size: int, length: int, dtype: torch.dtype, op: Any
) -> tuple[str, list[Any]] | None:
    """What C++ needs to reduce a tensor of `length` elements in place; None: it cannot."""
    operator_ = operator_for(op, dtype, torch.device("cpu"))
    if size == 1 or not operator_.is_native or operator_.factor is not None:
        return None
    return operator_.reduction, all_reduce_plans(rank, size, length, dtype, operator_.name, True)


# ---- in one operation of the engine, which NCCL does ------------------------------------------------------


def _engine_reduces(engine: _C.Communicator, name: str, op: Operator) -> bool:
    dtype = op.dtype.to_real() if _is_complex_sum(op) else op.dtype
    return engine.can_reduce(name, op.reduction, dtype)


def _is_complex_sum(op: Operator) -> bool:
    return op.dtype.is_complex and op.reduction in ("SUM", "AVG")


def _name_of(engine: _C.Communicator, name: str) -> str:
    """What errors call a reduction that this rank refuses."""
    return name if engine.can_reduce("all_gather", None, torch.uint8) else "exchange"


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
        tensor, *results = (torch.view_as_real(each).view(-1) for each in (tensor, *results))
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
        num_bytes = _num_bytes(tensor)
        if _levels(comm, num_bytes, line, find) is not None:
            is_done = False
        elif line is None:
            is_done = engine.all_reduce(tensor, op, _plans_in_one_call, None)
        else:
            with line.lock:
                has_no_other = line.last is None or line.last.poll()
                is_done = has_no_other and engine.all_reduce(tensor, op, _plans_in_one_call, line.channel)
    except Exception as error:
        refuse_for(comm, "exchange", error)
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
    with comm.collective(_name_of(engine, "all_reduce")):
        _check_targets(comm, tensors, "tensor")
        operator_ = operator_for(op, tensors[0].dtype, comm.device)
        flat, parts = _joined(tensors)
        levels = _levels(comm, flat.nbytes, line, find)
        brought = operator_.before(flat)
    if _engine_reduces(engine, "all_reduce", operator_):
        return _begin_in_engine(comm, engine, "all_reduce", flat, brought, operator_, waits, parts, tensors)
    exchanges = Exchanges(comm, waits, line.channel if line else None)
    if levels is not None:
        num_exchanges = 4
        steps = level_steps.all_reduce(exchanges, levels, brought, flat, operator_)
    else:
        num_exchanges = 2 if exchanges.has_order and flat.nbytes > MAX_WHOLE_BYTES else 1
        steps = steps_of.all_reduce(exchanges, brought, flat, operator_)
    steps = with_copies(exchanges.refusing(steps, num_exchanges), parts, tensors)
    line = line if num_exchanges > 1 else None
    return begin(comm, steps, [flat, brought, *tensors], waits, line, num_exchanges - 1)


def begin_reduce(comm: Any, engine: _C.Communicator, tensor: Tensor, op: Any, root: int, waits: bool) -> Any:
    """Reduces `tensor` in place on rank `root`. Returns a Work or an object with its methods."""
    with comm.collective(_name_of(engine, "reduce")):
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
    steps = steps_of.reduce(Exchanges(comm, waits), brought, flat, operator_, root)
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
    with comm.collective(_name_of(engine, "reduce_scatter")):
        _check_targets(comm, outputs, "output")
        if isinstance(inputs, Tensor):
            lengths = _lengths_in(comm, outputs, inputs)
            flat = flattened(inputs)
        else:
            flat, lengths = _joined_inputs(comm, outputs, inputs)
        operator_ = operator_for(op, outputs[0].dtype, comm.device)
        buffers = [buffer_for(output) for output in outputs]
        whole = buffers[0] if len(buffers) == 1 else flat.new_empty(lengths[comm.rank])
        levels = _levels(comm, flat.nbytes, line, find)
        brought = operator_.before(flat)
    parts = whole.split([output.numel() for output in outputs])
    if len(set(lengths)) == 1 and _engine_reduces(engine, "reduce_scatter", operator_):
        return _begin_in_engine(
            comm, engine, "reduce_scatter", whole, brought, operator_, waits, parts, outputs
        )
    exchanges = Exchanges(comm, waits, line.channel if line else None)
    if levels is not None and level_steps.saves_traffic(levels, operator_):
        steps = level_steps.reduce_scatter(exchanges, levels, brought, lengths, operator_, whole)
        steps = exchanges.refusing(steps, 2)
    else:
        line = None
        steps = steps_of.reduce_scatter(exchanges, brought, lengths, operator_, whole)
    return begin(comm, with_copies(steps, parts, outputs), [brought, whole, *outputs], waits, line)


def _scatter_in_one_call(
    rank: int, size: int, length: int, dtype: torch.dtype, op: Any
) -> tuple[str, list[Any]] | None:
    """As `_plans_in_one_call`, for pieces of `length` elements."""
    operator_ = operator_for(op, dtype, torch.device("cpu"))
    if size == 1 or not operator_.is_native or operator_.factor is not None:
        return None
    lengths, tag = (length,) * size, steps_of.tag_of_reduce_scatter(operator_)
    return operator_.reduction, [scatter_plan(rank, size, lengths, dtype, tag)]


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
                output, input, same_object(op), _scatter_in_one_call
            )
        except Exception as error:
            refuse_for(comm, "exchange", error)
            raise
        if is_done:
            return
    begin_reduce_scatter(comm, engine, [output], input, op, True, line, find).wait()


def _lengths_in(comm: Any, outputs: Sequence[Tensor], tensor: Tensor) -> tuple[int, ...]:
    """The checked lengths of the pieces of a tensor that holds those of all ranks."""
    _check(comm, tensor, "input")
    [output] = outputs
    if output.dtype != tensor.dtype or output.numel() * comm.size != tensor.numel():
        raise ValueError(
            f"input of shape {list(tensor.shape)}, {tensor.dtype}, is not {comm.size} times output of shape "
            f"{list(output.shape)}, {output.dtype}"
        )
    return (output.numel(),) * comm.size


def _joined_inputs(
    comm: Any, outputs: Sequence[Tensor], inputs: Sequence[Any]
) -> tuple[Tensor, tuple[int, ...]]:
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
    lengths = tuple(sum(tensor.numel() for tensor in of_rank) for of_rank in pieces)
    return _joined([tensor for of_rank in pieces for tensor in of_rank])[0], lengths


def _gather_in_one_call(
    rank: int, size: int, length: int, dtype: torch.dtype, op: None
) -> tuple[None, list[Any]] | None:
    """The plan of an all-gather of `length` elements per rank; None: it is a copy."""
    return None if size == 1 else (None, [all_gather_plan(rank, size, length, dtype)])


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
            output, input, _gather_in_one_call
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
        flat, whole = flattened(tensor), buffer_for(output)
        levels = _levels(comm, whole.nbytes, line, find)
    if engine.can_reduce("all_gather", None, flat.dtype):
        return _begin_in_engine(comm, engine, "all_gather", whole, flat, None, waits, [whole], [output])
    exchanges = Exchanges(comm, waits, line.channel if line else None, op="all_gather")
    if levels is None:
        plan = all_gather_plan(comm.rank, comm.size, flat.numel(), flat.dtype)
        work = exchanges.run(plan, [flat], [whole])
        if whole.data_ptr() == output.data_ptr():
            return work
        steps, line = iter([work]), None
    else:
        steps = exchanges.refusing(level_steps.all_gather(exchanges, levels, flat, whole), 2)
    return begin(comm, with_copies(steps, [whole], [output]), [whole, output], waits, line)
