"""The communicators of this process: cached per group, named for compiled graphs, closed at exit."""

from __future__ import annotations

import atexit
import contextlib
import sys
import weakref
from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.distributed as dist

from ..core.extension import _C
from ..core.process_groups import device_of, own_group, rank_in, timeout_of
from ..errors import summary_of
from .communicator import NAME_IN_GRAPHS, Communicator, communicator_for, graph_name, open_communicators
from .construction import MAX_CHANNELS

_LAST_CALLS_S = 10.0  # at exit, for threads of the library that call Python; closing takes them at most 3 s

_kept: weakref.WeakKeyDictionary[Any, dict[tuple[str, str], Communicator]] = weakref.WeakKeyDictionary()


def get_communicator(
    group: dist.ProcessGroup | None = None, device: str | torch.device | None = None
) -> Communicator:
    """The communicator of a group and device. The first call makes it without waiting for other ranks (for
    CUDA tensors, it waits until all ranks have reported whether they can use NCCL).

    Its timeout is the group's. It is closed at exit, or when another one is made after torch has destroyed
    its group. A closed one is replaced by a new one; a failed one is returned and keeps raising its cause
    until it is closed.

    Example:
        ```python
        comm = get_communicator()  # of the default group
        assert comm is get_communicator()
        comm.barrier()
        ```
    """
    # Channels cost nothing on the host; NCCL needs a communicator for each.
    return kept_communicator(group, device, "default", {"cpu": MAX_CHANNELS, "cuda": 2})


def kept_communicator(
    group: dist.ProcessGroup | None,
    device: str | torch.device | None,
    purpose: str,
    channels: Mapping[str, int],
) -> Communicator:
    """Like `get_communicator`, with one communicator for each purpose, so that messages of different purposes
    do not match. `channels` is by kind of device.
    """
    group = own_group(group)
    device = device_of(group, device)
    made, key = _kept.setdefault(group, {}), (purpose, str(device))
    if key not in made or made[key].closed:
        _close_those_of_destroyed_groups()
        name, timeout = f"{purpose} {device.type}", timeout_of(group, device)
        made[key] = communicator_for(name, group, device, channels[device.type], timeout=timeout)
    return made[key]


def _close_those_of_destroyed_groups() -> None:
    """Needed because a Communicator refers to its group, so neither would ever be destroyed."""
    groups = dist.distributed_c10d._world.pg_map
    for group in [group for group in _kept if group not in groups]:
        for communicator in _kept.pop(group).values():
            communicator.close()


def communicator_of(process_group: Any, tensor: Any) -> Communicator:
    """The kept communicator of a torch group (None: the default one) for the device of `tensor`. A
    Communicator is returned as it is.
    """
    if isinstance(process_group, Communicator):
        return process_group
    device = tensor.device if isinstance(tensor, torch.Tensor) else None
    is_known = device is not None and device.type in ("cpu", "cuda")
    return get_communicator(process_group, device if is_known else None)


def group_name(process_group: Any) -> str:
    """A string that stands for the group within this process and can be traced."""
    if isinstance(process_group, Communicator):
        return graph_name(process_group)
    if process_group is None:
        process_group = dist.group.WORLD
    assert process_group is not None
    return process_group.group_name


def named_group(name: str) -> Any:
    """The group or Communicator whose `group_name` is `name`."""
    if not name.startswith(NAME_IN_GRAPHS):
        return dist.distributed_c10d._resolve_process_group(
            cast(Any, name)
        )  # a NewType of str in some torches
    for communicator in open_communicators:
        if graph_name(communicator) == name:
            return communicator
    raise ValueError("the Communicator that a compiled function was traced with is closed")


def rank_and_size(process_group: Any, name: str = "the group") -> tuple[int, int]:
    """This process's rank in the group, and the group's size, without making a Communicator.

    Raises a ValueError that calls the group `name` if this rank is not a member.
    """
    if isinstance(process_group, Communicator):
        return process_group.rank, process_group.size
    return rank_in(process_group, name), dist.get_world_size(process_group)


@atexit.register
def _end() -> None:
    close_all()
    _C.end_interpreter_use(_LAST_CALLS_S)


def close_all() -> None:
    """Closes open communicators at exit; aborts them first if an exception ends the process."""
    crashed = getattr(sys, "last_value", None)
    for communicator in list(open_communicators):
        with contextlib.suppress(Exception):
            if crashed is not None:
                communicator.abort(f"the process ends after {summary_of(crashed)}")
            communicator.close()
