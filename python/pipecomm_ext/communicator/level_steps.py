"""Reductions and gathers of large tensors over several hosts, in two levels. The ranks of a host combine
their data, so each byte crosses the network once per host and not once per rank.

A rank works with the ranks of its host (`local`), and with those that have its place on the other hosts
(`across`). An element is reduced over the ranks of each host, then over the hosts, each time by one rank and
in the order of the ranks. So all ranks get the same bits, in every run on as many hosts. Between the levels,
sums and products of floats of less than 32 bits are float32.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Sequence

import torch
from torch import Tensor

from ..core.copyable import copyable
from ..core.extension import _C
from ..core.levels import Levels
from .plans import Shape, list_plan, tag_with
from .reduce_operators import Operator
from .reduction_steps import Exchanges, tag_of_reduce_scatter


class LevelExchanges:
    """Exchanges whose data moves between some ranks. All ranks take part, so a rank that disagrees or refuses
    reaches all. `tag` is that of the whole operation, alike on all ranks; errors show `shape`."""

    def __init__(self, exchanges: Exchanges, tag: str, shape: Shape) -> None:
        self._exchanges, self._tag, self._shape = exchanges, tag, shape
        self.rows = exchanges.rows

    def scatter(self, members: Sequence[int], pieces: Sequence[Tensor], rows: Sequence[Tensor]) -> _C.Work:
        """Member m gets pieces[m] of each other member m', as its rows[m']."""
        return self._run(members, pieces, rows)

    def gather(self, members: Sequence[int], own: Tensor, pieces: Sequence[Tensor]) -> _C.Work:
        """Every member's `own` gets to pieces[m] of all others."""
        return self._run(members, [own] * len(members), pieces)

    def _run(self, members: Sequence[int], sent: Sequence[Tensor], received: Sequence[Tensor]) -> _C.Work:
        rank, size = self._exchanges.rank, self._exchanges.size
        inputs, outputs = [sent[0][:0]] * size, [received[0][:0]] * size
        for idx, member in enumerate(members):
            if member != rank:
                inputs[member], outputs[member] = sent[idx], received[idx]
        dtype = inputs[0].dtype
        sizes = (tuple(((each.numel(),), dtype) for each in tensors) for tensors in (inputs, outputs))
        plan = list_plan(rank, size, *sizes, self._tag, (self._shape, dtype))
        return self._exchanges.run(plan, inputs, outputs)


def all_reduce(
    exchanges: Exchanges, levels: Levels, shape: Shape, brought: Tensor, tensor: Tensor, op: Operator
) -> Iterator[_C.Work]:
    """Reduces `brought` of all ranks into `tensor`, which may be the same."""
    within = LevelExchanges(exchanges, tag_with(f"all_reduce {op.name} {op.dtype}", shape), shape)
    local = _C.remainder_first(tensor.numel(), len(levels.local))
    pieces = tensor.split(local)
    across = _C.remainder_first(local[levels.place], len(levels.across))
    parts = pieces[levels.place].split(across)
    yield from _reduce_scatter(within, levels, brought.split(local), across, op, parts[levels.host])
    yield within.gather(levels.across, parts[levels.host], parts)
    yield within.gather(levels.local, pieces[levels.place], pieces)


def saves_traffic(levels: Levels, op: Operator) -> bool:
    """Whether a reduce-scatter sends less over the network in levels, where its sums may be wider numbers."""
    return len(levels.local) * op.dtype.itemsize > op.partial.dtype.itemsize


def reduce_scatter(
    exchanges: Exchanges,
    levels: Levels,
    shapes: Sequence[Shape],
    brought: Tensor,
    op: Operator,
    output: Tensor,
) -> Iterator[_C.Work]:
    """Reduces piece r of `brought`, of shapes[r], into `output` of rank r."""
    tag = tag_with(tag_of_reduce_scatter(op), *shapes)
    within = LevelExchanges(exchanges, tag, shapes[exchanges.rank])
    lengths = list(map(math.prod, shapes))
    of_ranks = brought.split(lengths)
    by_place = [torch.cat([of_ranks[rank] for rank in ranks]) for ranks in zip(*levels.ranks, strict=True)]
    across = [lengths[rank] for rank in levels.across]
    yield from _reduce_scatter(within, levels, by_place, across, op, output)


def _reduce_scatter(
    within: LevelExchanges,
    levels: Levels,
    pieces: Sequence[Tensor],
    across: Sequence[int],
    op: Operator,
    output: Tensor,
) -> Iterator[_C.Work]:
    """`pieces` are for the ranks of this host; the parts of this rank's piece have the lengths `across`."""
    part = yield from _reduced(within, levels.local, levels.place, pieces, op)
    part = yield from _reduced(within, levels.across, levels.host, part.split(list(across)), op)
    op.finish(part, len(levels.local) * len(levels.across), output)


def _reduced(
    within: LevelExchanges, members: Sequence[int], own_idx: int, pieces: Sequence[Tensor], op: Operator
) -> Generator[_C.Work, None, Tensor]:
    """Returns what is reduced of pieces[own_idx] of all members."""
    own = pieces[own_idx]
    rows = within.rows(len(members), own.numel(), own.dtype)
    yield within.scatter(members, pieces, rows)
    rows[own_idx] = own
    part = torch.empty(own.numel(), dtype=op.partial.dtype, device=own.device)
    op.partial.reduce([row.to(part.dtype) for row in rows], part)
    return part


def all_gather(
    exchanges: Exchanges, levels: Levels, shape: Shape, tensor: Tensor, output: Tensor
) -> Iterator[_C.Work]:
    """Gathers the tensors of all ranks into `output`, one after the other."""
    within = LevelExchanges(exchanges, tag_with(f"all_gather {output.dtype}", shape), shape)
    length = tensor.numel()
    by_place = exchanges.comm.empty((output.numel(),), output.dtype).split(len(levels.across) * length)
    column = by_place[levels.place]
    parts = column.split(length)
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        copyable(parts[levels.host]).copy_(copyable(tensor))
    yield within.gather(levels.across, tensor, parts)
    yield within.gather(levels.local, column, by_place)
    of_ranks = output.split(length)
    with torch.inference_mode(output.is_inference()), torch.no_grad():
        for place, of_place in enumerate(by_place):
            for host, part in enumerate(of_place.split(length)):
                copyable(of_ranks[levels.ranks[host][place]]).copy_(copyable(part))
