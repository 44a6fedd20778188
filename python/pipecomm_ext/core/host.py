"""Where this process runs: facts that ranks compare."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import torch.distributed as dist


def read_text(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError:
        return None


def network_namespace() -> str | None:
    """Returns the network namespace; ranks of one host that share it reach each other over the loopback."""
    return _namespace("net")


def place() -> dict[str, str | None]:
    """The host and the PID namespace: if both are equal, a pid means the same process to both ranks."""
    return {"boot_id": read_text("/proc/sys/kernel/random/boot_id"), "pid_namespace": _namespace("pid")}


def usable_cores() -> int:
    """Returns the processor cores on which this process may run, as a bit mask."""
    cores: Iterable[int]
    try:
        cores = os.sched_getaffinity(0)
    except OSError:
        cores = range(os.cpu_count() or 1)
    return sum(1 << core for core in cores)


def num_local_ranks() -> int:
    """Returns how many ranks of the job torchrun, Open MPI or MPICH started on this host; else all ranks."""
    for name in ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"):
        if os.environ.get(name, "").isdigit():
            return max(int(os.environ[name]), 1)
    return dist.get_world_size() if dist.is_initialized() else 1


def _namespace(kind: str) -> str | None:
    try:
        return os.readlink(f"/proc/self/ns/{kind}")
    except OSError:
        return None
