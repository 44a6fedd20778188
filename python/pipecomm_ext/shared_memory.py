"""How the ranks of a group find out whether shared memory connects them, and set it up.

A rank's memory is an anonymous file (memfd): nothing has a name, nothing outlives the processes, and the size
of /dev/shm does not matter. Peers open it as /proc/<pid>/fd/<fd>, which the kernel allows to processes of the
same user only; once all have it mapped, no descriptor of it is left.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from . import _C
from .rendezvous import Rendezvous

_PAGE_BYTES = 4096
# Address space for results, which takes memory only as far as it is used.
_MAX_WINDOW_BYTES = 1 << 40


def status() -> tuple[bool, str]:
    """Whether this process can share memory with others, and why (not)."""
    try:
        os.close(os.memfd_create("pipecomm", os.MFD_CLOEXEC))
        os.close(os.pidfd_open(os.getpid()))
        os.stat("/proc/self/fd")
        return True, "CPU tensors between ranks on one host"
    except (AttributeError, OSError) as error:
        return False, f"this system has no memfd, pidfd or /proc ({error})"


def host_facts() -> dict[str, Any]:
    """What must agree, or suffice, on all ranks."""
    available, reason = status()
    return {
        "boot_id": _read("/proc/sys/kernel/random/boot_id"),
        "pid_namespace": _namespace("pid"),
        "user": os.geteuid(),
        "available_bytes": available_bytes(),
        "cores": f"{sum(1 << core for core in os.sched_getaffinity(0)):x}",
        "obstacle": None if available else reason,
    }


def are_neighbours(everybody: list[dict[str, Any]]) -> bool:
    """Whether all ranks run on one host."""
    return all(facts["boot_id"] == everybody[0]["boot_id"] for facts in everybody)


def num_cores(everybody: list[dict[str, Any]]) -> int:
    """Of all that any of the ranks may use."""
    mask = 0
    for facts in everybody:
        mask |= int(facts["cores"], 16)
    return mask.bit_count()


def obstacle(everybody: list[dict[str, Any]], needed_bytes: int) -> str | None:
    """Why these ranks cannot share memory, or None; the same on all of them."""
    for key, text in [
        ("boot_id", "are on different hosts"),
        ("pid_namespace", "are in different PID namespaces (containers); start them in one"),
        ("user", "belong to different users"),
    ]:
        for rank, facts in enumerate(everybody):
            if facts[key] is None or facts[key] != everybody[0][key]:
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


def connect(
    meeting: Rendezvous, everybody: list[dict[str, Any]], ring_bytes: int, channels: int, epoch: int
) -> tuple[_C.SharedMemory | None, str]:
    """Shared memory between all ranks, or None and the cause. Collective; all ranks get it, or none does.

    `ring_bytes`: of one direction of one channel of a pair of ranks, rounded up to pages.
    """
    ring_bytes = -(-ring_bytes // _PAGE_BYTES) * _PAGE_BYTES
    size = meeting.size
    # Rings take memory when they are used: further channels than these carry little, if anything.
    used_bytes = _C.SharedMemory.control_bytes(size, min(channels, 2), ring_bytes)
    cause = obstacle(everybody, size * used_bytes)
    if cause is not None:
        return None, cause
    memory, record = None, {}
    total_bytes = min(facts["available_bytes"] for facts in everybody)
    window_bytes = min(total_bytes, _MAX_WINDOW_BYTES // size) // _PAGE_BYTES * _PAGE_BYTES
    try:
        memory = _C.SharedMemory(meeting.rank, size, channels, ring_bytes, window_bytes, epoch)
        record = {"pid": os.getpid(), "fd": memory.fd}
    except (ValueError, RuntimeError) as error:
        record = {"cause": str(error)}
    records = meeting.gather("memory", record)
    cause = _first_cause(records)
    if cause is not None:
        return None, cause
    record = {}
    try:
        memory.connect([(int(other["pid"]), int(other["fd"])) for other in records])
    except (ValueError, RuntimeError) as error:
        record = {"cause": str(error)}
    cause = _first_cause(meeting.gather("mapped", record))
    memory.close_descriptor()
    return (memory, f"all {size} ranks are on this host") if cause is None else (None, cause)


def available_bytes() -> int:
    """Memory that this process may still take: of the machine, or of its control group."""
    free_bytes = []
    for line in (_read("/proc/meminfo") or "").splitlines():
        if line.startswith("MemAvailable:"):
            free_bytes.append(int(line.split()[1]) * 1024)
    limit, used = _read("/sys/fs/cgroup/memory.max"), _read("/sys/fs/cgroup/memory.current")
    if limit is not None and limit.isdigit() and used is not None:
        free_bytes.append(max(0, int(limit) - int(used)))
    return min(free_bytes, default=0)


def _first_cause(records: list[dict[str, Any]]) -> str | None:
    return next(
        (f"rank {rank}: {record['cause']}" for rank, record in enumerate(records) if "cause" in record), None
    )


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None


def _namespace(kind: str) -> str | None:
    try:
        return os.readlink(f"/proc/self/ns/{kind}")
    except OSError:
        return None
