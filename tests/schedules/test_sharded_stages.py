"""Stages in FSDP2 and tensor parallelism: their own features, and those that they share with DDP."""

from __future__ import annotations

import functools
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from data_parallel_cases import Replicas, TwoBlocks, communicator, ddp, fsdp, mesh, sum_replicas
from pipelines import WIDTH, Block, plan_named
from ranks import on_ranks
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint as recomputed

from pipecomm_ext import PipeCommAborted
from pipecomm_ext.schedules import Executor, Plan, StageError

# ---- FSDP2 -------------------------------------------------------------------------------------------------


class Recomputed(TwoBlocks):
    """One block is recomputed, the other is not."""

    use_reentrant = False

    def forward(self, x):
        x = x if x.requires_grad else x.detach().requires_grad_()
        x = recomputed(self.blocks[0], x, use_reentrant=self.use_reentrant)
        return self.blocks[1](x)


class Reentrant(Recomputed):
    use_reentrant = True


@on_ranks(4)
@pytest.mark.parametrize(
    "wrap, layer, name",  # every pair of two of them
    [
        (ddp, Recomputed, "one_f_one_b"),
        (ddp, Reentrant, "zb_v"),
        (fsdp, Recomputed, "zb_v"),
        (fsdp, Reentrant, "one_f_one_b"),
    ],
)
def test_recomputation(world, wrap, layer, name):
    pipeline = Replicas(plan_named(name, 2, 4), wrap, layer)
    executor = pipeline.executor()
    for _ in range(2):
        pipeline.step(executor)
        pipeline.run_all()
    pipeline.assert_gradients()


def inner_only(module, **options):
    """Makes two roots in a stage, and weights that are neither sharded nor trained."""
    for block in module.blocks:
        fully_shard(block, mesh=mesh()["dp"], **options)
    return module


def count_reductions(pipeline: Replicas, executor: Executor) -> int:
    """The number of reduce-scatters in a step."""
    name = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
    with mock.patch.object(dist, name, wraps=getattr(dist, name)) as reduce_scatter:
        pipeline.step(executor)
    return reduce_scatter.call_count


@on_ranks(4)
@pytest.mark.parametrize("wrap", [
    functools.partial(fsdp, reshard_after_forward=True),
    functools.partial(fsdp, reshard_after_forward=False),
    inner_only,
], ids=["reshard", "keep", "inner"])  # fmt: skip
def test_one_reduction_per_step_and_settings_are_put_back(world, wrap):
    pipeline = Replicas(plan_named("zb_v", 2, 4), wrap)
    executor = pipeline.executor()
    num_groups = sum(isinstance(m, FSDPModule) for stage in pipeline.stages.values() for m in stage.modules())
    if wrap is not inner_only:
        num_groups -= len(pipeline.stages)  # the roots have no weights of their own
    for _ in range(2):
        assert count_reductions(pipeline, executor) == num_groups
        pipeline.run_all()
        pipeline.assert_gradients()
        for stage in pipeline.stages.values():
            assert all(isinstance(parameter, DTensor) for parameter in stage.parameters())  # sharded again
    for module in [*pipeline.stages.values(), *pipeline.whole]:
        module.zero_grad()
    sharded = [m for stage in pipeline.stages.values() for m in stage.modules() if isinstance(m, FSDPModule)]
    for is_last in (False, True):  # accumulation without communication
        for module in sharded:
            module.set_requires_gradient_sync(is_last, recurse=False)
        assert count_reductions(pipeline, executor) == (num_groups if is_last else 0)
        pipeline.run_all()
    pipeline.assert_gradients()


class ScaledBlock(Block):
    """W needs the values of weights: those of the two factors, to tell their gradients apart."""

    def __init__(self, depth: int):
        super().__init__(depth)
        self.scale = nn.Parameter(torch.linspace(1, 2, 9, dtype=torch.float64))

    def forward(self, x):
        weight = self.first.weight * self.scale[:, None]
        return x + self.second(torch.tanh(self.norm(nn.functional.linear(x, weight, self.first.bias))))


class Scaled(TwoBlocks):
    def __init__(self, depth: int):
        super().__init__(depth)
        self.blocks = nn.ModuleList(ScaledBlock(2 * depth + idx) for idx in range(2))


def late_weights(M: int) -> Plan:
    """All W after all I, and a forward in between, which frees the weights that it has gathered."""
    rows = [
        [*(f"{kind}{stage}.{micro}" for kind in "FI" for micro in range(M - 1)), f"F{stage}.{M - 1}"]
        + [*(f"W{stage}.{micro}" for micro in range(M - 1)), f"I{stage}.{M - 1}", f"W{stage}.{M - 1}"]
        for stage in range(2)
    ]
    return Plan("late_weights", P=2, M=M, owner=[0, 1], compute=[" ".join(row) for row in rows])


