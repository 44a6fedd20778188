"""Zero-bubble schedules: the backward is split into I (for the input, on the critical path) and W (for the
weights, free to move), and W fills what would be idle. Qi et al., Zero Bubble Pipeline Parallelism, 2023."""

from __future__ import annotations

from ..actions import actions_in
from ..plan import Plan
from .building_blocks import RowBuilder, require_counts
from .registry import generator


@generator("zbh1")
def zb_h1(P: int, M: int) -> Plan:
    """The 1F1B order with W postponed by r micro-batches on rank r. One stage per rank.

    Bubble (P-1)(F+I-W), peak min(M, P) on every rank.
    """
    require_counts(P=P, M=M)
    compute = []
    for rank in range(P):
        row = RowBuilder()
        num_warmup = min(M, P - 1 - rank)
        for _ in range(num_warmup):
            row.forward(rank)
        for k in range(M - num_warmup):
            row.forward(rank)
            row.backward_input(rank)
            if k >= rank:
                row.weight()
        for _ in range(num_warmup):
            row.backward_input(rank)
            row.weight()
        row.remaining_weights()
        compute.append(row.items)
    return Plan("zb_h1", P, M, owner=range(P), compute=compute)


@generator("zbh2")
def zb_h2(P: int, M: int) -> Plan:
    """More forwards ahead, W postponed by 2r micro-batches. One stage per rank.

    No idle time between a rank's first and last action at F=I=W (the ranks end P-1 units apart, so a gain
    needs an optimizer step that is not synchronised over ranks); peak min(M, 2P-1).
    """
    require_counts(P=P, M=M)
    compute = []
    for rank in range(P):
        row = RowBuilder()
        num_warmup = min(M, 2 * (P - rank) - 1)
        for _ in range(num_warmup):
            row.forward(rank)
        for k in range(M):
            row.backward_input(rank)
            if k >= 2 * rank:
                row.weight()
            if row.num_forwards(rank) < M:
                row.forward(rank)
        row.remaining_weights()
        compute.append(row.items)
    return Plan("zb_h2", P, M, owner=range(P), compute=compute)


@generator("zbv")
def zb_v(P: int, M: int) -> Plan:
    """Two chunks per rank placed as a V: rank r owns the stages r and 2P-1-r, so rank 0 has input and loss.

    No idle time between a rank's first and last action at F=I=W; peak 2P chunks. A step of fewer than 2P-1
    micro-batches is the schedule of 2P-1 without the missing ones.
    """
    require_counts(P=P, M=M)
    compute = []
    num_planned = max(M, 2 * P - 1)
    for rank in range(P):
        row = RowBuilder()
        down, up = rank, 2 * P - 1 - rank

        def whole_backward(stage, row=row):
            row.backward_input(stage)
            row.weight(stage)

        for _ in range(2 * (P - rank) - 1):
            row.forward(down)
        for _ in range(rank):
            row.forward(up)
            row.forward(down)
        for _ in range(P - rank):
            row.forward(up)
            whole_backward(up)
        while row.num_forwards(up) < num_planned:
            if row.num_forwards(down) < num_planned:
                row.forward(down)
            whole_backward(down)
            row.forward(up)
            whole_backward(up)
        for _ in range(rank):
            row.backward_input(down)
            row.backward_input(up)
        for _ in range(P - rank):
            whole_backward(down)
        row.remaining_weights(up)
        row.remaining_weights(down)
        compute.append([item for item in row.items if all(part.micro < M for part in actions_in(item))])
    return Plan("zb_v", P, M, owner=[*range(P), *reversed(range(P))], compute=compute)
