"""Gradients after a step: weights that stages share, and clipping, against one process."""

from __future__ import annotations

import contextlib
import math

import pytest
import torch
from pipelines import WIDTH, Block, Pipeline, make_executor, prepared
from ranks import on_ranks
from relay_cases import topology_of
from torch import nn

from pipecomm_ext import PipeCommError, PipeCommMismatch
from pipecomm_ext.schedules import Executor, get_plan

pytestmark = pytest.mark.filterwarnings("ignore:.*micro-batches are fewer than the stages")


class Tied(Block):
    """A Block with a matrix; in the first and the last stage it is the same weight."""

    def __init__(self, depth: int):
        super().__init__(depth)
        matrix = torch.linspace(-1, 1, WIDTH * WIDTH, dtype=torch.float64).view(WIDTH, WIDTH)
        self.matrix = nn.Parameter(matrix if depth in (0, self.last) else matrix * depth)

    def forward(self, x):
        return super().forward(x @ self.matrix)


class TiedPipeline(Pipeline):
    """`is_one`: the copies of a rank are one Parameter."""

    def __init__(self, plan, rank, is_one=True):
        self.ends = sorted({chain[end] for chain in plan.chains for end in (0, -1)})
        Tied.last = len(plan.chains[0]) - 1
        super().__init__(plan, rank, Tied)
        self.whole[-1].matrix = self.whole[0].matrix
        mine = [self.stages[stage] for stage in self.ends if stage in self.stages]
        for module in mine[1:] if is_one else ():
            module.matrix = mine[0].matrix

    def parameters_of_whole(self):
        return list(nn.ModuleList(self.whole).parameters())

    def expected_norm(self, max_norm, norm_type=2.0):
        """Clips the gradients of the whole model."""
        return torch.nn.utils.clip_grad_norm_(self.parameters_of_whole(), max_norm, norm_type)


@on_ranks(2, 3, 4)
@pytest.mark.parametrize("is_one", [True, False], ids=["one", "copies"])
def test_tied_weights_and_clipping(world, is_one):
    """Two chains and two copies of them (dualpipe), both ends on a rank (zb_v), and on two ranks."""
    P, M = world.size, 2 * world.size
    names = ["one_f_one_b", "zb_v"] + ["dualpipe"] * (P % 2 == 0)
    for name in names:
        plan = get_plan(name, P, M)
        pipeline = TiedPipeline(plan, world.rank, is_one)
        executor = make_executor(world, plan, pipeline)
        for max_norm, norm_type in ((0.5, 2), (1e6, 3.0), (0.01, math.inf)):
            pipeline.zero_grad()
            for _ in range(2):
                pipeline.step(executor)
                pipeline.run_whole()
            executor.sum_shared_gradients({"matrix": plan.chains[-1][:: len(plan.chains[0]) - 1]})
            executor.sum_replica_gradients()
            pipeline.assert_gradients()
            total = executor.clip_grad_norm_(max_norm, norm_type)
            expected = pipeline.expected_norm(max_norm, norm_type)
            torch.testing.assert_close(total, expected, rtol=1e-12, atol=0)
            pipeline.assert_gradients()


@on_ranks(3)
def test_shared_weights_by_parameter_and_by_other_names(world):
    plan = get_plan("one_f_one_b", 3, 3)
    pipeline = TiedPipeline(plan, world.rank)
    executor = make_executor(world, plan, pipeline)
    (stage,) = pipeline.stages.values()
    for weights in (
        {} if world.rank == 1 else {stage.matrix: [0, 2]},
        {"embedding": {0: "matrix", 2: "matrix"}},
        {"module.matrix": (2, 0)},  # as in DDP
    ):
        pipeline.zero_grad()
        pipeline.step(executor)
        pipeline.run_whole()
        executor.sum_shared_gradients(weights)
        pipeline.assert_gradients()
    if world.rank == 2:
        stage.matrix.grad = None  # counts as zeros
    executor.sum_shared_gradients({"matrix": [0, 2]})
    pipeline.assert_gradients()


