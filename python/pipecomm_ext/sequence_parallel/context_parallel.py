"""Split and gather over ring and Ulysses groups: zigzag or packed over the ring, contiguous over Ulysses.

Both groups come from a `ParallelState`, or anything with its members; only the members of an enabled group
are read. Semantics: MindSpeed-MM. Gradients are scaled once per enabled group, "down" for splits, "up" for
gathers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..communicator.registry import communicator_of
from ..core.checked import whole_number
from ..errors import PipeCommMismatch
from ..parallel_state import ParallelState, get_parallel_state
from .sizes import cal_split_sizes, checked_spec, dim_index, packed_split_rows
from .split_gather import (
    gather_forward_split_backward,
    load_balanced_gather_forward_split_backward,
    load_balanced_split_forward_gather_backward,
    packed_data_gather_forward_split_backward,
    packed_data_split_forward_gather_backward,
    split_forward_gather_backward,
)
from .split_gather_pair import OP


def split_forward_gather_backward_with_cp(
    input_: Tensor, dim: int, *, parallel_state: ParallelState | None = None
) -> Tensor:
    """Keeps my part of a tensor that all ranks of both groups hold: of my zigzag chunks, my Ulysses piece.

    The length of `dim` must be divisible by twice the ring size; Ulysses pieces are remainder-first. With
    neither group enabled the result is a copy.

    Raises:
        ValueError: the length is not divisible.
    """
    state = parallel_state or get_parallel_state()
    dim = _dim_index(dim, input_, "input_")
    result = input_
    if state.is_ring_enable():
        _check_zigzag(input_.size(dim), state.get_ring_group_size(), f"length of dim {dim}")
        result = load_balanced_split_forward_gather_backward(result, state.get_ring_group(), dim)
    if state.is_ulysses_enable():
        result = split_forward_gather_backward(result, state.get_ulysses_group(), dim, grad_scale="down")
    return _fresh(result, input_)


def gather_forward_split_backward_with_cp(
    input_: Tensor, dim: int, gather_size: int, *, parallel_state: ParallelState | None = None
) -> Tensor:
    """The inverse of `split_forward_gather_backward_with_cp`; `gather_size` is the global length of `dim`.

    Raises:
        ValueError: `gather_size` is not divisible by twice the ring size, or does not fit this rank's length.
    """
    state = parallel_state or get_parallel_state()
    with _refusing(state, input_):
        dim = _dim_index(dim, input_, "input_")
        ring_length = whole_number(gather_size, "gather_size")
        if state.is_ring_enable():
            _check_zigzag(ring_length, state.get_ring_group_size(), "gather_size")
            ring_length //= state.get_ring_group_size()
        sizes = _ulysses_sizes(ring_length, state, input_, dim, f"gather_size {gather_size}")
    result = _gather_over_ulysses(input_, dim, sizes, state)
    if state.is_ring_enable():
        result = load_balanced_gather_forward_split_backward(result, state.get_ring_group(), dim)
    return _fresh(result, input_)


def packed_data_split_forward_gather_backward_with_cp(
    x: Tensor, dim: int, seq_lens: Sequence[int] | Tensor, *, parallel_state: ParallelState | None = None
) -> Tensor:
    """Keeps my part of sequences packed along `dim`: each is cut over the ring, the result over Ulysses.

    The Ulysses group cuts the ring-local pieces of all sequences as one. Pieces are contiguous and
    remainder-first; any length is legal, also an empty piece. With neither group enabled the result is
    a copy.

    Raises:
        ValueError: no lengths, a negative one, or their sum is not the length of `dim`.
    """
    state = parallel_state or get_parallel_state()
    dim = _dim_index(dim, x, "x")
    [whole_row] = packed_split_rows(seq_lens, 1)
    _check_length(x, dim, sum(whole_row), "the sum of seq_lens")
    result = x
    if state.is_ring_enable():
        result = packed_data_split_forward_gather_backward(result, state.get_ring_group(), seq_lens, dim)
    if state.is_ulysses_enable():
        result = split_forward_gather_backward(result, state.get_ulysses_group(), dim, grad_scale="down")
    return _fresh(result, x)


def packed_data_gather_forward_split_backward_with_cp(
    x: Tensor, dim: int, seq_lens: Sequence[int] | Tensor, *, parallel_state: ParallelState | None = None
) -> Tensor:
    """The inverse of `packed_data_split_forward_gather_backward_with_cp`.

    Raises:
        ValueError: no lengths, a negative one, or they do not fit this rank's length of `dim`.
    """
    state = parallel_state or get_parallel_state()
    with _refusing(state, x):
        dim = _dim_index(dim, x, "x")
        ring_rank, ring_size = 0, 1
        if state.is_ring_enable():
            ring_rank, ring_size = state.get_ring_rank(), state.get_ring_group_size()
        rows = packed_split_rows(seq_lens, ring_size)
        sizes = _ulysses_sizes(sum(rows[ring_rank]), state, x, dim, "the share of seq_lens")
    result = _gather_over_ulysses(x, dim, sizes, state)
    if state.is_ring_enable():
        result = packed_data_gather_forward_split_backward(result, rows, state.get_ring_group(), dim)
    return _fresh(result, x)


def _gather_over_ulysses(local: Tensor, dim: int, sizes: list[int], state: ParallelState) -> Tensor:
    if not state.is_ulysses_enable():
        return local
    with _refusing(state, local, over=("ring",)):
        return gather_forward_split_backward(local, state.get_ulysses_group(), dim, sizes, grad_scale="up")


@contextlib.contextmanager
def _refusing(
    state: ParallelState, tensor: Any, over: tuple[str, ...] = ("ulysses", "ring")
) -> Iterator[None]:
    """Wraps the steps before the gathers over these groups: if one fails, they raise on all ranks."""
    groups = []
    if "ulysses" in over and state.is_ulysses_enable():
        groups.append(state.get_ulysses_group())
    if "ring" in over and state.is_ring_enable():
        groups.append(state.get_ring_group())
    try:
        yield
    except (ValueError, TypeError, IndexError, PipeCommMismatch) as error:
        for group in groups:
            communicator_of(group, tensor).refuse(OP, error)
        raise


def _dim_index(dim: Any, tensor: Any, name: str) -> int:
    shape, _ = checked_spec(tensor, name)
    return dim_index(dim, len(shape), "dim")


def _check_zigzag(length: int, ring_size: int, name: str) -> None:
    if length % (2 * ring_size):
        raise ValueError(f"{name} must be divisible by 2 * ring size = 2 * {ring_size}, and {length} is not")


def _check_length(tensor: Tensor, dim: int, expected: int, source: str) -> None:
    if tensor.size(dim) != expected:
        raise ValueError(f"{source} means a length of {expected} along dim {dim}, not {tensor.size(dim)}")


def _ulysses_sizes(
    ring_length: int, state: ParallelState, tensor: Tensor, dim: int, source: str
) -> list[int]:
    """Lengths of the Ulysses pieces of a ring-local dim, of which `tensor` must have mine."""
    sizes, mine = [ring_length], 0
    if state.is_ulysses_enable():
        sizes = cal_split_sizes(ring_length, state.get_ulysses_group_size())
        mine = state.get_ulysses_rank()
    _check_length(tensor, dim, sizes[mine], source)
    return sizes


def _fresh(result: Tensor, input_: Tensor) -> Tensor:
    return input_.clone(memory_format=torch.contiguous_format) if result is input_ else result
