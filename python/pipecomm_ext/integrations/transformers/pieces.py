"""Which tokens of a sequence a rank holds: in a Ulysses group, in a ring group, or in both."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...communicator.registry import communicator_of
from ...parallel_state import ParallelState
from ...sequence_parallel import cal_split_sizes, gather_forward_split_backward
from ...sequence_parallel.all_to_all import OP


def state_of(process_group: Any) -> ParallelState:
    """A ParallelState stands for itself; a torch group, a Communicator or None (the default group) is a
    Ulysses group.
    """
    if isinstance(process_group, ParallelState):
        return process_group
    return ParallelState(dist.group.WORLD if process_group is None else process_group)


@contextlib.contextmanager
def refusing(state: ParallelState, tensor: Tensor) -> Iterator[None]:
    """Tells all ranks of the groups what this rank raises here, before attention."""
    groups = [state.get_ulysses_group()] if state.get_ulysses_group() is not None else []
    groups += [state.get_ring_group()] if state.is_ring_enable() else []
    with contextlib.ExitStack() as stack:
        for group in groups:
            stack.enter_context(communicator_of(group, tensor).collective(OP))
        yield


def places(state: ParallelState, length: int) -> Tensor:
    """int64: where in a sequence of `length` this rank's tokens are, in the order in which it holds them."""
    held = _ring_places(state, length)[state.get_ring_rank()]
    sizes = cal_split_sizes(len(held), state.get_ulysses_group_size())
    return held.split(sizes)[state.get_ulysses_rank()]


def fewest_tokens(state: ParallelState, length: int) -> int:
    """Of any rank."""
    return min(len(held) // state.get_ulysses_group_size() for held in _ring_places(state, length))


def cut(tensor: Tensor, dim: int, state: ParallelState) -> Tensor:
    """This rank's tokens of a tensor that every rank holds; the sum of the ranks' gradients is its own."""
    return tensor.index_select(dim, places(state, tensor.size(dim)).to(tensor.device))


def gather(tensor: Tensor, dim: int, length: int, state: ParallelState) -> Tensor:
    """All tokens in order, on every rank. Has no gradient."""
    ring_places = _ring_places(state, length)
    if state.is_ulysses_enable():
        sizes = cal_split_sizes(len(ring_places[state.get_ring_rank()]), state.get_ulysses_group_size())
        tensor = gather_forward_split_backward(tensor, state.get_ulysses_group(), dim, sizes, None)
    if state.is_ring_enable():
        sizes = [len(held) for held in ring_places]
        tensor = gather_forward_split_backward(tensor, state.get_ring_group(), dim, sizes, None)
        tensor = tensor.index_select(dim, torch.cat(ring_places).argsort().to(tensor.device))
    return tensor


def _ring_places(state: ParallelState, length: int) -> list[Tensor]:
    """Of the tokens that each rank of the ring holds with its Ulysses group: of 2R slices two each."""
    size = state.get_ring_group_size()
    slices = torch.arange(length).split(cal_split_sizes(length, 2 * size))
    return [torch.cat([slices[rank], slices[2 * size - 1 - rank]]) for rank in range(size)]
