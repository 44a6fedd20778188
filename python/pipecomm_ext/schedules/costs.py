"""How long things take, in any unit of time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from numbers import Real

from .actions import Compute, Fused, PlanError

Cost = Real | tuple[Real, ...]


@dataclass(frozen=True)
class Costs:
    """Durations of forward (F), backward for input (I) and for weight (W); a full backward takes I + W.

    Each is one number, or a sequence with one per stage. FB is the duration of a fused slot (by the stage of
    its forward); None means that fusing gains nothing: F + I + W. `comm` is the time that a message takes
    once both ends are there (by the stage that made it). With integers or fractions every result is exact.
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
                if value < 0:
                    raise PlanError(f"cost {field.name} must not be negative, got {value}")

    def durations(self, row: Iterable[Compute]) -> list:
        """The duration of each compute slot of a row."""
        return [self._duration(item) for item in row]

    def _duration(self, item: Compute):
        if type(item) is Fused:
            forward, backward = item
            if self.FB is not None:
                return _at(self.FB, forward.stage)
            return self._duration(forward) + self._duration(backward)
        kind, stage, _ = item
        if kind == "F":
            return _at(self.F, stage)
        if kind == "I":
            return _at(self.I, stage)
        if kind == "W":
            return _at(self.W, stage)
        return _at(self.I, stage) + _at(self.W, stage)

    def latency(self, stage: int):
        """Duration of a message made by `stage`, from the moment at which both its ends have started."""
        return _at(self.comm, stage)


def _at(cost: Cost, stage: int):
    if type(cost) is not tuple:
        return cost
    if stage >= len(cost):
        raise PlanError(f"costs are given for {len(cost)} stages, but the plan has a stage {stage}")
    return cost[stage]


UNIT_COSTS = Costs()
