"""Boundary tensors between pipeline stages whose numbers of ranks differ."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor

from ..communicator import Communicator, Work, communicator_for
from ..core.checked import whole_number
from ..core.extension import _C
from ..core.tensor_specs import spec_of
from ..errors import PipeCommError, PipeCommMismatch
from ..parallel_state import PipelineTopology, get_pipeline_topology
from ..parallel_state.pipeline import NUM_LINK_COLOURS, NUM_RELAY_CHANNELS
from ..transports import MIXED
from . import cost
from .differentiable import give, take
from .link import BACKWARD, FORWARD, Link
from .operators import named_in_graphs, traced_relay
from .reduction import reduced
from .route import HELD, RESULT, Holding, Relayed, View, route_of

# Routes of earlier versions, which are never faster, and their replacements.
_REPLACED = {"leader": "direct", "pipelined": "direct"}
ALGORITHMS = ("auto", "sharded", "direct", *_REPLACED)
GRAD_REDUCES = ("leader", "sum", "mean")
OP = "relay"

GradReduce = Literal["leader", "sum", "mean"]
Layout = str | tuple[str, int]
Shape = tuple[int, ...]


class StageRelay:
    """Carries activations to the next stage and gradients to the previous one, between stages of any sizes.

    Args:
        topology: the stages; None is the default one of `parallel_state`.
        algorithm: how a tensor reaches all ranks of a stage; the same bits in each case. "sharded": each pair
            of ranks carries a part, then the stage gathers. "direct": every rank receives everything from the
            source. "auto" decides from bytes, stage sizes and transport. "leader" and "pipelined" are
            accepted, and mean "direct".
        layout: how the ranks of a stage hold the boundary tensor: "replicated", or ("sharded", dim) in
            remainder-first pieces, dim < 0 counted from the last one; one for all stages, or a list with one
            entry per stage. A sharded stage receives its pieces in one hop, whatever the algorithm.
        grad_reduce: what the backward sends for a replicated stage whose ranks hold different gradients:
            "leader" (the first rank's), "sum" or "mean" over the ranks, accumulated in fp32 if the dtype is
            smaller. The reduction is done in the stage when it is called, also with `async_op`.
        communicator: over the topology's group; None is the topology's own. Its first six channels carry
            the relay's messages, one for each link and direction. If it has fewer, a new one with the
            same device and transport is made here, which is a collective call.

    Arguments are the same on all ranks. All ranks of both stages call, in the same order; forward goes to the
    next stage, from the last stage to the first, and backward the other way. Neither the two directions nor
    the two links of a stage wait for each other. Shapes are always those of the **whole** boundary tensor;
    tensors are what this rank holds of it. A call that one rank rejects, or about which ranks disagree
    (shape, dtype, layout, algorithm), raises on all ranks of both stages, and the next call works.

    Raises:
        ValueError, TypeError: an unknown algorithm, layout or grad_reduce; a communicator of another group.

    Example:
        ```python
        topology = PipelineTopology([1, 1])  # ranks of each stage; they may differ
        relay = StageRelay(topology)
        x = torch.ones(2, 3) if topology.get_vtp_my_stage_idx() == 0 else None
        y = relay.relay(x, (2, 3), torch.float32, src_stage=0, dst_stage=1)
        ```
    """

    def __init__(
        self,
        topology: PipelineTopology | None = None,
        *,
        algorithm: Literal["auto", "sharded", "direct", "leader", "pipelined"] = "auto",
        layout: Layout | Sequence[Layout] = "replicated",
        grad_reduce: GradReduce = "leader",
        communicator: Communicator | None = None,
    ) -> None:
        self.topology = get_pipeline_topology() if topology is None else topology
        if not isinstance(self.topology, PipelineTopology):
            raise TypeError(f"topology must be a PipelineTopology, not {type(topology).__name__}")
        if algorithm not in ALGORITHMS:
            raise ValueError(f"algorithm must be one of {', '.join(ALGORITHMS)}, not {algorithm!r}")
        if grad_reduce not in GRAD_REDUCES:
            raise ValueError(f"grad_reduce must be one of {', '.join(GRAD_REDUCES)}, not {grad_reduce!r}")
        self._algorithm, self._grad_reduce = _REPLACED.get(algorithm, algorithm), grad_reduce
        self._stages = self.topology.stages
        self._dims = _dims_of(layout, len(self._stages))
        self.communicator = _usable(communicator, self.topology)
        self._pending: list[Work] = []
        self._send_failure: PipeCommError | None = None  # the first one, until `drain` raises it
        if communicator is None:
            self._connect_neighbours()
        self.name_in_graphs, self.anchor = named_in_graphs(self)

    # ---------------------------------------------------------------- neighbours

    @overload
    def send_forward(
        self, tensor: Tensor, async_op: Literal[True], *, shape: Sequence[int] | None = None
    ) -> Work: ...
    @overload
    def send_forward(
        self, tensor: Tensor, async_op: bool = False, *, shape: Sequence[int] | None = None
    ) -> Work | None: ...
    def send_forward(
        self, tensor: Tensor, async_op: bool = False, *, shape: Sequence[int] | None = None
    ) -> Work | None:
        """Sends the boundary tensor to the next stage; returns when that has accepted it, or returns a Work.

        `shape` is that of the whole tensor. If all ranks of a sharded stage pass it, they need not exchange
        their lengths first. The tensor must not change until the Work is done.
        """
        return self._send(FORWARD, tensor, async_op, shape)

    @overload
    def send_backward(
        self, gradient: Tensor, async_op: Literal[True], *, shape: Sequence[int] | None = None
    ) -> Work: ...
    @overload
    def send_backward(
        self, gradient: Tensor, async_op: bool = False, *, shape: Sequence[int] | None = None
    ) -> Work | None: ...
    def send_backward(
        self, gradient: Tensor, async_op: bool = False, *, shape: Sequence[int] | None = None
    ) -> Work | None:
        """Sends the gradient of what came from the previous stage back to it; see `send_forward`."""
        return self._send(BACKWARD, gradient, async_op, shape)

    @overload
    def recv_forward(
        self, shape: Sequence[int], dtype: torch.dtype, async_op: Literal[False] = False
    ) -> Tensor: ...
    @overload
    def recv_forward(
        self, shape: Sequence[int], dtype: torch.dtype, async_op: Literal[True]
    ) -> tuple[Tensor, Work]: ...
    @overload
    def recv_forward(
        self, shape: Sequence[int], dtype: torch.dtype, async_op: bool
    ) -> Tensor | tuple[Tensor, Work]: ...
    def recv_forward(
        self, shape: Sequence[int], dtype: torch.dtype, async_op: bool = False
    ) -> Tensor | tuple[Tensor, Work]:
        """Receives from the previous stage: a fresh tensor, or (tensor, Work) before it has arrived.

        The part within the stage runs as soon as the data arrive, even if no thread waits.
        """
        return self._recv(FORWARD, shape, dtype, async_op)

    @overload
    def recv_backward(
        self, shape: Sequence[int], dtype: torch.dtype, async_op: Literal[False] = False
    ) -> Tensor: ...
    @overload
    def recv_backward(
        self, shape: Sequence[int], dtype: torch.dtype, async_op: Literal[True]
    ) -> tuple[Tensor, Work]: ...
    @overload
    def recv_backward(
        self, shape: Sequence[int], dtype: torch.dtype, async_op: bool
    ) -> Tensor | tuple[Tensor, Work]: ...
    def recv_backward(
        self, shape: Sequence[int], dtype: torch.dtype, async_op: bool = False
    ) -> Tensor | tuple[Tensor, Work]:
        """Receives the gradient of what went to the next stage; see `recv_forward`."""
        return self._recv(BACKWARD, shape, dtype, async_op)

    def refuse(self, kind: str, receives: bool, error: Exception) -> None:
        """Replaces a call (`kind` FORWARD or BACKWARD) that this rank cannot make: the others raise."""
        link = self.link(kind, receives)
        self.communicator.refuse(OP, error, link.members, link.channel)

    def drain(self) -> None:
        """Waits for all sends of `async_op`.

        Raises the error of the first one that has failed since the last `drain`, even if its handle has
        raised it already or was dropped.
        """
        self._settle(self._pending)
        self._pending = []
        failure, self._send_failure = self._send_failure, None
        if failure is not None:
            raise failure

    # ---------------------------------------------------------------- any two stages

    def relay(
        self, tensor: Tensor | None, shape: Sequence[int], dtype: torch.dtype, src_stage: int, dst_stage: int
    ) -> Tensor:
        """Moves a tensor from one stage to another, recorded by autograd; ranks of other stages do not call.

        Args:
            tensor: what this rank of the source holds; None in the destination.
            shape, dtype: of the whole tensor.

        Returns:
            in the destination what this rank holds of it, which requires grad if its dtype can; its backward
            sends the gradient. In the source a tensor without elements, whose `backward()`, or that of
            anything computed with it, receives the gradient of `tensor` (a constant for second
            derivatives). Every call waits for the other stage, so both stages make their calls, backwards
            included, in one order; autograd runs the backwards of a loss in the reverse order of the calls.

        Raises:
            ValueError: this rank is in neither stage, or the stages are the same.
            PipeCommMismatch: in the backward of CPU tensors, if the stages run backwards in different orders.
        """
        for name, stage_idx in (("src_stage", src_stage), ("dst_stage", dst_stage)):
            if not 0 <= stage_idx < len(self._stages):
                raise ValueError(f"{name} {stage_idx} is not in 0..{len(self._stages) - 1}")
        if src_stage == dst_stage:
            raise ValueError(f"src_stage and dst_stage must differ, both are {src_stage}")
        mine = self.topology.get_vtp_my_stage_idx()
        if mine not in (src_stage, dst_stage):
            raise ValueError(f"this rank is in stage {mine}, neither in {src_stage} nor in {dst_stage}")
        is_source = mine == src_stage
        if torch.compiler.is_compiling():
            _check_given(tensor, dtype, is_source)
            return traced_relay(self, tensor, shape, dtype, src_stage, dst_stage)
        link = self.link_between(FORWARD, src_stage, dst_stage, None).numbered(self.communicator)
        with self._refused_on(link):
            _check_given(tensor, dtype, is_source)
        if tensor is not None:
            return give(self, link, tensor, shape)
        return take(self, link, shape, dtype, self.communicator.device)

    # ---------------------------------------------------------------- one relay

    def _send(self, kind: str, tensor: Tensor, async_op: bool, shape: Sequence[int] | None) -> Work | None:
        work = self.send_on(self.link(kind, receives=False), tensor, async_op, shape)
        if work is not None:
            done = [pending for pending in self._pending if pending.is_captured or pending.is_completed()]
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
        result, work = self.recv_on(self.link(kind, receives=True), shape, dtype, async_op)
        return (result, work) if async_op else result

    @overload
    def send_on(
        self, link: Link, tensor: Tensor, async_op: Literal[True], shape: Sequence[int] | None = None
    ) -> Work: ...
    @overload
    def send_on(
        self, link: Link, tensor: Tensor, async_op: bool, shape: Sequence[int] | None = None
    ) -> Work | None: ...
    def send_on(
        self, link: Link, tensor: Tensor, async_op: bool, shape: Sequence[int] | None = None
    ) -> Work | None:
        """Sends what this rank of the link's source holds."""
        with self._refused_on(link):
            if self._reduces(link):
                relayed, held = self._reduced(link, tensor, shape)
            else:
                holds_pieces = self._dims[link.source_idx] is not None
                if shape is None and holds_pieces and len(self._stages[link.source_idx]) > 1:
                    shape = self._agreed_shape(link, tensor)
                relayed, held = self._checked(link, tensor, shape)
        return self._run(relayed, held, None, link, async_op)

    @overload
    def recv_on(
        self, link: Link, shape: Sequence[int], dtype: torch.dtype, async_op: Literal[True]
    ) -> tuple[Tensor, Work]: ...
    @overload
    def recv_on(
        self, link: Link, shape: Sequence[int], dtype: torch.dtype, async_op: bool
    ) -> tuple[Tensor, Work | None]: ...
    def recv_on(
        self, link: Link, shape: Sequence[int], dtype: torch.dtype, async_op: bool
    ) -> tuple[Tensor, Work | None]:
        """Receives what this rank of the link's destination needs; the Work is done when it has arrived."""
        with self._refused_on(link):
            if not isinstance(dtype, torch.dtype):
                raise TypeError(f"dtype must be a torch.dtype, not {type(dtype).__name__}")
            relayed = self._relayed(link, shape_of(shape), dtype)
            result = self.communicator.empty(relayed.shape_on(self.communicator.rank), dtype)
            target = result.view(-1) if relayed.is_flat else result
        return result, self._run(relayed, None, target, link, async_op)

    def _run(
        self, relayed: Relayed, held: Tensor | None, result: Tensor | None, link: Link, async_op: bool
    ) -> Work | None:
        comm = self.communicator
        tensors = {name: tensor for name, tensor in ((HELD, held), (RESULT, result)) if tensor is not None}
        in_flight = async_op or relayed.num_chunks > 1  # else this thread waits for each hop when it posts it
        works: list[Work | None] = []
        for hop in route_of(comm.rank, comm.size, relayed):
            after = None if hop.after is None else works[hop.after]
            if after is not None and not async_op:  # this thread waits, so that the hop needs no channel
                after.wait()
                after = None
            work = comm.exchange(
                hop.plan,
                [_slice(tensors[view.of], view) for view in hop.inputs],
                [_slice(tensors[view.of], view) for view in hop.outputs],
                async_op=in_flight,
                op=OP,
                members=hop.members,
                within=link.members,
                channel=link.channel,
                after=after,
                gradient_of=0 if works else link.number,
            )
            works.append(work)
        if not in_flight:
            return None
        work = _C.join_works([work for work in works if work is not None])
        if async_op:
            return work
        work.wait()
        return None

    # ---------------------------------------------------------------- what the source sends

    def _checked(self, link: Link, tensor: Tensor, shape: Sequence[int] | None) -> tuple[Relayed, Tensor]:
        """The relay of what this rank of the source holds, and the tensor as the relay cuts it.

        `shape` is that of the whole tensor; None: `tensor` is whole.
        """
        spec_of(tensor, "tensor")
        whole = tuple(tensor.shape) if shape is None else shape_of(shape)
        relayed = self._relayed(link, whole, tensor.dtype)
        expected = relayed.shape_on(self.communicator.rank)
        if tuple(tensor.shape) != expected:
            raise ValueError(
                f"tensor must be {list(expected)}, what this rank holds of {list(whole)}, not "
                f"{list(tensor.shape)}"
            )
        tensor = tensor.detach()
        return relayed, tensor.reshape(-1) if relayed.is_flat else tensor

    def _reduced(self, link: Link, gradient: Tensor, shape: Sequence[int] | None) -> tuple[Relayed, Tensor]:
        """The relay of a gradient that the ranks of the source add up first, and this rank's piece of it."""
        with self._refused_in_source(link):
            relayed, held = self._checked(link, gradient, shape)
            if not (held.is_floating_point() or held.is_complex()):
                raise TypeError(
                    f'grad_reduce="{self._grad_reduce}" needs floating-point or complex gradients, not '
                    f"{held.dtype}"
                )
        return relayed, reduced(self.communicator, held, relayed, self._grad_reduce, link)

    def _agreed_shape(self, link: Link, tensor: Tensor) -> Shape:
        """The shape of the whole tensor, from the lengths that the ranks of the source exchange."""
        comm = self.communicator
        with self._refused_in_source(link):
            spec_of(tensor, "tensor")
            source = self.holding(link.source_idx, tensor.shape)
        dim, num_ranks = source.dim, len(source.ranks)
        assert dim is not None
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
        of_all = torch.empty(num_ranks, dtype=torch.int64, device=comm.device)
        comm.exchange(
            plan,
            [mine],
            [of_all],
            op=OP,
            members=sorted(source.ranks),
            within=link.within_stage,
            channel=link.stage_channel,
        )
        lengths = of_all.tolist()
        expected = _C.remainder_first(sum(lengths), num_ranks)
        if lengths != expected:
            raise ValueError(
                f"the ranks of stage {link.source_idx} hold lengths {lengths} along dim {dim}; the "
                f"remainder-first pieces of {sum(lengths)} are {expected}"
            )
        return (*tensor.shape[:dim], sum(lengths), *tensor.shape[dim + 1 :])

    # ---------------------------------------------------------------- what both ends know

    def _connect_neighbours(self) -> None:
        """Begins to connect to the stages before and after mine, without wrapping around at the ends."""
        mine, last = self.topology.get_vtp_my_stage_idx(), len(self._stages) - 1
        for kind, receives in itertools.product((FORWARD, BACKWARD), (False, True)):
            is_to_next = (kind == FORWARD) != receives
            if mine != (last if is_to_next else 0):
                self.connect(self.link(kind, receives))

    def connect(self, link: Link) -> None:
        """Begins to connect the ranks of a link, if it has a channel and this rank is among them."""
        if link.channel is not None and self.communicator.rank in link.members:
            self.communicator.connect(link.members, channels=[link.channel], together=True)

    def link(self, kind: str, receives: bool) -> Link:
        """The link between my stage and the one that `kind` names."""
        num_stages = len(self._stages)
        if num_stages == 1:
            raise ValueError("a pipeline of one stage has no stage to exchange with")
        mine = self.topology.get_vtp_my_stage_idx()
        step = 1 if kind == FORWARD else -1
        source_idx = mine - step if receives else mine
        lower = (source_idx if kind == FORWARD else source_idx - 1) % num_stages
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
        """Where a tensor goes from stage `source_idx` to stage `destination_idx`.

        `stage_channel` carries what the ranks of the source agree on first; default: `channel`.
        """
        members = tuple(sorted(self._stages[source_idx] + self._stages[destination_idx]))
        stage_channel = channel if stage_channel is None else stage_channel
        return Link(kind, source_idx, destination_idx, members, channel, stage_channel)

    def holding(self, stage_idx: int, shape: Sequence[int]) -> Holding:
        """How a stage holds a tensor with as many dims as `shape` has."""
        dim, num_dims = self._dims[stage_idx], len(shape)
        if dim is None:
            return Holding(self._stages[stage_idx])
        if not -num_dims <= dim < num_dims:
            raise ValueError(
                f"stage {stage_idx} holds the boundary tensor sharded along dim {dim}, but it has "
                f"{num_dims} dims: {list(shape)}"
            )
        return Holding(self._stages[stage_idx], dim % num_dims)

    def _returns_copies(self, link: Link) -> bool:
        """Whether several ranks of the source have a whole gradient."""
        is_replicated = self._dims[link.source_idx] is None and len(self._stages[link.source_idx]) > 1
        return is_replicated and link.kind == BACKWARD

    def _reduces(self, link: Link) -> bool:
        """Whether the source sums its ranks' gradients, each rank one piece."""
        return self._returns_copies(link) and self._grad_reduce != "leader"

    def is_led(self, link: Link) -> bool:
        """Whether several ranks have the whole gradient, and the first one sends its own."""
        return self._returns_copies(link) and self._grad_reduce == "leader"

    def _slowest_among(self, ranks: Sequence[int]) -> str:
        """The transport that messages between these ranks wait for."""
        transport = self.communicator.transport_among(ranks)
        return "tcp" if transport == MIXED else transport

    def _relayed(self, link: Link, whole: Shape, dtype: torch.dtype) -> Relayed:
        source = self.holding(link.source_idx, whole)
        destination = self.holding(link.destination_idx, whole)
        num_elements = math.prod(whole)
        is_flat = source.dim is None and destination.dim is None
        is_reduced = self._reduces(link)
        if is_reduced:
            source = dataclasses.replace(source, dim=destination.dim or 0)
        elif source.dim is None and link.kind == BACKWARD:
            source = dataclasses.replace(source, speaks_by_leader=True)
        algorithm, num_chunks = cost.choose(
            self._slowest_among([*source.ranks, *destination.ranks]),
            self._slowest_among(destination.ranks),
            num_elements * dtype.itemsize,
            num_speakers=1 if source.speaks_by_leader else len(source.ranks),
            num_receivers=1 if destination.dim is not None else len(destination.ranks),
            algorithm=self._algorithm,
            num_cores=self.communicator.num_cores,
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
            is_reduced=is_reduced,
        )

    # ---------------------------------------------------------------- refusals

    def _refused_in_source(self, link: Link) -> contextlib.AbstractContextManager[None]:
        """Wraps the checks before an exchange among the ranks of the source, where its other ranks wait."""
        return self.communicator.collective(OP, sorted(self._stages[link.source_idx]), link.stage_channel)

    @contextlib.contextmanager
    def _refused_on(self, link: Link) -> Iterator[None]:
        """Wraps the steps before a relay: if one fails, the relay raises on all ranks of both stages.

        Wrong arguments, ranks of this stage that disagree, and a lack of memory are such failures.
        """
        try:
            yield
        except (ValueError, TypeError, IndexError, RuntimeError) as error:
            if isinstance(error, PipeCommMismatch) or not isinstance(error, PipeCommError):
                self.communicator.refuse(OP, error, link.members, link.channel)
            raise


def _check_given(tensor: Any, dtype: Any, is_source: bool) -> None:
    if not is_source:
        if tensor is not None:
            raise ValueError("tensor must be None on the ranks of dst_stage, which receive it")
    elif not isinstance(tensor, Tensor):
        raise TypeError(f"tensor must be a torch.Tensor in src_stage, not {type(tensor).__name__}")
    elif tensor.dtype != dtype:
        raise ValueError(f"tensor is {tensor.dtype}, but dtype says {dtype}")


def _slice(tensor: Tensor, view: View) -> Tensor:
    return tensor.narrow(view.dim, view.start, view.length)


def shape_of(shape: Any) -> Shape:
    """A shape as a tuple of ints >= 0."""
    if not isinstance(shape, (list, tuple)):
        raise TypeError(f"shape must be a list of lengths, not {type(shape).__name__}")
    lengths = tuple(whole_number(length, "a length of shape") for length in shape)
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
        return whole_number(layout[1], "the sharded dim")
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
    return communicator_for(
        f"relays of {communicator.id}",
        topology.group,
        communicator.device,
        NUM_RELAY_CHANNELS,
        timeout=communicator.timeout,
        transport=communicator.requested,
    )
