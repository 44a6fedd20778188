"""The communicator: point-to-point batches, collectives and exchange plans over one group of ranks."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import functools
import math
import os
import sys
import warnings
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from . import _C, environment, flight, nccl, shared_memory
from .rendezvous import Rendezvous
from .specs import Spec, specs_of

Send = _C.Send
Recv = _C.Recv
Work = _C.Work

DEFAULT_TIMEOUT_S = 600.0
MAX_CHANNELS = 15


class Communicator:
    """Moves tensors between the ranks of a group. Construction is collective: all its ranks, same arguments.

    Args:
        group: a torch ProcessGroup; None is the default group. Used for its store and its ranks only: all
            connections are made here, once, and are the communicator's own.
        device: "cpu" or "cuda", the kind of tensors moved; None takes what the group can do, "cuda" first.
        transport: "auto", or "c10d", "nccl", "shm" to insist.
        channels: number of independent message orders per pair of ranks, 1 to 15 (say 0 for activations, 1
            for gradients): messages match in post order per (source, destination, channel).
        timeout: seconds or timedelta after which an operation fails, on all ranks, with PipeCommTimeout; None
            is 600 s, math.inf no limit.
        check: CPU tensors: "auto" and "full" compare op, dtype, shape and arguments of every message; "off"
            compares sizes only. CUDA tensors (NCCL): "auto" compares each distinct message or collective at
            its first use, "full" each one behind the transfer, which costs host time; a disagreement about a
            message then fails the communicator. "off" compares nothing.

    Peers are ranks within the group. After a failure (a dead peer, a timeout, `abort()`) every call raises
    the original cause. A context manager: leaving it closes, leaving it by an exception aborts.

    Raises:
        ValueError, TypeError: wrong arguments; the other ranks get PipeCommMismatch naming this one.
        PipeCommTimeout: a rank did not join within `timeout`.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        device: str | torch.device | None = None,
        transport: str = "auto",
        channels: int = 2,
        timeout: float | datetime.timedelta | None = None,
        check: str = "auto",
    ) -> None:
        group = own_group(group)
        error: Exception | None = None
        limit: float | None = DEFAULT_TIMEOUT_S
        facts: dict[str, Any] = {}
        try:
            limit = _seconds(timeout)
            settings = environment.read()
            facts = _facts(group, device, transport, channels, limit, check, settings)
            flight.start(settings["PIPECOMM_FLIGHT_DIR"])
        except (TypeError, ValueError) as wrong:
            error, facts = wrong, {"error": f"{type(wrong).__name__}: {wrong}"}
        meeting = Rendezvous(group, limit)
        try:
            everybody = meeting.gather("facts", facts)
        finally:
            if error is not None:
                raise error
        _require_equal(everybody, meeting.rank)
        self._group = group
        self._rank, self._size = meeting.rank, meeting.size
        self._device = torch.device(facts["device"])
        self._channels, self._timeout_s = channels, math.inf if limit is None else limit
        epoch = meeting.shared_random()
        self._id = f"{epoch:08x}"
        memory = None
        self._num_cores: int | None = None
        if self._device.type == "cuda":
            self._transport, self._transport_reason = _choose_for_cuda(facts, everybody)
        else:
            memory, self._transport_reason = _share_memory(meeting, facts, everybody, epoch)
            self._transport = "c10d"
            if memory is not None:
                self._transport = "shm"
                self._num_cores = shared_memory.num_cores([record["local"] for record in everybody])
        backend = _connect(meeting, epoch) if memory is None else None
        if self._transport == "nccl":
            self._c = nccl.make(
                meeting,
                backend,
                epoch=epoch,
                channels=channels,
                timeout=self._timeout_s,
                check=facts["check"],
                options=nccl.options(settings),
            )
        else:
            self._c = _C.Communicator(
                backend=backend,
                shared_memory=memory,
                rank=self._rank,
                size=self._size,
                epoch=epoch,
                channels=channels,
                timeout=self._timeout_s,
                num_threads=torch.get_num_threads(),
                checks=facts["check"] != "off",
                device=self._device.type,
            )
        del backend  # the extension is its only owner, so that close() really closes the connections
        _open.add(self)
        flight.watch(self)
        environment.warn_of_unknown(stacklevel=2)

    # ---------------------------------------------------------------- facts

    @property
    def id(self) -> str:
        """A random number of this communicator, the same on all ranks, by which records name it."""
        return self._id

    @property
    def rank(self) -> int:
        """My rank in the group."""
        return self._rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._size

    @property
    def group(self) -> dist.ProcessGroup:
        """The torch group that this was made from."""
        return self._group

    @property
    def device(self) -> torch.device:
        """The kind of device whose tensors are moved."""
        return self._device

    @property
    def channels(self) -> int:
        """Number of independent message orders per pair of ranks."""
        return self._channels

    @property
    def num_cores(self) -> int | None:
        """Number of processor cores that all ranks may use together, with `shm`; else None."""
        return self._num_cores

    @property
    def timeout(self) -> float:
        """Seconds after which an operation fails; math.inf: never."""
        return self._timeout_s

    @property
    def transport(self) -> str:
        """What moves the bytes: "c10d", "nccl" or "shm"; equal on all ranks."""
        return self._transport

    @property
    def transport_reason(self) -> str:
        """Why it was chosen."""
        return self._transport_reason

    @property
    def closed(self) -> bool:
        """Whether close() has finished."""
        return self._c.closed

    def __repr__(self) -> str:
        state = "closed" if self.closed else "failed" if self._c.failed else "open"
        return (
            f"<Communicator rank {self.rank} of {self.size}, {self.device.type}, {self.transport}, {state}>"
        )

    # ---------------------------------------------------------------- point to point

    def batch_p2p(self, ops: Sequence[Any], *, async_op: bool = False) -> Work | None:
        """Posts sends and receives as one group.

        Args:
            ops: `Send` / `Recv` objects, or torch.distributed.P2POp (their peers are global ranks, their tags
                channels). Any number, also none. Messages to oneself need their receive in the same batch.
            async_op: return a Work instead of waiting.

        Shapes and dtypes must agree on both ends, else both raise PipeCommMismatch and nothing is
        transferred. A non-contiguous send is copied, a non-contiguous receive staged. Buffers belong to the
        operation until it is done.
        """
        if any(type(op) is not Send and type(op) is not Recv for op in ops):
            ops = [self._from_torch(op, op_idx) for op_idx, op in enumerate(ops)]
        return self._finish(self._c.batch_p2p(ops, async_op), async_op)

    def send(self, tensor: torch.Tensor, dst: int, channel: int = 0) -> None:
        """Sends a tensor to rank `dst`; returns when the receiver has accepted it."""
        self._c.isend(tensor, dst, channel, False).wait()

    def recv(self, tensor: torch.Tensor, src: int, channel: int = 0) -> None:
        """Receives from rank `src` into `tensor`, whose shape and dtype must be the sender's."""
        self._c.irecv(tensor, src, channel, False).wait()

    def isend(self, tensor: torch.Tensor, dst: int, channel: int = 0) -> Work:
        """Like `send`, without waiting. The buffer must not change until the Work is done."""
        return self._c.isend(tensor, dst, channel)

    def irecv(self, tensor: torch.Tensor, src: int, channel: int = 0) -> Work:
        """Like `recv`, without waiting."""
        return self._c.irecv(tensor, src, channel)

    # ---------------------------------------------------------------- collectives

    def broadcast(self, tensor: torch.Tensor, src: int, *, async_op: bool = False) -> Work | None:
        """Copies `tensor` of rank `src` into `tensor` of all others; same shape and dtype everywhere."""
        with self.collective("broadcast"):
            work = self._c.broadcast(tensor, src, async_op)
        return self._finish(work, async_op)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor for results, on this communicator's device.

        With shared memory, large ones lie where peers can write them directly: one copy fewer, and no page
        faults once memory is used again. They own their memory as any tensor does, but a forked child goes on
        sharing it with this process.
        """
        if isinstance(shape, str) or not isinstance(shape, Sequence):
            raise TypeError(f"shape must be a sequence of lengths, not {type(shape).__name__}")
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype must be a torch.dtype, not {type(dtype).__name__}")
        if self._device.type != "cpu":
            return torch.empty(shape, dtype=dtype, device=self._device)
        return self._c.empty(list(shape), dtype)

    def barrier(self) -> None:
        """Returns when all ranks have called it."""
        self._c.barrier().wait()

    def all_to_all(
        self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], *, async_op: bool = False
    ) -> Work | None:
        """Sends inputs[r] to rank r and receives outputs[r] from it; any shapes and dtypes, empty ones too.

        The receiver's shape may differ from the sender's as long as the bytes are as many.
        """
        with self.collective("all_to_all"):
            plan = _list_plan(self.rank, self.size, specs_of(inputs, "inputs"), specs_of(outputs, "outputs"))
        return self.exchange(plan, inputs, outputs, async_op=async_op, op="all_to_all")

    def exchange(
        self,
        plan: _C.Plan,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        *,
        async_op: bool = False,
        op: str = "exchange",
        members: Sequence[int] = (),
        channel: int | None = None,
        after: Work | None = None,
    ) -> Work | None:
        """Runs an exchange plan: packs what is not contiguous, moves one message per peer, unpacks.

        `inputs` and `outputs` have the shapes and dtypes of the plan; inputs are read by their strides. All
        ranks call it, with plans of the same arguments; or only the ranks `members` (increasing), between
        which the plan moves data. On a `channel` (None: the order of all collectives) exchanges are posted in
        the order of the calls, and not before `after` has succeeded: the Work of another exchange, whose
        failure fails this one too. Nobody has to wait for that.
        """
        with self.collective(op, members, channel):
            if not isinstance(plan, _C.Plan):
                raise TypeError(f"plan must be an exchange plan, not {type(plan).__name__}")
            for name, tensors in (("inputs", inputs), ("outputs", outputs)):
                if not isinstance(tensors, (list, tuple)):
                    raise TypeError(f"{name} must be a list of tensors, not {type(tensors).__name__}")
            work = self._c.exchange(op, plan, inputs, outputs, async_op, members, channel, after)
        return self._finish(work, async_op)

    @contextlib.contextmanager
    def collective(self, op: str, members: Sequence[int] = (), channel: int | None = None) -> Iterator[None]:
        """Around the argument checks of a collective (of `members`, on `channel`, see `exchange`): if they
        fail here, every other rank's call of the same collective raises PipeCommMismatch with the reason,
        nobody waits, and the next call works.
        """
        try:
            yield
        except (ValueError, TypeError, IndexError) as error:
            self.refuse(op, error, members, channel)
            raise

    def refuse(
        self, op: str, error: Exception, members: Sequence[int] = (), channel: int | None = None
    ) -> None:
        """Instead of a collective that this rank cannot take part in because of `error`; does not wait."""
        self._c.refuse(op, f"{type(error).__name__}: {error}", members, channel)

    # ---------------------------------------------------------------- record

    def flight_record(self) -> list[dict[str, Any]]:
        """What this rank did lately: the last 1024 operations that have ended and all that have not, in the
        order of their calls, as plain data (docs/flight_record.md lists the fields). Any thread, any state.
        """
        return self._c.flight_record()

    def dump_flight(self, folder: str | os.PathLike[str]) -> str:
        """Writes the flight record to a new file in `folder`, which is made if it does not exist: JSON lines,
        for `python -m pipecomm_ext doctor --flight FOLDER`. Returns its path.

        Raises:
            ValueError: `folder` is none, or one in which others could replace files.
            OSError: it cannot be written.
        """
        return flight.dump(self, folder, "asked for")

    # ---------------------------------------------------------------- end

    def abort(self, reason: str = "") -> None:
        """Makes every pending and later call raise PipeCommAborted, on all ranks. Idempotent, any thread."""
        self._c.abort(str(reason))

    def close(self) -> None:
        """Waits for what is in flight, says goodbye and releases connections and threads. Idempotent.

        Messages that can no longer match because their peer has closed raise PipeCommPeerLost here if nobody
        else waited for them; those that nobody ever matches, PipeCommTimeout after the communicator's
        timeout.
        """
        _open.discard(self)
        try:
            self._c.close()
        finally:
            flight.dump_if_failed(self)

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, exc_type, exc, traceback) -> None:
        if exc_type is not None:
            self.abort(f"{exc_type.__name__}: {exc}")
        self.close()

    # ---------------------------------------------------------------- details

    @staticmethod
    def _finish(work: Work, async_op: bool) -> Work | None:
        if async_op:
            return work
        work.wait()
        return None

    def _from_torch(self, op: Any, op_idx: int) -> Send | Recv:
        if type(op) is Send or type(op) is Recv:
            return op
        if not isinstance(op, dist.P2POp):
            raise TypeError(
                f"ops[{op_idx}] must be a Send, a Recv or a torch.distributed.P2POp, not {type(op).__name__}"
            )
        peer = dist.get_group_rank(self._group, op.peer)
        return (Send if op.op is dist.isend else Recv)(op.tensor, peer, op.tag)


@functools.lru_cache(maxsize=256)
def _list_plan(rank: int, size: int, inputs: tuple[Spec, ...], outputs: tuple[Spec, ...]) -> _C.Plan:
    return _C.plan_all_to_all_list(rank, size, inputs, outputs)


# Communicators that are open, closed at exit; and the default ones.
_open: weakref.WeakSet[Communicator] = weakref.WeakSet()
_kept: weakref.WeakKeyDictionary[Any, dict[tuple[str, str], Communicator]] = weakref.WeakKeyDictionary()


def get_communicator(
    group: dist.ProcessGroup | None = None, device: str | torch.device | None = None
) -> Communicator:
    """The communicator of a group and device, made at the first call (a collective one) and closed at exit.

    A closed one is replaced by a new one; a failed one is returned and goes on raising its cause until it is
    closed.
    """
    # Channels cost nothing on the host; NCCL needs a communicator for each.
    return kept_communicator(group, device, "default", {"cpu": MAX_CHANNELS, "cuda": 2})


def kept_communicator(
    group: dist.ProcessGroup | None,
    device: str | torch.device | None,
    purpose: str,
    channels: dict[str, int],
) -> Communicator:
    """Like `get_communicator`, one for each purpose, so that their messages do not meet; `channels` is by
    kind of device.
    """
    group = own_group(group)
    kind = device_kind(group, device)
    made = _kept.setdefault(group, {})
    if (purpose, kind) not in made or made[purpose, kind].closed:
        made[purpose, kind] = Communicator(group, device=kind, channels=channels[kind])
    return made[purpose, kind]


@atexit.register
def _close_all() -> None:
    crashed = getattr(sys, "last_value", None)
    for communicator in list(_open):
        with contextlib.suppress(Exception):
            if crashed is not None:
                communicator.abort(f"the process ends after {type(crashed).__name__}: {crashed}")
            communicator.close()


def _seconds(timeout: float | datetime.timedelta | None) -> float | None:
    """Seconds, or None for no limit."""
    if timeout is None:
        return DEFAULT_TIMEOUT_S
    if isinstance(timeout, datetime.timedelta):
        timeout = timeout.total_seconds()
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        raise TypeError(
            f"timeout must be a number of seconds, a timedelta or None, not {type(timeout).__name__}"
        )
    if timeout == math.inf:
        return None
    if not 0 < timeout <= 10 * 365 * 86400:
        raise ValueError(
            f"timeout must be more than 0 and at most 10 years (math.inf: no limit), not {timeout}"
        )
    return float(timeout)


def own_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group, or the default one for None. ValueError if there is none, or without this rank."""
    if not dist.is_initialized():
        raise ValueError(
            "torch.distributed is not initialised; call torch.distributed.init_process_group() first"
        )
    if group is None:
        return dist.group.WORLD
    if group is dist.GroupMember.NON_GROUP_MEMBER or dist.get_rank(group) < 0:
        raise ValueError(f"rank {dist.get_rank()} (global) is not a member of the group")
    return group


