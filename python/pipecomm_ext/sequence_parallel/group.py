"""From what users pass as a process group to a Communicator, and to the name that compiled graphs hold."""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist

from ..communicator import Communicator, get_communicator


def communicator_of(process_group: Any, tensor: Any) -> Communicator:
    """Of a torch group (None: the default one) for the device of `tensor`; a Communicator stands for
    itself.
    """
    if isinstance(process_group, Communicator):
        return process_group
    device = tensor.device.type if isinstance(tensor, torch.Tensor) else None
    return get_communicator(process_group, device if device in ("cpu", "cuda") else None)


# Communicators that were passed to compiled functions in place of a group.
_named: weakref.WeakValueDictionary[str, Communicator] = weakref.WeakValueDictionary()


@torch.compiler.assume_constant_result
def group_name(process_group: Any) -> str:
    """A string that stands for the group within this process."""
    if isinstance(process_group, Communicator):
        name = f"pipecomm_ext.Communicator {id(process_group):#x}"
        _named[name] = process_group
        return name
    return (dist.group.WORLD if process_group is None else process_group).group_name


def named_group(name: str) -> Any:
    """The group or Communicator of that name."""
    if name in _named:
        return _named[name]
    return dist.distributed_c10d._resolve_process_group(name)


def rank_and_size(process_group: Any) -> tuple[int, int]:
    """Mine in the group, and its number of ranks, without making a Communicator."""
    if isinstance(process_group, Communicator):
        return process_group.rank, process_group.size
    rank = dist.get_rank(process_group)
    if rank < 0:
        raise ValueError(f"rank {dist.get_rank()} (global) is not a member of the group")
    return rank, dist.get_world_size(process_group)
