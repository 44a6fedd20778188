"""Reduces, piece by piece, gradients of which the ranks of a stage hold different versions."""

from __future__ import annotations

from torch import Tensor
from torch.distributed import ReduceOp

from ..communicator import Communicator
from ..communicator.reduce_operators import Operator
from ..core.extension import _C
from .link import Link
from .route import Relayed


def reduced(comm: Communicator, gradient: Tensor, relayed: Relayed, mode: str, link: Link) -> Tensor:
    """This rank's piece of the "sum" or "mean" over the ranks of the source: one exchange in the stage.

    The gradients are added in the order of the ranks, in fp32 if the dtype is smaller, and the result is
    rounded once: the same bits on every route.
    """
    pieces = relayed.source
    assert pieces.dim is not None
    plan = _C.plan_collect_pieces(
        comm.rank,
        comm.size,
        relayed.whole,
        (pieces.ranks, pieces.dim, None, False),
        tag=relayed.tag,
        shown=relayed.shown,
    )
    collected = [comm.empty(shape, gradient.dtype) for shape in plan.output_shapes]
    comm.exchange(
        plan,
        [gradient],
        collected,
        op="relay",
        members=sorted(pieces.ranks),
        within=link.within_stage,
        channel=link.stage_channel,
    )
    kind = ReduceOp.AVG if mode == "mean" else ReduceOp.SUM
    Operator(kind, gradient.dtype, gradient.device).reduce(collected, collected[0])
    return collected[0]
