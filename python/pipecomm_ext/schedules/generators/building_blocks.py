"""Building blocks of the generators: argument checks and the row under construction."""

from __future__ import annotations

from collections import Counter, deque

from ..actions import Action, Compute, Fused
from ..compute_plan import require_count
from ..plan_error import PlanError


def require(condition: bool, message: str) -> None:
    """Raises PlanError unless `condition` holds; `message` names the violated condition and the values."""
    if not condition:
        raise PlanError(message)


def require_counts(**counts) -> None:
    for name, value in counts.items():
        require_count(name, value)


class RowBuilder:
    """The row of one rank, written action by action.

    The micro-batches of a stage follow in order, forwards and backwards each, so a generator names only the
    stage. Weight gradients that I leaves behind are computed first in, first out, over all stages of the rank
    or of one stage.
    """

    def __init__(self) -> None:
        self.items: list[Compute] = []
        self._num_forwards: Counter[int] = Counter()  # by stage
        self._num_backwards: Counter[int] = Counter()
        self._pending_weights: deque[tuple[int, int]] = deque()

    def num_forwards(self, stage: int) -> int:
        return self._num_forwards[stage]

    def _next(self, kind: str, stage: int) -> Action:
        counts = self._num_forwards if kind == "F" else self._num_backwards
        counts[stage] += 1
        return Action(kind, stage, counts[stage] - 1)

    def forward(self, stage: int) -> None:
        self.items.append(self._next("F", stage))

    def backward(self, stage: int) -> None:
        self.items.append(self._next("B", stage))

    def backward_input(self, stage: int) -> None:
        action = self._next("I", stage)
        self.items.append(action)
        self._pending_weights.append((stage, action.micro))

    def weight(self, stage: int | None = None) -> None:
        """The oldest pending weight gradient (of `stage`)."""
        pending = self._pending_weights
        oldest = pending[0] if stage is None else next(entry for entry in pending if entry[0] == stage)
        pending.remove(oldest)
        self.items.append(Action("W", *oldest))

    def remaining_weights(self, stage: int | None = None) -> None:
        for pending_stage, _ in list(self._pending_weights):
            if stage in (None, pending_stage):
                self.weight(stage)

    def fused(self, forward_stage: int, backward_stage: int) -> None:
        self.items.append(Fused(self._next("F", forward_stage), self._next("B", backward_stage)))
