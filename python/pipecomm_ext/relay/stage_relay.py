"""Boundary tensors between pipeline stages whose numbers of ranks differ."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from .. import _C
from ..communicator import Communicator, Work
from ..errors import PipeCommError, PipeCommMismatch
from ..parallel_state import PipelineTopology, get_pipeline_topology
from ..parallel_state.pipeline import NUM_LINK_COLOURS, NUM_RELAY_CHANNELS
from ..specs import spec_of
from . import cost
from .differentiable import relay
from .reduction import check_can_be_reduced, reduced
from .route import HELD, RESULT, Holding, Hop, Relayed, View, route_of

ALGORITHMS = ("auto", "leader", "pipelined", "sharded", "direct")
GRAD_REDUCES = ("leader", "sum", "mean")
FORWARD, BACKWARD = "forward", "backward"

Layout = str | tuple[str, int]
Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Link:
    """Two stages and the order of messages between them: a channel, or None for that of all collectives.

    `stage_channel`: of what the source settles among its own ranks first; None: the same.
    """

    kind: str
    source_idx: int
    destination_idx: int
    members: tuple[int, ...]
    channel: int | None
    stage_channel: int | None = None

    def reversed(self) -> Link:
        """For the gradient of what goes over this link."""
        kind = BACKWARD if self.kind == FORWARD else FORWARD
        return dataclasses.replace(
            self, kind=kind, source_idx=self.destination_idx, destination_idx=self.source_idx
        )

    @property
    def channel_in_stage(self) -> int | None:
        return self.channel if self.stage_channel is None else self.stage_channel

    def __str__(self) -> str:
        return f"{self.kind}, stage {self.source_idx} to stage {self.destination_idx}"


class StageRelay:
    """Carries activations to the next stage and gradients to the previous one, between stages of any sizes.

    Args:
        topology: the stages; None is the default one of `parallel_state`.
        algorithm: how a tensor reaches all ranks of a stage; the same bits in each case. "leader": its first
            rank receives and passes on. "pipelined": the same in chunks, the next one received while one is
            passed on. "sharded": each pair of ranks carries a part, then the stage gathers. "direct": every
            rank receives everything from the source. "auto" decides from bytes, stage sizes and transport.
        layout: how the ranks of a stage hold the boundary tensor: "replicated", or ("sharded", dim) in
            remainder-first pieces, dim < 0 counted from the last one; one for all stages, or a list with one
            entry per stage. A sharded stage receives its pieces in one hop, whatever the algorithm.
        grad_reduce: what the backward sends for a replicated stage whose ranks hold different gradients:
            "leader" (the first rank's), "sum" or "mean" over the ranks, accumulated in fp32 if the dtype is
            smaller. The reduction is done in the stage when it is called, also with `async_op`.
        communicator: over the topology's group; None is the topology's own. Its first six channels carry
            the relay's messages; one with fewer channels lends its device and transport to one that is made
            here (a collective call), as the relay needs an order for each of its links.

    Arguments are the same on all ranks. All ranks of both stages call, in the same order; forward goes to the
    next stage, from the last stage to the first, and backward the other way. The two ways, and the two links
    of a stage, do not wait for each other. Shapes are always those of the **whole** boundary tensor; tensors
    are what this rank holds of it. A call that one rank rejects, or about which ranks disagree (shape, dtype,
    layout, algorithm), raises on all ranks of both stages, and the next call works.

    Raises:
        ValueError, TypeError: an unknown algorithm, layout or grad_reduce; a communicator of another group.
    """

    def __init__(
        self,
        topology: PipelineTopology | None = None,
        *,
        algorithm: str = "auto",
        layout: Layout | Sequence[Layout] = "replicated",
        grad_reduce: str = "leader",
        communicator: Communicator | None = None,
    ) -> None:
        self._topology = get_pipeline_topology() if topology is None else topology
        if not isinstance(self._topology, PipelineTopology):
            raise TypeError(f"topology must be a PipelineTopology, not {type(topology).__name__}")
        if algorithm not in ALGORITHMS:
            raise ValueError(f"algorithm must be one of {', '.join(ALGORITHMS)}, not {algorithm!r}")
        if grad_reduce not in GRAD_REDUCES:
            raise ValueError(f"grad_reduce must be one of {', '.join(GRAD_REDUCES)}, not {grad_reduce!r}")
        self._algorithm, self._grad_reduce = algorithm, grad_reduce
        self._dims = _dims_of(layout, self._topology.num_stages)
        self._comm = _usable(communicator, self._topology)
        self._pending: list[Work] = []
        self._send_failure: PipeCommError | None = None  # the first one, until `drain` raises it

    @property
    def topology(self) -> PipelineTopology:
        return self._topology

    @property
    def communicator(self) -> Communicator:
        return self._comm

    # ---------------------------------------------------------------- neighbours

    def send_forward(
        self, tensor: torch.Tensor, async_op: bool = False, *, shape: Sequence[int] | None = None
    ) -> Work | None:
        """Sends the boundary tensor to the next stage; returns when that has taken it, or a Work.

        `shape`: of the whole tensor. The ranks of a sharded stage that all give it save telling each other
        their lengths first. The tensor must not change until the Work is done.
        """
        return self._send(FORWARD, tensor, async_op, shape)

    def send_backward(
        self, gradient: torch.Tensor, async_op: bool = False, *, shape: Sequence[int] | None = None
    ) -> Work | None:
        """Sends the gradient of what came from the previous stage back to it; as `send_forward`."""
        return self._send(BACKWARD, gradient, async_op, shape)

    def recv_forward(
        self, shape: Sequence[int], dtype: torch.dtype, async_op: bool = False
    ) -> torch.Tensor | tuple[torch.Tensor, Work]:
        """Receives from the previous stage: a fresh tensor, or (tensor, Work) before it has arrived.

        The part within the stage runs as soon as the data are there, whether anybody waits or not.
        """
        return self._recv(FORWARD, shape, dtype, async_op)

    def recv_backward(
        self, shape: Sequence[int], dtype: torch.dtype, async_op: bool = False
    ) -> torch.Tensor | tuple[torch.Tensor, Work]:
        """Receives the gradient of what went to the next stage; as `recv_forward`."""
        return self._recv(BACKWARD, shape, dtype, async_op)

    def refuse(self, kind: str, receives: bool, error: Exception) -> None:
        """Instead of a call (`kind` FORWARD or BACKWARD) that this rank cannot make: the others raise."""
        self._refuse(self._link(kind, receives), error)

    def drain(self) -> None:
        """Waits for all sends of `async_op`; raises what went wrong with the first that failed since the last
        `drain`, whether its handle has said so or was dropped.
        """
        self._settle(self._pending)
        self._pending = []
        failure, self._send_failure = self._send_failure, None
        if failure is not None:
            raise failure

    # ---------------------------------------------------------------- any two stages

    def relay(
        self,
        tensor: torch.Tensor | None,
        shape: Sequence[int],
        dtype: torch.dtype,
        src_stage: int,
        dst_stage: int,
    ) -> torch.Tensor:
        """From one stage to another, recorded by autograd; ranks of other stages do not call.

        Args:
            tensor: what this rank of the source holds; None in the destination.
            shape, dtype: of the whole tensor.

        Returns:
            in the destination what this rank holds of it, which requires grad if its dtype can; its backward
            sends the gradient. In the source a tensor without elements, whose `backward()`, or that of
            anything computed with it, receives the gradient of `tensor` (a constant for second
            derivatives). Every call waits for the other stage, so both stages make their calls, backwards
            included, in one order.

        Raises:
            ValueError: this rank is in neither stage, or the stages are the same.
        """
        for name, stage_idx in (("src_stage", src_stage), ("dst_stage", dst_stage)):
            if not 0 <= stage_idx < self._topology.num_stages:
                raise ValueError(f"{name} {stage_idx} is not in 0..{self._topology.num_stages - 1}")
        if src_stage == dst_stage:
            raise ValueError(f"src_stage and dst_stage must differ, both are {src_stage}")
        mine = self._topology.get_vtp_my_stage_idx()
        if mine not in (src_stage, dst_stage):
            raise ValueError(f"this rank is in stage {mine}, neither in {src_stage} nor in {dst_stage}")
        return relay(self, tensor, shape, dtype, self.link_between(FORWARD, src_stage, dst_stage, None))

    # ---------------------------------------------------------------- one relay

    def _send(
        self, kind: str, tensor: torch.Tensor, async_op: bool, shape: Sequence[int] | None
    ) -> Work | None:
        work = self.send_on(self._link(kind, receives=False), tensor, async_op, shape)
        if async_op:
            done = [pending for pending in self._pending if pending.is_completed()]
            self._settle(done)
            self._pending = [pending for pending in self._pending if pending not in done] + [work]
        return work

    def _settle(self, works: Sequence[Work]) -> None:
        for work in works:
            try:
                work.wait()
            except PipeCommError as error:
                self._send_failure = self._send_failure or error

    def _recv(self, kind: str, shape: Any, dtype: Any, async_op: bool) -> Any:
        result, work = self.recv_on(self._link(kind, receives=True), shape, dtype, async_op)
        return (result, work) if async_op else result

    def send_on(
        self, link: Link, tensor: torch.Tensor, async_op: bool, shape: Sequence[int] | None = None
    ) -> Work | None:
        """What a rank of the link's source does."""
        reduces = self._reduces(link)
        is_cut = self._dims[link.source_idx] is not None and len(self._stage(link.source_idx)) > 1
        asks = is_cut and shape is None
        with self._refused_on(link):
            # What the stage settles by itself first is refused, too: the other ranks are waiting there.
            with self._settled_in_stage(link) if reduces or asks else contextlib.nullcontext():
                spec_of(tensor, "tensor")
                tensor = tensor.detach()
                if reduces:
                    check_can_be_reduced(tensor.dtype, self._grad_reduce)
                if asks:
                    source = self.holding(link.source_idx, tensor.shape)
                else:
                    whole = tuple(tensor.shape) if shape is None else shape_of(shape)
                    relayed = self._relayed_from(tensor, whole, link)
            if asks:
                relayed = self._relayed_from(tensor, self._whole_shape(tensor, source, link), link)
            held = tensor.reshape(-1) if relayed.is_flat else tensor
            if reduces:
                held = reduced(self._comm, held, relayed, self._grad_reduce, link.channel_in_stage)
        return self._run(relayed, held, None, link, async_op)

    def recv_on(
        self, link: Link, shape: Sequence[int], dtype: torch.dtype, async_op: bool
    ) -> tuple[torch.Tensor, Work | None]:
        """What a rank of the link's destination does."""
        with self._refused_on(link):
            whole = shape_of(shape)
            if not isinstance(dtype, torch.dtype):
                raise TypeError(f"dtype must be a torch.dtype, not {type(dtype).__name__}")
            relayed = self._relayed(link, whole, dtype)
            mine = self.holding(link.destination_idx, whole).shape_on(self._comm.rank, whole)
            result = self._comm.empty(mine, dtype)
        return result, self._run(
            relayed, None, result.view(-1) if relayed.is_flat else result, link, async_op
        )

    def _run(
        self,
        relayed: Relayed,
        held: torch.Tensor | None,
        result: torch.Tensor | None,
        link: Link,
        async_op: bool,
    ) -> Work | None:
        comm, tensors = self._comm, {HELD: held, RESULT: result}
        hops = route_of(comm.rank, comm.size, relayed)

        def exchange(hop: Hop, is_async: bool, after: Work | None = None) -> Work | None:
            return comm.exchange(
                hop.plan,
                [_slice(tensors[view.of], view) for view in hop.inputs],
                [_slice(tensors[view.of], view) for view in hop.outputs],
                async_op=is_async,
                op="relay",
                members=hop.members,
                channel=link.channel,
                after=after,
            )

        if not async_op and relayed.num_chunks == 1:
            for hop in hops:
                exchange(hop, False)
            return None
        works: list[Work] = []
        for hop in hops:
            after = None if hop.after is None else works[hop.after]
            if after is not None and not async_op:
                after.wait()
                after = None
            works.append(exchange(hop, True, after))
        work = _C.join_works(works)
        if async_op:
            return work
        work.wait()
        return None

    # ---------------------------------------------------------------- what both ends know

    def _link(self, kind: str, receives: bool) -> Link:
        """Between my stage and the one that `kind` names."""
        num_stages = self._topology.num_stages
        if num_stages == 1:
            raise ValueError("a pipeline of one stage has no stage to exchange with")
        mine = self._topology.get_vtp_my_stage_idx()
        step = 1 if kind == FORWARD else -1
        source_idx = mine - step if receives else mine
        lower = source_idx if kind == FORWARD else source_idx - 1
        lower %= num_stages
        colour = NUM_LINK_COLOURS - 1 if lower == num_stages - 1 else lower % 2
        channel = 2 * colour + (kind == BACKWARD)
        return self.link_between(kind, source_idx % num_stages, (source_idx + step) % num_stages, channel)

    def link_between(
        self,
        kind: str,
        source_idx: int,
        destination_idx: int,
        channel: int | None,
        stage_channel: int | None = None,
    ) -> Link:
        members = tuple(sorted(self._stage(source_idx) + self._stage(destination_idx)))
        return Link(kind, source_idx, destination_idx, members, channel, stage_channel)

    def _stage(self, stage_idx: int) -> tuple[int, ...]:
        return self._topology.stages[stage_idx]

    def holding(self, stage_idx: int, shape: Sequence[int]) -> Holding:
        """How a stage holds a tensor with as many dims as `shape` has."""
        dim, num_dims = self._dims[stage_idx], len(shape)
        if dim is None:
            return Holding(self._stage(stage_idx))
        if not -num_dims <= dim < num_dims:
            raise ValueError(
                f"stage {stage_idx} holds the boundary tensor sharded along dim {dim}, but it has "
                f"{num_dims} dims: {list(shape)}"
            )
        return Holding(self._stage(stage_idx), dim % num_dims)

    def _reduces(self, link: Link) -> bool:
        """Whether the source adds up its ranks' gradients, each rank a piece of them."""
        is_replicated = self._dims[link.source_idx] is None and len(self._stage(link.source_idx)) > 1
        return is_replicated and link.kind == BACKWARD and self._grad_reduce != "leader"

    def _relayed_from(self, tensor: torch.Tensor, whole: Shape, link: Link) -> Relayed:
        """`tensor` is to be what this rank, of the source, holds."""
        relayed = self._relayed(link, whole, tensor.dtype)
        expected = self.holding(link.source_idx, whole).shape_on(self._comm.rank, whole)
        if tuple(tensor.shape) != expected:
            raise ValueError(
                f"tensor must be {list(expected)}, what this rank holds of {list(whole)}, not "
                f"{list(tensor.shape)}"
            )
        return relayed

    def _relayed(self, link: Link, whole: Shape, dtype: torch.dtype) -> Relayed:
        source = self.holding(link.source_idx, whole)
        destination = self.holding(link.destination_idx, whole)
        num_elements = math.prod(whole)
        is_flat = source.dim is None and destination.dim is None
        if self._reduces(link):
            source = dataclasses.replace(source, dim=destination.dim or 0)
        elif source.dim is None and link.kind == BACKWARD:
            source = dataclasses.replace(source, speaks_by_leader=True)
        algorithm, num_chunks = cost.choose(
            self._comm.transport,
            num_elements * dtype.itemsize,
            num_speakers=1 if source.speaks_by_leader else len(source.ranks),
            num_receivers=1 if destination.dim is not None else len(destination.ranks),
            algorithm=self._algorithm,
            num_cores=self._comm.num_cores,
        )
        return Relayed(
            whole=((num_elements,) if is_flat else whole, dtype),
            source=source,
            destination=destination,
            algorithm=algorithm,
            num_chunks=num_chunks,
            is_flat=is_flat,
            shown=(whole, dtype),
            tag=f"{link}, {algorithm}, {self._grad_reduce}, {whole}",
        )

    def _whole_shape(self, tensor: torch.Tensor, source: Holding, link: Link) -> Shape:
        """From the lengths of all ranks of the stage."""
        comm, dim = self._comm, source.dim
        num_ranks = len(source.ranks)
        plan = _C.plan_reshard(
            comm.rank,
            comm.size,
            ((num_ranks,), torch.int64),
            (source.ranks, 0, None, False),
            (source.ranks, 0, None, True),
            tag=f"lengths, {link}",
            shown=(tuple(tensor.shape), tensor.dtype),
        )
        mine = torch.tensor([tensor.size(dim)], device=comm.device)
        everybody = torch.empty(num_ranks, dtype=torch.int64, device=comm.device)
        comm.exchange(
            plan, [mine], [everybody], op="relay", members=sorted(source.ranks), channel=link.channel_in_stage
        )
        lengths = everybody.tolist()
        expected = _C.remainder_first(sum(lengths), num_ranks)
        if lengths != expected:
            raise ValueError(
                f"the ranks of stage {link.source_idx} hold lengths {lengths} along dim {dim}; the "
                f"remainder-first pieces of {sum(lengths)} are {expected}"
            )
        return (*tensor.shape[:dim], sum(lengths), *tensor.shape[dim + 1 :])

    # ---------------------------------------------------------------- refusals

    def _settled_in_stage(self, link: Link) -> contextlib.AbstractContextManager[None]:
        return self._comm.collective("relay", sorted(self._stage(link.source_idx)), link.channel_in_stage)

    @contextlib.contextmanager
    def _refused_on(self, link: Link) -> Iterator[None]:
        """Like `Communicator.collective`; also if this rank's stage has not agreed with itself, or memory is
        short.
        """
        try:
            yield
        except (ValueError, TypeError, IndexError, RuntimeError) as error:
            if isinstance(error, PipeCommMismatch) or not isinstance(error, PipeCommError):
                self._refuse(link, error)
            raise

    def _refuse(self, link: Link, error: Exception) -> None:
        self._comm.refuse("relay", error, link.members, link.channel)


def _slice(tensor: torch.Tensor, view: View) -> torch.Tensor:
    return tensor.narrow(view.dim, view.start, view.length)


def shape_of(shape: Any) -> Shape:
    """A shape as a tuple of ints >= 0."""
    if not isinstance(shape, (list, tuple)):
        raise TypeError(f"shape must be a list of lengths, not {type(shape).__name__}")
    lengths = tuple(operator.index(length) for length in shape)
    if any(length < 0 for length in lengths):
        raise ValueError(f"shape must hold lengths >= 0, not {list(lengths)}")
    return lengths


def _dims_of(layout: Any, num_stages: int) -> tuple[int | None, ...]:
    """The sharded dim of every stage, as given (maybe counted from the end); None where it is replicated."""
    if isinstance(layout, list):
        if len(layout) != num_stages:
            raise ValueError(f"layout needs one entry for each of the {num_stages} stages, got {len(layout)}")
        return tuple(map(_dim_of, layout))
    return (_dim_of(layout),) * num_stages


def _dim_of(layout: Any) -> int | None:
    if layout == "replicated":
        return None
    if isinstance(layout, (tuple, list)) and len(layout) == 2 and layout[0] == "sharded":
        if not isinstance(layout[1], int) or isinstance(layout[1], bool):
            raise TypeError(f"the sharded dim must be an int, not {type(layout[1]).__name__}")
        return layout[1]
    raise ValueError(f'layout must be "replicated" or ("sharded", dim), not {layout!r}')


def _usable(communicator: Communicator | None, topology: PipelineTopology) -> Communicator:
    if communicator is None:
        return topology.communicator
    if not isinstance(communicator, Communicator):
        raise TypeError(f"communicator must be a Communicator, not {type(communicator).__name__}")
    theirs, ours = map(dist.get_process_group_ranks, (communicator.group, topology.group))
    if theirs != ours:
        raise ValueError(f"communicator joins the ranks {theirs}, but the topology has {ours}")
    if communicator.channels >= NUM_RELAY_CHANNELS:
        return communicator
    return Communicator(
        topology.group,
        device=communicator.device,
        transport=communicator.transport,
        channels=NUM_RELAY_CHANNELS,
        timeout=communicator.timeout,
    )