@on_ranks(3)
def test_wrong_calls_raise_on_all_ranks_and_the_next_step_works(world):
    plan = get_plan("one_f_one_b", 3, 3)
    pipeline = TiedPipeline(plan, world.rank)
    executor = make_executor(world, plan, pipeline, communicator=None)
    (stage,) = pipeline.stages.values()
    calls = [
        (TypeError, "weights must map names or parameters to stages", ["matrix"]),
        (TypeError, "must be a list or a mapping, not 0", {"matrix": 0}),
        (ValueError, r"must be some of this plan, got \[0, 3\]", {"matrix": [0, 3]}),
        (ValueError, "stage . must have 'head' as a parameter that requires gradients", {"head": [0, 2]}),
        (ValueError, r"the given parameter of shape \[6, 6\]", {nn.Parameter(torch.ones(6, 6)): [0, 2]}),
        (ValueError, "stage 0 must have 'frozen' as a parameter", {"frozen": [0, 2]}),
        (PipeCommMismatch, "1 weights here, 0 on rank 2", {} if world.rank == 2 else {"matrix": [0, 2]}),
    ]
    stage.frozen = nn.Parameter(torch.ones(2, dtype=torch.float64), requires_grad=world.rank != 0)
    for error, text, weights in calls:
        raises = pytest.raises((error, PipeCommMismatch), match=text)
        with world.breaking(), raises if weights else contextlib.nullcontext():
            executor.sum_shared_gradients(weights)
            if error is PipeCommMismatch and world.rank == 1:  # which holds none
                raise PipeCommMismatch(text)
    del stage.frozen
    pipeline.zero_grad()
    pipeline.assert_losses(pipeline.step(executor).losses, pipeline.run_whole())
    for arguments, error, text in (
        ((-1.0,), ValueError, "max_norm must be a number from 0 on, got -1"),
        ((math.nan,), ValueError, "max_norm must be a number from 0 on"),
        ((1.0, 0), ValueError, "norm_type must be a positive number or inf, got 0"),
        (("one",), ValueError, "could not convert"),
    ):
        with pytest.raises(error, match=text):
            executor.clip_grad_norm_(*arguments)
    executor.sum_shared_gradients({"matrix": [0, 2]})
    total = executor.clip_grad_norm_(0.1)
    torch.testing.assert_close(total, pipeline.expected_norm(0.1), rtol=1e-12, atol=0)
    with world.breaking(), pytest.raises(PipeCommError, match="6, 6"):
        executor.sum_shared_gradients({"any": {0: "matrix", 2: "first.weight"}})
        executor.clip_grad_norm_(1.0)  # rank 1, which holds none, hears of it here
    executor.close()


@on_ranks(2)
def test_gradients_that_are_not_finite_missing_or_of_several_dtypes(world):
    pipeline, executor = prepared(world, get_plan("one_f_one_b", 2, 2))
    assert executor.clip_grad_norm_(1.0).item() == 0  # no gradients at all
    (stage,) = pipeline.stages.values()
    stage.empty = nn.Parameter(torch.ones(0))
    stage.single = nn.Parameter(torch.ones(3))
    stage.brief = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    for parameter in (stage.empty, stage.single, stage.brief):
        parameter.grad = torch.full_like(parameter, 2.0)
    for norm_type, expected in ((2.0, math.sqrt(12 * 4)), (math.inf, 2.0), (1.0, 24.0)):
        total = executor.clip_grad_norm_(1e3, norm_type)
        assert total.dtype == torch.float64 and total.item() == pytest.approx(expected, rel=4e-3)
    executor.clip_grad_norm_(math.sqrt(12))
    for parameter in (stage.single, stage.brief):
        torch.testing.assert_close(parameter.grad, torch.ones_like(parameter), rtol=1e-2, atol=0)
    if world.rank == 0:
        stage.single.grad[1] = math.inf
    with pytest.raises(
        RuntimeError, match="the total norm of order 2.0 is inf: gradients that are not finite"
    ):
        executor.clip_grad_norm_(1.0, error_if_nonfinite=True)
    torch.testing.assert_close(stage.single.grad[0], torch.tensor(1.0), rtol=1e-2, atol=0)  # as it was
    assert not executor.clip_grad_norm_(1.0).isfinite()


@on_ranks(2)
def test_replicas_are_added_up_after_shared_weights(world):
    plan = get_plan("dualpipe", 2, 4)
    pipeline = TiedPipeline(plan, world.rank)
    executor = make_executor(world, plan, pipeline, communicator=None)
    pipeline.step(executor)
    executor.sum_replica_gradients()
    with (
        world.breaking(),
        pytest.raises((ValueError, PipeCommMismatch), match="call it before sum_replica_gradients"),
    ):
        executor.sum_shared_gradients({"matrix": [0, 1]})
    executor.close()


@on_ranks(4)
def test_stages_of_several_ranks(world):
    """Copies count once, and pieces, which have Megatron's attribute, each; shared weights rank by rank."""
    topology = topology_of(world, [1, 2, 1])
    plan = get_plan("one_f_one_b", 3, 3)
    pipeline = TiedPipeline(plan, topology.get_vtp_my_stage_idx())
    with Executor(plan, pipeline.stages, topology=topology, loss_fn=pipeline.loss_fn) as executor:
        pipeline.step(executor)
        pipeline.run_whole()
        executor.sum_shared_gradients({"matrix": [0, 2]})
        pipeline.assert_gradients()
        torch.testing.assert_close(executor.clip_grad_norm_(0.3), pipeline.expected_norm(0.3))
        pipeline.assert_gradients()
        if pipeline.rank == 1:
            pipeline.stages[1].matrix.tensor_model_parallel = True
        squares = sum(parameter.grad.square().sum() for parameter in pipeline.parameters_of_whole())
        squares += pipeline.whole[1].matrix.grad.square().sum()  # two pieces
        torch.testing.assert_close(executor.clip_grad_norm_(1.0), squares.sqrt())
        with (
            world.breaking(),
            pytest.raises((ValueError, PipeCommMismatch), match="must be equally many ranks each"),
        ):
            executor.sum_shared_gradients({"matrix": [0, 1]})
