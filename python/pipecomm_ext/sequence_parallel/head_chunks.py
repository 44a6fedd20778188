"""Which heads each rank attends to, in which chunk; and how many chunks pay off."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from ..transports import TRANSPORTS
from .sizes import Sizes, cal_split_sizes

MAX_CHUNKS = 16
# Floating-point operations per second of attention, by kind of device: guesses of the right order, which only
# decide whether communication is small in comparison.
_FLOPS_PER_S = {"cpu": 1e11, "cuda": 3e14}
# Posting and waiting for the four exchanges of a chunk, there and back.
_HOPS_PER_CHUNK = 4


@dataclass(frozen=True)
class HeadChunks:
    """A rank attends to consecutive query heads, in chunks; `*_sizes[chunk][rank]` heads from `*_starts`.

    Key/value heads go to a rank once, with the first of its chunks that reads them.
    """

    num_heads: int
    num_kv_heads: int
    q_starts: tuple[Sizes, ...]
    q_sizes: tuple[Sizes, ...]
    kv_starts: tuple[Sizes, ...]
    kv_sizes: tuple[Sizes, ...]

    # The key/value head of each one that is received, rank by rank: twice if two ranks read it.
    received: Sizes
    received_starts: tuple[Sizes, ...]  # where those of kv_starts[chunk][rank] lie in `received`

    def read_by(self, chunk: int, rank: int) -> list[int]:
        """The key/value head of each query head of a chunk."""
        start, size = self.q_starts[chunk][rank], self.q_sizes[chunk][rank]
        return [kv_head_of(head, self.num_heads, self.num_kv_heads) for head in range(start, start + size)]


def kv_head_of(head: int, num_heads: int, num_kv_heads: int) -> int:
    """The key/value head that a query head reads."""
    return head * num_kv_heads // num_heads


def head_chunks(num_heads: int, num_kv_heads: int, num_ranks: int, num_chunks: int) -> HeadChunks:
    """Query heads are divided over ranks remainder-first, then over chunks: between two key/value heads if a
    rank reads at least one for each chunk.
    """
    by_chunk: list[list[tuple[int, int, int, int]]] = [[] for _ in range(num_chunks)]
    end = 0
    for num_mine in cal_split_sizes(num_heads, num_ranks):
        start, end = end, end + num_mine
        first_kv = arrived = kv_head_of(start, num_heads, num_kv_heads) if num_mine else 0
        end_kv = kv_head_of(end - 1, num_heads, num_kv_heads) + 1 if num_mine else 0
        if end_kv - first_kv >= num_chunks:
            cuts = itertools.accumulate(cal_split_sizes(end_kv - first_kv, num_chunks), initial=first_kv)
            # Where the query heads begin that read this key/value head.
            bounds = [min(max(-(-cut * num_heads // num_kv_heads), start), end) for cut in cuts]
        else:
            bounds = list(itertools.accumulate(cal_split_sizes(num_mine, num_chunks), initial=start))
        for chunk, (low, high) in enumerate(itertools.pairwise(bounds)):
            needed = kv_head_of(high - 1, num_heads, num_kv_heads) + 1 if high > low else arrived
            by_chunk[chunk].append((low, high - low, arrived, max(0, needed - arrived)))
            arrived = max(arrived, needed)
    columns = [tuple(zip(*rows, strict=True)) for rows in by_chunk]
    q_starts, q_sizes, kv_starts, kv_sizes = zip(*columns, strict=True)
    received: list[int] = []
    received_starts: list[list[int]] = [[] for _ in range(num_chunks)]
    for rank in range(num_ranks):
        for chunk in range(num_chunks):
            start, size = kv_starts[chunk][rank], kv_sizes[chunk][rank]
            received_starts[chunk].append(len(received))
            received += range(start, start + size)
    return HeadChunks(
        num_heads,
        num_kv_heads,
        *(q_starts, q_sizes, kv_starts, kv_sizes),
        received=tuple(received),
        received_starts=tuple(tuple(starts) for starts in received_starts),
    )


def best_num_chunks(
    transport: str, device: str, num_bytes: int, num_flops: float, num_heads_each: int
) -> int:
    """Number of chunks for exchanges of `num_bytes` with attention of `num_flops` on one rank; equal on all.

    Of two overlapped parts the longer one counts, and one chunk of the shorter one. Where cores of the host
    move the bytes there is nothing to gain: attention would lose those cores.
    """
    costs = TRANSPORTS[transport].costs if transport in TRANSPORTS else None
    if costs is None or costs.core_bytes_per_s < float("inf"):
        return 1
    moving_s = num_bytes / costs.stage_bytes_per_s
    computing_s = num_flops / _FLOPS_PER_S[device]

    def seconds(num_chunks: int) -> float:
        shorter, longer = sorted((moving_s, computing_s))
        return longer + shorter / num_chunks + (num_chunks - 1) * _HOPS_PER_CHUNK * costs.hop_s

    return min(range(1, max(1, min(MAX_CHUNKS, num_heads_each)) + 1), key=seconds)
