"""The exchanges of Ulysses attention, as plans: to and from the heads of one chunk.

Each goes directly from, or to, the places of the chunk's heads in whole tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from ..core.extension import _C
from .head_chunks import HeadChunks, head_chunks
from .sizes import Sizes

_head_chunks = lru_cache(maxsize=64)(head_chunks)


@dataclass(frozen=True)
class Layout:
    """All that the exchanges of a call depend on, except the number of channels of the result."""

    rank: int
    shapes: tuple[tuple[int, ...], ...]  # of q, k and v
    dtypes: tuple[torch.dtype, ...]
    heads_dim: int
    seq_dim: int
    seq_sizes: Sizes
    num_chunks: int

    @property
    def heads(self) -> HeadChunks:
        q, k, _ = (shape[self.heads_dim] for shape in self.shapes)
        return _head_chunks(q, k, len(self.seq_sizes), self.num_chunks)


@lru_cache(maxsize=256)
def enter_plan(layout: Layout, chunk: int) -> _C.PreparedExchange:
    """From whole q, k and v to the heads of this rank's chunk."""
    heads, num_ranks = layout.heads, len(layout.seq_sizes)
    sizes = heads.q_sizes[chunk], heads.kv_sizes[chunk], heads.kv_sizes[chunk]
    starts = heads.q_starts[chunk], heads.kv_starts[chunk], heads.kv_starts[chunk]
    tensors = [
        (shape, dtype, scattered, layout.seq_sizes)
        for shape, dtype, scattered in zip(layout.shapes, layout.dtypes, sizes, strict=True)
    ]
    tag = f"chunk {chunk} of {layout.num_chunks}"
    return _C.plan_all_to_all(
        layout.rank, num_ranks, tensors, layout.heads_dim, layout.seq_dim, scatter_starts=starts, tag=tag
    )


@lru_cache(maxsize=256)
def enter_gradient_plan(layout: Layout, chunk: int, needs: tuple[bool, ...]) -> _C.PreparedExchange:
    """From the gradients of a chunk into those of whole q, and of all received heads of k and v."""
    heads, num_ranks = layout.heads, len(layout.seq_sizes)
    num_received = len(heads.received)
    q = heads.q_sizes[chunk], heads.q_starts[chunk], heads.num_heads
    kv = heads.kv_sizes[chunk], heads.received_starts[chunk], num_received
    shapes = enter_plan(layout, chunk).output_shapes
    rows = zip(shapes, layout.dtypes, (q, kv, kv), needs, strict=True)
    needed = [(shape, dtype, *places) for shape, dtype, places, need in rows if need]
    return _C.plan_all_to_all(
        layout.rank,
        num_ranks,
        [(shape, dtype, layout.seq_sizes, sizes) for shape, dtype, sizes, _, _ in needed],
        layout.seq_dim,
        layout.heads_dim,
        gather_starts=[starts for *_, starts, _ in needed],
        gather_lengths=[length for *_, length in needed],
    )


@lru_cache(maxsize=256)
def leave_plan(layout: Layout, chunk: int, num_channels: int, dtype: torch.dtype) -> _C.PreparedExchange:
    """From the result of a chunk into the whole result."""
    heads = layout.heads
    shape = (*enter_plan(layout, chunk).output_shapes[0][:-1], num_channels)
    return _C.plan_all_to_all(
        layout.rank,
        len(layout.seq_sizes),
        [(shape, dtype, layout.seq_sizes, heads.q_sizes[chunk])],
        layout.seq_dim,
        layout.heads_dim,
        gather_starts=[heads.q_starts[chunk]],
        gather_lengths=[heads.num_heads],
    )


@lru_cache(maxsize=256)
def leave_gradient_plan(
    layout: Layout, chunk: int, num_channels: int, dtype: torch.dtype
) -> _C.PreparedExchange:
    """From the gradient of the whole result to that of a chunk."""
    heads = layout.heads
    shape = (*layout.shapes[0][:-1], num_channels)
    return _C.plan_all_to_all(
        layout.rank,
        len(layout.seq_sizes),
        [(shape, dtype, heads.q_sizes[chunk], layout.seq_sizes)],
        layout.heads_dim,
        layout.seq_dim,
        scatter_starts=[heads.q_starts[chunk]],
    )