def device_kind(group: dist.ProcessGroup, device: str | torch.device | None) -> str:
    """ "cpu" or "cuda": the kind of `device`, or for None what the group can do, "cuda" first."""
    if device is None:
        kinds = {kind.type for kind in group._device_types}
        return "cuda" if "cuda" in kinds and torch.cuda.is_available() else "cpu"
    kind = str(device).split(":")[0]
    if kind not in ("cpu", "cuda"):
        raise ValueError(f'device must be "cpu" or "cuda", not "{device}"')
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError('device="cuda" needs a CUDA device, and this process sees none')
    return kind


def _facts(group, device, transport, channels, limit, check, settings) -> dict[str, Any]:
    """What this rank brings to the construction; must be equal on all ranks."""
    if transport not in environment.TRANSPORTS:
        raise ValueError(f"transport must be one of {', '.join(environment.TRANSPORTS)}, not {transport!r}")
    if check not in environment.CHECKS:
        raise ValueError(f"check must be one of {', '.join(environment.CHECKS)}, not {check!r}")
    if isinstance(channels, bool) or not isinstance(channels, int):
        raise TypeError(f"channels must be an int, not {type(channels).__name__}")
    if not 1 <= channels <= MAX_CHANNELS:
        raise ValueError(f"channels must be 1 to {MAX_CHANNELS}, not {channels}")
    requested = settings["PIPECOMM_TRANSPORT"] if transport == "auto" else transport
    kind = device_kind(group, device)
    if (requested == "shm" and kind != "cpu") or (requested == "nccl" and kind != "cuda"):
        raise ValueError(
            f'transport="{requested}" does not exist in this version for {kind} tensors; use "c10d"'
        )
    local = nccl.local_facts() if kind == "cuda" else {}
    if requested == "nccl" and local["problem"]:
        raise ValueError(f'transport="nccl" cannot be used: {local["problem"]}; use "c10d"')
    may_share = kind == "cpu" and requested != "c10d"
    return {
        "local": shared_memory.host_facts() if may_share else local,
        "device": kind,
        "transport": requested,
        "channels": channels,
        "timeout": limit,
        "check": settings["PIPECOMM_CHECK"] if check == "auto" else check,
        **environment.on_wire(settings),
    }


