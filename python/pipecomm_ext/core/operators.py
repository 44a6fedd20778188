"""Operators of compiled graphs that communicate."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op
from torch.fx import traceback
from torch.library import CustomOpDef


def communicates(operator: CustomOpDef) -> Callable[[Callable], Callable]:
    """Registers the fake kernel of an operator that other ranks take part in. The calls of all such operators
    stay in the graph, in program order.

    A compiler treats operators that change no argument as pure functions: it drops calls whose result is
    unused, merges calls with equal arguments, and reorders calls. Other ranks, whose graphs may differ, would
    wait for them, or receive the data of another call.
    """
    _register_effectful_op(operator._opoverload, _EffectType.ORDERED)

    def register(fake: Callable) -> Callable:
        @functools.wraps(fake)
        def ordered(*arguments: Any) -> Any:
            _keep_out_of_checkpoints()
            _order_effects_in_inductor()
            return fake(*arguments)

        operator.register_fake(ordered)
        return fake

    return register


def _keep_out_of_checkpoints() -> None:
    """Makes activation checkpoints in a graph save the results of the node that is traced now, instead of
    communicating once more in the backward. torch cannot partition effects that are computed again.
    """
    meta = traceback.get_current_meta()
    meta.pop("recompute", None)
    meta.pop("ac_graph_id", None)


def _order_effects_in_inductor() -> None:
    """Works around a bug of inductor, which loses the order of effects: it records by buffer name what must
    come first, and looks it up by operation name (pytorch/pytorch#189209). Only if inductor is loaded:
    importing it takes seconds. A call from a fake kernel is early enough: those are traced before lowering.
    """
    lowering = sys.modules.get("torch._inductor.lowering")
    if lowering is None:
        return
    with_effects = torch.ops.higher_order.with_effects
    original = getattr(lowering, "lowerings", {}).get(with_effects)
    if original is None or hasattr(original, "orders_pipecomm_ext"):
        return

    @functools.wraps(original)
    def ordered(token: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        graph = lowering.V.graph
        earlier, num_earlier = list(graph.effectful_ops.values()), len(graph.operations)
        results = original(token, op, *args, **kwargs)
        if getattr(op, "namespace", None) == "pipecomm_ext":
            for operation in graph.operations[num_earlier:]:
                after = graph.additional_buffer_deps[operation.get_operation_name()]
                after.update(node.get_name() for node in earlier)
        return results

    vars(ordered)["orders_pipecomm_ext"] = True
    lowering.lowerings[with_effects] = ordered
