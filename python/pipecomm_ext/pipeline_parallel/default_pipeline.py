"""The pipeline that schedules use when they are called without sizes and groups.

It is that of an initialised `megatron.core.parallel_state`, if the process has imported it, else that of
`pipecomm_ext.parallel_state.initialize_pipeline`.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from .. import parallel_state
from ..parallel_state import PipelineTopology

_NONE_GIVEN = (
    "give the pipeline's sizes and groups; there are no defaults before "
    "pipecomm_ext.parallel_state.initialize_pipeline() or Megatron's initialize_model_parallel()"
)


def default_sizes() -> tuple[int, int, int | None]:
    """Returns (ranks, my rank, chunks per rank or None without interleaving) of the default pipeline, or
    those of a pipeline of one rank if there is none.

    Raises:
        ValueError: there is none, but there are several ranks.
    """
    state = _megatron_state() or _topology()
    if state is None:
        if dist.is_initialized() and dist.get_world_size() > 1:
            raise ValueError(_NONE_GIVEN)
        return 1, 0, None
    num_chunks = state.get_virtual_pipeline_model_parallel_world_size()
    if isinstance(state, PipelineTopology) and num_chunks == 1:
        num_chunks = None  # its default; Megatron distinguishes one chunk from none
    return (
        state.get_pipeline_model_parallel_world_size(),
        state.get_pipeline_model_parallel_rank(),
        num_chunks,
    )


def is_default_last_stage(chunk: int | None) -> bool:
    """Whether this chunk (None: the only one) of this rank ends the default pipeline.

    Raises:
        ValueError: there are several ranks but no default pipeline, or several chunks and none is given.
    """
    num_ranks, rank, num_chunks = default_sizes()
    if chunk is None and (num_chunks or 1) > 1:
        raise ValueError(f"there are {num_chunks} chunks per rank: give vp_stage, or is_last_stage")
    return rank == num_ranks - 1 and (chunk is None or chunk == (num_chunks or 1) - 1)


def default_groups() -> SimpleNamespace:
    """The groups `pp`, `tp` and `cp` (None: no context parallelism) of the default pipeline.

    Raises:
        ValueError: there is none, or its stages have different numbers of ranks or are not in their order.
    """
    state = _megatron_state()
    if state is not None:
        return SimpleNamespace(
            pp=state.get_pipeline_model_parallel_group(),
            tp=state.get_tensor_model_parallel_group(),
            cp=megatron_cp_group(),
        )
    topology = _topology()
    if topology is None:
        raise ValueError(_NONE_GIVEN)
    if len(set(topology.get_vtp_size_list())) > 1:
        raise ValueError(
            "the stages of the default topology have different numbers of ranks, "
            f"{topology.get_vtp_size_list()}; Megatron's schedules need equal ones: use "
            "schedules.Executor(topology=) for these"
        )
    stages = topology.get_vtp_stage_ranks()
    if any(list(chain) != sorted(chain) for chain in zip(*stages, strict=True)):
        raise ValueError(
            f"the stages {stages} of the default topology are not in the order of their ranks, in which "
            "torch sorts the group that tells Megatron's schedules the order of stages: list the stages by "
            "increasing ranks, or use schedules.Executor(topology=) for these"
        )
    return SimpleNamespace(
        pp=topology.get_pipeline_model_parallel_group(),
        tp=topology.get_tensor_model_parallel_group(),
        cp=None,
    )


def default_replica() -> tuple[Any, int]:
    """The group of all ranks of this rank's replica of the model, and the global rank of the first of them.

    Raises:
        ValueError: there is no default pipeline.
    """
    state = _megatron_state()
    if state is not None:
        return state.get_model_parallel_group(), state.get_model_parallel_src_rank()
    topology = _topology()
    if topology is None:
        raise ValueError(_NONE_GIVEN)
    return topology.group, topology.get_vtp_stage_ranks()[0][0]


def megatron_cp_group() -> Any:
    """The context-parallel group of Megatron's state; None without one."""
    state = _megatron_state()
    return None if state is None else state.get_context_parallel_group(check_initialized=False)


def _megatron_state() -> Any:
    """Megatron's parallel_state if it is initialised, else None. It is not imported for this."""
    state = sys.modules.get("megatron.core.parallel_state")
    return state if state is not None and state.model_parallel_is_initialized() else None


def _topology() -> PipelineTopology | None:
    try:
        return parallel_state.get_pipeline_topology()
    except RuntimeError:
        return None
