"""Operators of compiled graphs whose calls other ranks take part in."""

from __future__ import annotations

from torch._higher_order_ops.effects import _EffectType, _register_effectful_op
from torch.library import CustomOpDef


def communicates(operator: CustomOpDef) -> CustomOpDef:
    """Makes a compiled graph keep all calls of an operator and of its like, in their order.

    A compiler takes operators that change no argument for functions, whose calls it drops if nobody uses the
    result, merges if the arguments are equal, and moves. Other ranks, with graphs of their own, would wait
    for them, or get the data of another call.
    """
    _register_effectful_op(operator._opoverload, _EffectType.ORDERED)
    return operator
