"""Checks of the process groups and devices that users pass."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from .extension import build_info


@dataclass(frozen=True, eq=False)
class StoreGroup:
    """What a communicator needs to know of a group of ranks that torch does not know, or not yet."""

    store: dist.Store
    rank: int
    size: int
    group_name: str


def place_in(group: dist.ProcessGroup | StoreGroup) -> tuple[int, int, dist.Store]:
    """This process's rank in the group, the number of its ranks, and its store."""
    if isinstance(group, StoreGroup):
        return group.rank, group.size, group.store
    store = dist.distributed_c10d._get_process_group_store(group)
    return dist.get_rank(group), dist.get_world_size(group), store


def own_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Returns the group, the default one for None. ValueError if there is none, or without this rank."""
    if not dist.is_initialized():
        raise ValueError(
            "torch.distributed is not initialised; call torch.distributed.init_process_group() first"
        )
    if group is None:
        group = dist.group.WORLD
        assert group is not None
        return group
    rank_in(group)
    return group


def rank_in(group: dist.ProcessGroup | None, name: str = "the group") -> int:
    """Returns this process's rank in `group`. If it is not a member, a ValueError calls the group `name`."""
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError(f"rank {dist.get_rank()} (global) is not a member of {name}")
    return rank


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    """The timeout that torch's group was made with; None if its backend does not expose it."""
    try:
        options = group._get_backend(device).options
    except (AttributeError, RuntimeError):
        return None
    timeout = getattr(options, "_timeout", None)  # torch's name for it
    return timeout if timeout is not None and timeout > timedelta(0) else None


def device_of(group: dist.ProcessGroup | StoreGroup, device: str | torch.device | None) -> torch.device:
    """Returns `device`, or the group's for None; a CUDA device with its index, by default the current one.

    gloo counts as a backend for CPU tensors, even where a group names it for CUDA tensors.
    """
    if device is None:
        device = "cuda" if _backend_for_cuda(group) != "gloo" and torch.cuda.is_available() else "cpu"
    kind, _, index = str(device).partition(":")
    if kind not in ("cpu", "cuda") or not (index or "0").isdecimal():
        raise ValueError(f'device must be "cpu" or "cuda", not "{device}"')
    if kind == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError('device="cuda" needs a CUDA device, but this process sees none')
    if not build_info.with_cuda:
        raise ValueError(
            f'device="cuda" needs a build of pipecomm_ext with CUDA, but {build_info.cuda_reason}'
        )
    count = torch.cuda.device_count()
    if index and int(index) >= count:
        raise ValueError(f'device="{device}" does not exist: this process sees {count} CUDA device(s)')
    return torch.device("cuda", int(index) if index else torch.cuda.current_device())


def _backend_for_cuda(group: dist.ProcessGroup | StoreGroup) -> str:
    """The name of the backend that the group has for CUDA tensors; "gloo" if it has none."""
    if isinstance(group, StoreGroup):
        return "gloo"
    backends = dict(
        entry.split(":", 1) for entry in dist.get_backend_config(group).split(",") if ":" in entry
    )
    return backends.get("cuda", "gloo")