def _require_equal(everybody: list[dict[str, Any]], rank: int) -> None:
    from .errors import PipeCommMismatch

    for key in everybody[0]:
        if key == "local":
            continue
        values = [record[key] for record in everybody]
        for other, value in enumerate(values):
            if value != values[0]:
                raise PipeCommMismatch(
                    f"rank {rank}: Communicator: ranks disagree about {key}: {values[0]!r} on rank 0, "
                    f"{value!r} on rank {other}",
                    op="Communicator",
                    rank=rank,
                    peer=other,
                    origin_rank=other,
                )


def _share_memory(
    meeting: Rendezvous, facts: dict[str, Any], everybody: list[dict[str, Any]], epoch: int
) -> tuple[_C.SharedMemory | None, str]:
    """Shared memory, if that is the transport, or None for c10d; and why. The same decision on all ranks."""
    requested = facts["transport"]
    if requested == "c10d":
        return None, "asked for"
    memory, reason = shared_memory.connect(
        meeting,
        [record["local"] for record in everybody],
        facts["PIPECOMM_SHM_RING_BYTES"],
        facts["channels"],
        epoch,
    )
    if memory is not None:
        return memory, "asked for" if requested == "shm" else reason
    if requested == "shm":
        raise ValueError(f'transport="shm" is not possible: {reason}; use "auto" or "c10d"')
    if shared_memory.are_neighbours([record["local"] for record in everybody]):
        warnings.warn(
            f"pipecomm_ext moves CPU tensors over sockets (c10d), not through shared memory: {reason}",
            RuntimeWarning,
            stacklevel=3,
        )
    return None, f"the portable transport (gloo), because {reason}"


