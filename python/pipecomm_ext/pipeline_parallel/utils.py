"""Where a rank is in its pipeline: the predicates of megatron.core.pipeline_parallel.utils (Core 0.20).

A group is a torch ProcessGroup or a Communicator, whose ranks are the stages in order; ranks that are
returned are global. Wrong arguments are ValueError, not assertions.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from ..communicator import Communicator
from ..communicator.registry import rank_and_size

__all__ = [
    "get_pp_first_rank",
    "get_pp_last_rank",
    "get_pp_next_rank",
    "get_pp_prev_rank",
    "is_pp_first_stage",
    "is_pp_last_stage",
    "is_vp_first_stage",
    "is_vp_last_stage",
]


def is_pp_first_stage(pp_group: Any) -> bool:
    """Whether this rank has the first stage of the group."""
    return rank_and_size(pp_group)[0] == 0


def is_pp_last_stage(pp_group: Any) -> bool:
    """Whether this rank has the last stage of the group."""
    rank, size = rank_and_size(pp_group)
    return rank == size - 1


def is_vp_first_stage(vp_stage: int | None, vp_size: int | None) -> bool:
    """Whether a chunk is the first of its rank's `vp_size`; None or 1: there is only chunk 0, or None."""
    return _chunk(vp_stage, vp_size) == 0


def is_vp_last_stage(vp_stage: int | None, vp_size: int | None) -> bool:
    """Whether a chunk is the last of its rank's `vp_size`; see `is_vp_first_stage`."""
    return _chunk(vp_stage, vp_size) == (vp_size or 1) - 1


def get_pp_first_rank(pp_group: Any) -> int:
    """Global rank of the first stage."""
    return _global_rank(pp_group, 0)


def get_pp_last_rank(pp_group: Any) -> int:
    """Global rank of the last stage."""
    return _global_rank(pp_group, -1)


def get_pp_next_rank(pp_group: Any) -> int | None:
    """Global rank of the next stage; None in the last one."""
    return None if is_pp_last_stage(pp_group) else _global_rank(pp_group, rank_and_size(pp_group)[0] + 1)


def get_pp_prev_rank(pp_group: Any) -> int | None:
    """Global rank of the previous stage; None in the first one."""
    return None if is_pp_first_stage(pp_group) else _global_rank(pp_group, rank_and_size(pp_group)[0] - 1)


def _chunk(vp_stage: int | None, vp_size: int | None) -> int | None:
    if (vp_size or 1) > 1:
        return vp_stage
    if vp_stage not in (None, 0):
        raise ValueError(f"vp_stage must be None or 0 with vp_size {vp_size}, not {vp_stage}")
    return 0


def _global_rank(pp_group: Any, idx: int) -> int:
    group = pp_group.group if isinstance(pp_group, Communicator) else pp_group
    return dist.get_process_group_ranks(group)[idx]
