"""Schedules with a whole backward: GPipe, 1F1B, interleaved 1F1B, and the U-shaped pipeline."""

from __future__ import annotations

from ..actions import Action
from ..plan import Plan
from .building_blocks import require, require_counts
from .registry import generator


@generator()
def gpipe(P: int, M: int) -> Plan:
    """All forwards, then all backwards, both in micro-batch order. One stage per rank.

    Bubble (P-1)(F+B) per rank, peak M activations. Huang et al., GPipe, 2019.
    """
    require_counts(P=P, M=M)
    compute = [[Action(kind, rank, micro) for kind in "FB" for micro in range(M)] for rank in range(P)]
    return Plan("gpipe", P, M, owner=range(P), compute=compute)


@generator("1f1b")
def one_f_one_b(P: int, M: int) -> Plan:
    """P-1-r forwards on rank r, then one forward and one backward in turn, then the rest. One stage per rank.

    Bubble (P-1)(F+B), peak min(M, P-r). Narayanan et al., PipeDream-Flush, 2021.
    """
    require_counts(P=P, M=M)
    compute = [_alternate(stage, M, num_warmup=min(M, P - 1 - stage)) for stage in range(P)]
    return Plan("one_f_one_b", P, M, owner=range(P), compute=compute)


def _alternate(stage: int, M: int, num_warmup: int) -> list[Action]:
    forwards = [Action("F", stage, micro) for micro in range(M)]
    backwards = [Action("B", stage, micro) for micro in range(M)]
    return _one_by_one(forwards, backwards, num_warmup)


def _one_by_one(forwards: list[Action], backwards: list[Action], num_warmup: int) -> list[Action]:
    """`num_warmup` forwards, then forward and backward in turn, then the remaining backwards."""
    row = forwards[:num_warmup]
    for forward, backward in zip(forwards[num_warmup:], backwards, strict=False):
        row += (forward, backward)
    return row + backwards[len(forwards) - num_warmup :]


@generator("interleaved")
def interleaved_1f1b(P: int, M: int, V: int, group_size: int | None = None) -> Plan:
    """1F1B with V chunks per rank: rank r owns the stages c*P + r. Chunks take turns after `group_size`
    micro-batches.

    Without `group_size`, M is cut into max(1, M // P) equal groups, which must come out even. With it, the
    last group takes the tail, which must be empty or have at least P micro-batches.
    Bubble (P-1)(F+B)/V; peak (V-1)G + 2(P-1-r) + 1 chunks. Narayanan et al., Megatron-LM, 2021.
    """
    require_counts(P=P, M=M, V=V)
    if group_size is None:
        num_rounds = max(1, M // P)
        require(
            M % num_rounds == 0,
            f"interleaved_1f1b: M={M} micro-batches do not cut into M // P = {num_rounds} "
            f"equal groups; choose M as a multiple of P={P}, or give group_size",
        )
        group_size = M // num_rounds
    else:
        require_counts(group_size=group_size)
        tail = M % group_size
        require(
            min(M, group_size) >= min(M, P) and (tail == 0 or tail >= P or M < group_size),
            f"interleaved_1f1b: group_size={group_size} with M={M}: the groups of micro-batches, "
            f"the last included, must not be smaller than P={P}",
        )
    order = [
        (chunk, micro)
        for start in range(0, M, group_size)
        for chunk in range(V)
        for micro in range(start, min(start + group_size, M))
    ]
    compute = []
    for rank in range(P):
        forwards = [Action("F", chunk * P + rank, micro) for chunk, micro in order]
        backwards = [Action("B", (V - 1 - chunk) * P + rank, micro) for chunk, micro in order]
        num_warmup = min(M * V, (V - 1) * group_size + 2 * (P - 1 - rank))
        compute.append(_one_by_one(forwards, backwards, num_warmup))
    return Plan("interleaved_1f1b", P, M, owner=[*range(P)] * V, compute=compute)


@generator()
def u_shaped(P: int, M: int) -> Plan:
    """A chain of P+1 stages that returns: rank 0 owns the first and the last one, so data, labels and loss.

    It is 1F1B of P+1 stages; the rows of the first and the last stage, which share rank 0, are merged by the
    time at which 1F1B starts their actions (F=1, B=2). Peak on rank 0: min(M, P+1) + 1.
    """
    require_counts(P=P, M=M)
    last = P
    rows = [_alternate(stage, M, num_warmup=min(M, P - stage)) for stage in range(P + 1)]

    def start_time(action: Action) -> int:
        kind, stage, micro = action
        if stage == last:
            return P + 3 * micro + (kind == "B")
        if kind == "B":
            return 3 * P + 1 + 3 * micro
        return micro if micro <= P else 3 * micro

    # At equal times the last stage comes first, because the backward begins there.
    home = sorted(rows[last] + rows[0], key=start_time)
    return Plan("u_shaped", P, M, owner=[*range(P), 0], compute=[home, *rows[1:last]])
