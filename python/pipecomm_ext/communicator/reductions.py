"""Reductions as exchange plans: pieces are exchanged, then reduced in the order of the ranks.

Every rank computes an element from the same numbers in the same order, or receives it from the one rank that
has computed it, so all ranks hold the same bits, in every run. Nothing here depends on when messages arrive.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from ..core.extension import _C
from .continuation import Continuation, Line, begin
from .refusal import refuse_for

# Up to here every rank gets whole tensors and reduces them itself, in one exchange.
MAX_WHOLE_BYTES = 32 << 10

_NAMES = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")
_BITWISE = {"BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor}
_SUMS = ("SUM", "AVG", "PREMUL_SUM")
_WIDE = (torch.float16, torch.bfloat16)
_SIGNED = {
    getattr(torch, f"uint{bits}"): getattr(torch, f"int{bits}")
    for bits in (16, 32, 64)
    if hasattr(torch, f"uint{bits}")
}


class Operator:
    """A reduce operator of torch's, checked for a dtype.

    Raises:
        TypeError: not a reduce operator.
        ValueError: it has no meaning for this dtype.
    """

    def __init__(self, op: Any, dtype: torch.dtype, device: torch.device) -> None:
        kind = getattr(op, "op", op)
        self.name: str = getattr(kind, "name", "")
        if self.name not in _NAMES:
            raise TypeError(f"op must be a ReduceOp of torch.distributed, not {op!r}")
        self.factor: Any = None
        if self.name == "PREMUL_SUM":
            self.factor = getattr(op, "factor", None)
            if self.factor is None:
                raise ValueError("PREMUL_SUM needs a factor: torch.distributed.ReduceOp.PREMUL_SUM(factor)")
        is_float = dtype.is_floating_point or dtype.is_complex
        if self.name in _BITWISE and is_float:
            raise ValueError(f"{self.name} is for integers and bool, not for {dtype}")
        if self.name in ("AVG", "PREMUL_SUM") and not is_float:
            raise ValueError(f"{self.name} is for floating point, not for {dtype}")
        if self.name in ("MIN", "MAX") and dtype.is_complex:
            raise ValueError(f"{self.name} has no meaning for {dtype}")
        self.reduction = "SUM" if self.factor is not None else self.name
        self.is_native = device.type == "cpu" and _C.reduces(self.reduction, dtype)

    def before(self, tensor: Tensor) -> Tensor:
        """Returns this rank's input to the reduction of `tensor`."""
        return tensor if self.factor is None else (tensor * self.factor).to(tensor.dtype)

    def reduce(self, rows: Sequence[Tensor], output: Tensor) -> None:
        """Reduces one contiguous tensor of each rank, in rank order, into `output`, which may be one of
        them."""
        if self.is_native:
            return _C.reduce(output, rows, self.reduction)
        with torch.inference_mode(output.is_inference()), torch.no_grad():  # in any thread
            return self._reduce(rows, output)

    def _reduce(self, rows: Sequence[Tensor], output: Tensor) -> None:
        dtype = output.dtype
        if dtype.is_complex and self.name in _SUMS:
            return self._reduce([torch.view_as_real(row) for row in rows], torch.view_as_real(output))
        if dtype.itemsize == 1 and dtype.is_floating_point or dtype in _WIDE:
            total = self._fold([row.to(torch.float32) for row in rows])
        elif dtype.is_complex and dtype.itemsize == 4:
            total = self._fold([row.to(torch.complex64) for row in rows])
        elif dtype in _SIGNED:
            total = self._fold_unsigned([row.view(_SIGNED[dtype]) for row in rows]).view(dtype)
        else:
            total = self._fold(rows)
        if self.name == "AVG":
            total = total / len(rows)
        output.copy_(total)
        return None

    def _fold_unsigned(self, rows: Sequence[Tensor]) -> Tensor:
        """Reduces unsigned integers viewed as signed ones: where that matters, the top bit is flipped."""
        if self.name not in ("MIN", "MAX"):
            return self._fold(rows)
        top = torch.iinfo(rows[0].dtype).min
        return self._fold([row ^ top for row in rows]) ^ top

    def _fold(self, rows: Sequence[Tensor]) -> Tensor:
        combine = _combiner(self.name, rows[0].dtype)
        if len(rows) == 1:
            return rows[0]
        total = combine(rows[0], rows[1])
        for row in rows[2:]:
            combine(total, row, out=total)
        return total


