"""Building blocks of the generators: argument checks and the row under construction."""

from __future__ import annotations

from collections import deque

from .actions import Action, Compute, Fused, PlanError


def require(condition: bool, message: str) -> None:
    """Generators refuse what they cannot schedule, naming the violated condition and the values."""
    if not condition:
        raise PlanError(message)


def require_counts(**counts) -> None:
    for name, value in counts.items():
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{name} must be an int, got {value!r} of type {type(value).__name__}")
        require(value >= 1, f"{name} must be at least 1, got {value}")


class Row:
    """The row of one rank, written action by action.

    Per stage, micro-batches go up in order for forwards and for backwards, so a generator names only the
    stage. The weight gradients that I leaves behind are paid first in, first out, over all stages of the rank
    or of one stage.
    """

    def __init__(self):
        self.items: list[Compute] = []
        self._num_forwards: dict[int, int] = {}
        self._num_backwards: dict[int, int] = {}
        self._pending_weights: deque[tuple[int, int]] = deque()

    def num_forwards(self, stage: int) -> int:
        return self._num_forwards.get(stage, 0)

    def _next_forward(self, stage: int) -> Action:
        micro = self._num_forwards.get(stage, 0)
        self._num_forwards[stage] = micro + 1
        return Action("F", stage, micro)

    def _next_backward(self, kind: str, stage: int) -> Action:
        micro = self._num_backwards.get(stage, 0)
        self._num_backwards[stage] = micro + 1
        return Action(kind, stage, micro)

    def forward(self, stage: int) -> None:
        self.items.append(self._next_forward(stage))

    def backward(self, stage: int) -> None:
        self.items.append(self._next_backward("B", stage))

    def backward_input(self, stage: int) -> None:
        action = self._next_backward("I", stage)
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
        self.items.append(Fused(self._next_forward(forward_stage), self._next_backward("B", backward_stage)))
