"""When the actions of a step ran, on this rank and then on all of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from ..communicator import Communicator
from ..schedules.actions import Compute, Fused
from ..schedules.plan import Plan
from ..schedules.timeline import Span, Timeline


class Recorder:
    """Start and end of each action of the last step, in host time or, for CUDA, in device time."""

    def __init__(self, device: torch.device):
        self._is_cuda = device.type == "cuda"
        self._marks: list[tuple[Any, Any]] = []
        self._origin: tuple[Any, float] | None = None  # an event, and the host's time when it was complete
        self.is_training = True

    def begin_step(self, is_training: bool) -> None:
        self._marks, self.is_training = [], is_training
        if self._is_cuda:
            event = self.mark()
            event.synchronize()
            self._origin = event, time.perf_counter()

    def mark(self) -> Any:
        """The current time, or an event in the current stream if the device has streams."""
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def add(self, start: Any, end: Any) -> None:
        self._marks.append((start, end))

    def seconds(self) -> torch.Tensor:
        """Starts and ends by the host's clock, float64[actions, 2]."""
        if not self._is_cuda or not self._marks:
            return torch.tensor(self._marks, dtype=torch.float64, device="cpu").view(-1, 2)
        self._marks[-1][1].synchronize()
        assert self._origin is not None
        event, origin_s = self._origin
        rows = [[origin_s + event.elapsed_time(mark) / 1e3 for mark in marks] for marks in self._marks]
        return torch.tensor(rows, dtype=torch.float64, device="cpu")


def gather_timeline(
    plan: Plan, rank: int, comm: Communicator, ranks_of: Sequence[Sequence[int]], mine: Recorder
) -> Timeline:
    """The last step of all pipeline ranks (of the first rank of each, if it is several) as one Timeline, in
    seconds. Collective. Ranks of one host share a clock; between hosts the times are only as accurate as
    their wall clocks.
    """
    items = [_computed(row, mine.is_training) for row in plan.compute]
    seconds = mine.seconds()
    with comm.collective("all_to_all"):
        if len(seconds) != len(items[rank]):
            raise ValueError("no step has been recorded yet: run step() before timeline()")
    # The largest difference: a pause of the thread between the two readings makes it smaller.
    wall_clock = max(time.time() - time.perf_counter() for _ in range(10))
    outgoing = (seconds + wall_clock).to(comm.device)
    incoming = [torch.empty(0, device="cpu")] * comm.size
    for row_items, peers in zip(items, ranks_of, strict=True):
        for peer in peers:
            incoming[peer] = torch.empty(len(row_items), 2, dtype=torch.float64, device=comm.device)
    comm.all_to_all([outgoing] * comm.size, incoming)
    rows = [incoming[peers[0]].tolist() for peers in ranks_of]
    begin = min((start for row in rows for start, _ in row), default=0.0)
    spans = [
        [Span(item, start - begin, end - begin) for item, (start, end) in zip(row_items, row, strict=True)]
        for row_items, row in zip(items, rows, strict=True)
    ]
    return Timeline.from_spans(plan, spans)


def _computed(row: tuple[Compute, ...], is_training: bool) -> list[Compute]:
    """The slots of a row that a step runs."""
    if is_training:
        return list(row)
    forwards = (item.forward if type(item) is Fused else item for item in row)
    return [action for action in forwards if action.kind == "F"]
