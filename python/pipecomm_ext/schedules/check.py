"""`check`: proves a plan before anything runs.

1. Completeness (`flow_of`): each stage runs each micro-batch once forward and once backward (B, or I and then
   W), on its owner, F first.
2. No data deadlock (`compute_run`): the compute rows run to the end.
3. Messages (`message_matching`): each transfer occurs once at both ends and matches in order.
4. No rendezvous deadlock (`program_run`): the program runs to the end although sends wait for their receives
   on one in-order stream per rank.
5. Limits: operations per group, activations and message buffers alive.
"""

from __future__ import annotations

from collections.abc import Sequence

from .compute_run import ComputeRun
from .costs import UNIT_COSTS
from .gc_pause import gc_paused
from .lowering import MAX_GROUP_OPS
from .plan import Plan
from .plan_error import PlanError, error_in_row
from .program_run import ProgramRun
from .simulate import peak_buffers
from .timeline import peak_activations


@gc_paused()
def check(
    plan: Plan,
    *,
    max_activations: int | Sequence[int] | None = None,
    max_buffers: int | Sequence[int] | None = None,
    max_group_ops: int = MAX_GROUP_OPS,
) -> None:
    """Proves that every rank can run `plan` to the end and that no message can be mistaken for another.

    Otherwise raises a PlanError with rank, position, action, what it waits for, and the rank's row. The
    limits, for all ranks or one per rank, bound the activations alive (F +1, B or W -1) and, at unit costs,
    the messages held (see `Timeline`).

    Example:
        ```python
        plan = get_plan("1f1b", P=4, M=8)
        check(plan, max_activations=4)  # raises PlanError if a rank would hold more, or wait for ever
        ```
    """
    if not isinstance(plan, Plan):
        raise TypeError(f"expected a Plan, got {type(plan).__name__}")
    try:
        run = ProgramRun(plan, UNIT_COSTS, max_group_ops)
    except PlanError:
        ComputeRun(plan, UNIT_COSTS)  # if the compute rows alone deadlock, say so instead
        raise
    if max_activations is not None:
        peaks = [peak_activations(row) for row in plan.compute]
        _check_limit(plan, "activations alive", peaks, max_activations)
    if max_buffers is not None:
        _check_limit(plan, "message buffers", peak_buffers(plan, run), max_buffers)


def _check_limit(plan: Plan, what: str, peaks: Sequence[int], limit: int | Sequence[int]) -> None:
    limits = [limit] * plan.P if isinstance(limit, int) else list(limit)
    if len(limits) != plan.P:
        raise ValueError(f"expected one limit, or one for each of {plan.P} ranks, got {len(limits)}")
    for rank, (peak, allowed) in enumerate(zip(peaks, limits, strict=True)):
        if peak > allowed:
            headline = f"{plan.name}: rank {rank} holds {peak} {what} at its peak; the limit is {allowed}"
            raise error_in_row(headline, plan.compute, rank, None, None)
