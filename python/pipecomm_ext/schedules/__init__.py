"""Pipeline schedules as data: generate, check, simulate, lower and draw them without processes or devices.

Nothing here imports the rest of the package. The classes that run plans are in higher layers; this module
imports them on access.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .actions import ACT, GRAD, RECV, SEND, Action, Fused, Group, Transfer
from .check import check
from .costs import Costs
from .drawing.draw import draw
from .generators import *  # noqa: F403  (every schedule by its name)
from .generators import GENERATORS, get_plan
from .plan import Plan, lower, merge_split_backward
from .plan_error import PlanError
from .simulate import simulate
from .timeline import Message, Span, Timeline

if TYPE_CHECKING:
    from ..dualpipe import DualPipe, DualPipeV, set_p2p_tensor_dtype, set_p2p_tensor_shapes
    from ..runtime import Executor, StageError, StepResult, WeightGradStore, run_backward

    # The schedules that `generators` finds; to a type checker, those not listed here are Any.
    from .generators.bidirectional import dualpipe as dualpipe
    from .generators.bidirectional import dualpipev as dualpipev
    from .generators.classic import gpipe as gpipe
    from .generators.classic import interleaved_1f1b as interleaved_1f1b
    from .generators.classic import one_f_one_b as one_f_one_b
    from .generators.classic import u_shaped as u_shaped
    from .generators.zero_bubble import zb_h1 as zb_h1
    from .generators.zero_bubble import zb_h2 as zb_h2
    from .generators.zero_bubble import zb_v as zb_v

__all__ = [
    "ACT",
    "GENERATORS",
    "GRAD",
    "RECV",
    "SEND",
    "Action",
    "Costs",
    "DualPipe",
    "DualPipeV",
    "Executor",
    "Fused",
    "Group",
    "Message",
    "Plan",
    "PlanError",
    "Span",
    "StageError",
    "StepResult",
    "Timeline",
    "Transfer",
    "WeightGradStore",
    "check",
    "draw",
    "get_plan",
    "lower",
    "merge_split_backward",
    "run_backward",
    "set_p2p_tensor_dtype",
    "set_p2p_tensor_shapes",
    "simulate",
    *GENERATORS,  # pyright: ignore[reportUnsupportedDunderAll]
]

_OF_DUALPIPE = ("DualPipe", "DualPipeV", "set_p2p_tensor_dtype", "set_p2p_tensor_shapes")
_OF_RUNTIME = ("Executor", "StageError", "StepResult", "WeightGradStore", "run_backward")
_HOME_OF = dict.fromkeys(_OF_DUALPIPE, "dualpipe") | dict.fromkeys(_OF_RUNTIME, "runtime")


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"pipecomm_ext.{_HOME_OF[name]}"), name)
