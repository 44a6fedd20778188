"""A step takes the time of its schedule: stages that only sleep, against the makespan of `simulate`.
Waiting for a message too early changes no value; it is detected here.

This needs a machine that does nothing else: `make faults` runs it, the suite does not (conftest.py).
"""

from __future__ import annotations

import statistics
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from pipelines import plan_named
from ranks import on_ranks
from torch import nn

from pipecomm_ext.pipeline_parallel import P2PCommunicator, PipelineConfig, get_forward_backward_func
from pipecomm_ext.schedules import Costs, DualPipe, DualPipeV, Executor, Plan, simulate

COSTS = Costs(F=0.024, I=0.048, W=0)  # seconds; a stage's weight is so small that W is free
NUM_STEPS = 5  # of which the median counts
NUM_MICROBATCHES = 8
BOUND = 1.15  # times the makespan; waiting for each message when it is posted costs 1.5 and more
SHAPE = (2, 1, 4)


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        time.sleep(COSTS.F)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        time.sleep(COSTS.I)
        return grad


class SleepingStage(nn.Module):
    def __init__(self, config=None):
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.ones(SHAPE[-1]))
        self.input_tensor = None

    def set_input_tensor(self, tensors):
        [self.input_tensor] = tensors

    def forward(self, x):
        return Sleep.apply((x if self.input_tensor is None else self.input_tensor) * self.weight)


def assert_takes_its_makespan(world, step, plan: Plan) -> None:
    """Checks the median of some steps."""
    ratios = []
    for _ in range(NUM_STEPS):
        world.meet()
        begin = time.monotonic()
        step()
        # The clock is the host's: from the first rank that begins to the last one that ends.
        times = torch.tensor([-begin, time.monotonic()], dtype=torch.float64)
        dist.all_reduce(times, op=dist.ReduceOp.MAX, group=world.group)
        ratios.append(times.sum().item() / simulate(plan, COSTS).makespan)
    ratio = statistics.median(ratios)
    assert ratio <= BOUND, f"a step takes {ratio:.2f} times the makespan of its schedule: {ratios}"


MODES = {
    "batched": {},
    "individual": {"batch_p2p_comm": False},
    "overlapped": {"batch_p2p_comm": False, "overlap_p2p_comm": True},
    "variable": {"variable_seq_lengths": True},
    "freeing": {"deallocate_pipeline_outputs": True},
}


@on_ranks(4)
@pytest.mark.parametrize("num_chunks", [None, 2])
@pytest.mark.parametrize("mode", MODES)
def test_megatrons_schedules(world, num_chunks, mode):
    config = PipelineConfig(pipeline_dtype=torch.float32, hidden_size=SHAPE[-1], **MODES[mode])
    p2p = P2PCommunicator(world.group, config)
    chunks = [SleepingStage(config) for _ in range(num_chunks or 1)]

    def forward_step_func(iterator, model):
        return model(torch.ones(SHAPE)), lambda output: (output.sum(), None)

    def step():
        get_forward_backward_func(world.size, num_chunks)(
            forward_step_func=forward_step_func,
            data_iterator=[None] * len(chunks) if num_chunks else None,
            model=chunks if num_chunks else chunks[0],
            num_microbatches=NUM_MICROBATCHES,
            seq_length=SHAPE[0],
            micro_batch_size=SHAPE[1],
            p2p_communicator=p2p,
            pg_collection=SimpleNamespace(tp=None, cp=None),
        )

    plan = plan_named("interleaved_1f1b" if num_chunks else "one_f_one_b", world.size, NUM_MICROBATCHES)
    assert_takes_its_makespan(world, step, plan)


@on_ranks(4)
@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b", "interleaved_1f1b", "zb_h1", "zb_v", "dualpipev"])
def test_the_executor(world, name):
    plan = plan_named(name, world.size, NUM_MICROBATCHES)
    stages = {stage: SleepingStage() for stage in plan.stages_of(world.rank)}
    is_first, is_last = (
        any(plan.owner[chain[end]] == world.rank for chain in plan.chains) for end in (0, -1)
    )
    micros = [torch.ones(SHAPE)] * plan.micros_per_chain
    with Executor(
        plan,
        stages,
        loss_fn=lambda output, target: output.sum(),
        communicator=world.shared_comm(channels=4),
    ) as executor:

        def step():
            executor.step(micros if is_first else None, micros if is_last else None)

        assert_takes_its_makespan(world, step, plan)


@on_ranks(4)
@pytest.mark.parametrize("kind", [DualPipe, DualPipeV])
def test_the_classes_of_dualpipe(world, kind):
    stages = nn.Sequential(SleepingStage(), SleepingStage())
    pipe = kind(stages)
    batch = torch.ones(NUM_MICROBATCHES, SHAPE[-1])
    is_end = world.rank == 0 or (kind is DualPipe and world.rank == world.size - 1)
    if is_end and kind is DualPipe:
        batch = batch[: NUM_MICROBATCHES // 2]

    def step():
        pipe.step(
            *([batch] if is_end else []),
            num_chunks=NUM_MICROBATCHES,
            criterion=lambda output, label: output.sum(),
            labels=[batch] if is_end else [],
        )

    plan = plan_named(kind.__name__.lower(), world.size, NUM_MICROBATCHES)
    assert_takes_its_makespan(world, step, plan)
    pipe.close()
