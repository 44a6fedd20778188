"""`Timeline`: when each action and message of a plan ran, simulated or measured, with the derived numbers."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import NamedTuple, cast

from .actions import Compute, Fused, Group, actions_in
from .costs import Costs, Number
from .plan import Plan


class Span(NamedTuple):
    """A compute slot, and its start and end in the unit of the timeline."""

    action: Compute
    start: Number
    end: Number


class Message(NamedTuple):
    """The ACT or GRAD that `stage` made for `micro`; both ends have started it at `start`."""

    what: str
    stage: int
    micro: int
    src: int
    dst: int
    start: Number
    end: Number


@dataclass(frozen=True)
class Timeline:
    """When everything in a plan ran, and what follows from it. Times are in the unit of the costs, or seconds
    if measured. Tuples have one entry per rank, but for `messages`.

    Attributes:
        makespan: from the first start (0 if simulated) to the last end.
        idle: makespan minus the rank's work: the bubble.
        bubble_ratio: idle time of all ranks over P * makespan.
        peak_activations: most micro-batches alive at once: F +1, B or W -1.
        spans: the compute slots with start and end, in order.
        own_span_idle: idle time between the rank's own first start and last end (the Zero Bubble measure).
        exposed_comm: time that computes waited for a message after its producer had ended.
        peak_buffers: most messages held at once: posted and not yet consumed, or produced and not yet sent.
        messages: all transfers, by start.
        plan: what ran; None if it is not known.
    """

    makespan: Number
    idle: tuple[Number, ...]
    bubble_ratio: float
    peak_activations: tuple[int, ...]
    spans: tuple[tuple[Span, ...], ...]
    own_span_idle: tuple[Number, ...] = ()
    exposed_comm: tuple[Number, ...] = ()
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

        Where a stage has no I, its whole backward counts as I, and W costs nothing. Messages take no time.
        """
        durations: dict[tuple[str, int], list[Number]] = {}
        for span in (span for row in self.spans for span in row):
            kind, stage = ("FB", span.action.forward.stage) if type(span.action) is Fused else span.action[:2]
            durations.setdefault((kind, stage), []).append(span.end - span.start)
        if not durations:
            raise ValueError("this timeline has no spans to take durations from")

        def per_stage(kind: str, other: str = "") -> tuple[Number, ...]:
            medians: list[Number] = []
            for stage in range(1 + max(stage for _, stage in durations)):
                times = durations.get((kind, stage)) or durations.get((other, stage)) or [0]
                medians.append(median(cast(list[float], times)))  # fractions stay exact
            return tuple(medians)

        has_fused = any(kind == "FB" for kind, _ in durations)
        fused = per_stage("FB") if has_fused else None
        return Costs(F=per_stage("F"), I=per_stage("I", "B"), W=per_stage("W"), FB=fused)

    def text_picture(self, width: int = 96) -> str:
        """One line per rank, `width` characters for the makespan: the kind of the running action, or a dot.

        X is a fused slot.
        """
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
        name = f"{self.plan.name} P={self.plan.P} M={self.plan.M}" if self.plan else "timeline"
        lines = [f"{name}: makespan {float(self.makespan):g}, bubble {self.bubble_ratio:.1%}"]
        for label, per_rank in (
            ("idle per rank", self.idle),
            ("idle within own span", self.own_span_idle),
            ("peak activations", self.peak_activations),
            ("exposed communication", self.exposed_comm),
            ("peak message buffers", self.peak_buffers),
        ):
            if per_rank:
                lines.append(f"  {label:<25}{' '.join(f'{float(value):g}' for value in per_rank)}")
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
