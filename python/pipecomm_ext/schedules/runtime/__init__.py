"""Runs plans on real ranks: the Executor, and DualPipe's classes on top of it."""

from .backward import run_backward
from .dualpipe import DualPipe, DualPipeV, set_p2p_tensor_dtype, set_p2p_tensor_shapes
from .errors import StageError
from .executor import Executor, StepResult
from .weight_grad_store import WeightGradStore

__all__ = [
    "DualPipe",
    "DualPipeV",
    "Executor",
    "StageError",
    "StepResult",
    "WeightGradStore",
    "run_backward",
    "set_p2p_tensor_dtype",
    "set_p2p_tensor_shapes",
]
