"""`simulate`: makespan, bubble and memory of a plan without processes."""

from __future__ import annotations

from .compute_run import ComputeRun
from .costs import UNIT_COSTS, Costs
from .flow import flow_of
from .gc_pause import gc_paused
from .plan import Plan, lower
from .program_run import ProgramRun
from .timeline import Message, Span, Timeline


@gc_paused()
def simulate(plan: Plan, costs: Costs = UNIT_COSTS, *, compute_only: bool = False) -> Timeline:
    """The timeline of `plan` at `costs`.

    The plan's own program is simulated, or else its lowering for these costs, with one in-order
    communication stream per rank. compute_only=True returns the lower bound instead: communication is
    unlimited, and a message arrives `comm` after its producer has ended. Raises PlanError for a deadlock or
    mismatched messages.

    Example:
        ```python
        timeline = simulate(get_plan("1f1b", P=4, M=8), Costs(F=1, I=1, W=1))
        print(f"{timeline.makespan} slots, {timeline.bubble_ratio:.0%} idle")
        print(timeline.text_picture())
        ```
    """
    if compute_only:
        return Timeline.from_spans(plan, _spans(plan, ComputeRun(plan, costs)))
    if not plan.has_own_program:
        plan = lower(plan, costs)
    run = ProgramRun(plan, costs)
    return Timeline.from_spans(
        plan,
        _spans(plan, run),
        _messages(plan, run),
        exposed_comm=_exposed_comm(plan, run),
        peak_buffers=peak_buffers(plan, run),
    )


def _spans(plan: Plan, run: ComputeRun | ProgramRun) -> list[list[Span]]:
    return [list(map(Span, *columns)) for columns in zip(plan.compute, run.starts, run.ends, strict=True)]


def _messages(plan: Plan, run: ProgramRun) -> list[Message]:
    messages, flow = [], flow_of(plan)
    for result, times in enumerate(run.sent_at):
        if times is not None:
            what, stage, micro = flow.named(result)
            receiver = flow.receiver_of_stage[result // flow.num_micros]
            messages.append(Message(what, stage, micro, plan.owner[stage], receiver, *times))
    return messages


def _produced_at(plan: Plan, run: ProgramRun) -> list:
    """Per result, the end of its producer."""
    flow = flow_of(plan)
    produced_at = [None] * flow.num_results
    for ends, outputs in zip(run.ends, flow.outputs, strict=True):
        for end, results in zip(ends, outputs, strict=True):
            for result in results:
                produced_at[result] = end
    return produced_at


def _exposed_comm(plan: Plan, run: ProgramRun) -> list:
    """Per rank, the time for which computes waited although all their inputs had been produced."""
    produced_at = _produced_at(plan, run)
    exposed = []
    for starts, ends, inputs in zip(run.starts, run.ends, flow_of(plan).inputs, strict=True):
        free_at = [0, *ends[:-1]]
        ready_at = [
            max([free, *(produced_at[result] for result in results)])
            for free, results in zip(free_at, inputs, strict=True)
        ]
        exposed.append(sum(start - ready for start, ready in zip(starts, ready_at, strict=True)))
    return exposed


def peak_buffers(plan: Plan, run: ProgramRun) -> list[int]:
    """Per rank, the most messages held at once: posted and not yet consumed, or produced and not yet sent."""
    flow, produced_at = flow_of(plan), _produced_at(plan, run)
    peaks = []
    for rank in range(plan.P):
        changes = []
        for group in run.groups[rank]:
            received = group.received
            changes += [(group.posted, 1)] * len(received)
            for result in group.results:
                if result not in received:
                    changes += (produced_at[result], 1), (group.end, -1)
        for start, results in zip(run.starts[rank], flow.inputs[rank], strict=True):
            changes += [
                (start, -1) for result in results if flow.receiver_of_stage[result // flow.num_micros] >= 0
            ]
        peaks.append(_peak(changes))
    return peaks


def _peak(changes: list[tuple]) -> int:
    """Highest count of (time, +1 | -1); at equal times arrivals count before departures."""
    count = peak = 0
    for _, change in sorted(changes, key=lambda change: (change[0], -change[1])):
        count += change
        peak = max(peak, count)
    return peak