@on_ranks(4)
def test_weights_are_gathered_for_the_weight_half_of_a_backward(world):
    pipeline = Replicas(late_weights(4), functools.partial(fsdp, reshard_after_forward=True), Scaled)
    executor = pipeline.executor()
    for _ in range(2):
        pipeline.step(executor)
        pipeline.run_all()
    pipeline.assert_gradients()


@on_ranks(4)
@pytest.mark.parametrize("make_plan", [functools.partial(plan_named, "one_f_one_b", 2), late_weights])
def test_mixed_precision_sums_micro_batches_in_the_dtype_of_the_reduction(world, make_plan):
    """16 micro-batches of equal gradients: sums in bfloat16 would lose the last ones."""
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float64
    )
    plan = make_plan(32)
    pipeline = Replicas(plan, functools.partial(fsdp, mp_policy=policy), last_rows=3)
    pipeline.inputs = [[torch.ones(3, WIDTH, dtype=torch.float64)] * plan.M]
    pipeline.targets = [[torch.zeros(3, WIDTH, dtype=torch.float64)] * plan.M]
    executor = pipeline.executor()
    pipeline.step(executor)
    (stage,) = pipeline.stages.values()
    many = [parameter.grad.full_tensor() for parameter in stage.parameters()]
    stage.zero_grad()
    plan = make_plan(2)
    pipeline.inputs, pipeline.targets = ([data[0][:2]] for data in (pipeline.inputs, pipeline.targets))
    Executor(plan, pipeline.stages, loss_fn=pipeline.loss_fn, communicator=communicator()).step(
        *pipeline.data()
    )
    for parameter, grad in zip(stage.parameters(), many, strict=True):
        torch.testing.assert_close(grad, 16 * parameter.grad.full_tensor(), rtol=1e-5, atol=1e-6)


@on_ranks(4)
@pytest.mark.parametrize("wrap", [ddp, fsdp], ids=["ddp", "fsdp"])
def test_after_a_failed_step_the_next_one_is_right(world, wrap, tmp_path):
    """Both pipelines fail with the same micro-batch, once their first stages can only wait: a copy that
    continued would wait for the other one in a collective of torch."""
    num_micros = 4
    pipeline = Replicas(plan_named("zb_h1", 2, num_micros), wrap)
    executor = pipeline.executor(communicator=mesh()["pp"].get_group())
    pipeline.step(executor)
    losses, forwards = iter(range(num_micros)), iter(range(num_micros))
    [(stage, module)] = pipeline.stages.items()

    def note_forward(*_):
        if stage == 0 and next(forwards) == num_micros - 1:
            (tmp_path / f"rank{world.rank}").touch()

    def failing(output, target):
        if next(losses) == 2:
            until = time.monotonic() + 60
            while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < until:
                time.sleep(0.001)
            raise ArithmeticError("no loss")
        return pipeline.loss_fn(output, target)

    inputs, targets = pipeline.data()
    targets = targets and {stage: [(target,) for target in values] for stage, values in targets.items()}
    hook = module.register_forward_hook(note_forward)
    with world.breaking(), pytest.raises((StageError, PipeCommAborted), match="no loss"):
        executor.step(inputs, targets, criterion=failing)
    hook.remove()
    module.zero_grad()
    expected = pipeline.run_all()
    pipeline.assert_losses(pipeline.step(executor).losses, expected)
    pipeline.assert_gradients()
    executor.close()


class Narrow(TwoBlocks):
    """Has a parameter without a part for the second rank; all stages share one weight."""

    def __init__(self, depth: int):
        super().__init__(depth)
        self.blocks[0].bias = nn.Parameter(torch.full((1,), 0.5, dtype=torch.float64))
        self.blocks[0].register_forward_hook(lambda block, inputs, output: output + block.bias)
        with torch.no_grad():
            self.blocks[0].first.weight.copy_(torch.linspace(-1, 1, 9 * WIDTH).view(9, WIDTH))


