"""Ranks on several hosts as two levels: those of a host, and those with the same place on each host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MIN_RANKS = 4  # two hosts of two ranks


@dataclass(frozen=True)
class Levels:
    """`ranks[h][p]` has place p on host h; this rank is ranks[host][place]."""

    ranks: tuple[tuple[int, ...], ...]
    host: int
    place: int

    @property
    def local(self) -> tuple[int, ...]:
        return self.ranks[self.host]

    @property
    def across(self) -> tuple[int, ...]:
        return tuple(of_host[self.place] for of_host in self.ranks)


def levels_among(rank: int, places: Sequence[Mapping[str, str | None]]) -> Levels | None:
    """Returns the levels of ranks at these places (see `place` in host.py), as `rank` sees them; ranks that
    see each other's processes are on one host. None: there is one level, since all ranks are on one host, or
    hosts have one rank or different numbers of ranks.
    """
    ranks: dict[object, list[int]] = {}
    for other, place in enumerate(places):
        name = place["boot_id"], place["pid_namespace"]
        ranks.setdefault(name if all(name) else other, []).append(other)
    if len(ranks) < 2 or len({len(of_host) for of_host in ranks.values()}) > 1 or len(ranks) == len(places):
        return None
    by_host = tuple(map(tuple, ranks.values()))
    host = next(idx for idx, of_host in enumerate(by_host) if rank in of_host)
    return Levels(by_host, host, by_host[host].index(rank))
