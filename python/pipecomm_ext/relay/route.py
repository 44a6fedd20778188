"""How a boundary tensor gets from one stage to another: hops in their order, as data.

A hop is one exchange plan. All ranks of both stages take part in the first hop, whether it moves data of
theirs or not: so they all learn whether they agree, and no later hop is posted if they do not.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

from .. import _C
from ..specs import Spec

HELD, RESULT = "held", "result"


@dataclass(frozen=True)
class Holding:
    """How a stage holds a tensor: along `dim` in remainder-first pieces, or (None) each rank the whole.

    `speaks_by_leader`: what the first rank holds counts, and only that.
    """

    ranks: tuple[int, ...]
    dim: int | None = None
    speaks_by_leader: bool = False

    @property
    def leader(self) -> int:
        return self.ranks[0]

    def shape_on(self, rank: int, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Of what a rank holds of a tensor of shape `whole`."""
        if self.dim is None:
            return whole
        length = _C.remainder_first(whole[self.dim], len(self.ranks))[self.ranks.index(rank)]
        return (*whole[: self.dim], length, *whole[self.dim + 1 :])


@dataclass(frozen=True)
class View:
    """A slice of what this rank holds, or of its result."""

    of: str
    dim: int
    start: int
    length: int


@dataclass(frozen=True)
class Hop:
    """One exchange: what it reads and writes here, who takes part, and which hop of the route it follows."""

    plan: _C.Plan
    members: tuple[int, ...]
    inputs: tuple[View, ...]
    outputs: tuple[View, ...]
    after: int | None = None


@dataclass(frozen=True)
class Relayed:
    """One relay as all ranks of both stages see it.

    `whole` is the tensor as it is cut: flat if neither side holds pieces, else in its own shape; `shown` is
    the tensor that errors name. `tag` holds further arguments that all ranks must share.
    """

    whole: Spec
    source: Holding
    destination: Holding
    algorithm: str
    num_chunks: int
    is_flat: bool
    shown: Spec
    tag: str

    @property
    def members(self) -> tuple[int, ...]:
        return tuple(sorted(self.source.ranks + self.destination.ranks))

    @property
    def cut_dim(self) -> int:
        for holding in (self.destination, self.source):
            if holding.dim is not None:
                return holding.dim
        return 0

    @property
    def takes_one_hop(self) -> bool:
        """Every piece goes straight to whoever is to hold it."""
        is_held_once = self.destination.dim is not None or len(self.destination.ranks) == 1
        return is_held_once or self.algorithm == "direct"


# A plan's view of a holding: ranks, dim, lengths (None: remainder-first), replicated.
_Layout = tuple[tuple[int, ...], int, tuple[int, ...] | None, bool]


@lru_cache(maxsize=256)
def route_of(rank: int, size: int, relayed: Relayed) -> tuple[Hop, ...]:
    """The hops that `rank` takes part in."""
    builder = _RouteBuilder(rank, size, relayed)
    if relayed.takes_one_hop:
        builder.add_direct()
    else:
        builder.add_chunks()
    return tuple(builder.hops)


