"""Gradients after a step: weights that stages share, and clipping, against one process."""

from __future__ import annotations

import contextlib
import functools
import math
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from pipelines import WIDTH, Block, Pipeline, executor_of, make_executor, prepared, squared_error
from ranks import on_ranks
from relay_cases import topology_of
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

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
        """Clips the gradients of the whole model; returns the norm."""
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
        for max_norm, norm_type in ((0.5, 2), (0.01, math.inf)) if is_one else ((0.5, 2), (1e6, 3.0)):
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
    pipeline.zero_grad()
    pipeline.step(executor)
    if world.rank == 2:
        stage.matrix.grad = None  # counts as zeros
    elif world.rank == 0:
        expected = stage.matrix.grad.clone()
    executor.sum_shared_gradients({"matrix": [0, 2]})
    if world.rank == 0:
        assert stage.matrix.grad.equal(expected)


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
        (
            ValueError,
            "a weight must be named once in sum_shared_gradients: that of 'again'",
            {"matrix": [0, 1], "again": {1: "matrix", 2: "matrix"}},
        ),
    ]
    stage.frozen = nn.Parameter(torch.ones(2, dtype=torch.float64), requires_grad=world.rank != 0)
    for error, text, weights in calls:
        with world.breaking(), pytest.raises((error, PipeCommMismatch), match=text):
            executor.sum_shared_gradients(weights)
    del stage.frozen
    for on_rank_0, on_rank_2 in (
        ({"matrix": [0, 2]}, {}),
        ({"matrix": [0, 2]}, {"matrix": [2]}),
        ({"matrix": [0, 2], "second.bias": [0, 1, 2]}, {"second.bias": [0, 1, 2], "matrix": [0, 2]}),
        ({"matrix": [0, 2]}, {"matrix": [0, 1, 2]}),
    ):
        with pytest.raises(PipeCommMismatch, match=r"ranks \d and \d name different weights of rank \d"):
            executor.sum_shared_gradients([on_rank_0, {}, on_rank_2][world.rank])
    assert executor.is_usable
    pipeline.zero_grad()
    pipeline.assert_losses(pipeline.step(executor).losses, pipeline.run_whole())
    for arguments, error, text in (
        ((-1.0,), ValueError, "max_norm must be a number >= 0, got -1"),
        ((math.nan,), ValueError, "max_norm must be a number >= 0"),
        ((1.0, 0), ValueError, "norm_type must be a positive number or inf, got 0"),
        (("one",), ValueError, "could not convert"),
    ):
        with pytest.raises(error, match=text):
            executor.clip_grad_norm_(*arguments)
    executor.sum_shared_gradients({"matrix": [0, 2]})
    total = executor.clip_grad_norm_(0.1)
    torch.testing.assert_close(total, pipeline.expected_norm(0.1), rtol=1e-12, atol=0)
    pipeline.zero_grad()
    pipeline.step(executor)
    with world.breaking(), pytest.raises(PipeCommError, match="6, 6"):
        executor.sum_shared_gradients({"any": {0: "matrix", 2: "first.weight"}})
        executor.clip_grad_norm_(1.0)  # rank 1, which holds none, gets the error here
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
    torch.testing.assert_close(stage.single.grad[0], torch.tensor(1.0), rtol=1e-2, atol=0)  # unchanged
    assert not executor.clip_grad_norm_(1.0).isfinite()


# ---- sums, once -------------------------------------------------------------------------------------------


def sum_replicas(executor):
    executor.sum_replica_gradients()


def sum_shared(executor):
    executor.sum_shared_gradients({"matrix": [0, 1]})


def nothing(_executor):
    pass


class Adding(nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(3)) for _ in range(10))

    def forward(self, x):
        return x + sum(self.weights)


