"""Pipeline schedules as data: generate, check, simulate, lower and draw them without processes or devices."""

from .actions import ACT, GRAD, RECV, SEND, Action, Fused, Group, PlanError, Transfer
from .bidirectional import dualpipe, dualpipev
from .catalog import GENERATORS, get_plan
from .check import check
from .classic import gpipe, interleaved_1f1b, one_f_one_b, u_shaped
from .costs import Costs
from .draw import draw
from .lower import lower
from .plan import Plan, merge_split_backward
from .runtime import (
    DualPipe,
    DualPipeV,
    Executor,
    StageError,
    StepResult,
    WeightGradStore,
    run_backward,
    set_p2p_tensor_dtype,
    set_p2p_tensor_shapes,
)
from .simulate import simulate
from .timeline import Message, Span, Timeline
from .zero_bubble import zb_h1, zb_h2, zb_v

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
    "dualpipe",
    "dualpipev",
    "get_plan",
    "gpipe",
    "interleaved_1f1b",
    "lower",
    "merge_split_backward",
    "one_f_one_b",
    "run_backward",
    "set_p2p_tensor_dtype",
    "set_p2p_tensor_shapes",
    "simulate",
    "u_shaped",
    "zb_h1",
    "zb_h2",
    "zb_v",
]
