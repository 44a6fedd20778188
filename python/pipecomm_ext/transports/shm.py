"""Shared memory between ranks on one host: whether two ranks can share it, and how much.

A rank's memory is an anonymous file (memfd): it has no name, does not outlive the processes, and does not
depend on the size of /dev/shm. Peers open it as /proc/<pid>/fd/<fd>, which the kernel allows only to
processes of the same user, while the communicator is open.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..core.environment import Number, Variable
from ..core.extension import _C
from ..core.host import read_text
from .transport import Costs, Transport

_RING_BYTES = Variable(
    "PIPECOMM_SHM_RING_BYTES",
    Number(64 << 10, 1 << 30, "bytes"),
    "size of a ring of `shm` (one direction, one channel, one pair)",
    1 << 20,
)
_PAGE_BYTES = 4096
# Address space for results of all ranks. It takes memory only where it is used.
_MAX_WINDOW_BYTES = 1 << 40
_MAX_RANKS = 1024


class Shm(Transport):
    name = "shm"
    devices = ("cpu",)
    # Measured: the sender's threads, two at most, copy into the receiver's memory.
    costs = Costs(100e-6, 10e9, 10e9, core_bytes_per_s=5e9)
    variables = (_RING_BYTES,)

    def status(self) -> tuple[bool, str]:
        try:
            os.close(os.memfd_create("pipecomm", os.MFD_CLOEXEC))
            os.close(os.pidfd_open(os.getpid()))
            os.stat("/proc/self/fd")
            return True, "CPU tensors between ranks on one host"
        except (AttributeError, OSError) as error:
            return False, f"memfd, pidfd or /proc cannot be used here ({error})"

    def local_facts(self, device: torch.device) -> dict[str, Any]:
        """Returns the facts that decide whether another rank can share memory with this one."""
        is_usable, reason = self.status()
        return {
            "user": os.geteuid(),
            "available_bytes": available_bytes(),
            "obstacle": None if is_usable else reason,
        }


def create_memory(
    connections: _C.Connections, size: int, channels: int, settings: Mapping[str, Any], facts: dict[str, Any]
) -> None:
    """Creates this rank's memory and adds its location, or the obstacle, to `facts`."""
    if facts["obstacle"] is None and not facts["available_bytes"]:
        facts["obstacle"] = "it cannot read its available_bytes in /proc"
    if facts["obstacle"] is None and size > _MAX_RANKS:
        facts["obstacle"] = f"shared memory is for at most {_MAX_RANKS} ranks, not {size}"
    if facts["obstacle"] is None:
        facts["obstacle"] = shortage(2, channels, settings, facts["available_bytes"])
    if facts["obstacle"] is not None:
        return
    window_bytes = min(facts["available_bytes"], _MAX_WINDOW_BYTES // size) // _PAGE_BYTES * _PAGE_BYTES
    try:
        connections.create_memory(channels, _ring_bytes(settings), window_bytes)
    except Exception as error:
        facts["obstacle"] = str(error)
        return
    facts |= {"fd": connections.memory_fd, "inode": connections.memory_inode, "window_bytes": window_bytes}


def shortage(num_ranks: int, channels: int, settings: Mapping[str, Any], available_bytes: int) -> str | None:
    """Returns why the available memory does not suffice for `num_ranks` ranks, or None."""
    # Rings take memory only when used: channels beyond the first two carry little, if anything.
    used_bytes = _C.Connections.memory_bytes(num_ranks, min(channels, 2), _ring_bytes(settings))
    needed_bytes = num_ranks * used_bytes
    if needed_bytes <= available_bytes // 2:
        return None
    return (
        f"the rings of {num_ranks} ranks may take {needed_bytes >> 20} MiB, but only "
        f"{available_bytes >> 20} MiB of memory are available, and they get at most half of that; lower "
        "PIPECOMM_SHM_RING_BYTES or channels"
    )


def obstacle(ranks: Sequence[int], both: Sequence[Mapping[str, Any]]) -> str | None:
    """Why two ranks with these facts cannot share memory, or None. Both come to the same result."""
    one, other = both
    for key, text in [
        ("boot_id", "are on different hosts"),
        ("pid_namespace", "are in different PID namespaces (containers); start them in one"),
        ("user", "belong to different users"),
    ]:
        if one[key] is not None and other[key] is not None and one[key] != other[key]:
            return f"ranks {ranks[0]} and {ranks[1]} {text}"
    for rank, facts in zip(ranks, both, strict=True):
        for key in ("boot_id", "pid_namespace"):
            if not facts[key]:
                return f"rank {rank} cannot read its {key} in /proc"
        if facts["obstacle"]:
            return f"rank {rank}: {facts['obstacle']}"
    return None


def _ring_bytes(settings: Mapping[str, Any]) -> int:
    return -(-settings[_RING_BYTES.name] // _PAGE_BYTES) * _PAGE_BYTES


def available_bytes() -> int:
    """Returns how much more memory the machine and the control group of this process can give it."""
    free_bytes = []
    for line in (read_text("/proc/meminfo") or "").splitlines():
        if line.startswith("MemAvailable:"):
            free_bytes.append(int(line.split()[1]) * 1024)
    limit, used = read_text("/sys/fs/cgroup/memory.max"), read_text("/sys/fs/cgroup/memory.current")
    if limit is not None and limit.isdigit() and used is not None:
        free_bytes.append(max(0, int(limit) - int(used)))
    return min(free_bytes, default=0)
