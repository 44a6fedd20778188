"""The groups that this rank is in: the defaults of the process, and the classes that describe them."""

from __future__ import annotations

import datetime
import inspect
from collections.abc import Callable, Sequence
from functools import update_wrapper
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from .pipeline import PipelineTopology
from .sequence import ParallelState

__all__ = [
    "ParallelState",
    "PipelineTopology",
    "destroy",
    "get_parallel_state",
    "get_pipeline_model_parallel_group",
    "get_pipeline_model_parallel_next_rank",
    "get_pipeline_model_parallel_prev_rank",
    "get_pipeline_model_parallel_rank",
    "get_pipeline_model_parallel_world_size",
    "get_pipeline_topology",
    "get_tensor_model_parallel_group",
    "get_tensor_model_parallel_rank",
    "get_tensor_model_parallel_world_size",
    "get_virtual_pipeline_model_parallel_rank",
    "get_virtual_pipeline_model_parallel_world_size",
    "get_vtp_my_stage_idx",
    "get_vtp_size_list",
    "get_vtp_stage_ranks",
    "initialize_pipeline",
    "initialize_sequence_parallel",
    "is_pipeline_first_stage",
    "is_pipeline_last_stage",
    "is_vtp_stage_rank0",
    "set_virtual_pipeline_model_parallel_rank",
]

_state: ParallelState | None = None
_topology: PipelineTopology | None = None


def initialize_sequence_parallel(ulysses_group: Any = None, ring_group: Any = None) -> ParallelState:
    """Makes and returns the default that the `*_with_cp` functions read. A second call replaces it."""
    global _state
    _state = ParallelState(ulysses_group, ring_group)
    return _state


def get_parallel_state() -> ParallelState:
    """Returns the default state.

    Raises:
        RuntimeError: there is none.
    """
    if _state is None:
        raise RuntimeError(
            "there is no parallel state; call pipecomm_ext.parallel_state.initialize_sequence_parallel() "
            "first, or pass parallel_state="
        )
    return _state


def initialize_pipeline(
    stages: Sequence[int] | Sequence[Sequence[int]],
    *,
    group: dist.ProcessGroup | None = None,
    virtual_stages: int = 1,
    timeout: float | datetime.timedelta | None = None,
    device: str | torch.device | None = None,
) -> PipelineTopology:
    """Makes and returns the default of every `topology=` argument, with the arguments of `PipelineTopology`.

    Raises:
        RuntimeError: there is a default already; `destroy()` it first.
    """
    global _topology
    if _topology is not None:
        raise RuntimeError(
            "there is a default pipeline topology already; call pipecomm_ext.parallel_state.destroy() first"
        )
    _topology = PipelineTopology(
        stages, group=group, virtual_stages=virtual_stages, timeout=timeout, device=device
    )
    return _topology


def get_pipeline_topology() -> PipelineTopology:
    """Returns the default topology.

    Raises:
        RuntimeError: there is none.
    """
    if _topology is None:
        raise RuntimeError(
            "there is no pipeline topology; call pipecomm_ext.parallel_state.initialize_pipeline() first, "
            "or pass topology="
        )
    return _topology


def destroy() -> None:
    """Removes the defaults. Idempotent; groups and communicators are not closed."""
    global _state, _topology
    _state = _topology = None


# ---- the getters of the default topology ------------------------------------------------------------------

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


def _of_default(
    getter: Callable[Concatenate[PipelineTopology, _Parameters], _Result],
) -> Callable[_Parameters, _Result]:
    """A method of `PipelineTopology` as a function of the default one; raises as `get_pipeline_topology`."""

    def get(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        return getter(get_pipeline_topology(), *args, **kwargs)

    update_wrapper(get, getter)
    _, *parameters = (signature := inspect.signature(getter)).parameters.values()
    get.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]  # any function may
    return get


get_vtp_size_list = _of_default(PipelineTopology.get_vtp_size_list)
get_vtp_stage_ranks = _of_default(PipelineTopology.get_vtp_stage_ranks)
get_vtp_my_stage_idx = _of_default(PipelineTopology.get_vtp_my_stage_idx)
is_vtp_stage_rank0 = _of_default(PipelineTopology.is_vtp_stage_rank0)
get_pipeline_model_parallel_group = _of_default(PipelineTopology.get_pipeline_model_parallel_group)
get_pipeline_model_parallel_next_rank = _of_default(PipelineTopology.get_pipeline_model_parallel_next_rank)
get_pipeline_model_parallel_prev_rank = _of_default(PipelineTopology.get_pipeline_model_parallel_prev_rank)
get_pipeline_model_parallel_rank = _of_default(PipelineTopology.get_pipeline_model_parallel_rank)
get_pipeline_model_parallel_world_size = _of_default(PipelineTopology.get_pipeline_model_parallel_world_size)
get_tensor_model_parallel_group = _of_default(PipelineTopology.get_tensor_model_parallel_group)
get_tensor_model_parallel_rank = _of_default(PipelineTopology.get_tensor_model_parallel_rank)
get_tensor_model_parallel_world_size = _of_default(PipelineTopology.get_tensor_model_parallel_world_size)
get_virtual_pipeline_model_parallel_rank = _of_default(
    PipelineTopology.get_virtual_pipeline_model_parallel_rank
)
get_virtual_pipeline_model_parallel_world_size = _of_default(
    PipelineTopology.get_virtual_pipeline_model_parallel_world_size
)
is_pipeline_first_stage = _of_default(PipelineTopology.is_pipeline_first_stage)
is_pipeline_last_stage = _of_default(PipelineTopology.is_pipeline_last_stage)
set_virtual_pipeline_model_parallel_rank = _of_default(
    PipelineTopology.set_virtual_pipeline_model_parallel_rank
)
