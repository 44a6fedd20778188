"""Runs plans on real ranks: the Executor, and DualPipe's classes on top of it."""

from .errors import StageError
from .executor import Executor, StepResult
from .weight_grad_store import WeightGradStore

__all__ = ["Executor", "StageError", "StepResult", "WeightGradStore"]
