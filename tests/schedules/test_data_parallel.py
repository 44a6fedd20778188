"""Stages in DDP and FSDP2 with every schedule; features of DDP only; and refusals."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from data_parallel_cases import Replicas, TwoBlocks, communicator, ddp, fsdp, mesh, replicated, sum_replicas
from pipelines import WIDTH, Block, plan_named
from ranks import on_ranks
from torch import nn

from pipecomm_ext import PipeCommAborted
from pipecomm_ext.runtime.data_parallel import ReducedOnce

# Whole and split backwards, one stage of a rank and two, one copy and two; together, all schedules.
# test_sharded_stages.py has gradients of DDP with dualpipe, and of FSDP2 with zb_v.
PLANS = {
    ddp: ["one_f_one_b", "interleaved_1f1b", "zb_v"],
    fsdp: ["gpipe", "zb_h1", "dualpipev", "dualpipe"],
    replicated: ["zb_v"],
}


@on_ranks(4)
@pytest.mark.parametrize(
    "wrap, name",
    [(wrap, name) for wrap, names in PLANS.items() for name in names],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_gradients_are_those_of_all_the_data(world, wrap, name):
    """Two steps accumulate, and a third one follows an optimizer step."""
    plan = plan_named(name, 2, 4)
    pipeline = Replicas(plan, wrap)
    executor = pipeline.executor(loss_scale="mean")
    for _ in range(2):
        expected = pipeline.run_all(scale=1 / plan.M)
        pipeline.assert_losses(pipeline.step(executor).losses, expected)
    sum_replicas(plan, executor)
    pipeline.assert_gradients()
    for modules in (pipeline.stages.values(), pipeline.whole):
        optimizer = torch.optim.SGD([p for module in modules for p in module.parameters()], lr=0.1)
        optimizer.step()
        optimizer.zero_grad()
    pipeline.assert_losses(executor.eval(*pipeline.data()).losses, pipeline.run_whole(backward=False))
    expected = pipeline.run_all(scale=1 / plan.M)
    pipeline.assert_losses(pipeline.step(executor).losses, expected)
    sum_replicas(plan, executor)
    pipeline.assert_gradients()


# ---- DDP ---------------------------------------------------------------------------------------------------


class Uneven(TwoBlocks):
    """Has an unused weight, one that only the second pipeline uses, a frozen one, and a buffer."""

    def __init__(self, depth: int):
        super().__init__(depth)
        self.unused, self.rare, self.frozen = (
            nn.Parameter(torch.full((WIDTH,), 0.5, dtype=torch.float64)) for _ in range(3)
        )
        self.frozen.requires_grad_(False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))

    def forward(self, x):
        if torch.is_grad_enabled():
            self.calls += 1
        # inputs of the second pipeline are marked by a positive first element
        return super().forward(x * self.frozen + (self.rare if self.is_second else 0))


@on_ranks(4)
@pytest.mark.parametrize("name", ["one_f_one_b", "zb_v"])
def test_unused_and_frozen_weights_views_hooks_and_buffers(world, name):
    buckets = []

    def hook(_, bucket):
        buckets.append(bucket.index())
        return (
            dist.all_reduce(bucket.buffer(), group=mesh()["dp"].get_group(), async_op=True)
            .get_future()
            .then(lambda future: future.value()[0] / 2)
        )

    def wrap(module):
        module.is_second = mesh().get_coordinate()[0] == 1
        wrapped = ddp(module, find_unused_parameters=True, gradient_as_bucket_view=True, bucket_cap_mb=0.0005)
        wrapped.register_comm_hook(None, hook)
        return wrapped

    pipeline = Replicas(plan_named(name, 2, 4), wrap, Uneven)
    executor = pipeline.executor()
    for step in range(3):
        buckets.clear()
        pipeline.step(executor)
        assert len(buckets) == len(set(buckets)) * len(pipeline.stages) > 2  # each once per step
        run_all_uneven(pipeline)
        pipeline.assert_gradients()
        for stage in pipeline.stages.values():
            assert stage.module.unused.grad is None and stage.module.frozen.grad is None
            stage.module.calls += pipeline.dp * 100  # which rank 0's replaces before the next step
            assert stage.module.calls.item() == 4 * (step + 1) + pipeline.dp * 100
        if step == 1:
            for module in [*pipeline.stages.values(), *pipeline.whole]:
                module.zero_grad()


def run_all_uneven(pipeline: Replicas) -> None:
    for seed in (1, 2):
        for layer in pipeline.whole:
            layer.is_second = seed == 2
        pipeline.set_data(seed, 2)
        pipeline.run_whole(scale=1 / 2)
    pipeline.set_data(1 + pipeline.dp, 2)


@on_ranks(4)
def test_no_sync_around_a_step_accumulates_without_communication(world):
    pipeline = Replicas(plan_named("zb_h1", 2, 4), ddp)
    executor = pipeline.executor()
    (stage,) = pipeline.stages.values()
    for module in (stage, *pipeline.whole):
        next(module.parameters()).register_hook(lambda gradient: gradient * 2)  # once for each micro-batch
    with stage.no_sync():
        pipeline.step(executor)
    pipeline.run_whole()
    pipeline.assert_gradients()  # of this pipeline alone
    for layer in pipeline.whole:
        layer.zero_grad()
    pipeline.step(executor)
    for _ in range(2):
        pipeline.run_all()
    pipeline.assert_gradients()


def wrap_inner(module):
    """DDP below the stage, and the stage not a module."""
    for idx, block in enumerate(module.blocks):
        module.blocks[idx] = ddp(block)
    return module


def in_a_function(module):
    module = ddp(module)
    return functools.partial(lambda scale, x: module(x * scale), 1.0)


@on_ranks(4)
def test_ddp_within_a_stage_and_in_functions(world):
    for wrap in (wrap_inner, in_a_function):
        pipeline = Replicas(plan_named("zb_v", 2, 4), wrap)
        executor = pipeline.executor()
        pipeline.step(executor)
        pipeline.run_all()
        if wrap is in_a_function:
            pipeline.stages = {s: f.func.__closure__[0].cell_contents for s, f in pipeline.stages.items()}
        pipeline.assert_gradients()


@on_ranks(4)
def test_a_loss_in_ddp(world):
    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = Block(9)

        def forward(self, output, target):
            return ((self.head(output) - target) ** 2).mean()

    pipeline = Replicas(plan_named("gpipe", 2, 4), ddp)
    pipeline.loss_fn, whole_loss = ddp(Loss()), Loss()
    executor = pipeline.executor()
    pipeline.step(executor)
    pipeline.loss_fn, wrapped = whole_loss, pipeline.loss_fn
    pipeline.run_all()
    pipeline.assert_gradients()
    if pipeline.rank == 1:
        for mine, theirs in zip(wrapped.parameters(), whole_loss.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-10, atol=1e-12)


def fsdp1(module):
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(
        module, process_group=mesh()["dp"].get_group(), device_id=torch.device("cpu")
    )


def composable(module):
    from torch.distributed._composable.replicate import replicate

    return replicate(module, process_group=mesh()["dp"].get_group())


@on_ranks(4)
@pytest.mark.parametrize("wrap, what", [
    (functools.partial(ddp, static_graph=True), "DistributedDataParallel with static_graph=True"),
    (fsdp1, "FullyShardedDataParallel, which reduces gradients in each backward"),
    (composable, "torch.distributed._composable.replicate"),
], ids=["static_graph", "fsdp1", "composable"])  # fmt: skip
def test_what_cannot_be_right_is_refused(world, wrap, what):
    pipeline = Replicas(plan_named("one_f_one_b", 2, 4), wrap)
    with pytest.raises(ValueError, match=what):
        pipeline.executor()
    communicator().barrier()  # is usable


class Engine(nn.Module):
    """Like Megatron-core's DDP."""

    ddp_config = SimpleNamespace(overlap_grad_reduce=True)

    def no_sync(self):
        raise AssertionError("not called")


