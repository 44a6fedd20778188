"""`Timeline`: when everything of a plan ran, simulated or measured, and the numbers that follow."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real
from statistics import median
from typing import NamedTuple

from .actions import Compute, Fused, Group, actions_in
from .costs import Costs
from .plan import Plan


class Span(NamedTuple):
    """A compute slot and the time it took."""

    action: Compute
    start: Real
    end: Real


class Message(NamedTuple):
    """The ACT or GRAD that `stage` made for `micro`, under way from `start` (both ends have started it) to
    `end`."""

    what: str
    stage: int
    micro: int
    src: int
    dst: int
    start: Real
    end: Real


@dataclass(frozen=True)
class Timeline:
    """Times are in the unit of the costs, or seconds if measured. Tuples have one entry per rank.

    makespan           from the first start (0 if simulated) to the last end
    idle               makespan less the rank's work: the bubble
    bubble_ratio       idle time of all ranks over P * makespan
    peak_activations   most micro-batches alive at once: F +1, B or W -1
    spans              per rank, its compute slots with start and end, in order
    own_span_idle      idle time between the rank's own first start and last end (the Zero Bubble measure)
    exposed_comm       time that computes waited for a message after its producer had ended
    peak_buffers       most messages held at once: posted and not yet consumed, or produced and not yet sent
    messages           all transfers, by start
    """

    makespan: Real
    idle: tuple[Real, ...]
    bubble_ratio: float
    peak_activations: tuple[int, ...]
    spans: tuple[tuple[Span, ...], ...]
    own_span_idle: tuple[Real, ...] = ()
    exposed_comm: tuple[Real, ...] = ()
    peak_buffers: tuple[int, ...] = ()
    messages: tuple[Message, ...] = ()
    plan: Plan | None = None

    @classmethod
    def from_spans(cls, plan: Plan, spans, messages=(), *, exposed_comm=(), peak_buffers=()) -> Timeline:
        """The timeline of `plan` from measured or simulated spans (per rank, in order of time)."""
        spans = tuple(tuple(Span(*span) for span in row) for row in spans)
        begin = min((row[0].start for row in spans if row), default=0)
        makespan = max((row[-1].end for row in spans if row), default=0) - begin
        work = [sum(span.end - span.start for span in row) for row in spans]
        idle = tuple(makespan - busy for busy in work)
        return cls(
            makespan=makespan,
            idle=idle,
            bubble_ratio=float(sum(idle) / (makespan * len(spans))) if makespan else 0.0,
            peak_activations=tuple(peak_activations(span.action for span in row) for row in spans),
            spans=spans,
            own_span_idle=tuple(
                row[-1].end - row[0].start - busy if row else 0 for row, busy in zip(spans, work, strict=True)
            ),
            exposed_comm=tuple(exposed_comm),
            peak_buffers=tuple(peak_buffers),
            messages=tuple(
                sorted((Message(*message) for message in messages), key=lambda m: (m.start, m[:5]))
            ),
            plan=plan,
        )

    def costs(self) -> Costs:
        """The median duration of each kind of action of each stage, to simulate what was measured.

        A whole backward counts as I, with a W of nothing, where a stage has no I. Messages take no time.
        """
        durations: dict[tuple[str, int], list[Real]] = {}
        for span in (span for row in self.spans for span in row):
            kind, stage = ("FB", span.action.forward.stage) if type(span.action) is Fused else span.action[:2]
            durations.setdefault((kind, stage), []).append(span.end - span.start)
        if not durations:
            raise ValueError("this timeline has no spans to take durations from")

        def per_stage(*kinds: str) -> tuple[Real, ...]:
            def cost(stage: int) -> Real:
                found = next((durations[kind, stage] for kind in kinds if (kind, stage) in durations), [0])
                return median(found)

            return tuple(map(cost, range(1 + max(stage for _, stage in durations))))

        has_fused = any(kind == "FB" for kind, _ in durations)
        return Costs(
            F=per_stage("F"),
            I=per_stage("I", "B"),
            W=per_stage("W"),
            FB=per_stage("FB") if has_fused else None,
        )

    def text_picture(self, width: int = 96) -> str:
        """One line per rank, `width` characters for the makespan: the kind of the action that runs then (X: a
        fused slot), or a dot."""
        begin = min((row[0].start for row in self.spans if row), default=0)
        lines = []
        for rank, row in enumerate(self.spans):
            cells = ["."] * width
            for action, start, end in row:
                first, last = (round(width * (time - begin) / self.makespan) for time in (start, end))
                letter = "X" if type(action) is Fused else action.kind
                cells[first:last] = letter * (last - first)
            lines.append(f"{rank:>3} |{''.join(cells)}|")
        return "\n".join(lines)

    def __str__(self) -> str:
        def per_rank(values):
            return " ".join(f"{float(value):g}" for value in values)

        name = f"{self.plan.name} P={self.plan.P} M={self.plan.M}" if self.plan else "timeline"
        lines = [
            f"{name}: makespan {float(self.makespan):g}, bubble {self.bubble_ratio:.1%}",
            f"  idle per rank            {per_rank(self.idle)}",
            f"  idle within own span     {per_rank(self.own_span_idle)}",
            f"  peak activations         {per_rank(self.peak_activations)}",
        ]
        if self.exposed_comm:
            lines.append(f"  exposed communication    {per_rank(self.exposed_comm)}")
        if self.peak_buffers:
            lines.append(f"  peak message buffers     {per_rank(self.peak_buffers)}")
        return "\n".join(lines)


def peak_activations(row) -> int:
    """Most activations alive at once when a row runs in order: F +1, B or W -1 (I keeps them for its W)."""
    alive = peak = 0
    for item in row:
        if type(item) is Group:
            continue
        for action in actions_in(item):
            if action.kind == "F":
                alive += 1
                peak = max(peak, alive)
            elif action.kind != "I":
                alive -= 1
    return peak