class _RouteBuilder:
    def __init__(self, rank: int, size: int, relayed: Relayed):
        self.hops: list[Hop] = []
        self._rank, self._size, self._relayed = rank, size, relayed
        self._shape, self._dtype = relayed.whole
        self._dim = relayed.cut_dim
        self._source, self._destination = relayed.source, relayed.destination

    def add_direct(self) -> None:
        destination = self._destination
        is_replicated = destination.dim is None
        layout = (destination.ranks, self._dim, None, is_replicated)
        mine = destination.shape_on(self._rank, self._shape) if self._rank in destination.ranks else None
        self._add_first(0, self._length, layout, None if mine is None else (0, mine[self._dim]))

    def add_chunks(self) -> None:
        """Two hops for each chunk: one arrives while the one before is passed on in the stage.

        All chunks follow the first one, with which the ranks agree, so the source never waits for more.
        """
        offsets = accumulate(_C.remainder_first(self._length, self._relayed.num_chunks), initial=0)
        chunks = [(start, end - start) for start, end in pairwise(offsets)]
        pass_on = self._add_gather if self._relayed.algorithm == "sharded" else self._add_pass_on
        for idx, chunk in enumerate(chunks):
            self._add_arrival(chunk, after=0 if idx else None)
        for idx, chunk in enumerate(chunks):
            pass_on(chunk, after=idx)

    def _add_arrival(self, chunk: tuple[int, int], after: int | None) -> None:
        """Sharded: to each its piece of the chunk; else all of it to the leader."""
        if self._relayed.algorithm == "sharded":
            layout = (self._destination.ranks, self._dim, None, False)
            received = self._piece_of(chunk)
        else:
            layout = ((self._destination.leader,), self._dim, None, True)
            received = chunk if self._rank == self._destination.leader else None
        self._add_first(*chunk, layout, received, after)

    def _piece_of(self, chunk: tuple[int, int]) -> tuple[int, int] | None:
        """This rank's part (start, length) of a chunk that the destination shares out."""
        ranks = self._destination.ranks
        if self._rank not in ranks:
            return None
        lengths, idx = _C.remainder_first(chunk[1], len(ranks)), ranks.index(self._rank)
        return chunk[0] + sum(lengths[:idx]), lengths[idx]

    def _add_gather(self, chunk: tuple[int, int], after: int) -> None:
        """The pieces of a chunk, to everybody in the stage; the own one lies in its place."""
        ranks, piece = self._destination.ranks, self._piece_of(chunk)
        if piece is None:
            return
        plan = self._plan(
            chunk[1],
            (ranks, self._dim, None, False),
            (ranks, self._dim, None, True),
            f"gather {chunk[0]}",
            own_in_place=True,
        )
        inputs, outputs = (self._view(RESULT, *piece),), (self._view(RESULT, *chunk),)
        self.hops.append(Hop(plan, tuple(sorted(ranks)), inputs, outputs, after))

    def _add_pass_on(self, chunk: tuple[int, int], after: int) -> None:
        """A chunk, from the leader to the others."""
        destination = self._destination
        if self._rank not in destination.ranks:
            return
        plan = self._plan(
            chunk[1],
            ((destination.leader,), self._dim, None, True),
            (tuple(sorted(set(destination.ranks) - {destination.leader})), self._dim, None, True),
            f"pass on {chunk[0]}",
        )
        view = (self._view(RESULT, *chunk),)
        is_leader = self._rank == destination.leader
        inputs, outputs = (view, ()) if is_leader else ((), view)
        self.hops.append(Hop(plan, tuple(sorted(destination.ranks)), inputs, outputs, after))

    @property
    def _length(self) -> int:
        return self._shape[self._dim]

    def _add_first(
        self,
        start: int,
        length: int,
        layout: _Layout,
        received: tuple[int, int] | None,
        after: int | None = None,
    ) -> None:
        """From the source, the slice [start, start + length) of the cut dim, to `layout`, of which this rank
        receives the slice `received` (start, length) of its result."""
        sent, sender = self._source_layout(start, length)
        plan = self._plan(length, sender, layout, f"first {start}")
        inputs = () if sent is None else (sent,)
        outputs = () if received is None else (self._view(RESULT, *received),)
        self.hops.append(Hop(plan, self._relayed.members, inputs, outputs, after))

    def _source_layout(self, start: int, length: int) -> tuple[View | None, _Layout]:
        """What this rank gives of a slice of the cut dim, and how the source holds that slice."""
        source, dim = self._source, self._dim
        is_mine = self._rank in source.ranks
        if source.dim is None:
            one_speaks = source.speaks_by_leader or self._relayed.algorithm in ("leader", "pipelined")
            speakers = (source.leader,) if one_speaks else source.ranks
            sent = self._view(HELD, start, length) if self._rank in speakers else None
            return sent, (speakers, dim, None, True)
        if source.dim != dim:  # never cut in chunks: the destination holds pieces
            held = source.shape_on(self._rank, self._shape) if is_mine else None
            sent = None if held is None else self._view(HELD, 0, held[dim])
            return sent, (source.ranks, source.dim, None, False)
        offsets = [0, *accumulate(_C.remainder_first(self._length, len(source.ranks)))]
        overlaps = [
            (max(start, begin), max(start, begin, min(start + length, end)))
            for begin, end in pairwise(offsets)
        ]
        sent = None
        if is_mine:
            idx = source.ranks.index(self._rank)
            begin, end = overlaps[idx]
            held_length = offsets[idx + 1] - offsets[idx]
            sent = self._view(HELD, min(begin - offsets[idx], held_length), end - begin)
        return sent, (source.ranks, dim, tuple(end - begin for begin, end in overlaps), False)

    def _view(self, of: str, start: int, length: int) -> View:
        return View(of, self._dim, start, length)

    def _plan(
        self, length: int, source: _Layout, destination: _Layout, hop: str, own_in_place: bool = False
    ) -> _C.Plan:
        shape = (*self._shape[: self._dim], length, *self._shape[self._dim + 1 :])
        return _C.plan_reshard(
            self._rank,
            self._size,
            (shape, self._dtype),
            source,
            destination,
            own_in_place=own_in_place,
            tag=f"{self._relayed.tag}; {self._relayed.num_chunks} chunks; {hop}",
            shown=self._relayed.shown,
        )
