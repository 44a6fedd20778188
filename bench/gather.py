"""Every rank gets the whole of a split dim, even, uneven, zigzag and packed, against torch's all-gathers."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from ops import BASELINE, Bench, Case
from work import count_work

from pipecomm_ext import (
    cal_split_sizes,
    cal_split_sizes_multi,
    gather_forward_split_backward,
    load_balanced_gather_forward_split_backward,
    packed_data_gather_forward_split_backward,
)

BARE = "bare all_gather"  # of equal pieces, into kept memory, without reordering
HIDDEN = 1280  # of a vision encoder
NUM_SEQUENCES = 16


def build(bench: Bench, num_bytes: int) -> Iterator[Case]:
    """[B, S, 1280] along S; size: what a rank holds. torch: padded all_gather, or one a sequence, + cat."""
    row_bytes = HIDDEN * bench.dtype.itemsize
    tokens = 2 * bench.size * max(1, num_bytes // row_bytes // 2)
    odd = bench.size - 1 if bench.size > 2 else 1
    for label, batch, length in [
        ("even", 1, tokens),
        ("uneven", 1, tokens + odd),
        ("uneven, B=2", 2, tokens // 2 + odd),
    ]:
        sizes = cal_split_sizes(length, bench.size)
        pieces = list(_whole(bench, batch, length).split(sizes, 1))
        yield _case(
            bench,
            label,
            pieces[bench.rank].clone(),
            torch.cat(pieces, 1),
            torch_call=lambda mine, sizes=sizes: torch.cat(_padded_all_gather(mine, sizes), 1),
            our_call=lambda mine, comm, sizes=sizes: gather_forward_split_backward(mine, comm, 1, sizes),
        )

    whole = _whole(bench, 1, tokens)
    chunks = whole.chunk(2 * bench.size, 1)
    order = [chunk for rank in range(bench.size) for chunk in (rank, 2 * bench.size - 1 - rank)]
    natural = [order.index(chunk) for chunk in range(2 * bench.size)]
    mine = torch.cat([chunks[bench.rank], chunks[2 * bench.size - 1 - bench.rank]], 1)
    held = [mine.size(1)] * bench.size

    def zigzag_by_torch(mine):
        shards = torch.cat(_padded_all_gather(mine, held), 1).chunk(2 * bench.size, 1)
        return torch.cat([shards[chunk] for chunk in natural], 1)

    yield _case(
        bench,
        "zigzag",
        mine,
        whole,
        zigzag_by_torch,
        lambda mine, comm: load_balanced_gather_forward_split_backward(mine, comm, 1),
    )

    lengths = [tokens // NUM_SEQUENCES + idx for idx in range(NUM_SEQUENCES)]
    rows = cal_split_sizes_multi(lengths, bench.size)
    sequences = _whole(bench, 1, sum(lengths)).split(lengths, 1)
    cuts = rows.t().tolist()  # [sequence][rank]
    mine = torch.cat([s.split(cut, 1)[bench.rank] for s, cut in zip(sequences, cuts, strict=True)], 1)

    def packed_by_torch(mine):
        parts = mine.split(rows[bench.rank].tolist(), 1)
        gathered = [_padded_all_gather(part, cut) for part, cut in zip(parts, cuts, strict=True)]
        return torch.cat([piece for pieces in gathered for piece in pieces], 1)

    yield _case(
        bench,
        f"{NUM_SEQUENCES} packed",
        mine,
        torch.cat(sequences, 1),
        packed_by_torch,
        lambda mine, comm: packed_data_gather_forward_split_backward(mine, rows, comm, 1),
    )


def _whole(bench: Bench, batch: int, length: int) -> torch.Tensor:
    return bench.data(batch * length * HIDDEN, sender=0).view(batch, length, HIDDEN)


def _padded_all_gather(mine: torch.Tensor, sizes: list[int]) -> list[torch.Tensor]:
    """torch's all-gather takes equal shapes only: pad to the longest, cut afterwards."""
    longest = max(sizes)
    sent = mine.contiguous()
    if min(sizes) != longest:
        sent = mine.new_empty([mine.size(0), longest, mine.size(2)])
        sent[:, : mine.size(1)].copy_(mine)
    received = [torch.empty_like(sent) for _ in sizes]
    dist.all_gather(received, sent)
    return [part[:, :size] for part, size in zip(received, sizes, strict=True)]


def _case(bench: Bench, label: str, mine: torch.Tensor, expected: torch.Tensor, torch_call, our_call) -> Case:
    share = expected.numel() // bench.size
    sent, bare = mine.new_zeros(share), mine.new_empty(share * bench.size)
    calls = {
        BASELINE: lambda: torch_call(mine),
        BARE: lambda: dist.all_gather_into_tensor(bare, sent),
        **{name: lambda comm=comm: our_call(mine, comm) for name, comm in bench.comms.items()},
    }
    calls, bound_of = bench.with_bounds(calls, copied=expected, over_torch=BARE)
    return Case(
        num_bytes=mine.nbytes,
        received=[],
        calls=calls,
        bus_factor=bench.size - 1,
        label=label,
        returns=expected,
        bound_of=bound_of,
        work=lambda impl: count_work(calls[impl], mine.nbytes, bench.comms.get(impl)),
    )
