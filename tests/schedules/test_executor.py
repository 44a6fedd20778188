"""The executor on real ranks against the unsplit model in one process."""

from __future__ import annotations

import random
import time

import pytest
import torch
import torch.distributed as dist
from pipelines import (
    WIDTH,
    Block,
    Pipeline,
    Rich,
    Selecting,
    StoringBlock,
    compare_step,
    make_executor,
    plan_named,
    prepared,
    squared,
    squared_error,
)
from ranks import on_ranks
from torch import nn

from pipecomm_ext import Communicator, PipeCommAborted
from pipecomm_ext.schedules import (
    GENERATORS,
    Costs,
    Executor,
    Fused,
    Plan,
    lower,
    merge_split_backward,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*micro-batches are fewer than the stages")


# ---- every schedule ---------------------------------------------------------------------------------------


@on_ranks(2, 3, 4)
def test_every_schedule_equals_the_unsplit_model(world):
    """Two steps that accumulate, the last micro-batch smaller; then forward only, with other sizes."""
    for name in GENERATORS:
        if name == "dualpipe" and world.size % 2:
            continue
        compare_with_unsplit(world, plan_named(name, world.size))


@on_ranks(8)
def test_eight_ranks(world):
    for name, M in (("zb_v", 8), ("dualpipe", 16)):
        compare_with_unsplit(world, plan_named(name, world.size, M))


def compare_with_unsplit(world, plan: Plan) -> None:
    pipeline = Pipeline(plan, world.rank)
    executor = make_executor(world, plan, pipeline)
    for _ in range(2):
        result = pipeline.step(executor)
    if plan.replicas:
        executor.sum_replica_gradients()
    for _ in range(2):
        losses = pipeline.run_whole()
    pipeline.assert_losses(result.losses, losses)
    pipeline.assert_gradients()
    pipeline.set_data(seed=7, last_rows=5, rows=1)
    with torch.no_grad():
        result = pipeline.step(executor)
    pipeline.assert_losses(result.losses, pipeline.run_whole(backward=False))
    pipeline.assert_gradients()  # untouched
    executor.close()


@on_ranks(3)
@pytest.mark.parametrize("M", [1, 2, 5])
def test_few_and_odd_numbers_of_micro_batches(world, M):
    for name in ("gpipe", "one_f_one_b", "zb_h1", "zb_h2", "zb_v", "u_shaped"):
        compare_with_unsplit(world, plan_named(name, world.size, M))


@on_ranks(1)
def test_one_rank_is_a_pipeline_too(world):
    for name in ("one_f_one_b", "interleaved_1f1b", "zb_v", "dualpipev", "u_shaped"):
        compare_with_unsplit(world, plan_named(name, 1, 4))


@on_ranks(2)
def test_user_plans_merged_backwards_and_programs_for_other_costs(world):
    mine = Plan("mine", P=2, M=3, owner=[0, 1, 1], compute=[
        "F0.0 F0.1 F0.2 B0.2 B0.0 I0.1 W0.1",
        "F1.0 F2.0 B2.0 F1.1 F2.1 F1.2 F2.2 B2.2 B1.2 B1.0 I2.1 B1.1 W2.1",
    ])  # fmt: skip
    compare_with_unsplit(world, mine)
    compare_with_unsplit(world, merge_split_backward(plan_named("zb_v", 2)))
    compare_with_unsplit(world, lower(plan_named("dualpipev", 2), Costs(F=3, I=1, W=7, comm=2)))


@on_ranks(2, 4)
def test_groups_as_single_batches_as_on_an_in_order_stream(world):
    """As for transports with which receives must not be posted before their place (NCCL)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipecomm_ext.runtime.border_channels.BorderChannels.waits_on_device", True)
        for name in ("one_f_one_b", "zb_v", "dualpipe"):
            compare_with_unsplit(world, plan_named(name, world.size))


@on_ranks(3)
def test_sockets_serve_as_well_as_shared_memory(world):
    for name in ("interleaved_1f1b", "zb_h2"):
        comm = world.shared_comm(channels=4, transport="tcp")
        compare_step(world, plan_named(name, world.size), communicator=comm)


PAUSES_S = [0, 0, 0.001, 0.01]


@on_ranks(4)
def test_unsteady_durations_and_sizes_that_change_in_every_step(world):
    """New shapes are announced while messages of known ones are in flight. A stage, but not the model that is
    unsplit, sometimes takes much longer than planned."""
    for name in ("interleaved_1f1b", "zb_v", "dualpipe"):
        pipeline, executor = prepared(world, plan_named(name, world.size))
        for stage, module in pipeline.stages.items():
            draw = random.Random(stage)
            module.register_forward_pre_hook(lambda *_, draw=draw: time.sleep(draw.choice(PAUSES_S)))
        sizes = random.Random(5)  # the same on all ranks
        for step in range(4):
            pipeline.set_data(seed=step, last_rows=1 + sizes.randrange(4))
            for data in pipeline.inputs, pipeline.targets:
                for chain in data:
                    for micro in range(len(chain)):
                        chain[micro] = chain[micro][: 1 + (micro * (step + 1)) % 3]
            losses = pipeline.step(executor).losses
            pipeline.assert_losses(losses, pipeline.run_whole())
        executor.sum_replica_gradients()
        pipeline.assert_gradients()


# ---- losses and outputs -----------------------------------------------------------------------------------


@on_ranks(2)
def test_mean_and_numbers_scale_gradients_and_not_losses(world):
    plan = plan_named("zb_v", 2)
    for loss_scale, factor in (("mean", 1 / plan.M), (0.5, 0.5), (4, 4.0)):
        compare_step(world, plan, scale=factor, loss_scale=loss_scale)


@on_ranks(2)
def test_outputs_are_those_of_the_last_stage_without_graph(world):
    plan = plan_named("one_f_one_b", 2)
    pipeline, executor = prepared(world, plan)
    for run in (executor.step, executor.eval):
        result = run(pipeline.of_my(0, pipeline.inputs), pipeline.of_my(-1, pipeline.targets))
        if world.rank == 0:
            assert result == (None, None)
            continue
        for x, output in zip(pipeline.inputs[0], result.outputs, strict=True):
            assert not output.requires_grad
            torch.testing.assert_close(output, nn.Sequential(*pipeline.whole)(x).detach())
    without = make_executor(world, plan, pipeline, return_outputs=False)
    assert pipeline.step(without).outputs is None
    no_targets = executor.eval(pipeline.of_my(0, pipeline.inputs))
    assert no_targets.losses is None and (world.rank == 0 or len(no_targets.outputs) == plan.M)


# ---- borders ----------------------------------------------------------------------------------------------


def rich_loss(output, target):
    x, *_ = output if isinstance(output, tuple) else (output,)
    return squared_error(x, target)


@on_ranks(2, 3)
def test_borders_of_several_tensors(world):
    """Integers, masks, views, empty tensors, and an unused one, whose gradient is None."""
    for name in ("one_f_one_b", "zb_v", "dualpipev"):
        result = compare_step(world, plan_named(name, world.size), Rich, rich_loss)
        if result.outputs is not None:
            assert all(len(output) == 6 and output[1].dtype == torch.int64 for output in result.outputs)


class Plain(nn.Module):
    """By depth: identity, a view, no weights, the same tensor twice, weights that need no gradient."""

    def __init__(self, depth: int):
        super().__init__()
        self.depth = depth
        self.scale = nn.Parameter(torch.full((WIDTH,), 1.5, dtype=torch.float64), requires_grad=depth != 3)

    def forward(self, x, again=None):
        if again is not None:
            x = x + again
        return [
            lambda: x * self.scale,
            lambda: x,
            lambda: x.view(-1).view_as(x).t().t(),
            lambda: (x * self.scale,) * 2,
            lambda: torch.relu(x),
            lambda: x * self.scale,
        ][self.depth]()


@on_ranks(3)
def test_identity_views_and_the_same_tensor_twice(world):
    for name in ("interleaved_1f1b", "zb_v", "dualpipev"):
        compare_step(world, plan_named(name, 3), Plain)


class Frozen(nn.Module):
    """The first stage needs no gradient, so its output has none; the last one has no gradient at all."""

    def __init__(self, depth: int):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        nn.init.eye_(self.linear.weight)
        self.linear.requires_grad_(depth > 0)
        self.is_detached = depth == 2

    def forward(self, x):
        y = self.linear(x)
        return y.detach() if self.is_detached else y


@on_ranks(3)
def test_stages_without_gradients(world):
    for name in ("one_f_one_b", "zb_h1"):
        pipeline, executor = prepared(world, plan_named(name, 3), Frozen)
        pipeline.assert_losses(pipeline.step(executor).losses, pipeline.run_whole(backward=False))
        gradients = [parameter.grad for parameter in pipeline.stages[world.rank].parameters()]
        if world.rank == 1:  # zeros arrived: the last stage had no gradient to send
            assert all(gradient is not None and not gradient.any() for gradient in gradients)
        else:
            assert gradients == [None, None]


class Toggling(nn.Module):
    """Passes on a tensor without gradient beside one with, and switches gradients of what it receives: `r`
    to on, as for a gradient penalty, `h` to off in the first micro-batch, as truncated backpropagation."""

    def __init__(self, depth: int):
        super().__init__()
        self.linear, self.num_calls = Block(depth), 0

    def forward(self, h, r=None):
        self.num_calls += 1
        if r is None:
            return self.linear(h), h * 1.0
        if self.num_calls == 1:
            h = h.detach_() if h._base is None else h
        return self.linear(h) * r.requires_grad_(), r.detach() + 1


@on_ranks(1, 2)
def test_a_stage_may_switch_gradients_of_what_it_receives(world):
    for name in ("interleaved_1f1b", "zb_v"):
        loss_fn = lambda outputs, target: squared_error(outputs[0], target)  # noqa: E731
        compare_step(world, plan_named(name, world.size, 4), Toggling, loss_fn, dynamic_shapes=True)


class Table(nn.Module):
    """The first stage passes on its table; the next one, unless unsplit, gives it a sparse gradient."""

    def __init__(self, depth: int):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 5 * WIDTH, dtype=torch.float64).view(5, WIDTH))

    def forward(self, x, table=None):
        if table is None:
            return (x * 10).long() % 5, self.weight * 1
        return nn.functional.embedding(x, table, sparse=table.is_leaf).sum(1) * self.weight[0]


@on_ranks(1, 2)
def test_a_sparse_gradient_of_what_a_stage_receives(world):
    for name in ("interleaved_1f1b",) if world.size == 1 else ("one_f_one_b", "zb_h1"):
        compare_step(world, plan_named(name, world.size, 2), Table)


@on_ranks(2)
def test_shapes_that_depend_on_data(world):
    pipeline, executor = prepared(
        world, plan_named("one_f_one_b", 2, 6), Selecting, squared, dynamic_shapes=True
    )
    for seed in (1, 2):
        pipeline.set_data(seed)
        losses = pipeline.step(executor).losses
        pipeline.assert_losses(losses, pipeline.run_whole())
    pipeline.assert_gradients()
    if world.rank == 0:  # else no rank announces them
        expected, message = ValueError, r"stage 0 made \(float64\[.*dynamic_shapes=True"
    else:
        expected, message = PipeCommAborted, "dynamic_shapes=True"
    comm = world.fresh_comm(channels=4)
    pipeline, executor = prepared(world, executor.plan, Selecting, squared, communicator=comm)
    with world.breaking(), pytest.raises(expected, match=f"(?s){message}"):
        pipeline.step(executor)


# ---- groups, several executors, mappings ------------------------------------------------------------------


@on_ranks(4)
def test_a_sub_group_and_two_pipelines_that_cross(world):
    """Ranks 1, 2, 3 run one pipeline; ranks 0..3 in another order run a second one, step by step in turns."""
    group = dist.new_group([1, 2, 3])
    outer_plan = plan_named("dualpipe", 4)
    outer = Pipeline(outer_plan, [2, 0, 3, 1][world.rank])
    outer_executor = Executor(
        outer_plan, outer.stages, loss_fn=outer.loss_fn, rank_mapping=[2, 0, 3, 1]
    )  # makes its own communicator
    inner_executor = None
    if world.rank > 0:
        inner_plan = plan_named("zb_v", 3)
        inner = Pipeline(inner_plan, world.rank - 1, seed=3)
        inner_executor = Executor(inner_plan, inner.stages, loss_fn=inner.loss_fn, communicator=group)
    for _ in range(2):
        outer_losses = outer.step(outer_executor).losses
        if inner_executor is not None:
            inner_losses = inner.step(inner_executor).losses
    outer_executor.sum_replica_gradients()
    outer.run_whole()
    outer.assert_losses(outer_losses, outer.run_whole())
    outer.assert_gradients()
    outer_executor.close()
    if inner_executor is not None:
        inner.run_whole()
        inner.assert_losses(inner_losses, inner.run_whole())
        inner.assert_gradients()
        inner_executor.close()
        assert inner_executor.communicator.closed
    dist.barrier()


@on_ranks(2)
def test_a_communicator_of_two_channels_will_do(world):
    compare_step(world, plan_named("zb_v", 2), communicator=world.comm)
    assert not world.comm.closed
    world.comm.barrier()


# ---- fused slots ------------------------------------------------------------------------------------------


@on_ranks(2)
def test_fused_slots_use_the_method_of_the_stages(world):
    for name, loss_scale in (("dualpipe", 1.0), ("dualpipev", 0.5)):
        plan = plan_named(name, 2)
        before = StoringBlock.num_calls
        compare_step(world, plan, StoringBlock, scale=loss_scale, loss_scale=loss_scale)
        num_fused = sum(type(item) is Fused for item in plan.compute[world.rank])
        assert StoringBlock.num_calls - before == num_fused > 0


def test_communicators_tell_their_channels_and_timeout(ranks):
    assert ranks.run(2, channels_and_timeout) == [((3, 7.0), (2, 600.0))] * 2


def channels_and_timeout(world):
    with Communicator(channels=3, timeout=7) as small:
        return (small.channels, small.timeout), (world.comm.channels, world.comm.timeout)
