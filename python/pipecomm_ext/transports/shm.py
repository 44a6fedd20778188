"""Shared memory between ranks on one host: whether it connects them, and how it is set up.

A rank's memory is an anonymous file (memfd): it has no name, does not outlive the processes, and does not
depend on the size of /dev/shm. Peers open it as /proc/<pid>/fd/<fd>, which the kernel allows only to
processes of the same user. Once all have mapped it, no descriptor of it is left.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from ..core.environment import Number, Variable
from ..core.extension import _C
from ..core.host import place, read_text
from .transport import Construction, Costs, Made, Transport, host_engine

_RING_BYTES = Variable(
    "PIPECOMM_SHM_RING_BYTES",
    Number(64 << 10, 1 << 30, "bytes"),
    "size of a ring of `shm` (one direction, one channel, one pair)",
    1 << 20,
)
_PAGE_BYTES = 4096
# Address space for results. It takes memory only where it is used.
_MAX_WINDOW_BYTES = 1 << 40


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
        """What must be equal on all ranks, or enough on each."""
        is_usable, reason = self.status()
        return {
            **place(),
            "user": os.geteuid(),
            "available_bytes": available_bytes(),
            "cores": f"{sum(1 << core for core in _usable_cores()):x}",
            "obstacle": None if is_usable else reason,
        }

    def make(self, construction: Construction, facts: Sequence[Mapping[str, Any]]) -> Made:
        memory, reason = _connect(construction, facts)
        if memory is not None:
            return Made(host_engine(construction, memory), reason, _num_cores(facts))
        warning = f"pipecomm_ext moves CPU tensors over sockets (c10d), not through shared memory: {reason}"
        return Made(None, reason, warning=warning if _are_on_one_host(facts) else None)


def _are_on_one_host(everybody: Sequence[Mapping[str, Any]]) -> bool:
    return all(facts["boot_id"] == everybody[0]["boot_id"] for facts in everybody)


def _num_cores(everybody: Sequence[Mapping[str, Any]]) -> int:
    """The number of cores that at least one of the ranks may use."""
    mask = 0
    for facts in everybody:
        mask |= int(facts["cores"], 16)
    return mask.bit_count()


def _obstacle(everybody: Sequence[Mapping[str, Any]], needed_bytes: int) -> str | None:
    """Why these ranks cannot share memory, or None."""
    for rank, facts in enumerate(everybody):
        for key in ("boot_id", "pid_namespace", "available_bytes"):
            if not facts[key]:
                return f"rank {rank} cannot read its {key} in /proc"
    for key, text in [
        ("boot_id", "are on different hosts"),
        ("pid_namespace", "are in different PID namespaces (containers); start them in one"),
        ("user", "belong to different users"),
    ]:
        for rank, facts in enumerate(everybody):
            if facts[key] != everybody[0][key]:
                return f"ranks 0 and {rank} {text}"
    for rank, facts in enumerate(everybody):
        if facts["obstacle"]:
            return f"rank {rank}: {facts['obstacle']}"
    least_bytes = min(facts["available_bytes"] for facts in everybody)
    if needed_bytes > least_bytes // 2:
        return (
            f"the rings of {len(everybody)} ranks may take {needed_bytes >> 20} MiB, but only "
            f"{least_bytes >> 20} MiB of memory are available, and they get at most half of that; lower "
            "PIPECOMM_SHM_RING_BYTES or channels"
        )
    return None


def _connect(
    construction: Construction, everybody: Sequence[Mapping[str, Any]]
) -> tuple[_C.SharedMemory | None, str]:
    """Shared memory between all ranks, or None and the cause. Collective; all ranks get it, or none does."""
    meeting, channels = construction.meeting, construction.channels
    size = meeting.size
    ring_bytes = -(-construction.settings[_RING_BYTES.name] // _PAGE_BYTES) * _PAGE_BYTES
    # Rings take memory when they are used: further channels than these carry little, if anything.
    used_bytes = _C.SharedMemory.control_bytes(size, min(channels, 2), ring_bytes)
    cause = _obstacle(everybody, size * used_bytes)
    if cause is not None:
        return None, cause
    memory: _C.SharedMemory | None = None
    record: dict[str, Any]
    total_bytes = min(facts["available_bytes"] for facts in everybody)
    window_bytes = min(total_bytes, _MAX_WINDOW_BYTES // size) // _PAGE_BYTES * _PAGE_BYTES
    try:
        memory = _C.SharedMemory(meeting.rank, size, channels, ring_bytes, window_bytes, construction.epoch)
        record = {"pid": os.getpid(), "fd": memory.fd}
    except Exception as error:
        record = {"cause": str(error)}
    records = meeting.gather("memory", record)
    cause = _first_cause(records)
    if cause is not None:
        return None, cause
    assert memory is not None
    record = {}
    try:
        memory.connect([(int(other["pid"]), int(other["fd"])) for other in records])
    except Exception as error:
        record = {"cause": str(error)}
    cause = _first_cause(meeting.gather("mapped", record))
    memory.close_descriptor()
    return (memory, f"all {size} ranks are on this host") if cause is None else (None, cause)


def _usable_cores() -> Iterable[int]:
    try:
        return os.sched_getaffinity(0)
    except OSError:
        return range(os.cpu_count() or 1)


def available_bytes() -> int:
    """Memory that the machine, or the control group of this process, still has for it."""
    free_bytes = []
    for line in (read_text("/proc/meminfo") or "").splitlines():
        if line.startswith("MemAvailable:"):
            free_bytes.append(int(line.split()[1]) * 1024)
    limit, used = read_text("/sys/fs/cgroup/memory.max"), read_text("/sys/fs/cgroup/memory.current")
    if limit is not None and limit.isdigit() and used is not None:
        free_bytes.append(max(0, int(limit) - int(used)))
    return min(free_bytes, default=0)


def _first_cause(records: list[dict[str, Any]]) -> str | None:
    return next(
        (f"rank {rank}: {record['cause']}" for rank, record in enumerate(records) if "cause" in record), None
    )