def _choose_for_cuda(facts: dict[str, Any], everybody: list[dict[str, Any]]) -> tuple[str, str]:
    if facts["transport"] != "auto":
        return facts["transport"], "asked for"
    problem = nccl.problem_of([other["local"] for other in everybody])
    if problem:
        return "c10d", f"staged through host memory over gloo, since NCCL cannot be used: {problem}"
    return "nccl", "CUDA tensors, and every rank has NCCL and a GPU of its own"


def _connect(meeting: Rendezvous, epoch: int):
    """Connections of our own between all ranks, over gloo, whatever the backend of the user's group."""
    if meeting.size == 1:
        return None
    remaining = meeting.remaining()
    limit = datetime.timedelta(days=3650) if remaining is None else datetime.timedelta(seconds=remaining)
    backend, outcome = None, {}
    try:
        backend = dist.ProcessGroupGloo(
            dist.PrefixStore(f"gloo/{epoch}", meeting.store), meeting.rank, meeting.size, limit
        )
        # Deadlines are ours: an expired wait of gloo would close every connection.
        backend._set_default_timeout(datetime.timedelta(days=3650))
    except RuntimeError as error:
        outcome = {"error": f"could not connect: {error}"}
    meeting.gather("connected", outcome)
    if backend is None:
        from .errors import PipeCommError

        raise PipeCommError(f"rank {meeting.rank}: {outcome['error']}", op="Communicator", rank=meeting.rank)
    return backend
