"""DualPipeV and DualPipe: forward of one micro-batch and backward of another in one fused slot. DeepSeek-AI,
DualPipe, 2025.

DualPipe on P ranks is DualPipeV on P/2 ranks plus its mirror image: rank r and rank P-1-r hold the same two
stages and do the same, with the two chains exchanged. So one generator of rows serves both.
"""

from __future__ import annotations

from ..actions import Compute
from ..plan import Plan
from .building_blocks import RowBuilder, require, require_counts
from .registry import generator


@generator()
def dualpipev(P: int, M: int, *, split_cooldown: bool = True, fuse_turn_pair: bool = False) -> Plan:
    """Two chunks per rank placed as a V: rank r owns the stages r and 2P-1-r, so rank 0 has input and loss.

    M >= 2P. Bubble (P-1)(FB+B-3W) at F=I=W, peak 2P+1 chunks.
    split_cooldown=False keeps the last backwards whole. With activation recomputation a late W keeps the
    recomputed activations alive; the price is a bubble of (P-1)(FB+B-W).
    fuse_turn_pair=True also fuses the very first forward-backward pair of the rank where the V turns.
    """
    require_counts(P=P, M=M)
    require(
        M >= 2 * P,
        f"dualpipev: M={M} micro-batches are too few for P={P} ranks; expected at least 2P = {2 * P}",
    )
    owner = [*range(P), *reversed(range(P))]
    compute = [
        _row_of_eight_steps(P, M, rank, rank, 2 * P - 1 - rank, split_cooldown, fuse_turn_pair)
        for rank in range(P)
    ]
    return Plan("dualpipev", P, M, owner=owner, compute=compute)


@generator()
def dualpipe(P: int, M: int, *, split_cooldown: bool = True, fuse_turn_pair: bool = False) -> Plan:
    """Two opposite chains of P stages on P ranks, M/2 micro-batches each: chain 0 (stages 0..P-1) runs from
    rank 0, chain 1 (stages P..2P-1, the same weights) from rank P-1.

    P even, M even, M >= 2P. Bubble (P/2-1)(FB+B-3W) at F=I=W, peak P+1. Options as in `dualpipev`.
    """
    require_counts(P=P, M=M)
    require(P % 2 == 0, f"dualpipe: P={P} ranks; expected an even number, since ranks r and P-1-r are a pair")
    require(M % 2 == 0, f"dualpipe: M={M} micro-batches; expected an even number, half for each direction")
    require(
        M >= 2 * P,
        f"dualpipe: M={M} micro-batches are too few for P={P} ranks; expected at least 2P = {2 * P}",
    )
    compute = []
    for rank in range(P):
        nearer, farther = rank, 2 * P - 1 - rank
        if rank >= P // 2:
            nearer, farther = farther, nearer
        pair_idx = min(rank, P - 1 - rank)
        compute.append(
            _row_of_eight_steps(P // 2, M // 2, pair_idx, nearer, farther, split_cooldown, fuse_turn_pair)
        )
    return Plan(
        "dualpipe",
        P,
        M,
        owner=[*range(P), *reversed(range(P))],
        next_of=[*range(1, P), None, *range(P + 1, 2 * P), None],
        replicas=[(stage, P + stage) for stage in range(P)],
        compute=compute,
    )


def _row_of_eight_steps(
    P: int, M: int, rank: int, s0: int, s1: int, split_cooldown: bool, fuse_turn_pair: bool
) -> list[Compute]:
    """DualPipe's eight steps on rank `rank` of a V of P ranks; s0 is the stage that gets its input first."""
    row = RowBuilder()
    to_turn, from_start = P - 1 - rank, rank + 1

    cooldown_backward = row.backward_input if split_cooldown else row.backward
    cooldown_weight = row.weight if split_cooldown else lambda: None

    for _ in range(2 * to_turn):  # 1: nF0
        row.forward(s0)
    for _ in range(from_start):  # 2: nF0F1
        row.forward(s0)
        row.forward(s1)
    for _ in range(to_turn):  # 3: nI1W1F1
        row.backward_input(s1)
        row.weight()
        row.forward(s1)
    for k in range(M - 2 * P + rank + 1):  # 4: nF0B1F1B0, the steady state
        if k == 0 and to_turn == 0 and not fuse_turn_pair:
            row.forward(s0)
            row.backward(s1)
        else:
            row.fused(s0, s1)
        row.fused(s1, s0)
    for _ in range(to_turn):  # 5: nB1F1B0
        row.backward(s1)
        row.fused(s1, s0)
    for k in range(2 * from_start):  # 6: nB1B0, the second half for the input only
        (row.backward if k < from_start else cooldown_backward)(s0 if k % 2 else s1)
    for _ in range(to_turn):  # 7: nW0I0
        cooldown_weight()
        cooldown_backward(s0)
    for _ in range(from_start):  # 8: nW
        cooldown_weight()
    return row.items
