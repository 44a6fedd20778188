"""Borders of pipeline ranks that are several ranks: a `StageRelay` moves their tensors.

All ranks of both ends take part in each relay. The specs of such a border describe whole tensors: its ranks
exchange the specs of what they hold, and each one infers the whole from the layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..communicator import Communicator, Work
from ..core.extension import _C
from ..parallel_state import PipelineTopology
from ..parallel_state.pipeline import NUM_RELAY_CHANNELS
from ..relay import StageRelay
from ..relay.link import BACKWARD, FORWARD, Link
from ..relay.stage_relay import GradReduce
from ..schedules.actions import ACT, GRAD
from ..schedules.plan import Plan
from .border import BorderSpec, OutputSpecs

Way = tuple[str, int, int]  # what, from pipeline rank, to pipeline rank


class RelayedBorders:
    """The borders of a plan that are served by relays, as one rank sees them.

    Each way has a channel that no other way to or from the same pipeline ranks uses: a relay of several hops
    delays what follows it on its channel, and a receive may be posted long before its message is produced.
    One more channel serves the agreement among the ranks of one pipeline rank.

    Raises:
        ValueError: the communicator has too few channels from `first_channel` on.
    """

    def __init__(self, plan: Plan, relay: StageRelay, first_channel: int):
        self._relay = relay
        self._me = relay.communicator.rank
        channel_of = _channels(_ways(plan, relay.topology), first_channel + 1)
        num_channels = 1 + max(channel_of.values(), default=-1)
        if num_channels > relay.communicator.channels:
            raise ValueError(
                f"the borders of {plan.name} between stages of several ranks need {num_channels} channels, "
                f"the communicator has {relay.communicator.channels}; give one with more (15 at most), or "
                "none"
            )
        self._links = {
            way: relay.link_between(FORWARD if way[0] == ACT else BACKWARD, *way[1:], channel, first_channel)
            for way, channel in channel_of.items()
        }
        for link in self._links.values():
            relay.connect(link)

    def link(self, way: Way) -> Link | None:
        """The link that carries the messages of this way; None if they go from one rank to one rank."""
        return self._links.get(way)

    def send(self, link: Link, tensors: Sequence[torch.Tensor], specs: Sequence[BorderSpec]) -> list[Work]:
        """Sends the parts that this rank holds of the tensors that `specs` describe."""
        return [
            self._relay.send_on(link, tensor, True, spec.shape)
            for tensor, spec in zip(tensors, specs, strict=True)
        ]

    def receive(self, link: Link, specs: Sequence[BorderSpec]) -> tuple[list[torch.Tensor], Work | None]:
        """The parts that this rank will hold, and the work after which they have arrived."""
        received = [self._relay.recv_on(link, spec.shape, spec.dtype, True) for spec in specs]
        work = _C.join_works([work for _, work in received]) if received else None
        return [tensor for tensor, _ in received], work

    def members_but_me(self, link: Link) -> list[int]:
        return [rank for rank in link.members if rank != self._me]

    def sources_but_me(self, link: Link) -> list[int]:
        return [rank for rank in self._sources(link) if rank != self._me]

    def leader_to_compare(self, link: Link) -> int | None:
        """The rank whose gradient is sent on behalf of all ranks of the source; None if there is none."""
        return self._sources(link)[0] if self._relay.is_led(link) else None

    def _sources(self, link: Link) -> tuple[int, ...]:
        return self._relay.topology.stages[link.source_idx]

    # ---------------------------------------------------------------- whole tensors and pieces

    def held(self, rank: int, link: Link, whole: OutputSpecs) -> OutputSpecs:
        """The parts of whole tensors that a rank of the source holds."""
        return whole._replace(tensors=tuple(self._held_on(rank, link, spec) for spec in whole.tensors))

    def _held_on(self, rank: int, link: Link, whole: BorderSpec) -> BorderSpec:
        holding = self._relay.holding(link.source_idx, whole.shape)
        return whole._replace(shape=holding.shape_on(rank, whole.shape))

    def whole(self, link: Link, stage: int, specs_of: dict[int, OutputSpecs]) -> OutputSpecs:
        """The specs of the whole tensors, from those that each rank of the source holds.

        Raises:
            ValueError: these are not pieces of the same tensors.
        """
        ranks = self._sources(link)
        held = [specs_of[rank] for rank in ranks]
        pieces = zip(*(specs.tensors for specs in held), strict=False)
        whole = OutputSpecs(tuple(self._joined(link, specs) for specs in pieces), held[0].structure)
        for rank, specs in zip(ranks, held, strict=True):
            if specs != self.held(rank, link, whole):
                shown = ", ".join(f"{specs_of[rank]} on rank {rank}" for rank in ranks)
                raise ValueError(
                    f"stage {stage} made {shown}; by its layout these must be equal (replicated) or "
                    "remainder-first pieces of the same tensors (sharded)"
                )
        return whole

    def _joined(self, link: Link, specs: Sequence[BorderSpec]) -> BorderSpec:
        first = specs[0]
        dim = self._relay.holding(link.source_idx, first.shape).dim
        if dim is None:
            return first
        length = sum(spec.shape[dim] if dim < len(spec.shape) else 0 for spec in specs)
        return first._replace(shape=(*first.shape[:dim], length, *first.shape[dim + 1 :]))


def make_relay(
    communicator: Communicator, topology: PipelineTopology, layout: Any, grad_reduce: GradReduce
) -> StageRelay:
    """The relay of an executor. Raises ValueError and TypeError for wrong arguments."""
    if communicator.channels < NUM_RELAY_CHANNELS:
        raise ValueError(
            f"the communicator has {communicator.channels} channels; an Executor with a topology needs "
            f"{NUM_RELAY_CHANNELS} or more"
        )
    return StageRelay(topology, layout=layout, grad_reduce=grad_reduce, communicator=communicator)


def _ways(plan: Plan, topology: PipelineTopology) -> list[Way]:
    """The ways of outputs and gradients between pipeline ranks, at least one of which is several ranks."""
    ways: dict[Way, None] = {}
    for stage, following in enumerate(plan.next_of):
        if following is not None:
            source, destination = plan.owner[stage], plan.owner[following]
            is_one_to_one = len(topology.stages[source]) == len(topology.stages[destination]) == 1
            if source != destination and not is_one_to_one:
                ways |= {(ACT, source, destination): None, (GRAD, destination, source): None}
    return list(ways)


def _channels(ways: Sequence[Way], first: int) -> dict[Way, int]:
    """For each way the lowest channel that no other way to or from the same pipeline ranks has."""
    channel_of: dict[Way, int] = {}
    for way in ways:
        taken = {channel for other, channel in channel_of.items() if {*other[1:]} & {*way[1:]}}
        channel_of[way] = next(c for c in range(first, first + len(ways)) if c not in taken)
    return channel_of