def _combiner(name: str, dtype: torch.dtype) -> Callable[..., Tensor]:
    if name in _SUMS:
        return torch.logical_or if dtype == torch.bool else torch.add
    if name == "PRODUCT":
        return torch.logical_and if dtype == torch.bool else torch.mul
    if name == "MIN":
        return torch.logical_and if dtype == torch.bool else torch.minimum
    if name == "MAX":
        return torch.logical_or if dtype == torch.bool else torch.maximum
    return _BITWISE[name]


# ---- plans ------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=256)
def whole_plan(rank: int, size: int, length: int, dtype: torch.dtype, root: int, tag: str) -> Any:
    """Moves every other rank's tensor to rank `root`, or to all ranks (-1), one after the other."""
    everybody, lengths = list(range(size)), [length] * size
    target = (everybody, 0, None, True) if root < 0 else ([root], 0, [size * length], False)
    whole = ((size * length,), dtype)
    return _C.plan_reshard(
        rank, size, whole, (everybody, 0, lengths, False), target, True, tag, ((length,), dtype)
    )


@functools.lru_cache(maxsize=256)
def _scatter_plan(rank: int, size: int, lengths: tuple[int, ...], dtype: torch.dtype, tag: str) -> Any:
    """Moves piece r of every other rank's tensor to rank r."""
    whole = ((sum(lengths),), dtype)
    return _C.plan_collect_pieces(rank, size, whole, (list(range(size)), 0, lengths, False), True, tag)


@functools.lru_cache(maxsize=256)
def _all_reduce_plans(
    rank: int, size: int, length: int, dtype: torch.dtype, name: str, has_order: bool
) -> list[Any]:
    """One plan; or, for large tensors if the order of the second exchange is certain, two: the pieces of a
    tensor to the ranks that reduce them, then piece r of rank r's tensor to those of all other ranks."""
    tag = f"all_reduce {name} {dtype}"
    if not has_order or length * dtype.itemsize <= MAX_WHOLE_BYTES:
        return [whole_plan(rank, size, length, dtype, -1, tag)]
    everybody, lengths = list(range(size)), tuple(_C.remainder_first(length, size))
    source, target = (everybody, 0, lengths, False), (everybody, 0, None, True)
    gather = _C.plan_reshard(rank, size, ((length,), dtype), source, target, True, tag)
    return [_scatter_plan(rank, size, lengths, dtype, tag), gather]


# ---- the operations, of contiguous tensors of one dim ----------------------------------------------------
# `comm` is a Communicator. `waits`: the thread that posts an exchange waits for it at once.


def all_reduce_steps(
    comm: Any, tensor: Tensor, op: Operator, waits: bool, channel: int | None = None
) -> Iterator[_C.Work]:
    """Reduces in place. Large tensors take two exchanges if the order of the second one is certain: on a
    channel that is kept for it, or because the caller waits. Else every rank gets whole tensors.
    """
    rank, size, length, dtype = comm.rank, comm.size, tensor.numel(), tensor.dtype
    brought = op.before(tensor)
    if size == 1:
        if length:
            op.reduce([brought], tensor)
        return
    options: Any = {"async_op": not waits, "op": "exchange", "returns_work": True}
    has_order = waits or channel is not None
    plans = _all_reduce_plans(rank, size, length, dtype, op.name, has_order)
    if len(plans) == 1:
        rows = comm.empty((size * length,), dtype)
        yield comm.exchange(plans[0], [brought], [rows], **options)
        op.reduce(_with_own(rows.view(size, length).unbind(0), rank, brought), tensor)
        return
    lengths = tuple(_C.remainder_first(length, size))
    others = _rows(comm, size - 1, lengths[rank], dtype)
    yield comm.exchange(plans[0], [brought], others, **options)
    own = tensor.split(lengths)[rank]
    op.reduce([*others[:rank], brought.split(lengths)[rank], *others[rank:]], own)
    yield comm.exchange(plans[1], [own], [tensor], channel=channel, **options)


def reduce_steps(comm: Any, tensor: Tensor, op: Operator, root: int, waits: bool) -> Iterator[_C.Work]:
    """Reduces in place on rank `root`; `tensor` of the others stays unchanged."""
    rank, size, length, dtype = comm.rank, comm.size, tensor.numel(), tensor.dtype
    tag = f"reduce {op.name} {dtype} {root}"
    rows = comm.empty((size * length,), dtype) if rank == root else None
    plan, brought = whole_plan(rank, size, length, dtype, root, tag), op.before(tensor)
    outputs = [] if rows is None else [rows]
    yield comm.exchange(plan, [brought], outputs, async_op=not waits, op="exchange", returns_work=True)
    if rows is not None:
        op.reduce(_with_own(rows.view(size, length).unbind(0), rank, brought), tensor)


