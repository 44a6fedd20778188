"""Identifies processes: on a busy machine the pids of ended processes are soon reused."""

from __future__ import annotations

from pathlib import Path


def start_of(pid: int) -> str | None:
    """When the process with this pid began, in ticks since boot; None if it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, *fields = stat.rpartition(")")[2].split()
    return None if state in "ZX" else fields[18]  # see proc(5)


def running(starts: dict[int, str | None]) -> list[int]:
    """Which of these processes, given with their starts, have not ended."""
    return [pid for pid, start in starts.items() if start_of(pid) == start is not None]
