"""Gradients that the ranks of a stage hold in different versions, added up piece by piece."""

from __future__ import annotations

import torch

from .. import _C
from ..communicator import Communicator
from .route import Relayed


def check_can_be_reduced(dtype: torch.dtype, mode: str) -> None:
    if not (dtype.is_floating_point or dtype.is_complex):
        raise TypeError(f'grad_reduce="{mode}" needs floating-point or complex gradients, not {dtype}')


def reduced(
    comm: Communicator, gradient: torch.Tensor, relayed: Relayed, mode: str, channel: int | None
) -> torch.Tensor:
    """This rank's piece of the "sum" or "mean" over the ranks of the source: one exchange in the stage.

    Added up in rank order, in fp32 if the dtype is smaller, and rounded once: the same bits on every route.
    """
    pieces = relayed.source
    plan = _C.plan_collect_pieces(
        comm.rank,
        comm.size,
        relayed.whole,
        (pieces.ranks, pieces.dim, None, False),
        tag=relayed.tag,
        shown=relayed.shown,
    )
    collected = [comm.empty(shape, gradient.dtype) for shape in plan.output_shapes]
    comm.exchange(plan, [gradient], collected, op="relay", members=sorted(pieces.ranks), channel=channel)
    dtype = gradient.dtype
    total = collected[0].to(torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype)
    for piece in collected[1:]:
        total += piece.to(total.dtype)
    if mode == "mean":
        total /= len(collected)
    return total.to(dtype)
