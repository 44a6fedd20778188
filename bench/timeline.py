"""When each exchange of an attention sublayer was posted and finished, and when attention ran: a picture."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from pipecomm_ext import Communicator

Interval = tuple[float, float]  # seconds since 1970

ROWS = ("attention", "q, k, v", "result")  # of a rank; the last two with their gradients
COLORS = dict(zip(ROWS, ("#d9904a", "#4878a8", "#6aa56e"), strict=True))
ROWS_APART = 3.5  # of one rank and the next
NUM_LANES = 3  # of a row of exchanges, used in turns: about as many as are in flight


@dataclass
class Call:
    """One call on one rank: for each row, forward and, if there is one, backward, the times of each chunk."""

    begin: float
    end: float
    rows: dict[str, list[list[Interval]]]  # from post to end, for exchanges


def duration_s(calls: list[Call]) -> float:
    """From the first rank's start to the last one's end."""
    return max(call.end for call in calls) - min(call.begin for call in calls)


class Stamped:
    """Attention that records when it starts and ends, forward and backward."""

    def __init__(self, attention: Callable[..., torch.Tensor]):
        self.attention = attention
        self.stamps: list[float] = []

    def __call__(self, *qkv: torch.Tensor) -> torch.Tensor:
        return _Stamp.apply(self.stamps, self.attention(*_Stamp.apply(self.stamps, *qkv)))

    @property
    def intervals(self) -> list[Interval]:
        return list(zip(self.stamps[::2], self.stamps[1::2], strict=True))


class _Stamp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, stamps: list[float], *tensors: torch.Tensor):
        ctx.stamps = stamps
        stamps.append(time.time())
        views = tuple(tensor.view_as(tensor) for tensor in tensors)
        return views if len(views) > 1 else views[0]

    @staticmethod
    def backward(ctx, *grads: torch.Tensor):
        ctx.stamps.append(time.time())
        return None, *grads


def record(comm: Communicator, num_chunks: int, attention: Stamped, call: Callable[[], object]) -> list[Call]:
    """Records one call on all ranks; returns it by rank. Collective. Chunks must be of one size."""
    dist.barrier()
    last = max((op["number"] for op in comm.flight_record()), default=-1)
    begin = time.time()
    call()
    end = time.time()
    # Chunk by chunk, in the backward in reverse; the smaller exchanges of a pass are those of results.
    ops = [op for op in comm.flight_record() if op["number"] > last]
    rows: dict[str, list[list[Interval]]] = {row: [] for row in ROWS}
    while ops:
        one_pass, ops = ops[: 2 * num_chunks], ops[2 * num_chunks :]
        one_pass.sort(key=lambda op: op["messages"][0]["bytes"])
        times = [(op["posted_at"], op["ended_at"]) for op in one_pass]
        idx = len(rows["attention"]) * num_chunks
        in_order = attention.intervals[idx : idx + num_chunks], times[num_chunks:], times[:num_chunks]
        for row, intervals in zip(ROWS, in_order, strict=True):
            rows[row].append(intervals if idx == 0 else intervals[::-1])
    calls: list[Call | None] = [None] * comm.size
    dist.all_gather_object(calls, Call(begin, end, rows))
    return calls  # type: ignore[return-value]


def draw(path: str, panels: dict[str, list[Call]], title: str) -> None:
    """A panel for each name, on one scale of time; exchanges in lanes, from their post to their end."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    num_ranks = len(next(iter(panels.values())))
    figure, axes = plt.subplots(
        len(panels), 1, sharex=True, squeeze=False, layout="constrained",
        figsize=(11, 1 + len(panels) * (0.6 + num_ranks)),
    )  # fmt: skip
    for axis, (name, calls) in zip(axes[:, 0], panels.items(), strict=True):
        begin = min(call.begin for call in calls)
        end_ms = 1e3 * duration_s(calls)
        for rank, call in enumerate(calls):
            _draw_rank(axis, ROWS_APART * rank, call, begin)
        axis.axvline(end_ms, color="black", linewidth=0.8, linestyle=":")
        axis.set_yticks(
            [ROWS_APART * rank + row for rank in range(num_ranks) for row in range(len(ROWS))],
            [f"rank {rank}   {row}" if row == ROWS[0] else row for rank in range(num_ranks) for row in ROWS],
        )
        axis.set_title(f"{name}: {end_ms:.0f} ms", loc="left", fontsize=10)
        axis.set_ylim(ROWS_APART * num_ranks - 0.8, -0.7)
        axis.tick_params(axis="y", length=0, labelsize=8)
        for side in ("top", "right", "left"):
            axis.spines[side].set_visible(False)
    axes[-1, 0].set_xlabel(
        "ms; the numbers are those of chunks, and exchanges reach from their post to their end"
    )
    axes[-1, 0].set_xlim(left=0)
    figure.suptitle(title)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _draw_rank(axis, top: float, call: Call, begin: float) -> None:
    shortest_named = 0.012 * (call.end - call.begin)
    for row_idx, row in enumerate(ROWS):
        for intervals in call.rows[row]:
            num_lanes = 1 if row == ROWS[0] or len(intervals) == 1 else NUM_LANES
            height = 0.84 / num_lanes
            for chunk, (start, end) in enumerate(intervals):
                place = top + row_idx + height * (chunk % num_lanes - (num_lanes - 1) / 2)
                left, width = 1e3 * (start - begin), 1e3 * (end - start)
                axis.barh(place, width, height, left, color=COLORS[row], edgecolor="white", linewidth=0.5)
                if len(intervals) > 1 and end - start > shortest_named:
                    style = {"ha": "center", "va": "center_baseline", "fontsize": 8 if num_lanes == 1 else 5}
                    axis.text(left + width / 2, place, chunk, **style)
