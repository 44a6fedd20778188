"""The loop over one rank's row of a plan, for the Executor and for Megatron's schedules."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ..communicator import Communicator
from ..errors import StageError, summary_of
from ..schedules.actions import Action, Compute, Fused, Item, actions_in
from ..schedules.plan import Plan
from .mailbox import Mailbox

# How long a rank with wrong step arguments waits for the other ranks to report the same.
REFUSAL_S = 2.0
_COMPUTE = (Action, Fused)


class PlanLoop:
    """Posts the groups of a row, and computes its slots, each as soon as it has what it needs.

    Args:
        chain_input: `chain_input(stage, micro)` returns the input of a chain's first stage.
        compute: `compute(item, position, actions, operands)` computes a slot: in training the actions of the
            item, else only its forward. An operand is what an action needs from outside its stage: inputs
            (F), gradients of the outputs (B, I), or None.
    """

    def __init__(
        self,
        plan: Plan,
        mailbox: Mailbox,
        chain_input: Callable[[int, int], Any],
        compute: Callable[[Compute, int, Sequence[Action], Sequence[Any]], None],
    ):
        self._plan, self._mailbox = plan, mailbox
        self._chain_input, self._compute = chain_input, compute
        self.item: Item | None = None  # where the loop is

    def run(self, row: Sequence[Any], is_training: bool) -> None:
        """Runs the row; without training only its forwards."""
        is_profiling = torch.autograd._profiler_enabled()
        for position, item in enumerate(row):
            self.item = item
            if type(item) not in _COMPUTE:
                self._mailbox.post(item)
            elif is_profiling:
                with torch.profiler.record_function(str(item)):
                    self._run_slot(item, position, is_training)
            else:
                self._run_slot(item, position, is_training)
        self._mailbox.finish_step()

    def _run_slot(self, item: Compute, position: int, is_training: bool) -> None:
        actions: Sequence[Action] = actions_in(item)
        if not is_training:
            actions = [action for action in actions if action.kind == "F"]
        if actions:
            self._compute(item, position, actions, [self._operand(*action) for action in actions])

    def _operand(self, kind: str, stage: int, micro: int) -> Any:
        if kind == "F":
            if self._plan.prev_of[stage] is None:
                return self._chain_input(stage, micro)
            return self._mailbox.take_inputs(stage, micro)
        if kind == "W" or self._plan.next_of[stage] is None:
            return None
        return self._mailbox.take_gradients(stage, micro)


@contextlib.contextmanager
def failing_together(abort: Callable[[str], None]) -> Iterator[None]:
    """Aborts the communication, with the reason, if anything raises in this context: then all ranks raise."""
    try:
        yield
    except BaseException as error:
        abort(str(error) if isinstance(error, StageError) else summary_of(error))
        raise


@contextlib.contextmanager
def refused_together(
    given: Callable[[], Communicator | None], abort: Callable[[str], None]
) -> Iterator[None]:
    """Wraps the checks of a step's arguments. If all ranks raise here, nothing has been sent, and a `given`
    communicator remains usable. If only some do, the others would wait, so this calls `abort`."""
    try:
        yield
    except BaseException as error:
        try:
            communicator = given()
            if communicator is None or not isinstance(error, Exception):
                raise
            communicator.barrier(timeout=REFUSAL_S)
        except BaseException:
            abort(summary_of(error))
        raise
