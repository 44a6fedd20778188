"""Checks a case, then times its implementations in turns, so that drift of the machine affects all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from ops import BASELINE, Case
from work import Work

NUM_BLOCKS = 10  # per implementation, in turns
SECONDS_PER_RESULT = 1.0  # aimed at, if the number of iterations is not given
MIN_ITERATIONS, MAX_ITERATIONS = 20, 2000


@dataclass
class Result:
    """One line of the table. Times are the slowest rank's, per iteration."""

    op: str
    impl: str
    num_bytes: int
    count: int
    dtype: str
    num_wrong: int
    bus_factor: float
    has_bandwidth: bool
    iterations_us: list[float] = field(repr=False)
    ratio: float = 1.0  # baseline's time / this one's, median over pairs of neighbouring blocks
    bound_ratio: float | None = None  # the same with the bound's time: 1 is as fast as can be
    label: str = ""
    work: Work | None = None

    @property
    def min_us(self) -> float:
        return min(self.iterations_us)

    @property
    def median_us(self) -> float:
        return statistics.median(self.iterations_us)

    @property
    def p99_us(self) -> float:
        return sorted(self.iterations_us)[int(0.99 * (len(self.iterations_us) - 1))]

    @property
    def algbw(self) -> float | None:
        """GB/s (1e9 bytes) at the median time."""
        return self.num_bytes / self.median_us / 1e3 if self.has_bandwidth else None

    @property
    def busbw(self) -> float | None:
        return self.algbw * self.bus_factor if self.has_bandwidth else None


def measure(
    op: str, case: Case, dtype: torch.dtype, device: torch.device, iters: int | None, warmup: int
) -> list[Result]:
    """Collective; every rank returns the same results."""
    numbers_wrong = {
        impl: 0 if impl in case.bounds else _count_wrong(case, call) for impl, call in case.calls.items()
    }
    timers = {impl: _timer(case, call, device) for impl, call in case.calls.items()}
    for timer in timers.values():
        for _ in range(warmup):
            timer()
    num_per_block = _iterations_per_block(timers, iters)
    blocks: dict[str, list[torch.Tensor]] = {impl: [] for impl in timers}
    for block_idx in range(NUM_BLOCKS):
        order = list(timers) if block_idx % 2 == 0 else list(reversed(timers))
        for impl in order:
            dist.barrier()
            seconds = [timers[impl]() for _ in range(num_per_block)]
            blocks[impl].append(torch.tensor(seconds, dtype=torch.float64))
    slowest = {impl: _max_over_ranks(torch.stack(times)) * 1e6 for impl, times in blocks.items()}
    work = {impl: case.work(impl) for impl in case.calls} if case.work else {}
    medians = {impl: times.median(dim=1).values for impl, times in slowest.items()}

    def time_ratio(reference: str, impl: str) -> float:
        return (medians[reference] / medians[impl]).median().item()

    return [
        Result(
            op=op,
            impl=impl,
            num_bytes=case.num_bytes,
            count=case.num_bytes // dtype.itemsize,
            dtype=str(dtype).removeprefix("torch."),
            num_wrong=numbers_wrong[impl],
            bus_factor=case.bus_factor,
            has_bandwidth=case.has_bandwidth,
            iterations_us=times.flatten().tolist(),
            ratio=time_ratio(BASELINE, impl),
            bound_ratio=time_ratio(case.bound_of[impl], impl) if impl in case.bound_of else None,
            label=case.label,
            work=work.get(impl),
        )
        for impl, times in slowest.items()
    ]


def _count_wrong(case: Case, call: Callable[[], object]) -> int:
    """Wrong elements on all ranks after one call into poisoned buffers."""
    for buffer, expected in case.received:
        buffer.copy_(torch.full_like(expected, 119))
    dist.barrier()
    posted = call()
    if case.drain is not None:
        case.drain(posted)
    arrived = [*case.received] if case.returns is None else [*case.received, (posted, case.returns)]
    different = [_num_different(buffer, expected, case.tolerance) for buffer, expected in arrived]
    total = torch.tensor(sum(different))
    dist.all_reduce(total)
    return int(total)


def _num_different(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> int:
    """Number of elements with a different byte, or, with a tolerance, a different value."""
    if actual.shape != expected.shape:
        return expected.numel()
    if tolerance:
        is_close = (actual - expected).abs() <= tolerance * expected.abs().max()  # False for NaN
        return int((~is_close).sum())
    ours, theirs = (
        tensor.contiguous().flatten().view(torch.uint8).view(-1, tensor.itemsize)
        for tensor in (actual, expected)
    )
    return int((ours != theirs).any(dim=1).sum())


def _timer(case: Case, call: Callable[[], object], device: torch.device) -> Callable[[], float]:
    """Times one call on this rank, or a part of it, in seconds; only the posting if the case has a drain."""

    def timed() -> float:
        start = case.clock()
        posted = call()
        if case.drain is None and device.type == "cuda":
            torch.cuda.synchronize()
        seconds = (case.clock() - start) / case.num_parts
        if case.drain is not None:
            case.drain(posted)
        return seconds

    return timed


def _iterations_per_block(timers: dict[str, Callable[[], float]], iters: int | None) -> int:
    """The same on all ranks."""
    if iters is None:
        start = time.perf_counter()
        for timer in timers.values():
            timer()
        mean_s = _max_over_ranks(torch.tensor([time.perf_counter() - start])).item() / len(timers)
        iters = min(MAX_ITERATIONS, max(MIN_ITERATIONS, int(SECONDS_PER_RESULT / mean_s)))
    return -(-iters // NUM_BLOCKS)


def _max_over_ranks(values: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return values
