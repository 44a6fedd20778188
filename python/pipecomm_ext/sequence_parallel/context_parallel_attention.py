"""Attention over ring and Ulysses groups: heads for sequence within a Ulysses group, keys over the ring."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ..communicator import Communicator
from ..communicator.registry import communicator_of
from ..parallel_state import ParallelState, get_parallel_state
from .all_to_all import OP
from .heads_argument import AsksForHeads
from .ulysses import Attention, layout_of, ulysses_attention
from .zigzag_attention import attend, check_arguments, read_keys, traced_keys, zigzag_slices


def attention_with_cp(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attention: Attention | None = None,
    *,
    is_causal: bool,
    chunks: int | str = "auto",
    gather_size: int | None = None,
    heads_dim: int = 2,
    seq_dim: int = 1,
    parallel_state: ParallelState | None = None,
    **attention_kwargs: Any,
) -> Tensor:
    """Attention over a sequence that ranks hold as `split_forward_gather_backward_with_cp` returns it.

    The ranks of a Ulysses group exchange sequence for heads, in chunks (`ulysses_attention`); with its heads
    a rank attends over its ring group, which holds the sequence in zigzag order (`zigzag_attention`). With
    one group enabled it is one of the two, with none it is `attention` alone. Equal to attention on one rank
    that holds everything.

    Args:
        q, k, v: as for `ulysses_attention`. Of 2R slices of the sequence, the ranks with number r of R in
            their ring group hold the slices r and 2R - 1 - r together, cut over their Ulysses group by
            `cal_split_sizes`.
        attention, is_causal: as for `zigzag_attention`, whichever groups are enabled.
        chunks: of heads, as for `ulysses_attention`.
        gather_size: the length of the whole sequence. Without it all ranks must hold the same length.
        heads_dim, seq_dim: dims of q, k and v; negative ones count from the end.
        parallel_state: the groups; None is the default of `initialize_sequence_parallel`.
        attention_kwargs: `dropout_p`, `scale` and `enable_gqa`, for `attention`; others are refused.

    Returns:
        a tensor like `q`, this rank's piece of the result.

    Raises:
        RuntimeError: there is no parallel state.
        ValueError, IndexError, TypeError: bad arguments on this rank; nothing was sent.
        PipeCommMismatch: another rank of either group refused, or its attention raised, or the ranks'
            arguments do not fit; the next call works.

    Example:
        ```python
        state = parallel_state.ParallelState(ulysses_group=dist.group.WORLD)  # and ring_group=
        q = torch.randn(1, 3, 4, 8)
        out = attention_with_cp(q, q, q, is_causal=True, parallel_state=state)
        ```
    """
    state = parallel_state or get_parallel_state()
    if torch.compiler.is_compiling():
        return _traced(
            q, k, v, attention, is_causal, gather_size, heads_dim, seq_dim, state, attention_kwargs
        )
    ulysses = communicator_of(state.get_ulysses_group(), q) if state.is_ulysses_enable() else None
    ring = communicator_of(state.get_ring_group(), q) if state.is_ring_enable() else None
    with contextlib.ExitStack() as refusing:
        for comm in (ulysses, ring):
            if comm is not None:
                refusing.enter_context(comm.collective(OP))
        dims = check_arguments(q, k, v, is_causal, heads_dim, seq_dim, attention_kwargs)
        over_ring = _OverRing(ring, attention, is_causal, *dims, gather_size, attention_kwargs)
        num_chunks, ring_length = 1, gather_size
        if ulysses is not None:
            ring_lengths = _ring_lengths(state, q.size(dims[1]), gather_size)
            # The number of chunks follows from the longest: all ranks of the ring must choose the same one.
            layout = layout_of(ulysses, q, k, v, *dims, chunks, max(ring_lengths))
            over_ring.num_left = sum(sizes[ulysses.rank] > 0 for sizes in layout.heads.q_sizes)
            num_chunks = layout.num_chunks
            ring_length = None if gather_size is None else ring_lengths[state.get_ring_rank()]
    if ulysses is None:
        return over_ring(q, k, v)
    if ring is not None and over_ring.num_left == 0:  # no heads: errors that others get with keys
        with _refusing(ulysses):
            ring.barrier()
    with _refusing(ring, lambda: over_ring.num_left > 0):
        return ulysses_attention(
            q,
            k,
            v,
            over_ring,
            ulysses,
            chunks=num_chunks,
            gather_size=ring_length,
            heads_dim=heads_dim,
            seq_dim=seq_dim,
        )


def _ring_lengths(state: ParallelState, length: int, gather_size: int | None) -> list[int]:
    """The length that each rank of the ring holds with its Ulysses group; `length` is that of this rank."""
    num_ranks = state.get_ring_group_size()
    slices = zigzag_slices(length * state.get_ulysses_group_size(), num_ranks, gather_size)
    return [slices[rank] + slices[-1 - rank] for rank in range(num_ranks)]


class _OverRing:
    """Attention over the ring, for the heads of one chunk at a time; without a ring, attention alone."""

    def __init__(
        self,
        ring: Communicator | None,
        attention: Attention | None,
        is_causal: bool,
        heads_dim: int,
        seq_dim: int,
        gather_size: int | None,
        kwargs: Mapping[str, Any],
    ):
        self.ring, self.attention, self.is_causal = ring, attention, is_causal
        self.dims, self.gather_size, self.kwargs = (heads_dim, seq_dim), gather_size, kwargs
        self.num_left = 0  # exchanges of keys that the other ranks of the ring still wait for

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, heads: range | None = None) -> Tensor:
        _, seq_dim = self.dims
        spans = [(q.size(seq_dim), k.size(seq_dim))]
        if self.ring is not None:
            num_left, self.num_left = self.num_left - 1, 0  # failures now reach all ranks of the ring
            k, v, spans = read_keys(self.ring, k, v, self.is_causal, seq_dim, self.gather_size)
            self.num_left = num_left
        first = 0 if heads is None else heads.start
        return attend(q, k, v, self.attention, spans, self.is_causal, *self.dims, self.kwargs, first)


@contextlib.contextmanager
def _refusing(comm: Communicator | None, is_awaited: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Reports any error here to the ranks of `comm`, also one that this rank received from another group, if
    they wait for this rank then.
    """
    try:
        yield
    except Exception as error:
        if comm is not None and is_awaited():
            comm.refuse(OP, error)
        raise


def _traced(
    q, k, v, attention, is_causal, gather_size, heads_dim, seq_dim, state: ParallelState, kwargs
) -> Tensor:
    """In a compiled graph: one chunk, by operators that stay in it."""
    heads_dim, seq_dim = check_arguments(q, k, v, is_causal, heads_dim, seq_dim, kwargs)

    def over_ring(q: Tensor, k: Tensor, v: Tensor, heads: range | None = None) -> Tensor:
        spans = [(q.size(seq_dim), k.size(seq_dim))]
        if state.is_ring_enable():
            k, v, spans = traced_keys(state.get_ring_group(), k, v, is_causal, seq_dim, gather_size)
        first = 0 if heads is None else heads.start
        return attend(q, k, v, attention, spans, is_causal, heads_dim, seq_dim, kwargs, first)

    if not state.is_ulysses_enable():
        return over_ring(q, k, v)
    ring_length = None
    if gather_size is not None:
        ring_length = _ring_lengths(state, q.size(seq_dim), gather_size)[state.get_ring_rank()]
    places = {"gather_size": ring_length, "heads_dim": heads_dim, "seq_dim": seq_dim}
    return ulysses_attention(q, k, v, AsksForHeads(over_ring), state.get_ulysses_group(), **places)
