"""Attention over ranks in every way, compared with attention of the whole sequence in one process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from sequence_cases import cut, grid, numbers, offsets, remainder_first

from pipecomm_ext import attention_with_cp, ulysses_attention, zigzag_attention
from pipecomm_ext.parallel_state import ParallelState

SEQ, HEADS = 1, 2
WAYS = ["ulysses", "zigzag", "ring by ulysses"]


def plain_attention(q, k, v, is_causal=False, bias=0):
    """Attention by the formula, for [batch, sequence, heads, channels]; the last query reads the last key."""
    read = torch.arange(q.size(HEADS)) * k.size(HEADS) // q.size(HEADS)
    k, v = (tensor.index_select(HEADS, read) for tensor in (k, v))
    scores = torch.einsum("bqhc,bkhc->bhqk", q, k) / q.size(-1) ** 0.5 + bias
    if is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(scores.size(-1) - scores.size(-2) + 1)
        scores = scores.masked_fill(later, -torch.inf)
    return torch.einsum("bhqk,bkhc->bqhc", scores.softmax(-1), v)


def alibi_attention(q, k, v, is_causal=False, heads=None):
    """Attention with a bias per head, which needs the numbers of these heads among all (at most 8)."""
    slopes = 0.5 ** torch.arange(1.0, 9.0, dtype=q.dtype)
    slopes = slopes[: q.size(HEADS)] if heads is None else slopes[heads]
    later = torch.arange(q.size(SEQ))[:, None] + k.size(SEQ) - q.size(SEQ) - torch.arange(k.size(SEQ))
    return plain_attention(q, k, v, is_causal, -slopes[:, None, None] * later)


def whole_tensors(batch, length, heads, kv_heads, channels=4, value_channels=None, dtype=torch.float64):
    shapes = [(heads, channels), (kv_heads, channels), (kv_heads, value_channels or channels)]
    names = zip("qkv", shapes, strict=True)
    return [numbers((batch, length, *shape), dtype, name).requires_grad_() for name, shape in names]


def zigzag(tensor, rank, num_ranks, dim=SEQ):
    """The two slices of a rank, one after the other."""
    sizes = remainder_first(tensor.size(dim), 2 * num_ranks)
    both = rank, 2 * num_ranks - 1 - rank
    return torch.cat([tensor.narrow(dim, offsets(sizes)[idx], sizes[idx]) for idx in both], dim)


def state_of(num_ulysses: int) -> ParallelState:
    """Ulysses groups of consecutive ranks, ring groups across them."""
    return grid(dist.get_world_size() // num_ulysses)[0]


def my_piece(tensor, state, dim=SEQ):
    """My Ulysses piece of my two zigzag slices."""
    slices = zigzag(tensor, state.get_ring_rank(), state.get_ring_group_size(), dim)
    sizes = remainder_first(slices.size(dim), state.get_ulysses_group_size())
    return cut(slices, dim, sizes, state.get_ulysses_rank())


class Way(NamedTuple):
    """A function of the package, and which piece of a whole tensor this rank has."""

    function: Callable[..., torch.Tensor]  # of q, k, v, attention and keywords
    piece: Callable[..., torch.Tensor]  # of a whole tensor and the dim of its sequence
    num_pieces: int  # into which a sequence is cut

    def leaves(self, whole):
        return [self.piece(tensor.detach()).requires_grad_(tensor.requires_grad) for tensor in whole]

    def check(self, whole, is_causal, attention=None, reference=plain_attention):
        """Checks the result and all gradients, for a loss that weights each element differently."""
        expected = reference(*whole, is_causal)
        weights = numbers(tuple(expected.shape), expected.dtype, "weights")
        (expected * weights).sum().backward()
        local, length = self.leaves(whole), whole[0].size(SEQ)
        gather_size = None if length % self.num_pieces == 0 else length
        result = self.function(*local, attention, is_causal=is_causal, gather_size=gather_size)
        assert_close(result, self.piece(expected))
        (result * self.piece(weights)).sum().backward()
        for mine, full in zip(local, whole, strict=True):
            assert_close(mine.grad, self.piece(full.grad))


def assert_close(actual, expected) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-10)


def ulysses_way(world, chunks="auto") -> Way:
    def piece(tensor, dim=SEQ):
        return cut(tensor, dim, remainder_first(tensor.size(dim), world.size), world.rank)

    function = functools.partial(ulysses_attention, process_group=world.comm, chunks=chunks)
    return Way(function, piece, world.size)


def zigzag_way(world) -> Way:
    function = functools.partial(zigzag_attention, process_group=world.comm)
    piece = functools.partial(zigzag, rank=world.rank, num_ranks=world.size)
    return Way(function, lambda tensor, dim=SEQ: piece(tensor, dim=dim), 2 * world.size)


def cp_way(state, chunks="auto") -> Way:
    function = functools.partial(attention_with_cp, parallel_state=state, chunks=chunks)
    num_pieces = 2 * state.get_ring_group_size() * state.get_ulysses_group_size()
    return Way(function, lambda tensor, dim=SEQ: my_piece(tensor, state, dim), num_pieces)


def way_of(name: str, world, chunks=2) -> Way:
    if name == "ulysses":
        return ulysses_way(world, chunks)
    return zigzag_way(world) if name == "zigzag" else cp_way(state_of(2), chunks)