@on_ranks(1)
def test_executors_of_several_threads(world):
    """Each thread reads and drops gradients of its own stages only; those of others change meanwhile."""
    plan, names = get_plan("interleaved_1f1b", P=1, M=2, V=2), [f"weights.{idx}" for idx in range(10)]

    def train(group):
        stages = [Adding(), Adding()]
        with Executor(plan, stages, loss_fn=squared_error, communicator=group) as executor:
            for _ in range(30):
                nn.ModuleList(stages).zero_grad()
                executor.step([torch.ones(2, 3)] * 2, [torch.zeros(2, 3)] * 2)
                executor.sum_shared_gradients(dict.fromkeys(names, [0, 1]))
        return stages[0].weights[0].grad

    groups = [torch.distributed.new_group([0]) for _ in range(3)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    try:
        with ThreadPoolExecutor() as pool:
            results = list(pool.map(train, groups))
    finally:
        sys.setswitchinterval(interval)
    expected = torch.full((3,), 2 * 2 * 2 * 2 * 21 / 6)  # stages, micro-batches, rows; the slope at 21
    for result in results:
        torch.testing.assert_close(result, expected)


def clip(executor):
    executor.clip_grad_norm_(1.0)


WRONG_ORDERS = [
    (sum_replicas, nothing, sum_shared, "call it before sum_replica_gradients"),
    (sum_replicas, nothing, sum_replicas, "must be called once: the gradients of this step are sums"),
    (sum_shared, nothing, sum_shared, "must be named once .* its gradient is a sum already"),
    (clip, nothing, sum_shared, "must precede clip_grad_norm_"),
    (sum_replicas, Pipeline.step, sum_replicas, "added up after an earlier step already"),
    (sum_shared, Pipeline.step, sum_shared, "added up after an earlier step already"),
]


@on_ranks(2)
@pytest.mark.filterwarnings("ignore:clip_grad_norm_ of dualpipe before")
@pytest.mark.parametrize("order", range(len(WRONG_ORDERS)))
def test_sums_that_would_be_wrong_are_refused_on_all_ranks(world, order):
    first, between, last, text = WRONG_ORDERS[order]
    plan = get_plan("dualpipe", 2, 4)
    pipeline = TiedPipeline(plan, world.rank)
    executor = make_executor(world, plan, pipeline, communicator=None)
    pipeline.step(executor)
    first(executor)
    if between is Pipeline.step:
        pipeline.step(executor)
        pipeline.step(executor)
    with world.breaking(), pytest.raises((ValueError, PipeCommError), match=text):
        last(executor)
    pipeline.zero_grad()
    pipeline.step(executor)
    pipeline.run_whole()
    sum_replicas(executor)
    executor.close()


@on_ranks(2)
def test_clipping_before_the_sum_of_copies_warns(world):
    pipeline, executor = prepared(world, get_plan("dualpipe", 2, 4))
    pipeline.step(executor)
    with pytest.warns(
        UserWarning, match="before sum_replica_gradients takes the gradients of the first copies"
    ) as caught:
        executor.clip_grad_norm_(1.0)
    assert caught[0].filename == __file__  # the line that the user must change


# ---- stages that are functions ----------------------------------------------------------------------------


class Trainer:
    """Its stage is a method, with modules in hidden places."""

    def __init__(self, module):
        self.parts = {"block": [module]}

    def run(self, x):
        return self.parts["block"][0](x)

    def recompute(self, x):
        return checkpoint(self.parts["block"][0], x, use_reentrant=True)


def with_leaves(module):
    """The weights are a dict of tensors that are not parameters."""
    weights = {name: part.detach().clone().requires_grad_() for name, part in module.named_parameters()}
    return lambda x: functional_call(module, weights, (x,)), list(weights.values())


FORMS = {
    "a method": lambda module: (Trainer(module).run, list(module.parameters())),
    "functional_call": with_leaves,
    "a partial": lambda module: (functools.partial(module), list(module.parameters())),
    "a checkpoint": lambda module: (
        lambda x: checkpoint(Trainer(module).run, x, use_reentrant=False),
        list(module.parameters()),
    ),
    "one of each": lambda module: (module, list(module.parameters())),
}


@on_ranks(2)
@pytest.mark.parametrize("name", ["one_f_one_b", "zb_v"])
@pytest.mark.parametrize("form", FORMS)
def test_parameters_of_stages_that_are_functions(world, form, name):
    """Inputs that require grad are not parameters, nor are the tensors that they were made from."""
    plan = get_plan(name, 2, 4)
    pipeline = Pipeline(plan, world.rank)
    made = {stage: FORMS[form](module) for stage, module in pipeline.stages.items()}
    if form == "one of each" and world.rank == 1:
        made[1] = with_leaves(pipeline.stages[1])
    stages = {stage: function for stage, (function, _) in made.items()}
    executor = executor_of(world, plan, stages, loss_fn=pipeline.loss_fn)
    encoder = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
    for parameter in encoder.parameters():
        parameter.grad = torch.full_like(parameter, 100.0)
    assert executor.clip_grad_norm_(1.0).item() == 0
    (first, second, *others), targets = pipeline.inputs[0], pipeline.targets[0]
    executor.step([first.clone().requires_grad_(), second + 0 * encoder(second), *others], targets)
    pipeline.run_whole()
    parameters = [part for module in pipeline.whole for part in module.parameters()]
    expected = nn.utils.clip_grad_norm_(parameters, 0.1)
    torch.testing.assert_close(executor.clip_grad_norm_(0.1), expected, rtol=1e-12, atol=0)
    for stage, (_, mine) in made.items():
        for part, theirs in zip(mine, pipeline.whole[pipeline.depth_of[stage]].parameters(), strict=True):
            torch.testing.assert_close(part.grad, theirs.grad, rtol=1e-10, atol=1e-12)


@on_ranks(2)
def test_modules_that_a_function_recomputes_are_known(world):
    plan = get_plan("one_f_one_b", 2, 4)
    pipeline = Pipeline(plan, world.rank)
    (stage,) = pipeline.stages
    trainer = Trainer(pipeline.stages[stage])
    executor = executor_of(
        world, plan, [trainer.recompute if stage else trainer.run], loss_fn=pipeline.loss_fn
    )
    pipeline.step(executor)
    pipeline.run_whole()
    parameters = [part for module in pipeline.whole for part in module.parameters()]
    expected = nn.utils.clip_grad_norm_(parameters, 0.1)
    torch.testing.assert_close(executor.clip_grad_norm_(0.1), expected, rtol=1e-12, atol=0)
    pipeline.assert_gradients()


@on_ranks(2)
@pytest.mark.parametrize("shows_some", [False, True])
def test_functions_that_hide_their_parameters_are_refused_or_a_warning(world, shows_some):
    plan = get_plan("one_f_one_b", 2, 4)
    pipeline = Pipeline(plan, world.rank)
    (stage,) = pipeline.stages
    trainer = Trainer(pipeline.stages[stage])
    shown = nn.Linear(WIDTH, WIDTH, dtype=torch.float64) if shows_some else nn.Identity()
    stages = [lambda x: shown(checkpoint(trainer.run, x, use_reentrant=True))] if stage else [trainer.run]
    with executor_of(world, plan, stages, loss_fn=pipeline.loss_fn, communicator=None) as executor:
        pipeline.step(executor)
        if shows_some:
            warned = pytest.warns(UserWarning, match=r"stages \[1\] .* leaves out parameters that are hidden")
            with warned if stage else contextlib.nullcontext():
                executor.clip_grad_norm_(1.0)
            return
        with (
            world.breaking(),
            pytest.raises((ValueError, PipeCommError), match="checkpointing that hides its parameters"),
        ):
            executor.clip_grad_norm_(1.0)


@on_ranks(4)
def test_stages_of_several_ranks(world):
    """Copies count once, pieces (with Megatron's attribute) on each rank; shared weights rank by rank."""
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
            pytest.raises((ValueError, PipeCommMismatch), match="must have the same number of ranks"),
        ):
            executor.sum_shared_gradients({"matrix": [0, 1]})
