"""The operations that the benchmark compares. To add one: write a function like these and list it in OPS.

An op builds, for one message size on this rank, a Case: the same transfer by torch.distributed and by ours,
and what must have arrived. Calls block until this rank's part is done, unless posting alone is measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import mpi
import torch
import torch.distributed as dist
from bare_socket import NAME as SOCKET
from bare_socket import BareSockets, is_possible
from work import Work

from pipecomm_ext import Communicator, Recv, Send

BASELINE = "torch"
MEMCPY = "memcpy"  # all ranks copy the same number of bytes at once: the minimum over memory
NUM_HOST_OPS = 8  # operations of the batch whose posting is measured


@dataclass(frozen=True)
class Bench:
    """What every op gets: this rank, and one communicator per transport."""

    rank: int
    size: int
    device: torch.device
    dtype: torch.dtype
    comms: dict[str, Communicator]
    matrix: tuple[tuple[int, ...], ...] | None = None  # bytes[source][destination] of an uneven all-to-all
    attention: str = "sdpa"  # or "sleep"
    mpi: Any = None  # mpi4py's communicator of the same ranks, if MPI has started them

    @property
    def next(self) -> int:
        return (self.rank + 1) % self.size

    @property
    def previous(self) -> int:
        return (self.rank - 1) % self.size

    def data(self, numel: int, sender: int, message_idx: int = 0) -> torch.Tensor:
        """What rank `sender` sends: small whole numbers that identify sender, message and position."""
        codes = (torch.arange(numel) + 13 * sender + 29 * message_idx) % 113
        return codes.to(self.dtype).to(self.device)

    def poison(self, numel: int) -> torch.Tensor:
        return torch.full((numel,), 119, device=self.device).to(self.dtype)

    def for_each_transport(self, call: Callable[[Communicator], object]) -> dict[str, Callable]:
        return {name: lambda comm=comm: call(comm) for name, comm in self.comms.items()}

    def by_mpi(self, call: Callable[..., object], *tensors: torch.Tensor) -> dict[str, Callable]:
        """call(communicator, buffer of each tensor), if MPI has started the ranks."""
        if self.mpi is None:
            return {}
        buffers = [mpi.buffer_of(tensor) for tensor in tensors]
        return {mpi.NAME: lambda: call(self.mpi, *buffers)}

    def over_sockets(
        self, destination: int | None, source: int | None, play: Callable[[BareSockets], object]
    ) -> dict[str, Callable]:
        """Collective: play(sockets), if one of ours goes over TCP and all ranks are on one host."""
        goes_over_tcp = any(comm.transport == "tcp" for comm in self.comms.values())
        if self.device.type != "cpu" or not goes_over_tcp or not is_possible():
            return {}
        sockets = BareSockets(destination, source)
        return {SOCKET: lambda: play(sockets)}

    def numel(self, num_bytes: int) -> int:
        return max(1, num_bytes // self.dtype.itemsize)

    def with_bounds(
        self, calls: dict[str, Callable], copied: torch.Tensor, over_torch: str | None = None
    ) -> tuple[dict[str, Callable], dict[str, str]]:
        """The calls, and which of them bounds which: `over_torch` and bare sockets, where available, bound
        torch's transport and ours over TCP; a copy of `copied` by all ranks at once bounds the rest.
        """
        if SOCKET in calls:
            over_torch = SOCKET
        if self.device.type != "cpu":
            return calls, {} if over_torch is None else dict.fromkeys(calls, over_torch)
        over_memory = {mpi.NAME, *(name for name, comm in self.comms.items() if comm.transport == "shm")}
        bound_of = {name: MEMCPY if name in over_memory else over_torch or MEMCPY for name in calls}
        if MEMCPY not in bound_of.values():
            return calls, bound_of
        into = torch.empty_like(copied)
        return {**calls, MEMCPY: lambda: into.copy_(copied)}, bound_of


@dataclass
class Case:
    """One op at one size. `calls` and `drain` are by implementation."""

    num_bytes: int  # that a rank sends, or holds (nccl-tests' "size")
    received: list[tuple[torch.Tensor, torch.Tensor]]  # (buffer, what must be in it after a call)
    calls: dict[str, Callable[[], object]]
    drain: Callable[[object], None] | None = None  # finishes, unmeasured, what a call posted
    bus_factor: float = 1.0  # bus bandwidth / algorithm bandwidth, as nccl-tests define it
    label: str = ""  # what distinguishes cases of one size
    returns: torch.Tensor | None = None  # what a call must return, where results are fresh tensors
    bound_of: dict[str, str] = field(
        default_factory=dict
    )  # the call that shows an implementation's minimum time
    work: Callable[[str], Work] | None = None  # what one call of an implementation copies and allocates
    tolerance: float = 0.0  # of what arrived, relative to its largest value; 0: every byte counts
    clock: Callable[[], float] = time.perf_counter  # in seconds
    num_parts: int = 1  # of a call; times are those of a part
    moves_size: bool = True  # a call moves `num_bytes`, so that bandwidths mean something
    parts: set[str] = field(default_factory=set)  # calls that do a part of the work, for comparison

    @property
    def has_bandwidth(self) -> bool:
        return self.drain is None and self.moves_size

    @property
    def bounds(self) -> set[str]:
        """Calls that only show the minimum possible time; their results are not checked."""
        return self.parts.union(self.bound_of.values())


def p2p(bench: Bench, num_bytes: int) -> Case:
    """isend to the next and irecv from the previous rank, a ring as nccl-tests' sendrecv."""
    numel = bench.numel(num_bytes)
    sent, received = bench.data(numel, bench.rank), bench.poison(numel)

    def torch_call():
        works = [dist.irecv(received, bench.previous), dist.isend(sent, bench.next)]
        for work in works:
            work.wait()

    def our_call(comm: Communicator):
        works = [comm.irecv(received, bench.previous), comm.isend(sent, bench.next)]
        for work in works:
            work.wait()

    def mpi_call(world, outgoing, incoming):
        for request in [world.Irecv(incoming, bench.previous), world.Isend(outgoing, bench.next)]:
            request.Wait()

    return _ring_case(bench, sent, received, torch_call, our_call, mpi_call)


