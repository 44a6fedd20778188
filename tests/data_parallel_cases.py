"""Stages in wrappers of torch, 2 pipelines of 2 ranks, compared with one process with the data of both."""

from __future__ import annotations

import functools

import torch.distributed as dist
from pipelines import Block, Pipeline
from ranks import keep_groups
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from pipecomm_ext import Communicator
from pipecomm_ext.schedules import Executor


@functools.cache
def mesh():
    """dp x pp: ranks 0 and 1 are a pipeline, and 2 and 3."""
    whole = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    keep_groups()
    return whole


@functools.cache
def communicator():
    return Communicator(mesh()["pp"].get_group(), channels=4)


class TwoBlocks(nn.Module):
    """A stage whose submodules are sharded separately."""

    def __init__(self, depth: int):
        super().__init__()
        self.blocks = nn.ModuleList(Block(2 * depth + idx) for idx in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def ddp(module: nn.Module, **options) -> nn.Module:
    return DistributedDataParallel(module, process_group=mesh()["dp"].get_group(), **options)


def fsdp(module: nn.Module, **options) -> nn.Module:
    for block in module.blocks:
        fully_shard(block, mesh=mesh()["dp"], **options)
    return fully_shard(module, mesh=mesh()["dp"], **options)


class Replicas(Pipeline):
    """This rank's stages in a wrapper, and one unsplit model that sees the data of both pipelines."""

    def __init__(self, plan, wrap, layer=TwoBlocks, **options):
        self.dp, pp = mesh().get_coordinate()
        super().__init__(plan, pp, layer, seed=1 + self.dp, **options)
        self.stages = {stage: wrap(module) for stage, module in self.stages.items()}

    def executor(self, **options) -> Executor:
        options.setdefault("communicator", communicator())
        return Executor(self.plan, self.stages, loss_fn=self.loss_fn, **options)

    def data(self) -> tuple:
        return self.of_my(0, self.inputs), self.of_my(-1, self.targets)

    def run_all(self, scale: float = 1.0) -> list:
        """Makes the gradients of `whole` means over the pipelines; returns the losses of this one."""
        for seed in (1, 2):
            self.set_data(seed, 2)
            losses = self.run_whole(scale=scale / 2)
            if seed == 1 + self.dp:
                mine = losses
        self.set_data(1 + self.dp, 2)
        return mine


def replicated(module: nn.Module) -> nn.Module:
    from torch.distributed._composable.replicate_with_fsdp import replicate

    return replicate(module, mesh=mesh()["dp"])


def sum_replicas(plan, executor) -> None:
    if plan.replicas:
        executor.sum_replica_gradients()
