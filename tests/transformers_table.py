"""The table of test_transformers_combinations.py: scripts, models and their wrappers."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import combination_scripts as scripts
import torch
import torch.distributed as dist
from combination_sides import Side
from ranks import keep_groups
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel


def plain(model: nn.Module) -> nn.Module:
    return model


def in_checkpoints(model: nn.Module) -> nn.Module:
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def in_reentrant_checkpoints(model: nn.Module) -> nn.Module:
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    return model.train()


class Adapted(nn.Module):
    """LoRA on a frozen layer."""

    def __init__(self, base: nn.Linear):
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 2, bias=False, dtype=base.weight.dtype)
        self.up = nn.Linear(2, base.out_features, bias=False, dtype=base.weight.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def adapted(model: nn.Module) -> nn.Module:
    model.requires_grad_(False)
    torch.manual_seed(3)
    for layer in model.model.layers:
        layer.self_attn.q_proj = Adapted(layer.self_attn.q_proj)
        layer.self_attn.v_proj = Adapted(layer.self_attn.v_proj)
    return model


class OverTokens(Side):
    """A model in one process, or with a function that splits batches on ranks."""

    factor = 1  # of losses

    def __init__(self, model: nn.Module, batches: list[dict], split: Callable[[dict], dict] | None = None):
        super().__init__(SimpleNamespace(), {0: model})
        self.batches, self.split = batches, split

    def of_all_copies(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.split is not None:
            dist.all_reduce(tensor)
        return tensor

    def _run(self) -> dict[int, list[torch.Tensor]]:
        losses = []
        for batch in self.batches:
            loss = self.modules[0](**(batch if self.split is None else self.split(batch))).loss
            losses.append(loss.detach().clone())
            if torch.is_grad_enabled():
                loss = loss * self.factor
                (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        return {0: [self.of_all_copies(loss) for loss in losses]}

    def sum(self) -> None:
        for parameter in self.parameters():
            self.of_all_copies(parameter.grad)


class InReplicas(OverTokens):
    """A model in DDP, whose gradients are means over the ranks."""

    def __init__(self, model: nn.Module, batches: list[dict], split: Callable[[dict], dict]):
        super().__init__(self.wrapped(model), batches, split)
        self.factor = dist.get_world_size()

    def wrapped(self, model: nn.Module) -> nn.Module:
        return DistributedDataParallel(model)

    def sum(self) -> None:
        pass


class InShards(InReplicas):
    """A model in FSDP2, with means as well."""

    def wrapped(self, model: nn.Module) -> nn.Module:
        mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
        keep_groups()
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)


class Row(NamedTuple):
    script: Callable[[Side], Any] = scripts.train
    made: Callable[[nn.Module], nn.Module] = plain
    side: type[OverTokens] = OverTokens


ROWS = {
    "training": Row(),
    "checkpoints": Row(made=in_checkpoints),
    "reentrant checkpoints": Row(made=in_reentrant_checkpoints),
    "LoRA": Row(made=adapted),
    "saved_tensors_hooks": Row(scripts.saved_tensors_elsewhere),
    "hooks after accumulation": Row(scripts.after_accumulation),
    "evaluation between steps": Row(scripts.evaluation_between),
    "DDP": Row(side=InReplicas),
    "DDP, checkpoints": Row(made=in_checkpoints, side=InReplicas),
    "DDP, LoRA": Row(made=adapted, side=InReplicas),
    "FSDP2": Row(side=InShards),
    "FSDP2, checkpoints": Row(made=in_checkpoints, side=InShards),
}