@on_ranks(4)
def test_settings_and_wrappers_that_cannot_be_right_are_refused(world):
    for name, value, text in (
        ("mixed_precision", object(), "with mixed_precision="),
        ("_delay_all_reduce_params", [1], "with delay_all_reduce_named_params="),
        ("_use_python_reducer", True, "with the Python reducer of torch.compile"),
    ):
        wrapped = ddp(Block(1))
        setattr(wrapped, name, value)
        with pytest.raises(ValueError, match=text):
            ReducedOnce({0: nn.Sequential(wrapped)}, (), is_training=True)
        ReducedOnce({0: wrapped}, (), is_training=False)
    wrapped = ddp(Block(1))
    wrapped.module.first.weight._in_backward_optimizers = []
    with pytest.raises(ValueError, match="with optimizers that run within backward"):
        ReducedOnce({0: Block(2)}, (wrapped,), is_training=True)
    engine = Engine()
    with pytest.raises(
        ValueError, match=r"wrapped in test_data_parallel.Engine, which reduces .* in each backward"
    ):
        ReducedOnce({0: engine}, (), is_training=True)
    engine.ddp_config = SimpleNamespace(overlap_grad_reduce=False)
    ReducedOnce({0: engine}, (), is_training=True)
    wrapped = ddp(Block(1))
    wrapped.reducer = SimpleNamespace()
    with pytest.raises(RuntimeError, match="has no SimpleNamespace.prepare_for_backward, which an Executor"):
        ReducedOnce({0: wrapped}, (), is_training=True)


@on_ranks(4)
def test_join_is_refused(world):
    pipeline = Replicas(plan_named("one_f_one_b", 2, 4), ddp)
    executor = pipeline.executor(communicator=mesh()["pp"].get_group())
    (stage,) = pipeline.stages.values()
    expected = (ValueError, PipeCommAborted)
    with world.breaking(), pytest.raises(expected, match=r"DistributedDataParallel with join\(\)"):
        with stage.join(enable=True):
            try:
                pipeline.step(executor)
            finally:
                stage._join_config = stage._join_config._replace(enable=False)  # nothing to shadow
    executor.close()
