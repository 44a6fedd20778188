"""torch groups that the ranks of a group make while other ranks of the world take no part."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.distributed as dist

from ..communicator import DEFAULT_TIMEOUT_S
from ..core.rendezvous import Rendezvous

# torch >= 2.14 names a group that only its members make after its ranks and a counter, which it increments on
# the members only. Ranks whose counters differ wait for each other forever in their next `new_group`. Groups
# made here take numbers that torch's own counter never reaches, and leave that counter unchanged.
FIRST_NUMBER = 1 << 40
_next_number = FIRST_NUMBER


def make_groups(
    group: dist.ProcessGroup, all_ranks: list[list[int]]
) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """Makes torch groups of these global ranks. Returns those that this rank is in, by their ranks.

    All ranks of `group` call it with equal arguments.
    """
    made: Sequence[tuple[list[int], object]]
    if dist.get_world_size(group) == dist.get_world_size():
        made = [(ranks, dist.new_group(ranks)) for ranks in all_ranks]
    elif torch.__version__ >= "2.14":
        made = _make_numbered_groups(group, all_ranks)
    else:
        made = _make_equally_many_groups(group, all_ranks)
    me = dist.get_rank()
    return {tuple(ranks): new for ranks, new in made if me in ranks and isinstance(new, dist.ProcessGroup)}


def _make_numbered_groups(
    group: dist.ProcessGroup, all_ranks: list[list[int]]
) -> Sequence[tuple[list[int], object]]:
    global _next_number
    counters = dist.distributed_c10d._world
    meeting = Rendezvous(group, DEFAULT_TIMEOUT_S, "PipelineTopology")
    first = max(record["next"] for record in meeting.gather("groups", {"next": _next_number}))
    _next_number = first + len(all_ranks)
    me, torchs_own = dist.get_rank(), counters.group_count
    made = []
    try:
        for number, ranks in zip(itertools.count(first), all_ranks):
            if me in ranks:
                counters.group_count = number
                made.append((ranks, dist.new_group(ranks, use_local_synchronization=True)))
    finally:
        counters.group_count = torchs_own
    return made


def _make_equally_many_groups(
    group: dist.ProcessGroup, all_ranks: list[list[int]]
) -> Sequence[tuple[list[int], object]]:
    """torch < 2.14 counts the groups that a process has made, so all ranks must make the same number: a rank
    that is not a member makes a group with itself."""
    me, names = dist.get_rank(), dist.distributed_c10d._world.pg_names
    meeting = Rendezvous(group, DEFAULT_TIMEOUT_S, "PipelineTopology")
    records = meeting.gather("groups", {"num_made": len(names)})
    for _ in range(max(record["num_made"] for record in records) - len(names)):
        dist.new_group([me], use_local_synchronization=True)
    return [
        (ranks, dist.new_group(ranks if me in ranks else [me], use_local_synchronization=True))
        for ranks in all_ranks
    ]
