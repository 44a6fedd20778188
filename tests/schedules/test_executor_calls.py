"""Less usual arguments of an Executor, and the errors for wrong ones."""

from __future__ import annotations

import functools

import pytest
import torch
from pipelines import WIDTH, Block, Pipeline, ReentrantBlock, executor_of, make_executor, prepared
from ranks import on_ranks
from torch import nn

from pipecomm_ext import Communicator, PipeCommAborted, PipeCommError, PipeCommMismatch
from pipecomm_ext.schedules import Executor, Plan, get_plan

TWINS = Plan("twins", P=3, M=4, owner=[0, 1, 2, 0, 1, 2], next_of=[1, 2, None, 4, 5, None], compute=[
    "F0.0 F0.1 F3.0 F3.1 B0.0 B3.0 B0.1 B3.1",
    "F1.0 F1.1 F4.0 F4.1 B1.0 B4.0 B1.1 B4.1",
    "F2.0 B2.0 F2.1 B2.1 F5.0 B5.0 F5.1 B5.1",
])  # fmt: skip


# ---- two chains -------------------------------------------------------------------------------------------


@on_ranks(3)
@pytest.mark.filterwarnings("ignore:.*micro-batches are fewer than the stages")
def test_two_chains_in_one_direction(world):
    """Announcements of one chain must not mix with those of the other."""
    for num_channels in (4, 3):  # 3: the executor makes a communicator for its headers
        pipeline = Pipeline(TWINS, world.rank)
        with make_executor(
            world, TWINS, pipeline, communicator=world.shared_comm(channels=num_channels)
        ) as executor:
            pipeline.assert_losses(pipeline.step(executor).losses, pipeline.run_whole())
    executor = make_executor(world, TWINS, pipeline, communicator=None)
    expected = (ValueError, PipeCommAborted)
    with world.breaking(), pytest.raises(expected, match="give a mapping from stage to a list"):
        with executor:
            executor.step(pipeline.inputs[0], pipeline.targets[0])


@on_ranks(2)
def test_all_ranks_may_pass_the_mappings_of_all_chains(world):
    plan = get_plan("dualpipe", 2, 4)
    pipeline = Pipeline(plan, world.rank)
    inputs, targets = (
        {chain[end]: values for chain, values in zip(plan.chains, data, strict=True)}
        for end, data in ((0, pipeline.inputs), (-1, pipeline.targets))
    )
    executor = make_executor(world, plan, pipeline)
    pipeline.assert_losses(executor.step(inputs, targets).losses, pipeline.run_whole())
    mine = {chain[0]: values if plan.owner[chain[0]] == world.rank else None
            for chain, values in zip(plan.chains, pipeline.inputs, strict=True)}  # fmt: skip
    pipeline.assert_losses(executor.step(mine, targets).losses, pipeline.run_whole())


@on_ranks(2)
@pytest.mark.parametrize("name", ["zb_h1", "zb_v", "dualpipe"])
def test_reentrant_checkpoints_in_split_backwards(world, name):
    plan = get_plan(name, 2, 4)
    pipeline = Pipeline(plan, world.rank, ReentrantBlock)
    with make_executor(world, plan, pipeline) as executor:
        for _ in range(2):
            pipeline.assert_losses(pipeline.step(executor).losses, pipeline.run_whole())
        executor.sum_replica_gradients()
    pipeline.assert_gradients()


# ---- losses -----------------------------------------------------------------------------------------------


