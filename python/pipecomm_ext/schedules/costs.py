"""`Costs`: durations of actions and messages, in any unit of time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from numbers import Real

from .actions import Compute, Fused
from .plan_error import PlanError

Number = float | Fraction
Cost = Number | Sequence[Number]


@dataclass(frozen=True)
class Costs:
    """Durations of forward (F), backward for input (I) and for weight (W); a full backward takes I + W.

    Each is one number, or a sequence with one per stage. Results are exact for integers and fractions.

    Attributes:
        F, I, W: of the forward, and of the parts of the backward.
        FB: of a fused slot (by the stage of its forward); None means that fusing gains nothing: F + I + W.
        comm: the time that a message takes once both ends have started it (by the stage that made it).
    """

    F: Cost = 1
    I: Cost = 1  # noqa: E741
    W: Cost = 1
    FB: Cost | None = None
    comm: Cost = 0

    def __post_init__(self):
        for field in fields(self):
            cost = getattr(self, field.name)
            if isinstance(cost, Sequence) and not isinstance(cost, str):
                cost = tuple(cost)
                object.__setattr__(self, field.name, cost)
            elif cost is None and field.name == "FB":
                continue
            for value in cost if isinstance(cost, tuple) else (cost,):
                if not isinstance(value, Real):
                    raise TypeError(f"cost {field.name} must be a number or one per stage, got {value!r}")
                if value < 0 or not value < math.inf:
                    raise PlanError(f"cost {field.name} must be finite and not negative, got {value}")

    def durations(self, row: Iterable[Compute]) -> list[Number]:
        """The duration of each compute slot of a row."""
        return [self._duration(item) for item in row]

    def _duration(self, item: Compute) -> Number:
        if type(item) is Fused:
            forward, backward = item
            if self.FB is not None:
                return _at(self.FB, forward.stage)
            return self._duration(forward) + self._duration(backward)
        kind, stage, _ = item
        if kind == "B":
            return _at(self.I, stage) + _at(self.W, stage)
        return _at(getattr(self, kind), stage)

    def latency(self, stage: int) -> Number:
        """The duration of a message made by `stage`, once both its ends have started."""
        return _at(self.comm, stage)


def _at(cost: Cost, stage: int) -> Number:
    if not isinstance(cost, Sequence):
        return cost
    if stage >= len(cost):
        raise PlanError(f"costs are given for {len(cost)} stages, but the plan has a stage {stage}")
    return cost[stage]


UNIT_COSTS = Costs()
