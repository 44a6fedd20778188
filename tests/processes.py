"""Identifies processes: on a busy machine the pids of ended processes are soon reused."""

from __future__ import annotations

from pathlib import Path


def _stat_of(pid: int) -> list[str] | None:
    """The fields of proc(5) from the state on; None if the process has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else fields


def start_of(pid: int) -> str | None:
    """When the process with this pid began, in ticks since boot; None if it has ended."""
    fields = _stat_of(pid)
    return fields and fields[19]


def state_of(pid: int) -> str | None:
    """The state of the process, such as "S" (sleeping) or "T" (stopped); None if it has ended."""
    fields = _stat_of(pid)
    return fields and fields[0]


def running(starts: dict[int, str | None]) -> list[int]:
    """Which of these processes, given with their starts, have not ended."""
    return [pid for pid, start in starts.items() if start_of(pid) == start is not None]