class Mean(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return (x * self.weight).mean()


@on_ranks(2)
def test_without_a_loss_fn_the_loss_is_what_the_last_stage_returns(world):
    plan = get_plan("1f1b", 2, 4)
    inputs = [torch.full((2, 3), float(micro)) for micro in range(4)]
    executor = executor_of(world, plan, [[nn.Identity(), Mean()][world.rank]])
    for run, targets in ((executor.step, None), (executor.eval, None), (executor.eval, inputs)):
        losses = run(inputs, targets).losses
        assert losses is None if world.rank == 0 else torch.stack(losses).tolist() == [0, 1, 2, 3]
    assert all(weight.grad == 6 for stage in executor.stages.values() for weight in stage.parameters())
    executor = executor_of(world, plan, [nn.Identity()])
    for targets in (None, inputs):
        losses, outputs = executor.eval(inputs, targets)
        assert losses is None and (outputs is None) == (world.rank == 0)


@on_ranks(2)
def test_a_step_may_have_a_criterion_and_keep_outputs_of_its_own(world):
    plan = get_plan("1f1b", 2, 4)
    inputs = [torch.full((3,), float(micro)) for micro in range(4)]
    targets = [(torch.full((3,), 2.0), torch.full((3,), 0.5)) for _ in range(4)]
    stages = [nn.Linear(3, 3), lambda x: (x, 2 * x)]
    executor = executor_of(
        world,
        plan,
        [stages[world.rank]],
        loss_fn=lambda outputs, target: outputs[0].sum() * len(target),
        return_outputs=False,
    )

    def criterion(x, doubled, factor, bias):
        assert torch.equal(doubled, 2 * x)
        return (x * factor + bias).mean()

    for _ in range(2):  # the next step has the executor's own again
        losses, outputs = executor.step(inputs, targets, criterion=criterion, return_outputs=True)
        own_losses, own_outputs = executor.step(inputs, targets)
        assert own_outputs is None
        if world.rank == 1:
            xs = [x for x, _ in outputs]
            torch.testing.assert_close(losses, [2 * x.mean() + 0.5 for x in xs])
            torch.testing.assert_close(own_losses, [2 * x.sum() for x in xs])


class Detached(nn.Module):
    """Its loss has no gradient, so its fused slots have no backward."""

    def forward(self, x):
        return x.detach()

    @classmethod
    def overlapped_forward_backward(cls, *_arguments):
        raise AssertionError("there is nothing to run backward from")


@on_ranks(1)
def test_a_fused_slot_without_anything_to_run_backward_from(world):
    plan = get_plan("dualpipev", 1, 4)
    executor = Executor(plan, [Detached(), Detached()], communicator=world.comm, loss_fn=lambda y, t: y.sum())
    losses = executor.step([torch.full((2,), float(micro)) for micro in range(4)], [None] * 4).losses
    assert torch.stack(losses).tolist() == [0, 2, 4, 6]


# ---- memory -----------------------------------------------------------------------------------------------


class Watching(nn.Module):
    """At each W of the weight it counts which inputs still have their gradient."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.inputs, self.numbers_left = [], []
        self.linear.weight.register_post_accumulate_grad_hook(self._count)

    def forward(self, x):
        self.inputs.append(x)
        return self.linear(x)

    def _count(self, _weight):
        self.numbers_left.append(sum(x.grad is not None for x in self.inputs))


@on_ranks(2)
def test_gradients_of_inputs_are_not_kept_until_w(world):
    plan = get_plan("zb_h2", 2, 4)
    pipeline = Pipeline(plan, world.rank)
    stage = Watching() if world.rank == 1 else pipeline.stages[0]
    pipeline.step(executor_of(world, plan, [stage], loss_fn=pipeline.loss_fn))
    if world.rank == 1:
        assert stage.numbers_left == [0] * 4


# ---- gradients of replicas --------------------------------------------------------------------------------


class PartlyFrozen(Block):
    def __init__(self, depth: int):
        super().__init__(depth)
        self.first.requires_grad_(False)


@on_ranks(2)
def test_sums_over_replicas_leave_frozen_parameters_alone(world):
    pipeline, executor = prepared(world, get_plan("dualpipe", 2, 4), PartlyFrozen)
    pipeline.step(executor)
    executor.sum_replica_gradients()
    pipeline.run_whole()
    pipeline.assert_gradients()  # None where the unsplit model has none


@on_ranks(2)
def test_replicas_that_are_no_modules_are_refused_on_all_ranks(world):
    pipeline, executor = prepared(world, get_plan("dualpipe", 2, 4), communicator=None)
    if world.rank == 0:
        executor.stages[0] = functools.partial(executor.stages[0])
    expected = TypeError if world.rank == 0 else PipeCommAborted
    with (
        world.breaking(),
        pytest.raises(expected, match="stage 0 must be a module to have gradients, not partial"),
    ):
        executor.sum_replica_gradients()
    assert pipeline.step(executor).losses is not None  # it still works
    executor.close()


# ---- refused ----------------------------------------------------------------------------------------------


@on_ranks(2)
def test_a_closed_executor_stays_closed(world):
    pipeline, executor = prepared(world, get_plan("1f1b", 2, 4), communicator=None)
    pipeline.step(executor)
    executor.close()
    executor.close()
    for _ in range(2):
        with pytest.raises(ValueError, match="this Executor is closed; make a new one"):
            pipeline.step(executor)


@on_ranks(2)
def test_one_channel_is_not_enough(world):
    plan = get_plan("1f1b", 2, 4)
    with Communicator(channels=1) as comm:
        with pytest.raises(ValueError, match="has 1 channel; an Executor needs 2"):
            Executor(plan, [nn.Identity()], communicator=comm)
        comm.barrier()


@on_ranks(2)
def test_a_timeline_that_one_rank_did_not_record_is_refused_on_all(world):
    pipeline, executor = prepared(world, get_plan("1f1b", 2, 4), record_timeline=world.rank == 0)
    pipeline.step(executor)
    expected = PipeCommMismatch if world.rank == 0 else ValueError
    with world.breaking(), pytest.raises(expected, match="make the Executor with record_timeline=True"):
        executor.timeline()
    pipeline.step(executor)


@on_ranks(2)
def test_errors_have_the_ranks_of_the_communicator(world):
    plan = get_plan("1f1b", 2, 4)
    pipeline = Pipeline(plan, 1 - world.rank)
    if world.rank == 1:
        pipeline.stages[0] = lambda x: 1 / 0
    with world.broken_comm(channels=4) as comm:
        executor = make_executor(world, plan, pipeline, communicator=comm, rank_mapping=[1, 0])
        with world.breaking(), pytest.raises(PipeCommError) as caught:
            executor.step(pipeline.inputs[0], pipeline.targets[0])
    assert "rank 1: F0.0 at position 0 of one_f_one_b: ZeroDivisionError" in str(caught.value)
    assert caught.value.origin_rank == 1
