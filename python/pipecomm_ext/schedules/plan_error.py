"""`PlanError`, and the texts that show where a plan fails: the place in its row, and which ranks wait."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

_NUM_AROUND = 24  # items of a row on each side of the failing one
_MAX_SHOWN = 16  # ranks of a deadlock


class PlanError(ValueError):
    """A plan that cannot be read or must not run.

    Attributes that do not apply are None.

    Attributes:
        rank: the rank whose row is wrong.
        position: index in that row.
        action: the item there.
        waits_for: what never arrives, as text.
    """

    def __init__(self, message, *, rank=None, position=None, action=None, waits_for=None):
        super().__init__(message)
        self.rank = rank
        self.position = position
        self.action = action
        self.waits_for = waits_for


def row_text(row: Iterable) -> str:
    """A row of items as one line of text; `actions.parse_row` reads it back."""
    return " ".join(map(str, row))


def error_in_row(headline, rows, rank, position, action, waits_for=None, details=()) -> PlanError:
    """A PlanError that shows the row of `rank` with the failing place marked."""
    lines = [headline, *details, f"  row of rank {rank}: {_marked_row(rows[rank], position)}"]
    return PlanError("\n".join(lines), rank=rank, position=position, action=action, waits_for=waits_for)


def slot_error(name: str, rows, rank: int, position: int, problem: str, waits_for=None) -> PlanError:
    """A PlanError about one item of a row, or about its end."""
    item = rows[rank][position] if position < len(rows[rank]) else None
    headline = f"{name}: rank {rank}, position {position}: {item}: {problem}"
    return error_in_row(headline, rows, rank, position, item, waits_for)


def _marked_row(row, position: int | None) -> str:
    """The row as text with `>>item<<` at `position`; long rows are cut around it."""
    if position is None:
        return row_text(row) if len(row) <= 2 * _NUM_AROUND else f"{row_text(row[: 2 * _NUM_AROUND])} ..."
    begin, end = max(0, position - _NUM_AROUND), position + _NUM_AROUND + 1
    here = f">>{row[position]}<<" if position < len(row) else ">>end<<"
    parts = [
        "..." if begin else "",
        row_text(row[begin:position]),
        here,
        row_text(row[position + 1 : end]),
        "..." if end < len(row) else "",
    ]
    return " ".join(part for part in parts if part)


class Blocked(NamedTuple):
    """A rank that cannot go on: its next item, what that item waits for, and the rank that should send it."""

    rank: int
    position: int
    item: Any
    waits_for: str
    source: int


def deadlock_error(name: str, rows, blocked: dict[int, Blocked], where: str) -> PlanError:
    """The error for a set of blocked ranks; a ring of ranks that wait for each other comes first."""
    path, rank = [], min(blocked)
    while rank in blocked and rank not in path:
        path.append(rank)
        rank = blocked[rank].source
    ring = path[path.index(rank) :] if rank in path else path[-1:]
    turn = ring.index(min(ring))
    ring = ring[turn:] + ring[:turn]
    shown = (ring + [rank for rank in sorted(blocked) if rank not in ring])[:_MAX_SHOWN]
    lines = [
        f"  rank {rank}, position {position}: {item} waits for {waits_for} from rank {source}"
        for rank, position, item, waits_for, source in map(blocked.__getitem__, shown)
    ]
    if len(blocked) > len(shown):
        lines.append(f"  ... and {len(blocked) - len(shown)} more ranks")
    first = blocked[ring[0]]
    headline = f"{name}: deadlock in the {where}; {len(blocked)} of {len(rows)} ranks cannot go on"
    return error_in_row(headline, rows, first.rank, first.position, first.item, first.waits_for, lines)
