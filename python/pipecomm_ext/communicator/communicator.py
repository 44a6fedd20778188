"""The communicator: point-to-point batches, collectives and exchange plans over one group of ranks."""

from __future__ import annotations

import contextlib
import datetime
import math
import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, overload

import torch
import torch.distributed as dist
from torch.compiler import is_compiling

from ..core import environment, flight
from ..core.checked import whole_number
from ..core.extension import _C
from ..core.levels import Levels
from ..core.process_groups import StoreGroup, own_group
from ..core.tensor_specs import specs_of
from ..errors import summary_of
from ..transports import nccl
from . import reductions, traced
from .construction import Made, make
from .continuation import Continuation, finish_in_background
from .plans import list_plan
from .refusal import RefusedOnError, refuse_for

Send = _C.Send
Recv = _C.Recv
Work = _C.Work

NAME_IN_GRAPHS = "pipecomm_ext.Communicator"  # no name of a torch group begins with it
open_communicators: weakref.WeakSet[Communicator] = weakref.WeakSet()


class Communicator:
    """Moves tensors between the ranks of a group. All ranks of the group construct it, with equal arguments.

    The constructor waits for no other rank: two ranks connect when one of them first needs the other, or when
    `connect` names it. (CUDA tensors with transport="auto": it waits until all ranks have reported whether
    they can use NCCL.)

    Args:
        group: a torch ProcessGroup; None is the default group. Only its store and its ranks are used: the
            communicator makes its own connections.
        device: "cpu", "cuda" or "cuda:1", where the tensors are; "cuda" is the device that is current now.
            None follows the group: "cpu" if its backend for CUDA is gloo, or if it has none.
        transport: "auto", or "tcp", "nccl" or "shm" to insist on one; "c10d" is the former name of "tcp".
        channels: number of independent message orders per pair of ranks, 1 to 15 (say 0 for activations, 1
            for gradients): messages match in post order per (source, destination, channel). Over NCCL they
            are independent while their kernels fit the device (docs/nccl.md), and an operation that
            one rank captures in a CUDA graph must be captured on all its ranks.
        timeout: seconds or timedelta after which an operation fails, on all ranks, with PipeCommTimeout; None
            is 600 s, math.inf no limit.
        check: CPU tensors: "auto" and "full" compare op, dtype, shape and arguments of every message; "off"
            compares sizes only. CUDA tensors (NCCL): "auto" compares each distinct message or collective at
            its first use, in parallel with the transfer, "full" all of them, for which synchronous calls and
            collectives wait; a disagreement fails the communicator. "off" compares nothing.

    Peers are ranks of the group. After a failure (a dead peer, a timeout, `abort()`) every call raises the
    original cause. As a context manager it closes at the end of the block, and aborts first if an exception
    ends the block.

    Raises:
        ValueError, TypeError: wrong arguments. Ranks that need this one then raise a PipeCommMismatch that
            names it.
        PipeCommMismatch: arguments that differ from those of the rank that came first.
        PipeCommTimeout: for CUDA tensors with "auto", a rank did not join within `timeout`.

    Example:
        ```python
        with Communicator(timeout=60) as comm:  # over the default group
            other = 1 - comm.rank
            sent, received = torch.full((4,), float(comm.rank)), torch.empty(4)
            comm.batch_p2p([Send(sent, other), Recv(received, other)])
        ```
    """

    __slots__ = {
        "id": "A random number that names this communicator in records; the same on all ranks.",
        "rank": "This process's rank in the group.",
        "size": "Number of ranks.",
        "group": "The torch group that this was made from.",
        "device": "The torch.device whose tensors are moved; a CUDA device has its index.",
        "channels": "Number of independent message orders per pair of ranks.",
        "timeout": "Seconds after which an operation fails; math.inf: never.",
        "requested": 'What was asked for as `transport`: a name, or "auto".',
        "_transport": "The name of what moves the bytes between all ranks; None: each pair has its own way.",
        "_reason": "Why.",
        "_routes": "What the ranks have published of themselves.",
        "_c": "The communicator of the extension.",
        "__weakref__": "For the set of open communicators.",
    }

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        device: str | torch.device | None = None,
        transport: Literal["auto", "tcp", "nccl", "shm", "c10d"] = "auto",
        channels: int = 2,
        timeout: float | datetime.timedelta | None = None,
        check: Literal["auto", "full", "off"] = "auto",
    ) -> None:
        group = own_group(group)
        self._set_up(group, make(group, device, transport, channels, timeout, check, purpose=""))
        environment.warn_of_unknown(stacklevel=2)

    def _set_up(self, group: dist.ProcessGroup | StoreGroup, made: Made) -> None:
        self.group: Any = group
        self._transport, self._reason, self._routes = made.transport, made.reason, made.routes
        self.id, self.requested = made.id, made.requested
        self.rank, self.size = made.meeting.rank, made.meeting.size
        self.device = made.device
        self.channels = made.channels
        self.timeout = made.timeout_s
        self._c = made.engine
        open_communicators.add(self)
        flight.watch(self)

    def __setattr__(self, name: str, value: Any) -> None:
        if hasattr(self, "_c"):
            raise AttributeError(f"the {name} of a Communicator cannot be changed; make another one")
        super().__setattr__(name, value)

    @property
    def closed(self) -> bool:
        """Whether close() has finished."""
        return self._c.closed

    @property
    def failure(self) -> dict[str, Any] | None:
        """Why every call fails, as plain data with the fields of the error; None: there was no failure."""
        return self._c.failure()

    def __repr__(self) -> str:
        state = "closed" if self.closed else "failed" if self._c.failed else "open"
        return (
            f"<Communicator rank {self.rank} of {self.size}, {self.device}, {self.known_transport}, {state}>"
        )

    # ---------------------------------------------------------------- routes

    def connect(
        self,
        peers: Iterable[int] | None = None,
        *,
        channels: Iterable[int] | None = None,
        direction: Literal["send", "recv"] | None = None,
        together: bool = False,
    ) -> None:
        """Begins to connect to these peers (None: to all ranks), so that no first message has to. Returns at
        once; it is enough that one of the two ends calls it. Does nothing once the communicator has failed or
        is closed.

        Over NCCL each direction of each channel of a peer takes memory of the device: `channels` and
        `direction` select those to connect. None: all of them, and with all ranks also those of collectives.
        Call it before messages are in flight: while NCCL connects, CUDA may wait for kernels that wait for
        other ranks, and a link that needs such a wait is never made.

        Args:
            together: connect what exchanges between the peers and this rank use (see `exchange`) instead of
                messages, on `channels` (None: in the order of all collectives).

        Raises:
            TypeError, ValueError: a peer is not a rank of the group, or no such channel or direction exists.
        """
        checked = [self._checked_peer(peer) for peer in (range(self.size) if peers is None else peers)]
        chosen = None if channels is None else [self._checked_channel(c) for c in channels]
        if together:
            if direction is not None:
                raise ValueError("exchanges have no direction: together=True takes none")
            members = sorted({*checked, self.rank})
            for channel in [None] if chosen is None else chosen:
                self._c.connect_exchanges(members, channel)
        else:
            self._c.connect(checked, chosen, direction)

    @property
    def transport(self) -> str:
        """The transport that moves the bytes: "tcp", "nccl" or "shm", or "mixed" if it is not the same for
        all pairs of ranks.

        It follows from where the ranks are, and is equal on all of them; `route` shows pairs that use another
        one. Waits until all ranks have made the communicator.

        Raises:
            PipeCommTimeout: a rank has not made it within `timeout`.
            PipeCommMismatch: a rank refuses to make it.
        """
        return self.transport_among(range(self.size))

    @property
    def transport_reason(self) -> str:
        """Why `transport` is what it is, and how much device memory NCCL has taken. Waits as `transport`."""
        if self._transport is None:
            return self._routes.reason()
        if self._transport == "nccl":
            return f"{self._reason}; {nccl.usage_text(*self.nccl_usage, self.device)}"
        return self._reason

    @property
    def nccl_usage(self) -> tuple[int, int]:
        """The number of NCCL communicators that this rank has made so far, and the bytes of its device that
        all processes have taken meanwhile; zeros without NCCL.
        """
        return self._c.nccl_usage()

    @property
    def known_transport(self) -> str:
        """The value of `transport` if it is known without waiting, else "auto"."""
        if self._transport is None and not self._routes.are_all_known():
            return "auto"
        return self.transport

    @property
    def num_cores(self) -> int | None:
        """Number of processor cores that the ranks may use together if `transport` is "shm", else None. Waits
        as `transport`; equal on all ranks.
        """
        return self._routes.num_cores() if self._transport in (None, "shm") else None

    def transport_among(self, ranks: Iterable[int]) -> str:
        """The transport used among `ranks`; the same on each of them."""
        return self._transport or self._routes.transport_among(ranks)

    def route(self, peer: int) -> tuple[str, str]:
        """Returns the transport of messages to and from `peer` ("tcp", "nccl" or "shm"), and why; or ("self",
        ...) for the rank itself, whose messages are copies.

        If the route is not made yet, returns the expected one, after waiting until `peer` has made the
        communicator.

        Raises:
            TypeError, ValueError: `peer` is not a rank of the group.
            PipeCommTimeout: `peer` has not made the communicator within `timeout`.
            PipeCommMismatch: it refuses to make it.
        """
        if self._checked_peer(peer) == self.rank:
            return "self", "a message to oneself is a copy"
        if self._transport is not None:
            return self._transport, self._reason
        way, surprise = self._c.route(peer)
        obstacle = surprise or self._routes.obstacle(self.rank, peer)
        way = way or ("tcp" if obstacle else "shm")
        return way, obstacle or "both ranks are on this host"

    # ---------------------------------------------------------------- point to point

    @overload
    def batch_p2p(self, ops: Sequence[Any], *, async_op: Literal[True]) -> Work: ...
    @overload
    def batch_p2p(self, ops: Sequence[Any], *, async_op: bool = False) -> Work | None: ...
    def batch_p2p(self, ops: Sequence[Any], *, async_op: bool = False) -> Work | None:
        """Posts sends and receives as one group.

        Args:
            ops: a list or a tuple of any number of `Send` and `Recv`, or of P2POp of torch.distributed or
                `pipecomm_ext.distributed`, whose peers are global ranks and whose tags are channels. A
                message to oneself needs its receive in the same batch.
            async_op: return a Work instead of waiting.

        Shapes and dtypes must agree on both ends, otherwise both raise PipeCommMismatch and nothing is
        transferred. A non-contiguous send is copied, a non-contiguous receive staged. Buffers belong to the
        operation until it is done. A graph of torch.compile keeps batches of P2POp, which are done when this
        returns.

        Example:
            ```python
            left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
            received = torch.empty(4)
            work = comm.batch_p2p([Send(torch.ones(4), right), Recv(received, left)], async_op=True)
            work.wait()  # compute in between
            ```
        """
        if not isinstance(ops, (list, tuple)):  # an iterator could be read only once
            raise TypeError(f"ops must be a list or a tuple, not {type(ops).__name__}")
        if is_compiling() and all(isinstance(op, dist.P2POp) for op in ops):
            traced.batch_p2p(graph_name(self), [self._traced_message(op) for op in ops])
            return traced.done_work() if async_op else None
        for op in ops:
            if type(op) is not Send and type(op) is not Recv:
                ops = [self._from_torch(op, op_idx) for op_idx, op in enumerate(ops)]
                break
        return self._c.batch_p2p(ops, async_op)

    def send(self, tensor: torch.Tensor, dst: int, channel: int = 0) -> None:
        """Sends a tensor to rank `dst`; returns when the receiver has accepted it.

        Example:
            ```python
            if comm.rank == 0:
                comm.send(torch.arange(3), 1)
            else:
                comm.recv(received := torch.empty(3, dtype=torch.int64), 0)
            ```
        """
        if is_compiling():
            traced.batch_p2p(graph_name(self), [traced.Message(True, tensor, dst, channel)])
            return
        self._c.send(tensor, dst, channel)

    def recv(self, tensor: torch.Tensor, src: int, channel: int = 0) -> None:
        """Receives from rank `src` into `tensor`, whose shape and dtype must be the sender's."""
        if is_compiling():
            traced.batch_p2p(graph_name(self), [traced.Message(False, tensor, src, channel)])
            return
        self._c.recv(tensor, src, channel)

    def isend(self, tensor: torch.Tensor, dst: int, channel: int = 0) -> Work:
        """Like `send`, without waiting. The buffer must not change until the Work is done, and must keep its
        storage (see `Work`).
        """
        return self._c.isend(tensor, dst, channel)

    def irecv(self, tensor: torch.Tensor, src: int, channel: int = 0) -> Work:
        """Like `recv`, without waiting. See `Work`."""
        return self._c.irecv(tensor, src, channel)

    # ---------------------------------------------------------------- collectives

    @overload
    def broadcast(self, tensor: torch.Tensor, src: int, *, async_op: Literal[True]) -> Work: ...
    @overload
    def broadcast(self, tensor: torch.Tensor, src: int, *, async_op: bool = False) -> Work | None: ...
    def broadcast(self, tensor: torch.Tensor, src: int, *, async_op: bool = False) -> Work | None:
        """Copies `tensor` of rank `src` into `tensor` of all others; same shape and dtype everywhere.

        Example:
            ```python
            weights = torch.ones(4) if comm.rank == 0 else torch.empty(4)
            comm.broadcast(weights, src=0)
            ```
        """
        if is_compiling() and not async_op:
            traced.broadcast(graph_name(self), tensor, src, is_source=src == self.rank)
            return None
        try:
            return self._c.broadcast(tensor, src, async_op)
        except Exception as error:
            refuse_for(self, "broadcast", error)
            raise

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Returns an uninitialised tensor for results, on this communicator's device.

        With shared memory, peers can write into large ones directly, which saves a copy, and page faults once
        memory is reused. They own their memory as any tensor does, but their storage cannot be resized: torch
        raises a RuntimeError. Large are those of 64 KiB and more.

        Example:
            ```python
            received = comm.empty((1024, 1024), torch.float32)  # over shared memory, peers write it directly
            comm.batch_p2p([Send(torch.ones(1024, 1024), 1 - comm.rank), Recv(received, 1 - comm.rank)])
            ```
        """
        is_sequence = isinstance(shape, (list, tuple)) or isinstance(shape, Sequence)  # the latter is slow
        if isinstance(shape, str) or not is_sequence:
            raise TypeError(f"shape must be a sequence of lengths, not {type(shape).__name__}")
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype must be a torch.dtype, not {type(dtype).__name__}")
        if is_compiling():
            return torch.ops.pipecomm_ext.empty(list(shape), dtype, graph_name(self))
        try:
            if math.prod(shape) * dtype.itemsize >= _C.MIN_RESULT_BYTES:
                result = self._c.empty(list(shape), dtype)
                if result is not None:
                    return result
            if len(shape) == 0:
                return torch.empty((), dtype=dtype, device=self.device)
            # torch reads lengths passed as separate arguments in two thirds of the time.
            return torch.empty(*shape, dtype=dtype, device=self.device)
        except (TypeError, RuntimeError):
            self._c.empty(list(shape), dtype)  # raises an error about the wrong length
            raise

    @overload
    def barrier(self, *, timeout: None = None, async_op: Literal[True]) -> Work: ...
    @overload
    def barrier(
        self, *, timeout: float | datetime.timedelta | None = None, async_op: bool = False
    ) -> Work | None: ...
    def barrier(
        self, *, timeout: float | datetime.timedelta | None = None, async_op: bool = False
    ) -> Work | None:
        """Returns when all ranks have called it, or a Work that is done by then. `timeout` limits how long
        this rank waits; it then raises PipeCommTimeout, and the barrier stays in flight.
        """
        try:
            if timeout is None:
                return self._c.barrier(async_op)
            if async_op:
                raise ValueError(
                    "barrier: timeout has no effect with async_op=True; pass it to the handle's wait()"
                )
            _C.timeout_seconds(timeout)  # raises before the barrier is posted if it is wrong
            work = self._c.barrier(True)
        except Exception as error:
            refuse_for(self, "barrier", error)
            raise
        work.wait(timeout)
        return None

    @overload
    def all_to_all(
        self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], *, async_op: Literal[True]
    ) -> Work: ...
    @overload
    def all_to_all(
        self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], *, async_op: bool = False
    ) -> Work | None: ...
    def all_to_all(
        self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], *, async_op: bool = False
    ) -> Work | None:
        """Sends inputs[r] to rank r and receives outputs[r] from it. The tensors may have any shapes and
        dtypes, and may be empty.

        The receiver's shape may differ from the sender's if the number of bytes is the same.

        Example:
            ```python
            inputs = [torch.full((rank + 1,), float(comm.rank)) for rank in range(comm.size)]
            outputs = [torch.empty(comm.rank + 1) for _ in range(comm.size)]  # sizes may differ
            comm.all_to_all(inputs, outputs)
            ```
        """
        return self.exchange(
            lambda: list_plan(self.rank, self.size, specs_of(inputs, "inputs"), specs_of(outputs, "outputs")),
            inputs,
            outputs,
            async_op=async_op,
            op="all_to_all",
        )

    @overload
    def all_reduce(
        self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, *, async_op: Literal[True]
    ) -> Work: ...
    @overload
    def all_reduce(
        self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, *, async_op: bool = False
    ) -> Work | None: ...
    def all_reduce(
        self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, *, async_op: bool = False
    ) -> Work | None:
        """Reduces the `tensor` of all ranks in place, element by element: all ranks get the same bits; of CPU
        tensors in every run on the same hosts.

        Over NCCL, NCCL's own functions reduce CUDA tensors if they have the dtype and the operator
        (docs/backend.md), and float16 and bfloat16 are then rounded at each rank.

        Args:
            tensor: any shape and strides, the same on all ranks.
            async_op: the same on all ranks. If set, every rank gets the tensors of all ranks and reduces
                them itself, unless NCCL does, so its memory and traffic grow with their number.
            op: an operator of torch.distributed.ReduceOp. float16 and bfloat16 are reduced in float32, unless
                NCCL reduces them; integers wrap; of bool, SUM is "any", PRODUCT "all" and BXOR the parity.

        Raises:
            ValueError: `op` has no meaning for the dtype: AVG of integers, bitwise operators of floats.

        Example:
            ```python
            total = torch.full((4,), float(comm.rank + 1))
            comm.all_reduce(total)  # the sum of all ranks, with the same bits on each
            ```
        """
        if not async_op:
            reductions.all_reduce(self, self._c, tensor, op, find=self._levels)
            return None
        return self._in_background(reductions.begin_all_reduce(self, self._c, [tensor], op, False, None))

    @overload
    def reduce_scatter(
        self,
        output: torch.Tensor,
        input: torch.Tensor | Sequence[torch.Tensor],
        op: Any = dist.ReduceOp.SUM,
        *,
        async_op: Literal[True],
    ) -> Work: ...
    @overload
    def reduce_scatter(
        self,
        output: torch.Tensor,
        input: torch.Tensor | Sequence[torch.Tensor],
        op: Any = dist.ReduceOp.SUM,
        *,
        async_op: bool = False,
    ) -> Work | None: ...
    def reduce_scatter(
        self,
        output: torch.Tensor,
        input: torch.Tensor | Sequence[torch.Tensor],
        op: Any = dist.ReduceOp.SUM,
        *,
        async_op: bool = False,
    ) -> Work | None:
        """Reduces piece r of the `input` of all ranks into the `output` of rank r. `input` is one tensor, the
        pieces concatenated along dim 0 or stacked, or a list of them, whose shapes may differ. Otherwise as
        `all_reduce`.

        Example:
            ```python
            mine = torch.empty(2)
            comm.reduce_scatter(mine, torch.ones(2 * comm.size))  # piece r of the sum, on rank r
            ```
        """
        if not async_op:
            reductions.reduce_scatter(self, self._c, output, input, op, find=self._levels)
            return None
        handle = reductions.begin_reduce_scatter(self, self._c, [output], input, op, False)
        return self._in_background(handle)

    def _levels(self) -> Levels | None:
        return self._routes.levels if self.device.type == "cpu" else None

    @overload
    def all_gather(self, output: torch.Tensor, input: torch.Tensor, *, async_op: Literal[True]) -> Work: ...
    @overload
    def all_gather(
        self, output: torch.Tensor, input: torch.Tensor, *, async_op: bool = False
    ) -> Work | None: ...
    def all_gather(self, output: torch.Tensor, input: torch.Tensor, *, async_op: bool = False) -> Work | None:
        """Gathers the `input` of all ranks into `output`, concatenated along dim 0 or stacked.

        Example:
            ```python
            everybody = torch.empty(comm.size, 3)
            comm.all_gather(everybody, torch.full((3,), float(comm.rank)))  # row r is that of rank r
            ```
        """
        if not async_op:
            reductions.all_gather(self, self._c, output, input, find=self._levels)
            return None
        return self._in_background(reductions.begin_all_gather(self, self._c, output, input, False))

    def exchange(
        self,
        plan: _C.PreparedExchange | Callable[[], _C.PreparedExchange],
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        *,
        async_op: bool = False,
        op: str = "exchange",
        members: Sequence[int] = (),
        within: Sequence[int] = (),
        channel: int | None = None,
        after: Work | None = None,
        gradient_of: int = 0,
        returns_work: bool = False,
    ) -> Work:
        """Runs an exchange plan: packs what is not contiguous, moves one message per peer, unpacks.

        All ranks call it, with plans made from the same arguments; or only the ranks `members` (increasing),
        if the plan moves data only between them.

        Args:
            plan: the plan, or a function that makes it; if that raises, the exchange is refused.
            inputs, outputs: tensors of the shapes and dtypes that the plan has for them, with any strides.
            within: over NCCL, exchanges of the same members on a channel have an NCCL communicator of their
                own; with `within` they use that of these ranks (increasing, the members among them).
            channel: exchanges of a channel are posted in the order of the calls; None is the order of all
                collectives.
            after: the Work of another exchange of this communicator, in any order. This one is posted once
                that one has succeeded, and fails if it fails, even if no thread waits.
            gradient_of: the `number` of the Work whose gradients are moved. CPU tensors: ranks compare it.
            returns_work: return the Work also without async_op; it is then done. With neither, None is
                returned.
        """
        try:
            if callable(plan):
                plan = plan()
            if not isinstance(plan, _C.PreparedExchange):
                raise TypeError(f"plan must be an exchange plan, not {type(plan).__name__}")
            if not isinstance(inputs, (list, tuple)):
                raise TypeError(f"inputs must be a list of tensors, not {type(inputs).__name__}")
            if not isinstance(outputs, (list, tuple)):
                raise TypeError(f"outputs must be a list of tensors, not {type(outputs).__name__}")
            return self._c.exchange(
                op,
                plan,
                inputs,
                outputs,
                async_op,
                members,
                within,
                channel,
                after,
                gradient_of,
                returns_work,
            )
        except Exception as error:
            refuse_for(self, op, error, members, channel)
            raise

    def collective(
        self, op: str, members: Sequence[int] = (), channel: int | None = None
    ) -> contextlib.AbstractContextManager[None]:
        """Wraps the steps before a collective (of `members`, on `channel`, see `exchange`). If this rank
        raises anything here, every other rank's call of the same collective raises PipeCommMismatch with the
        reason; no rank waits, and the next call works.
        """
        return RefusedOnError(self, op, members, channel)

    def refuse(
        self, op: str, error: BaseException, members: Sequence[int] = (), channel: int | None = None
    ) -> None:
        """Refuses a collective that this rank cannot take part in because of `error`. Does not wait."""
        self._c.refuse(op, summary_of(error), members, channel)

    # ---------------------------------------------------------------- record

    def flight_record(self) -> list[dict[str, Any]]:
        """Returns the last 1024 operations that have ended and all that have not, in the order of their
        calls, as plain data (docs/flight_record.md lists the fields). May be called by any thread, in any
        state.
        """
        return self._c.flight_record()

    def connection_events(self) -> list[dict[str, Any]]:
        """Returns the states that the connections of this rank have entered, oldest first, as plain data
        (docs/flight_record.md lists the states): the latest of each connection, and the last 1024 others. May
        be called by any thread, in any state.
        """
        return self._c.connection_events()

    def dump_flight(self, folder: str | os.PathLike[str]) -> str:
        """Writes the flight record to a new file of JSON lines in `folder`, which is made if it does not
        exist, and returns its path. `python -m pipecomm_ext doctor --flight FOLDER` reads it.

        Raises:
            ValueError: others could replace files in `folder`.
            OSError: the file cannot be written.
        """
        return flight.dump(self, folder, "asked for")

    # ---------------------------------------------------------------- end

    def abort(self, reason: str = "", *, cause: Communicator | None = None) -> None:
        """Makes every pending and later call raise PipeCommAborted, on all ranks. Idempotent; may be called
        by any thread.

        Args:
            reason: a text for the error.
            cause: another communicator of the same ranks. If it has failed, calls of this one raise the same
                error as its calls.
        """
        self._c.abort(str(reason), None if cause is None else cause._c)

    def close(self) -> None:
        """Waits for what is in flight, then releases connections and threads. Idempotent.

        Raises:
            PipeCommPeerLost: a message, for which no other call has waited, cannot match any more because its
                peer has closed.
            PipeCommTimeout: a message found no match within the communicator's timeout.
        """
        self._close(None)

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, exc_type, exc, traceback) -> None:
        if exc_type is None:
            return self.close()
        self.abort(summary_of(exc))
        with contextlib.suppress(Exception):  # the block's own exception is more helpful
            self.close()

    # ---------------------------------------------------------------- details

    def _close(self, patience_s: float | None) -> None:
        open_communicators.discard(self)
        try:
            self._c.close(patience_s)
        finally:
            flight.dump_if_failed(self)

    def _checked_peer(self, peer: int) -> int:
        peer = whole_number(peer, "peer")
        if not 0 <= peer < self.size:
            raise ValueError(
                f"peer {peer} is not in 0..{self.size - 1}; it is a rank within the group, not a global rank"
            )
        return peer

    def _checked_channel(self, channel: int) -> int:
        channel = whole_number(channel, "channel")
        if not 0 <= channel < self.channels:
            raise ValueError(f"channel {channel} is not in 0..{self.channels - 1}")
        return channel

    @staticmethod
    def _in_background(handle: Work) -> Work:
        if isinstance(handle, Continuation):
            finish_in_background(handle)
        return handle

    def _traced_message(self, op: dist.P2POp) -> traced.Message:
        is_send, peer = op.op is dist.isend, dist.get_group_rank(self.group, op.peer)
        return traced.Message(is_send, op.tensor, peer, op.tag)

    def _from_torch(self, op: Any, op_idx: int) -> Send | Recv:
        if type(op) is Send or type(op) is Recv:
            return op
        kind: Any = getattr(op, "message_type", None)  # of a P2POp of pipecomm_ext.distributed
        if isinstance(op, dist.P2POp):
            kind = Send if op.op is dist.isend else Recv
        if kind is None:
            raise TypeError(
                f"ops[{op_idx}] must be a Send, a Recv or a torch.distributed.P2POp, not {type(op).__name__}"
            )
        return kind(op.tensor, dist.get_group_rank(self.group, op.peer), op.tag)


def communicator_for(
    purpose: str,
    group: dist.ProcessGroup | StoreGroup,
    device: str | torch.device | None,
    channels: int,
    *,
    timeout: float | datetime.timedelta | None = None,
    transport: str = "auto",
) -> Communicator:
    """Makes a Communicator that meets those of the same purpose, whatever else a rank made before. The
    package makes its own ones in this way, so that they do not shift the numbers of the user's.
    """
    communicator = Communicator.__new__(Communicator)
    made = make(group, device, transport, channels, timeout, "auto", purpose)
    communicator._set_up(group, made)
    environment.warn_of_unknown(stacklevel=2)
    return communicator


def graph_name(communicator: Communicator) -> str:
    """Returns a string that stands for the communicator, on all its ranks, and can be traced. A communicator
    that is made later has another one."""
    return f"{NAME_IN_GRAPHS} {communicator.id}"


def engine_of(communicator: Communicator) -> _C.Communicator:
    """Returns the communicator of the extension, which the functions of `reductions` take."""
    return communicator._c


def close_patiently(communicator: Communicator, patience_s: float) -> None:
    """Closes it, but after that time gives up receives on the CPU that no rank has matched."""
    communicator._close(patience_s)
