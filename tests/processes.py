"""Which process a number means: on a busy machine the numbers of ended processes are soon those of others."""

from __future__ import annotations

from pathlib import Path


def start_of(pid: int) -> str | None:
    """When the process that has this number began, in ticks since the machine did; None if it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, *fields = stat.rpartition(")")[2].split()
    return None if state in "ZX" else fields[18]  # see proc(5)


def running(starts: dict[int, str | None]) -> list[int]:
    """Those of these processes, with their starts, that have not ended."""
    return [pid for pid, start in starts.items() if start_of(pid) == start is not None]
