"""From what users pass as a process group to a Communicator, and to the name that compiled graphs hold."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ..communicator import Communicator, get_communicator
from ..communicator import _open as open_communicators


def communicator_of(process_group: Any, tensor: Any) -> Communicator:
    """Of a torch group (None: the default one) for the device of `tensor`; a Communicator stands for
    itself.
    """
    if isinstance(process_group, Communicator):
        return process_group
    device = tensor.device.type if isinstance(tensor, torch.Tensor) else None
    return get_communicator(process_group, device if device in ("cpu", "cuda") else None)


def group_name(process_group: Any) -> str:
    """A string that stands for the group within this process; can be traced."""
    if isinstance(process_group, Communicator):
        return f"{_COMMUNICATOR} {id(process_group)}"
    return (dist.group.WORLD if process_group is None else process_group).group_name


_COMMUNICATOR = "pipecomm_ext.Communicator"


def named_group(name: str) -> Any:
    """The group or Communicator of that name."""
    if not name.startswith(_COMMUNICATOR):
        return dist.distributed_c10d._resolve_process_group(name)
    for communicator in open_communicators:
        if group_name(communicator) == name:
            return communicator
    raise ValueError("the Communicator that a compiled function was traced with is closed")


def rank_and_size(process_group: Any) -> tuple[int, int]:
    """Mine in the group, and its number of ranks, without making a Communicator."""
    if isinstance(process_group, Communicator):
        return process_group.rank, process_group.size
    rank = dist.get_rank(process_group)
    if rank < 0:
        raise ValueError(f"rank {dist.get_rank()} (global) is not a member of the group")
    return rank, dist.get_world_size(process_group)
