"""Which groups this rank is in: the process-wide defaults, and what they are made of."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from .pipeline import PipelineTopology
from .sequence import ParallelState

__all__ = [
    "ParallelState",
    "PipelineTopology",
    "destroy",
    "get_parallel_state",
    "get_pipeline_topology",
    "initialize_pipeline",
    "initialize_sequence_parallel",
]

_state: ParallelState | None = None
_topology: PipelineTopology | None = None


def initialize_sequence_parallel(ulysses_group: Any = None, ring_group: Any = None) -> ParallelState:
    """Makes and returns the default that the `*_with_cp` functions read; a second call replaces it."""
    global _state
    _state = ParallelState(ulysses_group, ring_group)
    return _state


def get_parallel_state() -> ParallelState:
    """The default.

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
) -> PipelineTopology:
    """Makes the default `PipelineTopology` (see there) of whatever takes `topology=`, and returns it.

    Raises:
        RuntimeError: there is one already; `destroy()` it first.
    """
    global _topology
    if _topology is not None:
        raise RuntimeError(
            "there is a default pipeline topology already; call pipecomm_ext.parallel_state.destroy() first"
        )
    _topology = PipelineTopology(stages, group=group, virtual_stages=virtual_stages, timeout=timeout)
    return _topology


def get_pipeline_topology() -> PipelineTopology:
    """The default.

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
    """Forgets the defaults. Idempotent; groups and communicators are not closed."""
    global _state, _topology
    _state = _topology = None