def sendrecv(bench: Bench, num_bytes: int) -> Case:
    """The same ring in one call, which waits: MPI's Sendrecv, and batches of a send and a receive."""
    numel = bench.numel(num_bytes)
    sent, received = bench.data(numel, bench.rank), bench.poison(numel)

    def torch_call():
        ops = [dist.P2POp(dist.irecv, received, bench.previous), dist.P2POp(dist.isend, sent, bench.next)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    def our_call(comm: Communicator):
        comm.batch_p2p([Recv(received, bench.previous), Send(sent, bench.next)])

    def mpi_call(world, outgoing, incoming):
        world.Sendrecv(outgoing, bench.next, recvbuf=incoming, source=bench.previous)

    return _ring_case(bench, sent, received, torch_call, our_call, mpi_call)


def _ring_case(bench: Bench, sent, received, torch_call, our_call, mpi_call) -> Case:
    calls = {
        BASELINE: torch_call,
        **bench.for_each_transport(our_call),
        **bench.by_mpi(mpi_call, sent, received),
        **bench.over_sockets(bench.next, bench.previous, lambda sockets: sockets.exchange(sent, received)),
    }
    calls, bound_of = bench.with_bounds(calls, copied=sent)
    return Case(
        num_bytes=sent.nbytes,
        received=[(received, bench.data(received.numel(), bench.previous))],
        calls=calls,
        bound_of=bound_of,
    )


def pingpong(bench: Bench, num_bytes: int) -> Case:
    """Blocking send and recv, there and back, between neighbours 0-1, 2-3, ...: twice the one-way time."""
    numel = bench.numel(num_bytes)
    peer = bench.rank ^ 1
    sent, received = bench.data(numel, bench.rank), bench.poison(numel)
    if peer >= bench.size:  # the last of an odd number has no partner
        names = [BASELINE, *bench.comms, *([mpi.NAME] if bench.mpi else [])]
        calls = dict.fromkeys(names, lambda: None) | bench.over_sockets(None, None, lambda _: None)
        calls, bound_of = bench.with_bounds(calls, copied=sent[:0])
        return Case(sent.nbytes, [], calls, bound_of=bound_of)

    def play(send: Callable, recv: Callable, outgoing: Any = sent, incoming: Any = received):
        if bench.rank < peer:
            send(outgoing, peer)
            recv(incoming, peer)
        else:
            recv(incoming, peer)
            send(outgoing, peer)

    def copies():
        if bench.rank < peer:  # one at a time, as the messages go
            received.copy_(sent)
            received.copy_(sent)

    def play_over(sockets: BareSockets):
        play(
            lambda outgoing, _: sockets.exchange(outgoing, None),
            lambda incoming, _: sockets.exchange(None, incoming),
        )

    calls = {
        BASELINE: lambda: play(dist.send, dist.recv),
        **bench.for_each_transport(lambda comm: play(comm.send, comm.recv)),
        **bench.by_mpi(lambda world, *buffers: play(world.Send, world.Recv, *buffers), sent, received),
        **bench.over_sockets(peer, peer, play_over),
    }
    calls, bound_of = bench.with_bounds(calls, copied=sent)
    if MEMCPY in calls:
        calls[MEMCPY] = copies
    return Case(
        num_bytes=sent.nbytes,
        received=[(received, bench.data(numel, peer))],
        calls=calls,
        bound_of=bound_of,
    )


def batch(bench: Bench, num_bytes: int) -> Case:
    """A pipeline stage's batch: activations to the next rank, gradients to the previous one, two channels."""
    numel = bench.numel(num_bytes // 2)
    routes = [
        (bench.next, bench.previous, 0),
        (bench.previous, bench.next, 1),
    ]  # (destination, source, channel)
    sent = [bench.data(numel, bench.rank, channel) for _, _, channel in routes]
    received = [bench.poison(numel) for _ in routes]

    def torch_call():
        ops = [dist.P2POp(dist.irecv, received[c], source, tag=c) for _, source, c in routes]
        ops += [dist.P2POp(dist.isend, sent[c], destination, tag=c) for destination, _, c in routes]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    def our_call(comm: Communicator):
        ops = [Recv(received[c], source, c) for _, source, c in routes]
        ops += [Send(sent[c], destination, c) for destination, _, c in routes]
        comm.batch_p2p(ops)

    calls = {BASELINE: torch_call, **bench.for_each_transport(our_call)}
    calls, bound_of = bench.with_bounds(calls, copied=torch.cat(sent))
    return Case(
        num_bytes=sum(tensor.nbytes for tensor in sent),
        received=[(received[c], bench.data(numel, source, c)) for _, source, c in routes],
        calls=calls,
        bound_of=bound_of,
    )


def broadcast(bench: Bench, num_bytes: int) -> Case:
    """Rank 0 to all."""
    numel = bench.numel(num_bytes)
    expected = bench.data(numel, sender=0)
    tensor = expected.clone() if bench.rank == 0 else bench.poison(numel)
    calls = {
        BASELINE: lambda: dist.broadcast(tensor, src=0),
        **bench.for_each_transport(lambda comm: comm.broadcast(tensor, 0)),
        **bench.by_mpi(lambda world, buffer: world.Bcast(buffer, 0), tensor),
    }
    calls, bound_of = bench.with_bounds(calls, copied=tensor)
    return Case(
        num_bytes=tensor.nbytes,
        received=[] if bench.rank == 0 else [(tensor, expected)],
        calls=calls,
        bound_of=bound_of,
    )


def host(bench: Bench, num_bytes: int) -> Case:
    """The host's time to build and post a batch of 8 operations (4 sends, 4 receives), not to finish it."""
    numel = bench.numel(num_bytes)
    messages = range(NUM_HOST_OPS // 2)
    sent = [bench.data(numel, bench.rank, idx) for idx in messages]
    received = [bench.poison(numel) for _ in messages]

    def torch_call():
        ops = [dist.P2POp(dist.irecv, tensor, bench.previous) for tensor in received]
        ops += [dist.P2POp(dist.isend, tensor, bench.next) for tensor in sent]
        return dist.batch_isend_irecv(ops)

    def our_call(comm: Communicator):
        ops = [Recv(tensor, bench.previous) for tensor in received]
        ops += [Send(tensor, bench.next) for tensor in sent]
        return comm.batch_p2p(ops, async_op=True)

    return _posting_case(bench, sent, received, torch_call, our_call)


def host_prebuilt(bench: Bench, num_bytes: int) -> Case:
    """Like host, with the operations built once and posted again and again."""
    numel = bench.numel(num_bytes)
    messages = range(NUM_HOST_OPS // 2)
    sent = [bench.data(numel, bench.rank, idx) for idx in messages]
    received = [bench.poison(numel) for _ in messages]
    torch_ops = [dist.P2POp(dist.irecv, tensor, bench.previous) for tensor in received]
    torch_ops += [dist.P2POp(dist.isend, tensor, bench.next) for tensor in sent]
    our_ops = [Recv(tensor, bench.previous) for tensor in received]
    our_ops += [Send(tensor, bench.next) for tensor in sent]
    return _posting_case(
        bench,
        sent,
        received,
        lambda: dist.batch_isend_irecv(torch_ops),
        lambda comm: comm.batch_p2p(our_ops, async_op=True),
    )


def _posting_case(bench: Bench, sent, received, torch_call, our_call) -> Case:
    def drain(works) -> None:
        for work in works if isinstance(works, list) else [works]:
            work.wait()

    numel = sent[0].numel()
    return Case(
        num_bytes=sent[0].nbytes,
        received=[(tensor, bench.data(numel, bench.previous, idx)) for idx, tensor in enumerate(received)],
        calls={BASELINE: torch_call, **bench.for_each_transport(our_call)},
        drain=drain,
    )


@dataclass(frozen=True)
class Op:
    build: Callable[[Bench, int], Case | Iterable[Case]]
    default_sizes: tuple[int, ...]


KIB, MIB = 1 << 10, 1 << 20
DATA_SIZES = (4 * KIB, 64 * KIB, MIB, 16 * MIB)

OPS = {
    "p2p": Op(p2p, DATA_SIZES),
    "sendrecv": Op(sendrecv, DATA_SIZES),
    "pingpong": Op(pingpong, DATA_SIZES),
    "batch": Op(batch, DATA_SIZES),
    "broadcast": Op(broadcast, DATA_SIZES),
    "host": Op(host, (KIB,)),
    "host_prebuilt": Op(host_prebuilt, (KIB,)),
}
