"""Small models cut into stages, and the same models unsplit in one process, for tests of pipelines."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from unittest import mock

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from pipecomm_ext.schedules import Executor, Plan, WeightGradStore, get_plan

WIDTH = 6
Micro = tuple[torch.Tensor, ...]


class Block(nn.Module):
    """Nonlinear, with weights of several kinds: [rows, WIDTH] -> the same."""

    def __init__(self, depth: int):
        super().__init__()
        generator = torch.Generator().manual_seed(100 + depth)
        self.first, self.norm, self.second = nn.Linear(WIDTH, 9), nn.LayerNorm(9), nn.Linear(9, WIDTH)
        self.double()
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(torch.tanh(self.norm(self.first(x))))


def batches(num_micros: int, seed: int, rows: int = 3, last_rows: int | None = None) -> list[torch.Tensor]:
    """[rows, WIDTH] each; the last one may be smaller or larger."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [rows] * (num_micros - 1) + [rows if last_rows is None else last_rows]
    return [torch.randn(size, WIDTH, generator=generator, dtype=torch.float64) for size in sizes]


def squared_error(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((output - target) ** 2).mean()


class Pipeline:
    """A plan's stages of this rank and the whole unsplit model, with data for all chains.

    `layer(depth)` makes a layer of the model; both sides start from equal weights.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        layer: Callable[[int], nn.Module] = Block,
        loss_fn: Callable = squared_error,
        seed: int = 1,
        last_rows: int | None = 2,
        rows: int = 3,
    ):
        self.plan, self.rank, self.loss_fn = plan, rank, loss_fn
        self.depth_of = {stage: depth for chain in plan.chains for depth, stage in enumerate(chain)}
        self.whole = [layer(depth) for depth in range(len(plan.chains[0]))]
        self.stages = {s: copy.deepcopy(self.whole[self.depth_of[s]]) for s in plan.stages_of(rank)}
        self.set_data(seed, last_rows, rows)

    def set_data(self, seed: int, last_rows: int | None = None, rows: int = 3) -> None:
        num_micros = self.plan.micros_per_chain
        seeds = [1000 * seed + chain_idx for chain_idx in range(len(self.plan.chains))]
        self.inputs = [batches(num_micros, chain_seed, rows, last_rows) for chain_seed in seeds]
        self.targets = [batches(num_micros, 500 + chain_seed, rows, last_rows) for chain_seed in seeds]

    def of_my(self, end: int, data: list[list]) -> dict[int, list] | None:
        """The data of the chains whose first (0) or last (-1) stage is mine, by stage."""
        mine = {
            chain[end]: values
            for chain, values in zip(self.plan.chains, data, strict=True)
            if self.plan.owner[chain[end]] == self.rank
        }
        return mine or None

    def step(self, executor: Executor):
        return executor.step(self.of_my(0, self.inputs), self.of_my(-1, self.targets))

    def run_whole(self, backward: bool = True, scale: float = 1.0) -> list[list[torch.Tensor]]:
        """Adds the gradients of all micro-batches to the unsplit model; returns the losses by chain."""
        losses = []
        for inputs, targets in zip(self.inputs, self.targets, strict=True):
            losses.append([])
            for x, target in zip(inputs, targets, strict=True):
                for layer in self.whole:
                    x = layer(**x) if isinstance(x, dict) else layer(*x) if isinstance(x, tuple) else layer(x)
                loss = self.loss_fn(x, target)
                if backward:
                    (loss * scale).backward()
                losses[-1].append(loss.detach())
        return losses

    def assert_losses(self, got, expected: list[list[torch.Tensor]]) -> None:
        mine = self.of_my(-1, expected)
        if mine is None:
            assert got is None
            return
        by_stage = got if isinstance(got, dict) else {next(iter(mine)): got}
        assert set(by_stage) == set(mine)
        for stage, losses in mine.items():
            assert all(not loss.requires_grad and loss.shape == () for loss in by_stage[stage])
            torch.testing.assert_close(by_stage[stage], losses, rtol=1e-12, atol=1e-12)

    def assert_gradients(self) -> None:
        """Checks all my stages; a replicated one has only its part, so sum the replicas before."""
        for stage, module in self.stages.items():
            whole = self.whole[self.depth_of[stage]]
            for (name, mine), theirs in zip(module.named_parameters(), whole.parameters(), strict=True):
                grad, where = mine.grad, f"stage {stage}, {name}"
                assert (grad is None) == (theirs.grad is None), where
                if grad is not None:
                    grad = grad.full_tensor() if hasattr(grad, "full_tensor") else grad  # of FSDP
                    is_equal = torch.allclose(grad, theirs.grad, rtol=1e-10, atol=1e-12)
                    assert is_equal, f"{where}: {grad} is not {theirs.grad}"

    def zero_grad(self) -> None:
        for module in [*self.whole, *self.stages.values()]:
            module.zero_grad()


def plan_named(name: str, P: int, M: int | None = None) -> Plan:
    M = 2 * P if M is None else M
    return get_plan(name, P, M, 2) if name == "interleaved_1f1b" else get_plan(name, P, M)


def executor_of(world, plan: Plan, stages, **options) -> Executor:
    """An Executor over a communicator that tests share, unless `options` has one."""
    options.setdefault("communicator", world.shared_comm(channels=4))
    return Executor(plan, stages, **options)


def make_executor(world, plan: Plan, pipeline: Pipeline, **options) -> Executor:
    return executor_of(world, plan, pipeline.stages, loss_fn=pipeline.loss_fn, **options)


def prepared(world, plan: Plan, layer=Block, loss_fn=squared_error, **options) -> tuple[Pipeline, Executor]:
    pipeline = Pipeline(plan, world.rank, layer, loss_fn)
    return pipeline, make_executor(world, plan, pipeline, **options)


def compare_step(world, plan: Plan, layer=Block, loss_fn=squared_error, scale: float = 1.0, **options):
    """Runs a step, compares losses and gradients with the unsplit model, and returns the step's result."""
    pipeline, executor = prepared(world, plan, layer, loss_fn, **options)
    result = pipeline.step(executor)
    if plan.replicas:
        executor.sum_replica_gradients()
    pipeline.assert_losses(result.losses, pipeline.run_whole(scale=scale))
    pipeline.assert_gradients()
    return result


def refused_by_one() -> AbstractContextManager:
    """For steps whose arguments only some ranks refuse: these wait less long for the others to do so."""
    return mock.patch("pipecomm_ext.runtime.plan_loop.REFUSAL_S", 0.1)


class Failing(Block):
    """Raises once, in the forward or backward of the micro-batch given by `where`."""

    def __init__(self, depth: int, where: str | None = None, micro: int = 2):
        super().__init__(depth)
        self.where, self.micro, self.num_calls = where, micro, 0

    def forward(self, x):
        y = super().forward(x)
        if self.where is not None:
            self.num_calls += 1
            if self.num_calls == self.micro + 1:
                if self.where == "forward":
                    self._raise(None)
                y.register_hook(self._raise)
        return y

    def _raise(self, _gradient):
        self.where = None
        raise KeyError("no such expert")


class Selecting(nn.Module):
    """Passes on a number of rows that depends on the data."""

    def __init__(self, depth: int):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        nn.init.eye_(self.linear.weight)

    def forward(self, x):
        x = self.linear(x)
        return x[: 1 + int((x[:, 0] > 0).sum())]


def squared(output: torch.Tensor, _target) -> torch.Tensor:
    return output.square().sum()


class Rich(nn.Module):
    """Passes on six tensors: differentiable, a view, integers, a mask, an unused one, an empty one."""

    def __init__(self, depth: int):
        super().__init__()
        self.depth = depth
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        nn.init.normal_(self.linear.weight, generator=torch.Generator().manual_seed(depth))
        nn.init.zeros_(self.linear.bias)

    def forward(self, x, ids=None, tail=None, mask=None, unused=None, empty=None):
        if ids is None:
            ids = torch.arange(len(x))
            mask = x[:, 0] > 0
            tail = x[:, 2:]
            empty = x[:0]
        elif not torch.equal(ids, torch.arange(len(x)) + 2 * self.depth):
            raise RuntimeError("ids arrived wrong")
        x = torch.tanh(self.linear(x)) * mask[:, None] + ids[:, None] * 0.1
        x = x + nn.functional.pad(tail, (2, 0))
        return x, ids + 2, x[:, 2:], mask.clone(), x * 3, empty


class StoringLinear(torch.autograd.Function):
    """The weight gradient goes through WeightGradStore, and is written by hand."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors

        def weight_gradient():
            added = gradient.flatten(0, -2).t() @ x.flatten(0, -2)
            weight.grad = added if weight.grad is None else weight.grad + added

        if WeightGradStore.enabled:
            WeightGradStore.put(weight_gradient)
        else:
            weight_gradient()
        return gradient @ weight, None


class StoringBlock(nn.Module):
    """A block as DualPipe's users write it, with its own method for a fused slot, whose calls it counts."""

    num_calls = 0

    def __init__(self, depth: int):
        super().__init__()
        self.weight = nn.Parameter(Block(depth).first.weight.detach()[:WIDTH].clone())

    def forward(self, x, shift=0):
        return torch.tanh(StoringLinear.apply(x, self.weight)) + shift

    @classmethod
    def overlapped_forward_backward(
        cls, module0, inputs0, criterion0, labels0, module1, loss1, outputs1, output_grads1
    ):
        cls.num_calls += 1
        outputs0 = [module0(*inputs0)]
        loss0 = criterion0(*outputs0, *labels0) if criterion0 is not None else None
        if loss1 is not None:
            assert outputs1 == output_grads1 == []
            loss1.backward()
            loss1.detach_()
        else:
            torch.autograd.backward(outputs1, output_grads1)
        return outputs0, loss0


class MegatronChunk(nn.Module):
    """A stage for Megatron's schedules: takes [..., WIDTH] of the stage before it, or the data."""

    def __init__(self, stage: int, config):
        super().__init__()
        generator = torch.Generator().manual_seed(100 + stage)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator))
        self.config, self.input_tensor = config, None

    def set_input_tensor(self, tensors):
        assert isinstance(tensors, list)
        [self.input_tensor] = tensors

    def forward(self, x):
        return torch.tanh((x if self.input_tensor is None else self.input_tensor) @ self.weight)


class MegatronCheckpoint(torch.autograd.Function):
    """Reentrant recomputation by a Function that refuses as Megatron-core's does."""

    @staticmethod
    def forward(ctx, run, x):
        ctx.run = run
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx, gradient):
        if not torch.autograd._is_checkpoint_valid():
            raise RuntimeError(
                "Checkpointing is not compatible with .grad(), please use .backward() if possible"
            )
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            torch.autograd.backward(ctx.run(x), gradient)
        return None, x.grad


class ReentrantBlock(Block):
    """A Block whose first half is recomputed, alternately by torch's and by Megatron-core's checkpoint."""

    def __init__(self, depth: int):
        super().__init__(depth)
        self.is_torch = depth % 2 == 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if x.requires_grad else x.detach().requires_grad_()  # else the weights within get no gradient
        if self.is_torch:
            return x + self.second(torch.tanh(checkpoint(self.half, x, use_reentrant=True)))
        return x + self.second(torch.tanh(MegatronCheckpoint.apply(self.half, x)))

    def half(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.first(x))
