"""Two sides of a comparison on every rank: the client as it is, and the same with this package in it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import nn

Step = Callable[[], object]


def ratio_of_times(theirs: Step, ours: Step, rounds: int = 7) -> tuple[float, float]:
    """Their time of a step over ours, the same on all ranks: the median of pairs of steps, and that of the
    fastest steps, which a busy machine changes less. A step's time is that of its slowest rank."""
    seconds = torch.zeros(rounds, 2, dtype=torch.float64)
    for idx in range(rounds):
        order = [(0, theirs), (1, ours)]
        for side, step in order if idx % 2 else reversed(order):
            dist.barrier()
            begin = time.perf_counter()
            step()
            seconds[idx, side] = time.perf_counter() - begin
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    fastest_theirs, fastest_ours = seconds.amin(0).tolist()
    return statistics.median((seconds[:, 0] / seconds[:, 1]).tolist()), fastest_theirs / fastest_ours


def gradients(modules: Iterable[nn.Module]) -> list[torch.Tensor]:
    """Copies of all gradients, Megatron's main_grad included."""
    parameters = [parameter for module in modules for parameter in module.parameters()]
    found = [getattr(parameter, "main_grad", parameter.grad) for parameter in parameters]
    return [gradient.clone() for gradient in found if gradient is not None]


def assert_same_bits(ours: list[torch.Tensor], theirs: list[torch.Tensor], what: str) -> None:
    assert len(ours) == len(theirs), f"{len(ours)} {what}, not {len(theirs)}"
    for idx, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        assert torch.equal(mine, other), f"{what} {idx}: off by {(mine - other).abs().max().item():.2e}"