def reduce_scatter_steps(
    comm: Any, output: Tensor, tensor: Tensor, lengths: tuple[int, ...], op: Operator, waits: bool
) -> Iterator[_C.Work]:
    """Reduces piece r of `tensor`, of lengths[r] elements, into `output` of rank r."""
    rank, size, dtype = comm.rank, comm.size, tensor.dtype
    tag = _tag_of_reduce_scatter(op, dtype)
    others, brought = _rows(comm, size - 1, lengths[rank], dtype), op.before(tensor)
    plan = _scatter_plan(rank, size, lengths, dtype, tag)
    yield comm.exchange(plan, [brought], others, async_op=not waits, op="exchange", returns_work=True)
    op.reduce([*others[:rank], brought.split(lengths)[rank], *others[rank:]], output)


def _rows(comm: Any, num_rows: int, length: int, dtype: torch.dtype) -> list[Tensor]:
    return list(comm.empty((num_rows * length,), dtype).view(num_rows, length).unbind(0))


def _with_own(rows: Sequence[Tensor], rank: int, own: Tensor) -> list[Tensor]:
    return [own if idx == rank else row for idx, row in enumerate(rows)]


# ---- tensors of any form -----------------------------------------------------------------------------------


def flattened(tensor: Tensor) -> Tensor:
    """The elements of a dense tensor as one dim: its own memory if it is contiguous, else a copy."""
    tensor = tensor.detach()
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg().contiguous()
    return tensor.view(-1)


def buffer_for(tensor: Tensor) -> Tensor:
    """`flattened` for a tensor that will be overwritten: its contents are not copied."""
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor.detach().view(-1)
    return torch.empty(tensor.numel(), dtype=tensor.dtype, device=tensor.device)


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


_operator_without_factor = functools.lru_cache(maxsize=256)(Operator)


def _operator(op: Any, dtype: torch.dtype, device: torch.device) -> Operator:
    kind = getattr(op, "op", op)
    if isinstance(kind, ReduceOp.RedOpType) and kind != ReduceOp.PREMUL_SUM:
        return _operator_without_factor(kind, dtype, device)
    return Operator(op, dtype, device)


def _same_object(op: Any) -> Any:
    """The same object for equal operators, by which C++ finds what it has prepared: torch passes a new object
    in each call."""
    kind = getattr(op, "op", op)
    return op if kind is op or kind == ReduceOp.PREMUL_SUM else getattr(ReduceOp, kind.name, op)


def _plans_in_one_call(
    rank: int, size: int, length: int, dtype: torch.dtype, op: Any
) -> tuple[str, list[Any]] | None:
    """What C++ needs to reduce a tensor of `length` elements in place; None: it cannot."""
    operator_ = _operator(op, dtype, torch.device("cpu"))
    if size == 1 or not operator_.is_native or operator_.factor is not None:
        return None
    return operator_.reduction, _all_reduce_plans(rank, size, length, dtype, operator_.name, True)


def all_reduce(
    comm: Any,
    engine: _C.Communicator,
    tensor: Tensor,
    op: Any,
    channel: int | None = None,
    line: Line | None = None,
) -> None:
    """Reduces one tensor in place and waits; in host memory by one call of C++, unless operations in the line
    still have to post their second exchanges."""
    try:
        op = _same_object(op)
        if line is None:
            is_done = engine.all_reduce(tensor, op, _plans_in_one_call, channel)
        else:
            with line.lock:
                has_no_other = line.last is None or line.last.poll()
                is_done = has_no_other and engine.all_reduce(tensor, op, _plans_in_one_call, channel)
    except Exception as error:
        refuse_for(comm, "exchange", error)
        raise
    if not is_done:
        begin_all_reduce(comm, [tensor], op, True, channel, line).wait()


def begin_all_reduce(
    comm: Any, tensors: Sequence[Tensor], op: Any, waits: bool, channel: int | None, line: Line | None
) -> Continuation:
    """Reduces tensors of one dtype in place, as one exchange."""
    with comm.collective("exchange"):
        _check_targets(comm, tensors, "tensor")
        operator_ = _operator(op, tensors[0].dtype, comm.device)
        flat, parts = _joined(tensors)
    steps = all_reduce_steps(comm, flat, operator_, waits, channel)
    is_in_line = channel is not None and flat.numel() * flat.dtype.itemsize > MAX_WHOLE_BYTES
    steps = with_copies(steps, parts, tensors)
    return begin(comm, steps, [flat, *tensors], waits, line if is_in_line else None)


