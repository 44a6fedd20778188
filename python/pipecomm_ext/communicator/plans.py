"""The exchange plans of reductions, gathers and lists. Reductions and gathers move tensors of one dim;
`shape` is that of the tensor of the caller, which the ranks compare and errors show."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from ..core.extension import _C
from ..core.tensor_specs import TensorSpec

Lengths = Sequence[int] | None
Shape = tuple[int, ...]
# Up to here every rank gets whole tensors and reduces them itself, in one exchange.
MAX_WHOLE_BYTES = 32 << 10


@functools.lru_cache(maxsize=256)
def whole_plan(
    rank: int, size: int, shape: Shape, dtype: torch.dtype, root: int, tag: str, own_in_place: bool = True
) -> Any:
    """Moves every other rank's tensor to rank `root`, or to all ranks (-1), one after the other."""
    everybody, length = list(range(size)), math.prod(shape)
    source, whole = (everybody, 0, [length] * size, False), ((size * length,), dtype)
    target = (everybody, 0, None, True) if root < 0 else ([root], 0, [size * length], False)
    tag, shown = tag_with(tag, shape), (shape, dtype)
    return _C.plan_reshard(rank, size, whole, source, target, own_in_place, tag, shown)


def tag_with(tag: str, *shapes: Shape) -> str:
    """A tag of plans that states the shapes, too."""
    return " ".join([tag, *(str(list(shape)) for shape in shapes)])


@functools.lru_cache(maxsize=256)
def scatter_plan(rank: int, size: int, shapes: tuple[Shape, ...], dtype: torch.dtype, tag: str) -> Any:
    """Moves piece r, of shapes[r], of every other rank's tensor to rank r, which has one output for each
    other rank."""
    tag, shown = tag_with(tag, *shapes), (shapes[rank], dtype)
    return _collect_plan(rank, size, tuple(map(math.prod, shapes)), dtype, tag, shown)


def _collect_plan(
    rank: int, size: int, lengths: tuple[int, ...], dtype: torch.dtype, tag: str, shown: TensorSpec
) -> Any:
    pieces = (list(range(size)), 0, lengths, False)
    return _C.plan_collect_pieces(rank, size, ((sum(lengths),), dtype), pieces, True, tag, shown)


@functools.lru_cache(maxsize=256)
def all_reduce_plans(
    rank: int, size: int, shape: Shape, dtype: torch.dtype, name: str, has_order: bool
) -> list[Any]:
    """One plan; or, for large tensors if the order of the second exchange is certain, two: the pieces of a
    tensor to the ranks that reduce them, then piece r of rank r's tensor to those of all other ranks."""
    tag, length = f"all_reduce {name} {dtype}", math.prod(shape)
    if not has_order or length * dtype.itemsize <= MAX_WHOLE_BYTES:
        return [whole_plan(rank, size, shape, dtype, -1, tag)]
    tag, shown = tag_with(tag, shape), (shape, dtype)
    everybody, lengths = list(range(size)), tuple(_C.remainder_first(length, size))
    source, target = (everybody, 0, lengths, False), (everybody, 0, None, True)
    gather = _C.plan_reshard(rank, size, ((length,), dtype), source, target, True, tag, shown)
    return [_collect_plan(rank, size, lengths, dtype, tag, shown), gather]


@functools.lru_cache(maxsize=256)
def list_plan(
    rank: int,
    size: int,
    inputs: tuple[TensorSpec, ...],
    outputs: tuple[TensorSpec, ...],
    tag: str = "",
    shown: TensorSpec | None = None,
) -> Any:
    """Moves a tensor from each rank to each. All ranks must have the same `tag`. Errors show `shown` (None:
    the first input)."""
    return _C.plan_all_to_all_list(rank, size, inputs, outputs, tag, shown)


def concatenation_plan(rank: int, local: TensorSpec, lengths: Sequence[int]) -> Any:
    """Gives all ranks the concatenation along dim 0 of their tensors of these lengths."""
    segments = [[segment] for segment in zip(accumulate(lengths, initial=0), lengths, strict=False)]
    return _C.plan_gather(rank, len(lengths), local, 0, segments)


@functools.lru_cache(maxsize=256)
def all_gather_list_plan(rank: int, size: int, local: TensorSpec, outputs: tuple[TensorSpec, ...]) -> Any:
    return _C.plan_all_gather_list(rank, size, local, outputs)


@functools.lru_cache(maxsize=256)
def all_to_all_single_plan(
    rank: int, size: int, local: TensorSpec, output: TensorSpec, sent: Lengths, received: Lengths
) -> Any:
    """`sent` and `received`: lengths along dim 0, see `split_lengths`."""
    lengths = split_lengths(local, sent, size, "input"), split_lengths(output, received, size, "output")
    return _C.plan_all_to_all_single(rank, size, local, output, *lengths)


def split_lengths(spec: TensorSpec, lengths: Lengths, size: int, name: str) -> tuple[int, ...]:
    """Lengths along dim 0; as in torch, None or an empty list means equal ones."""
    if lengths:
        return tuple(lengths)
    shape, _ = spec
    if not shape or shape[0] % size:
        raise ValueError(
            f"dim 0 of {name} of shape {list(shape)} must divide by the {size} ranks; or give sizes"
        )
    return (shape[0] // size,) * size
