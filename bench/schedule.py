"""A pipeline's training step: ours, and torch.distributed.pipelining's with the same modules and ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from ops import BASELINE, KIB, Bench, Case, Op
from torch import nn
from torch.nn import functional

from pipecomm_ext.schedules import Executor, Plan, get_plan

HIDDEN = 64
TOLERANCE = 1e-5  # of gradients: sums over micro-batches in another order

SCHEDULES = {  # ours, stages per rank, torch's
    "1F1B": ("one_f_one_b", 1, "Schedule1F1B"),
    "interleaved": ("interleaved_1f1b", 2, "ScheduleInterleaved1F1B"),
    "ZB-V": ("zb_v", 2, "ScheduleZBVZeroBubble"),
    "DualPipeV": ("dualpipev", 2, "ScheduleDualPipeV"),
}


class Layer(nn.Module):
    """[rows, hidden] -> the same."""

    def __init__(self, hidden: int, depth: int):
        super().__init__()
        torch.manual_seed(depth)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(functional.gelu(self.up(x)))


class Gain(nn.Module):
    """Almost no work: what remains is the time of the runtime."""

    def __init__(self, _hidden: int, _depth: int):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gain


def step(bench: Bench, num_bytes: int) -> Iterator[Case]:
    """A training step of 2P micro-batches, without optimizer; size: bytes of a micro-batch's activation."""
    num_rows = max(1, num_bytes // (HIDDEN * bench.dtype.itemsize))
    for label in SCHEDULES:
        yield _case(bench, label, Layer, (num_rows, HIDDEN))


def host(bench: Bench, num_bytes: int) -> Iterator[Case]:
    """Processor time of the training thread per action (F, B, I or W) where stages do next to nothing."""
    for label, (_, num_local, _) in SCHEDULES.items():
        case = _case(bench, label, Gain, (max(1, num_bytes // bench.dtype.itemsize), 1))
        num_actions = 2 * 2 * bench.size * num_local  # forwards and backwards; a split one counts once
        yield replace(case, clock=time.thread_time, num_parts=num_actions)


def _case(bench: Bench, label: str, layer: Callable[[int, int], nn.Module], micro_shape: tuple) -> Case:
    name, num_local, torch_schedule = SCHEDULES[label]
    num_micros = 2 * bench.size
    sizes = (num_local,) if name == "interleaved_1f1b" else ()
    plan = get_plan(name, bench.size, num_micros, *sizes)
    whole = [layer(HIDDEN, depth).to(bench.device, bench.dtype) for depth in range(plan.num_stages)]
    torch.manual_seed(0)
    batch, targets = (
        torch.randn(num_micros * micro_shape[0], micro_shape[1]).to(bench.device, bench.dtype)
        for _ in range(2)
    )
    stages = {stage: whole[stage] for stage in plan.stages_of(bench.rank)}
    expected = _unsplit_gradients(whole, batch, targets, num_micros, stages)
    gradients = _flat_gradients(stages)

    calls = {BASELINE: _torch_step(bench, plan, stages, torch_schedule, batch, targets)}
    for impl, comm in bench.comms.items():
        calls[impl] = _our_step(plan, stages, comm, batch, targets)
    return Case(
        num_bytes=batch[: micro_shape[0]].nbytes,
        received=[(gradients, expected)],
        calls={impl: _with_zeroed(gradients, call) for impl, call in calls.items()},
        label=f"{label}, {plan.num_stages} stages, {num_micros} micro-batches",
        tolerance=TOLERANCE,
        moves_size=False,
    )


def _with_zeroed(gradients: torch.Tensor, call: Callable[[], object]) -> Callable[[], object]:
    def zero_and_call():
        gradients.zero_()
        call()

    return zero_and_call


def _flat_gradients(stages: dict[int, nn.Module]) -> torch.Tensor:
    """One tensor of which the gradients of all parameters are views."""
    parameters = [parameter for stage in stages.values() for parameter in stage.parameters()]
    flat = torch.zeros_like(nn.utils.parameters_to_vector(parameters).detach())
    for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        parameter.grad = part.view_as(parameter)
    return flat


def _unsplit_gradients(whole, batch, targets, num_micros, stages) -> torch.Tensor:
    for x, target in zip(batch.chunk(num_micros), targets.chunk(num_micros), strict=True):
        for layer in whole:
            x = layer(x)
        functional.mse_loss(x, target).backward()
    return torch.cat([p.grad.flatten() for stage in stages.values() for p in stage.parameters()])


def _our_step(plan: Plan, stages, comm, batch, targets) -> Callable[[], object]:
    executor = Executor(plan, stages, communicator=comm, loss_fn=functional.mse_loss, return_outputs=False)
    inputs, labels = list(batch.chunk(plan.M)), list(targets.chunk(plan.M))
    return lambda: executor.step(inputs, labels)


def _torch_step(bench: Bench, plan: Plan, stages, schedule: str, batch, targets) -> Callable[[], object]:
    from torch.distributed.pipelining import PipelineStage, schedules  # takes seconds to import

    local = [PipelineStage(module, stage, plan.num_stages, bench.device) for stage, module in stages.items()]
    for stage in local:  # V schedules send to themselves before the first step, which gloo refuses
        stage._get_init_p2p_neighbors_ops = list
    runner = getattr(schedules, schedule)(
        local[0] if len(local) == 1 else local,
        plan.M,
        loss_fn=functional.mse_loss,
        scale_grads=False,
    )
    has_input = plan.chains[0][0] in stages
    has_loss = plan.chains[0][-1] in stages

    def call():
        arguments = (batch,) if has_input else ()
        options = {"target": targets, "losses": []} if has_loss else {}
        runner.step(*arguments, return_outputs=False, **options)

    return call


SCHEDULE_OPS = {
    "schedule": Op(step, (16 * KIB, 256 * KIB)),
    "schedule_host": Op(host, (4,)),
}
