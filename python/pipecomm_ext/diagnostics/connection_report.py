"""What the doctor tells, from flight records, of connections that are not made or were lost."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

EVENT_FIELDS = {
    "time": (int, float),
    "connection": str,
    "peer": (int, type(None)),
    "state": str,
    "detail": str,
    "peer_now": (str, type(None)),
}
# States in which a connection waits for nothing. The end of a communicator is told by its failure.
_QUIET = frozenset({"shm", "tcp", "gone", "connected", "closing", "closed", "ready"})


def unmade_connections(rank: int, head: dict[str, Any], at_least_s: float) -> Iterator[str]:
    """Yields a sentence for each connection of `rank` that has not been made for `at_least_s`, or was lost.

    Args:
        rank: the rank that wrote the record.
        head: the first line of its record.
        at_least_s: younger attempts are simply under way.
    """
    latest: dict[tuple[str, int | None], dict[str, Any]] = {}
    began_at: dict[tuple[str, int | None], float] = {}  # of the attempt to make it
    for event in head.get("connections", []):
        key = (event["connection"], event["peer"])
        if key not in latest or latest[key]["state"] in _QUIET:
            began_at[key] = event["time"]
        latest[key] = event
    for (connection, peer), event in latest.items():
        over_tcp = latest.get(("tcp", peer)) if connection == "route" else None
        is_told_as_tcp = over_tcp is not None and over_tcp["state"] not in _QUIET
        if connection == "communicator" or event["state"] in _QUIET or is_told_as_tcp:
            continue
        other = "the others" if peer is None else f"rank {peer}"
        detail = f", {event['detail']}" if event["detail"] else ""
        if event["state"] == "lost":
            seconds = max(0.0, head["time"] - event["time"])
            yield f"Rank {rank} lost {other} {seconds:.1f} s before ({connection}{detail})."
            continue
        seconds = max(0.0, head["time"] - began_at[connection, peer])
        if seconds >= at_least_s:
            state = f"{connection} {event['state']}{detail}"
            yield f"Rank {rank} has not connected to {other} for {seconds:.1f} s ({state}){_why(event)}."


def _why(event: dict[str, Any]) -> str:
    """What the transport knows of the peer, without what the sentence says anyhow."""
    text = event["peer_now"]
    if text is None or text in ("is connected", "is not connected"):
        return ""
    problem = re.fullmatch(r"is not connected \((.*)\)", text, re.DOTALL)
    return f": {problem[1]}" if problem else f": rank {event['peer']} {text}"
