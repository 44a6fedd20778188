"""Gradients of stages that hold the same weights (`Plan.replicas`), as DualPipe's two chains do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from ...communicator import Communicator, Recv, Send
from ..plan import Plan

CHANNEL = 1  # of gradients


def sum_replicas(
    plan: Plan,
    rank: int,
    stages: Mapping[int, nn.Module],
    communicator: Communicator,
    ranks_of: Sequence[Sequence[int]],
) -> None:
    """Replaces the gradients of replicated stages by the sum over their replicas, the same bits on all ranks.

    Collective. A gradient that is None counts as zeros, and becomes one if all replicas have none. Shapes and
    dtypes of the parameters must agree. Those that need no gradient, on all replicas alike, are left out.

    Raises:
        ValueError: there are replicas, and a pipeline rank is several of the communicator's `ranks_of` it.
    """
    if plan.replicas and any(len(ranks) > 1 for ranks in ranks_of):
        raise ValueError(
            f"the replicas of {plan.name} must be one rank each, but the topology has stages of several; add "
            "their gradients up over groups of your own"
        )
    peer_of = [ranks[0] for ranks in ranks_of]
    trained = {stage: _trained_parameters(stage, module) for stage, module in stages.items()}
    ops: list[Send | Recv] = []
    gradients_of: dict[int, list[torch.Tensor]] = {}  # by stage, of all replicas of mine
    groups = [group for group in plan.replicas if any(plan.owner[stage] == rank for stage in group)]
    for group in groups:
        mine = [stage for stage in group if plan.owner[stage] == rank]
        peers = sorted({plan.owner[stage] for stage in group} - {rank})
        for stage in mine:
            gradients_of[stage] = [_gradient(parameter) for parameter in trained[stage]]
            for peer in peers:
                ops += [Send(gradient, peer_of[peer], CHANNEL) for gradient in gradients_of[stage]]
        for stage in group:
            if stage not in mine:
                gradients_of[stage] = [torch.empty_like(part) for part in gradients_of[mine[0]]]
                peer = peer_of[plan.owner[stage]]
                ops += [Recv(gradient, peer, CHANNEL) for gradient in gradients_of[stage]]
    communicator.batch_p2p(ops)
    for group in groups:
        totals = [sum(parts[1:], start=parts[0]) for parts in zip(*map(gradients_of.get, group), strict=True)]
        for stage in group:
            if plan.owner[stage] == rank:
                for parameter, total in zip(trained[stage], totals, strict=True):
                    parameter.grad = total.clone()


def _trained_parameters(stage: int, module: nn.Module) -> list[nn.Parameter]:
    if not isinstance(module, nn.Module):
        raise TypeError(f"stage {stage} must be a module to have gradients, not {type(module).__name__}")
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
