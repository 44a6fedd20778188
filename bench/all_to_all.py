"""All-to-all between two dims, even and uneven, against the algorithms in use."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from ops import BASELINE, Bench, Case
from work import count_work

from pipecomm_ext import all_to_all, cal_split_sizes
from pipecomm_ext import distributed as pipecomm_dist

LIST = "list + cat"
BARE = "bare a2a"  # all_to_all_single of the packed bytes into kept memory: the minimum over torch
SEQ, HEADS = 1, 2  # dims of [batch, seq, heads, head_dim]
HEAD_DIM = 128


def build(bench: Bench, num_bytes: int) -> Iterator[Case]:
    """[B, S, H, 128], heads (H) against sequence (S). torch: permute + all_to_all_single + permute."""
    if bench.matrix is not None:
        yield _matrix_case(bench)
        return
    odd = bench.size - 1 if bench.size > 2 else 1
    # 24 heads as in HunyuanVideo; 25 are divisible by 5 ranks only.
    for label, batch, heads, extra_tokens, scatter, gather in [
        ("even, H to S", 1, 24, 0, HEADS, SEQ),
        ("even, S to H", 1, 24, 0, SEQ, HEADS),
        ("even, H to S, B=2", 2, 24, 0, HEADS, SEQ),
        ("S uneven, H to S", 1, 24, odd, HEADS, SEQ),
        ("H uneven, H to S", 1, 25, 0, HEADS, SEQ),
        ("both uneven, H to S", 1, 25, odd, HEADS, SEQ),
        ("both uneven, S to H", 1, 25, odd, SEQ, HEADS),
    ]:
        row_bytes = batch * heads * HEAD_DIM * bench.dtype.itemsize
        tokens = max(1, num_bytes // row_bytes) * bench.size + extra_tokens
        yield _case(bench, label, [batch, tokens, heads, HEAD_DIM], scatter, gather)


def _case(bench: Bench, label: str, whole_shape: list[int], scatter: int, gather: int) -> Case:
    trade = Trade(
        scatter,
        gather,
        cal_split_sizes(whole_shape[scatter], bench.size),
        cal_split_sizes(whole_shape[gather], bench.size),
        bench.rank,
    )
    whole = bench.data(torch.Size(whole_shape).numel(), sender=0).view(whole_shape)
    mine = whole.split(trade.gather_sizes, gather)[bench.rank].clone()
    expected = whole.split(trade.scatter_sizes, scatter)[bench.rank].clone()
    packed, unpacked = torch.empty_like(mine).flatten(), torch.empty_like(expected).flatten()
    sent, received = trade.counts(mine)

    def ours(comm):
        return all_to_all(
            mine,
            comm,
            scatter,
            gather,
            scatter_sizes=trade.scatter_sizes,
            gather_sizes=trade.gather_sizes,
        )

    calls = {
        BASELINE: lambda: trade.by_permutation(mine),
        LIST: lambda: trade.by_lists(mine),
        BARE: lambda: dist.all_to_all_single(unpacked, packed, received, sent),
        **{name: lambda comm=comm: ours(comm) for name, comm in bench.comms.items()},
    }
    calls, bound_of = bench.with_bounds(calls, copied=mine.flatten(), over_torch=BARE)
    return Case(
        num_bytes=mine.nbytes,
        received=[],
        calls=calls,
        bus_factor=(bench.size - 1) / bench.size,
        label=label,
        returns=expected,
        bound_of=bound_of,
        work=lambda impl: count_work(calls[impl], mine.nbytes, bench.comms.get(impl)),
    )


@dataclass(frozen=True)
class Trade:
    """One all-to-all, and the two algorithms that libraries use for it."""

    scatter: int
    gather: int
    scatter_sizes: list[int]
    gather_sizes: list[int]
    rank: int

    def counts(self, mine: torch.Tensor) -> tuple[list[int], list[int]]:
        """Elements to, and from, each rank."""
        rest = mine.numel() // (mine.size(self.scatter) * mine.size(self.gather))
        sent = [size * self.gather_sizes[self.rank] * rest for size in self.scatter_sizes]
        return sent, [size * self.scatter_sizes[self.rank] * rest for size in self.gather_sizes]

    def by_permutation(self, mine: torch.Tensor) -> torch.Tensor:
        """Moves the ranks' shares of the scatter dim (if uneven, the whole dim) to the front, and back."""
        sent, received = self.counts(mine)
        is_even = len(set(self.scatter_sizes)) == len(set(self.gather_sizes)) == 1
        front = mine.unflatten(self.scatter, (len(sent), -1)) if is_even else mine
        packed = front.movedim(self.scatter, 0).contiguous()
        unpacked = packed.new_empty(sum(received))
        dist.all_to_all_single(unpacked, packed.view(-1), received, sent)
        if is_even:
            whole_shape = self._part_shape(mine, sum(self.gather_sizes))
            if torch.Size(whole_shape[: self.gather]).numel() == 1:
                return unpacked.view(whole_shape)  # the parts are in the right order already
            return torch.cat(self._shaped(unpacked, received, mine), self.gather)
        parts = []
        for part, length in zip(unpacked.split(received), self.gather_sizes, strict=True):
            shape = self._part_shape(mine, length)
            shape.insert(0, shape.pop(self.scatter))
            parts.append(part.view(shape).movedim(0, self.scatter))
        return torch.cat(parts, self.gather)

    def by_lists(self, mine: torch.Tensor) -> torch.Tensor:
        """Sends a piece to each rank, and concatenates what comes from each."""
        sent, received = self.counts(mine)
        if torch.Size(mine.shape[: self.scatter]).numel() == 1:
            packed = mine.view(-1)  # the pieces are contiguous already
        else:
            packed = mine.new_empty(sum(sent))
            pieces = mine.split(self.scatter_sizes, self.scatter)
            for part, piece in zip(packed.split(sent), pieces, strict=True):
                part.view(piece.shape).copy_(piece)
        unpacked = mine.new_empty(sum(received))  # gloo has no exchange of lists of unequal lengths
        dist.all_to_all_single(unpacked, packed, received, sent)
        return torch.cat(self._shaped(unpacked, received, mine), self.gather)

    def _part_shape(self, mine: torch.Tensor, length: int) -> list[int]:
        """The shape of the part from a rank that holds `length` of the gather dim."""
        shape = list(mine.shape)
        shape[self.scatter] = self.scatter_sizes[self.rank]
        shape[self.gather] = length
        return shape

    def _shaped(self, unpacked: torch.Tensor, received: list[int], mine: torch.Tensor) -> list[torch.Tensor]:
        return [
            part.view(self._part_shape(mine, length))
            for part, length in zip(unpacked.split(received), self.gather_sizes, strict=True)
        ]


def _matrix_case(bench: Bench) -> Case:
    """The bytes of a matrix, without packing."""
    size, rank = bench.size, bench.rank
    counts = [[bench.numel(num_bytes) if num_bytes else 0 for num_bytes in row] for row in bench.matrix]
    sent, received = counts[rank], [row[rank] for row in counts]
    pieces = [bench.data(counts[rank][dst], rank, dst) for dst in range(size)]
    expected = torch.cat([bench.data(counts[src][rank], src, rank) for src in range(size)])
    packed, unpacked = torch.cat(pieces), torch.empty_like(expected)
    calls = {
        BASELINE: lambda: dist.all_to_all_single(unpacked, packed, received, sent),
        **{
            name: lambda comm=comm: pipecomm_dist.all_to_all_single(unpacked, packed, received, sent, comm)
            for name, comm in bench.comms.items()
        },
    }
    largest = max(max(map(sum, counts)), max(map(sum, zip(*counts, strict=True)))) * bench.dtype.itemsize
    return Case(
        num_bytes=largest,  # the most that any rank sends or receives
        received=[(unpacked, expected)],
        calls=calls,
        label="matrix",
        work=lambda impl: count_work(calls[impl], largest, bench.comms.get(impl)),
    )
