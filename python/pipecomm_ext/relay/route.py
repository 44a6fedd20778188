"""How a boundary tensor gets from one stage to another: hops in their order, as data.

A hop is one exchange plan. All ranks of both stages take part in the first hop, even those without data in
it: so they all learn whether they agree, and no later hop is posted if they do not.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

from ..core.extension import _C
from ..core.tensor_specs import TensorSpec
from ..sequence_parallel.sizes import cal_split_sizes

HELD, RESULT = "held", "result"


@dataclass(frozen=True)
class Holding:
    """How a stage holds a tensor: along `dim` in remainder-first pieces, or (None) each rank the whole.

    `speaks_by_leader`: only what the first rank holds is sent.
    """

    ranks: tuple[int, ...]
    dim: int | None = None
    speaks_by_leader: bool = False

    def shape_on(self, rank: int, whole: tuple[int, ...]) -> tuple[int, ...]:
        """The shape that a rank holds of a tensor of shape `whole`."""
        if self.dim is None:
            return whole
        length = cal_split_sizes(whole[self.dim], len(self.ranks))[self.ranks.index(rank)]
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

    plan: _C.PreparedExchange
    members: tuple[int, ...]
    inputs: tuple[View, ...]
    outputs: tuple[View, ...]
    after: int | None = None


@dataclass(frozen=True)
class Relayed:
    """One relay as all ranks of both stages see it.

    `whole` is the tensor as it is cut: flat if neither side holds pieces, else in its own shape; `shown` is
    the tensor that errors name. `tag` holds further arguments that all ranks must share. If the source
    `is_reduced`, each of its ranks has a whole gradient of its own, and `source` are the pieces of their sum.
    """

    whole: TensorSpec
    source: Holding
    destination: Holding
    algorithm: str
    num_chunks: int
    is_flat: bool
    shown: TensorSpec
    tag: str
    is_reduced: bool = False

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
        """Whether every piece goes directly to the ranks that need it."""
        is_held_once = self.destination.dim is not None or len(self.destination.ranks) == 1
        return is_held_once or self.algorithm == "direct"

    def shape_on(self, rank: int) -> tuple[int, ...]:
        """The shape of the tensor that a rank sends, or receives."""
        whole, _ = self.shown
        if rank not in self.source.ranks:
            return self.destination.shape_on(rank, whole)
        return whole if self.is_reduced else self.source.shape_on(rank, whole)


Span = tuple[int, int]  # start and length along the cut dim
# A plan's view of a holding: ranks, dim, lengths (None: remainder-first), replicated.
_Layout = tuple[tuple[int, ...], int, tuple[int, ...] | None, bool]


@lru_cache(maxsize=256)
def route_of(rank: int, size: int, relayed: Relayed) -> tuple[Hop, ...]:
    """The hops that `rank` takes part in."""
    builder = _RouteBuilder(rank, size, relayed)
    return builder.direct() if relayed.takes_one_hop else builder.sharded()


class _RouteBuilder:
    def __init__(self, rank: int, size: int, relayed: Relayed):
        self._rank, self._size, self._relayed = rank, size, relayed
        self._shape, self._dtype = relayed.whole
        self._dim = relayed.cut_dim
        self._length = self._shape[self._dim]
        self._source, self._destination = relayed.source, relayed.destination
        self._replicas: _Layout = (self._destination.ranks, self._dim, None, True)

    def direct(self) -> tuple[Hop, ...]:
        destination, received = self._destination, None
        if self._rank in destination.ranks:
            received = 0, destination.shape_on(self._rank, self._shape)[self._dim]
        pieces: _Layout = (destination.ranks, self._dim, None, False)
        layout = self._replicas if destination.dim is None else pieces
        return (self._arrival((0, self._length), layout, received, after=None),)

    def sharded(self) -> tuple[Hop, ...]:
        """Two hops for each chunk: a chunk arrives while the one before it is gathered in the stage.

        The ranks agree with the first chunk, and all others follow it: the source waits for nothing else.
        """
        offsets = accumulate(self._cut(self._length, self._relayed.num_chunks), initial=0)
        chunks = [(start, end - start) for start, end in pairwise(offsets)]
        hops = [
            self._arrival(chunk, self._pieces(chunk), self._piece_of(chunk), after=0 if idx else None)
            for idx, chunk in enumerate(chunks)
        ]
        if self._rank in self._destination.ranks:
            hops += [self._gather(chunk, after=idx) for idx, chunk in enumerate(chunks)]
        return tuple(hops)

    def _arrival(self, chunk: Span, layout: _Layout, received: Span | None, after: int | None) -> Hop:
        """The hop of a chunk from the source to `layout`, which fills `received` of this rank's result."""
        sent, sender = self._source_layout(*chunk)
        plan = self._plan(chunk[1], sender, layout, f"first {chunk[0]}")
        inputs = () if sent is None else (sent,)
        outputs = () if received is None else (self._view(RESULT, *received),)
        return Hop(plan, self._relayed.members, inputs, outputs, after)

    def _gather(self, chunk: Span, after: int) -> Hop:
        """The hop that gathers a chunk on every rank of the stage; a rank's own piece is already in place."""
        plan = self._plan(
            chunk[1], self._pieces(chunk), self._replicas, f"gather {chunk[0]}", own_in_place=True
        )
        mine = self._piece_of(chunk)
        assert mine is not None
        inputs = (self._view(RESULT, *mine),)
        outputs = (self._view(RESULT, *chunk),)
        return Hop(plan, tuple(sorted(self._destination.ranks)), inputs, outputs, after)

    def _piece_of(self, chunk: Span) -> Span | None:
        """This rank's part of a chunk that is divided among the destination's ranks."""
        ranks = self._destination.ranks
        if self._rank not in ranks:
            return None
        lengths, idx = self._cut(chunk[1], len(ranks)), ranks.index(self._rank)
        return chunk[0] + sum(lengths[:idx]), lengths[idx]

    def _pieces(self, chunk: Span) -> _Layout:
        """The layout of a chunk that is divided among the destination's ranks."""
        ranks = self._destination.ranks
        return ranks, self._dim, self._cut(chunk[1], len(ranks)), False

    def _cut(self, length: int, num_parts: int) -> tuple[int, ...]:
        """Lengths of parts; a flat tensor is cut at multiples of 16 bytes, which NCCL moves at once."""
        granule = max(1, 16 // self._dtype.itemsize) if self._relayed.is_flat else 1
        granules = accumulate(_C.remainder_first(-(-length // granule), num_parts), initial=0)
        return tuple(end - begin for begin, end in pairwise(min(n * granule, length) for n in granules))

    def _source_layout(self, start: int, length: int) -> tuple[View | None, _Layout]:
        """What this rank sends of a span of the cut dim, and how the source holds that span."""
        source, dim = self._source, self._dim
        is_mine = self._rank in source.ranks
        if source.dim is None:
            speakers = source.ranks[:1] if source.speaks_by_leader else source.ranks
            sent = self._view(HELD, start, length) if self._rank in speakers else None
            return sent, (speakers, dim, self._cut(length, len(speakers)), True)
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
    ) -> _C.PreparedExchange:
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