def begin_reduce(comm: Any, tensor: Tensor, op: Any, root: int, waits: bool) -> Continuation:
    """Reduces `tensor` in place on rank `root`."""
    with comm.collective("exchange"):
        _check_targets(comm, [tensor], "tensor")
        operator_ = _operator(op, tensor.dtype, comm.device)
        flat = flattened(tensor)
    steps = reduce_steps(comm, flat, operator_, root, waits)
    is_root = comm.rank == root
    steps = with_copies(steps, [flat] if is_root else [], [tensor] if is_root else [])
    return begin(comm, steps, [flat, tensor], waits)


def begin_reduce_scatter(
    comm: Any, outputs: Sequence[Tensor], inputs: Tensor | Sequence[Any], op: Any, waits: bool
) -> Continuation:
    """Reduces piece r of all ranks into rank r's outputs, as one exchange of one dtype.

    inputs[r] is the piece for rank r, a tensor, or for several outputs a list of them; the ranks' sizes may
    differ. Or `inputs` is one tensor with the pieces one after the other, of one size for all ranks.
    """
    with comm.collective("exchange"):
        _check_targets(comm, outputs, "output")
        if isinstance(inputs, Tensor):
            lengths = _lengths_in(comm, outputs, inputs)
            flat = flattened(inputs)
        else:
            flat, lengths = _joined_inputs(comm, outputs, inputs)
        operator_ = _operator(op, outputs[0].dtype, comm.device)
        buffers = [buffer_for(output) for output in outputs]
        whole = buffers[0] if len(buffers) == 1 else flat.new_empty(lengths[comm.rank])
    steps = reduce_scatter_steps(comm, whole, flat, lengths, operator_, waits)
    parts = whole.split([output.numel() for output in outputs])
    return begin(comm, with_copies(steps, parts, outputs), [flat, whole, *outputs], waits)


def _scatter_in_one_call(
    rank: int, size: int, length: int, dtype: torch.dtype, op: Any
) -> tuple[str, list[Any]] | None:
    """As `_plans_in_one_call`, for pieces of `length` elements."""
    operator_ = _operator(op, dtype, torch.device("cpu"))
    if size == 1 or not operator_.is_native or operator_.factor is not None:
        return None
    tag = _tag_of_reduce_scatter(operator_, dtype)
    return operator_.reduction, [_scatter_plan(rank, size, (length,) * size, dtype, tag)]


def reduce_scatter(comm: Any, engine: _C.Communicator, output: Tensor, input: Any, op: Any) -> None:
    """`begin_reduce_scatter` into one tensor, and waits; for one tensor in host memory one call of C++."""
    if isinstance(input, Tensor):
        try:
            is_done = engine.reduce_scatter(output, input, _same_object(op), _scatter_in_one_call)
        except Exception as error:
            refuse_for(comm, "exchange", error)
            raise
        if is_done:
            return
    begin_reduce_scatter(comm, [output], input, op, True).wait()


def _tag_of_reduce_scatter(op: Operator, dtype: torch.dtype) -> str:
    return f"reduce_scatter {op.name} {dtype}"


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
    return None if size == 1 else (None, [_concatenation_plan(rank, size, length, dtype)])


def all_gather(comm: Any, engine: _C.Communicator, output: Tensor, input: Tensor) -> None:
    """`begin_all_gather`, and waits; for contiguous tensors in host memory one call of C++."""
    try:
        is_done = engine.all_gather(output, input, _gather_in_one_call)
    except Exception as error:
        refuse_for(comm, "all_gather", error)
        raise
    if not is_done:
        begin_all_gather(comm, output, input, True).wait()


def begin_all_gather(comm: Any, output: Tensor, tensor: Tensor, waits: bool) -> Any:
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
        plan = _concatenation_plan(comm.rank, comm.size, flat.numel(), flat.dtype)
    work = comm.exchange(plan, [flat], [whole], async_op=not waits, op="all_gather", returns_work=True)
    if whole.data_ptr() == output.data_ptr():
        return work
    return begin(comm, with_copies(iter([work]), [whole], [output]), [whole, output], waits)


@functools.lru_cache(maxsize=256)
def _concatenation_plan(rank: int, size: int, length: int, dtype: torch.dtype) -> Any:
    return _C.plan_gather(rank, size, ((length,), dtype), 0, [length] * size)