@on_ranks(4)
@pytest.mark.parametrize("wrap", [ddp, fsdp], ids=["ddp", "fsdp"])
def test_clipping_and_shared_weights(world, wrap):
    for name in ("one_f_one_b", "dualpipe"):
        pipeline = Replicas(plan_named(name, 2, 4), wrap, Narrow)
        pipeline.whole[1].blocks[0].first.weight = pipeline.whole[0].blocks[0].first.weight
        executor = pipeline.executor()
        for norm_type in (2.0, float("inf")):
            for module in [*pipeline.stages.values(), *pipeline.whole]:
                module.zero_grad()
            pipeline.step(executor)
            pipeline.run_all()
            executor.sum_shared_gradients({"blocks.0.first.weight": [0, 1]})
            sum_replicas(pipeline.plan, executor)
            pipeline.assert_gradients()
            total = executor.clip_grad_norm_(0.3, norm_type)
            parameters = list(nn.ModuleList(pipeline.whole).parameters())
            expected = torch.nn.utils.clip_grad_norm_(parameters, 0.3, norm_type)
            torch.testing.assert_close(total, expected, rtol=1e-10, atol=0)
            pipeline.assert_gradients()


# ---- tensor parallelism ------------------------------------------------------------------------------------


class Mlp(nn.Module):
    def __init__(self, depth: int):
        super().__init__()
        torch.manual_seed(depth)
        self.norm, self.first, self.second = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)
        self.double()

    def forward(self, x):
        return x + self.second(torch.tanh(self.first(self.norm(x))))


def tensor_parallel(module):
    return parallelize_module(module, mesh()["dp"], {"first": ColwiseParallel(), "second": RowwiseParallel()})


@on_ranks(4)
def test_an_overflow_in_one_shard_counts_in_all_pipelines(world):
    replicas = Replicas(plan_named("one_f_one_b", 2), fsdp)
    parameters = list(nn.ModuleList(replicas.stages.values()).parameters())
    optimizer, scaler = torch.optim.SGD(parameters, lr=0.1), torch.amp.GradScaler("cpu", init_scale=1024.0)
    executor = replicas.executor()
    for is_overflow, scale in ((True, 512.0), (False, 512.0)):
        executor.step(*replicas.data())
        if is_overflow and world.rank == 0:
            parameters[0].grad.to_local().fill_(torch.inf)
        executor.unscale_(scaler, optimizer)
        before = parameters[0].to_local().clone()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == scale and parameters[0].to_local().equal(before) == is_overflow
        optimizer.zero_grad()


@on_ranks(4)
@pytest.mark.parametrize("name", ["one_f_one_b", "zb_h1", "zb_v", "dualpipev"])
def test_tensor_parallel_stages(world, name):
    """Both columns of ranks have the same data."""
    pipeline = Replicas(plan_named(name, 2, 4), tensor_parallel, Mlp)
    pipeline.set_data(1)
    executor = pipeline.executor()
    for _ in range(2):
        pipeline.assert_losses(pipeline.step(executor).losses, pipeline.run_whole())
    pipeline.assert_gradients()
    total = executor.clip_grad_norm_(0.3)
    parameters = [parameter for layer in pipeline.whole for parameter in layer.parameters()]
    torch.testing.assert_close(total, torch.nn.utils.clip_grad_norm_(parameters, 0.3), rtol=1e-10, atol=0)
    pipeline.assert_gradients()


@on_ranks(4)
def test_a_dtensor_between_stages_is_refused(world):
    def wrap(module):
        module.register_forward_hook(lambda _, inputs, output: DTensor.from_local(output, mesh()["dp"]))
        return module

    pipeline = Replicas(plan_named("one_f_one_b", 2, 2), wrap, Mlp, last_rows=3)
    executor = pipeline.executor(communicator=mesh()["pp"].get_group())
    with (
        world.breaking(),
        pytest.raises((TypeError, PipeCommAborted), match="tensor is a DTensor; pass a plain"),
    ):
        pipeline.step(executor)
    executor.close()


# ---- checkpoints -------------------------------------------------------------------------------------------


@on_ranks(4)
@pytest.mark.parametrize("wrap", [fsdp, tensor_parallel], ids=["fsdp", "tensor_parallel"])
def test_a_distributed_checkpoint_of_the_whole_model(world, wrap, tmp_path):
    layer = Mlp if wrap is tensor_parallel else TwoBlocks
    pipeline = Replicas(plan_named("zb_v", 2, 4), wrap, layer)
    pipeline.step(pipeline.executor())  # FSDP2 leaves nothing gathered
    mine = {
        f"layers.{pipeline.depth_of[stage]}.{name}": value
        for stage, module in pipeline.stages.items()
        for name, value in module.state_dict().items()
    }
    checkpoint.save(mine, checkpoint_id=tmp_path)
    whole = nn.ModuleDict({"layers": nn.ModuleList(pipeline.whole)})
    expected = {name: value.clone() for name, value in whole.state_dict().items()}
    loaded = {name: torch.zeros_like(value) for name, value in expected.items()}
    if world.rank == 3:
        checkpoint.load(loaded, checkpoint_id=tmp_path, no_dist=True)
        assert all(torch.equal(loaded[name], value) for name, value in expected.items())
