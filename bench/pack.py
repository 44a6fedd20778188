"""Packing alone: the pieces of a tensor for 8 peers in a row, against torch and a plain copy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.distributed as dist
from ops import BASELINE, Bench, Case
from work import Work, count_work

from pipecomm_ext import Communicator, gather_forward_split_backward

LIST = "list + cat"
COPY = "plain copy"  # of the same number of bytes, into kept memory
OURS = "pipecomm"
NUM_PEERS = 8


def build(bench: Bench, num_bytes: int) -> Iterator[Case]:
    """[S, 8, run] to 8 peers by the middle dim, every rank for itself. torch: movedim + contiguous."""
    groups = [dist.new_group([rank]) for rank in range(bench.size)]
    with Communicator(groups[bench.rank], device=bench.device) as alone:
        for label, run_numel, parts in [
            ("3 heads of 128 a run", 384, 1),
            ("the same, q of fused qkv", 384, 3),
            ("1 head of 128 a run", 128, 1),
            ("64 channels a run", 64, 1),
        ]:
            yield _case(bench, alone, num_bytes, label, run_numel, parts)


def _case(bench: Bench, alone: Communicator, num_bytes: int, label: str, run_numel: int, parts: int) -> Case:
    """A gather over one rank is a copy by the engine; for a permuted view it does the same as packing."""
    tokens = max(1, num_bytes // (NUM_PEERS * run_numel * bench.dtype.itemsize))
    fused = bench.data(tokens * parts * NUM_PEERS * run_numel, sender=bench.rank)
    rows = fused.view(tokens, parts, NUM_PEERS, run_numel)[:, 0]
    by_peer = rows.movedim(1, 0)
    expected = by_peer.clone(memory_format=torch.contiguous_format)
    kept = torch.empty_like(expected)
    calls = {
        BASELINE: lambda: by_peer.contiguous(),
        LIST: lambda: torch.cat([rows[:, peer].contiguous() for peer in range(NUM_PEERS)]).view_as(expected),
        COPY: lambda: kept.copy_(expected),
        OURS: lambda: gather_forward_split_backward(by_peer, alone, 0),
    }

    def work(impl: str) -> Work:
        counted = count_work(calls[impl], expected.nbytes, None)
        return replace(counted, copy_passes=1.0) if impl == OURS else counted  # the exchange is the copy

    return Case(
        num_bytes=expected.nbytes,
        received=[],
        calls=calls,
        label=label,
        returns=expected,
        bound_of=dict.fromkeys(calls, COPY),
        work=work,
    )
