"""Checks the arguments of an Executor, and brings them into one form."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from ...communicator import Communicator
from ...errors import PipeCommMismatch
from ...parallel_state import PipelineTopology
from ..plan import Plan

Stage = Callable[..., Any]
MicroBatches = Sequence[Any]


def as_tuple(value: Any) -> tuple:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def by_stage(
    name: str, values: Any, stages: list[int], all_stages: list[int], num_micros: int
) -> dict[int, MicroBatches]:
    """Micro-batches of my `stages`, from a list if there is one, or from a mapping that may have others of
    `all_stages`, too. Raises ValueError or TypeError."""
    if not stages:
        return {}
    if not isinstance(values, Mapping):
        if len(stages) > 1:
            raise ValueError(
                f"{name}: the stages {stages} on this rank all need some; give a mapping from stage to a list"
            )
        values = {stages[0]: values}
    if not set(stages) <= set(values) <= set(all_stages):
        raise ValueError(f"{name} must be given for the stages {stages}, got {list(values)}")
    mine = {stage: values[stage] for stage in stages}
    for stage, micro_batches in mine.items():
        if isinstance(micro_batches, torch.Tensor) or not isinstance(micro_batches, Sequence):
            raise TypeError(
                f"{name} of stage {stage} must be a list of {num_micros} micro-batches, not "
                f"{type(micro_batches).__name__}; this rank owns that stage"
            )
        if len(micro_batches) != num_micros:
            raise ValueError(
                f"{name} of stage {stage} has {len(micro_batches)} micro-batches, the plan has {num_micros}"
            )
    return mine


def one_or_many(by_stage: dict[int, list]) -> Any:
    if len(by_stage) == 1:
        return next(iter(by_stage.values()))
    return by_stage or None


def ranks_by_pipeline_rank(
    plan: Plan, comm: Communicator, topology: PipelineTopology | None, rank_mapping: Sequence[int] | None
) -> tuple[tuple[int, ...], ...]:
    """The communicator's ranks that each pipeline rank stands for."""
    if topology is None:
        if comm.size != plan.P:
            raise ValueError(
                f"{plan.name} is a plan for {plan.P} ranks, the communicator has {comm.size}; "
                "make the plan for as many, or give a group of that size"
            )
        return tuple((peer,) for peer in pipeline_order(rank_mapping, comm.size))
    if not isinstance(topology, PipelineTopology):
        raise TypeError(f"topology must be a PipelineTopology, not {type(topology).__name__}")
    if rank_mapping is not None:
        raise ValueError("rank_mapping must be None with a topology, whose stages are in order already")
    if topology.num_stages != plan.P:
        raise ValueError(
            f"{plan.name} is a plan for {plan.P} ranks, the topology has {topology.num_stages} stages; "
            "make the plan for as many"
        )
    return topology.stages


def pipeline_order(rank_mapping: Sequence[int] | None, size: int) -> list[int]:
    """The communicator's rank of each pipeline rank."""
    if rank_mapping is None:
        return list(range(size))
    mapping = list(rank_mapping)
    if sorted(mapping) != list(range(size)):
        raise ValueError(
            f"rank_mapping must name each pipeline rank 0..{size - 1} once, one for each rank of the "
            f"communicator, got {mapping}"
        )
    return [mapping.index(rank) for rank in range(size)]


def stages_by_id(plan: Plan, rank: int, stages: Any) -> dict[int, Stage]:
    owned = plan.stages_of(rank)
    if isinstance(stages, Mapping):
        if set(stages) != set(owned):
            raise ValueError(f"rank {rank} owns the stages {list(owned)}, stages has {sorted(stages)}")
        stages = [stages[stage] for stage in owned]
    elif isinstance(stages, torch.nn.ModuleList) or (
        isinstance(stages, Sequence) and not isinstance(stages, str)
    ):
        stages = list(stages)
    else:
        raise TypeError(f"stages must be a mapping or a list of modules, not {type(stages).__name__}")
    if len(stages) != len(owned):
        raise ValueError(f"rank {rank} owns the stages {list(owned)}, stages has {len(stages)} entries")
    for stage, module in zip(owned, stages, strict=True):
        if not callable(module):
            raise TypeError(f"stage {stage} must be a module or a callable, not {type(module).__name__}")
    return dict(zip(owned, stages, strict=True))


def loss_factor(loss_scale: Any, plan: Plan) -> float:
    if loss_scale in ("sum", "mean"):
        return 1.0 if loss_scale == "sum" else 1.0 / plan.M
    if isinstance(loss_scale, bool) or not isinstance(loss_scale, (int, float)):
        raise ValueError(f'loss_scale must be "sum", "mean" or a number, not {loss_scale!r}')
    return float(loss_scale)


def device_of(stages: Any) -> torch.device | None:
    """Of the first parameter; None if there is none, or `stages` are not what they should be."""
    values = stages.values() if isinstance(stages, Mapping) else stages
    if isinstance(values, Iterable):
        for module in values:
            if isinstance(module, torch.nn.Module):
                for parameter in module.parameters():
                    return parameter.device
    return None


def require_equal_settings(comm: Communicator, settings: tuple) -> None:
    digest = hashlib.sha256(repr(settings).encode()).digest()[:7]
    mine = torch.tensor([int.from_bytes(digest, "big")], device=comm.device)
    everybody = [torch.empty_like(mine) for _ in range(comm.size)]
    comm.all_to_all([mine] * comm.size, everybody)
    for peer, other in enumerate(everybody):
        if not other.equal(everybody[0]):
            raise PipeCommMismatch(
                f"rank {comm.rank}: Executor: rank {peer} has another plan, rank_mapping or dynamic_shapes "
                "(or topology, layout, grad_reduce) than rank 0; give all ranks the same",
                op="Executor",
                rank=comm.rank,
                peer=peer,
                origin_rank=peer,
            )
