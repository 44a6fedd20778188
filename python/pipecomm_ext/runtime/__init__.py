"""Runs plans on real ranks: the Executor and its parts."""

from ..errors import StageError
from .backward import run_backward
from .chain_ends import StepResult
from .executor import Executor
from .weight_grad_store import WeightGradStore

__all__ = ["Executor", "StageError", "StepResult", "WeightGradStore", "run_backward"]
