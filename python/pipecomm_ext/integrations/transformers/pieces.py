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
    """Returns a ParallelState as it is; a torch group, a Communicator or None (the default group) becomes its
    Ulysses group.
    """
    if isinstance(process_group, ParallelState):
        return process_group
    return ParallelState(dist.group.WORLD if process_group is None else process_group)


@contextlib.contextmanager
def refusing(process_group: Any, tensor: Tensor) -> Iterator[None]:
    """Reports what this rank raises here, before attention, to all ranks of the groups."""
    if torch.compiler.is_compiling():  # a captured graph cannot contain it
        yield
        return
    try:
        yield
    except Exception:  # no preparation before: each layer of each forward comes here
        state = state_of(process_group)
        groups = [state.get_ulysses_group()] if state.get_ulysses_group() is not None else []
        groups += [state.get_ring_group()] if state.is_ring_enable() else []
        with contextlib.ExitStack() as stack:
            for group in groups:
                stack.enter_context(communicator_of(group, tensor).collective(OP))
            raise


def ring_lengths(state: ParallelState, length: int) -> list[int]:
    """How many tokens each rank of the ring holds with its Ulysses group: two of 2R slices each."""
    size = state.get_ring_group_size()
    slices = cal_split_sizes(length, 2 * size)
    return [slices[rank] + slices[2 * size - 1 - rank] for rank in range(size)]


def lengths(state: ParallelState, length: int) -> list[int]:
    """How many tokens each rank of this rank's Ulysses group holds."""
    return cal_split_sizes(ring_lengths(state, length)[state.get_ring_rank()], state.get_ulysses_group_size())


def cut(tensor: Tensor, dim: int, state: ParallelState) -> Tensor:
    """This rank's tokens of a tensor that every rank holds; the sum of the ranks' gradients is its own."""
    length = tensor.size(dim)
    held = _ring_places(state, length)[state.get_ring_rank()]
    places = held.split(lengths(state, length))[state.get_ulysses_rank()]
    return tensor.index_select(dim, places.to(tensor.device))


def gather(tensor: Tensor, dim: int, length: int, state: ParallelState) -> Tensor:
    """All tokens in order, on every rank. Has no gradient."""
    if state.is_ulysses_enable():
        sizes = lengths(state, length)
        tensor = gather_forward_split_backward(tensor, state.get_ulysses_group(), dim, sizes, None)
    if state.is_ring_enable():
        sizes = ring_lengths(state, length)
        tensor = gather_forward_split_backward(tensor, state.get_ring_group(), dim, sizes, None)
        order = torch.cat(_ring_places(state, length)).argsort()
        tensor = tensor.index_select(dim, order.to(tensor.device))
    return tensor


def _ring_places(state: ParallelState, length: int) -> list[Tensor]:
    """The positions in the sequence of the tokens that each rank of the ring holds, in its order."""
    size = state.get_ring_group_size()
    slices = torch.arange(length, device="cpu").split(cal_split_sizes(length, 2 * size))
    return [torch.cat([slices[rank], slices[2 * size - 1 - rank]]) for rank in range(size)]
