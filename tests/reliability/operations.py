"""Every public operation once: how all ranks call it with arguments from a draw, and the right result.

    call = OPERATIONS["broadcast"].prepare(comm, draw)   # data, nothing is sent
    for work in call.start():                            # may be repeated
        work.wait()
    call.check()                                         # against a model of all ranks, by bytes

All ranks prepare an operation with equal draws, unless a test needs a disagreement. The communicator needs
NUM_CHANNELS channels. The fault suite, the soak and the matrix of wrong calls all read this table: they all
test an operation that is added here.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from patterns import assert_same, pattern, poison
from sequence_cases import remainder_first

from pipecomm_ext import _C, Communicator, Recv, Send
from pipecomm_ext import distributed as facade

NUM_CHANNELS = 7  # those of a relay, and one more


@dataclass(frozen=True)
class Draw:
    """The parameters of a call of any operation."""

    key: object = 0  # names the data
    length: int = 6  # of the dims that are moved
    dtype: torch.dtype = torch.float32
    variant: int = 0  # the rest: source rank, sizes, dims, channel

    @classmethod
    def random(cls, rng: random.Random, lengths: list[int]) -> Draw:
        dtype = rng.choice([torch.float32, torch.bfloat16, torch.int64, torch.uint8])
        return cls(rng.getrandbits(32), rng.choice(lengths), dtype, rng.randrange(6))


class Call(NamedTuple):
    start: Callable[[], list[Any]]  # returns what must be waited for
    check: Callable[[], None]

    def run(self) -> None:
        for work in self.start():
            work.wait()
        self.check()


class Operation(NamedTuple):
    name: str
    prepare: Callable[[Communicator, Draw], Call]
    # "collective": all ranks detect one that disagrees. "ring": its neighbours do, and all ranks end.
    # "chain": its neighbours do, and later ranks keep waiting. "apart": it has connections of its own, so
    # faults of this communicator do not affect it.
    form: str
    # In which of shape, dtype, plan (Draw.variant) a disagreement of two ranks is detected. Lists are
    # compared by bytes and dtypes, not by shapes; a split of integers has no backward to compare.
    compares: tuple[str, ...]


OPERATIONS: dict[str, Operation] = {}


def operation(name: str, form: str, compares: str = "shape dtype plan"):
    """Adds a function that prepares calls to the table."""

    def register(prepare: Callable[[Communicator, Draw], Call]):
        OPERATIONS[name] = Operation(name, prepare, form, tuple(compares.split()))
        return prepare

    return register


def run_some(comm: Communicator, rng: random.Random, operation: Operation, lengths: list[int]) -> None:
    for _ in range(4):
        draw = Draw.random(rng, lengths)
        try:
            operation.prepare(comm, draw).run()
        except Exception as error:
            raise AssertionError(f"{operation.name} with {draw}") from error


def works_of(*works: Any) -> list[Any]:
    """The handles, without the None of calls that have waited themselves."""
    return [work for work in works if work is not None]


def check_tensors(actual, expected, name: str) -> None:
    for idx, (got, wanted) in enumerate(zip(actual, expected, strict=True)):
        assert_same(got, wanted, f"{name}[{idx}]")


# ---- point to point: every rank to the next one ------------------------------------------------------------


class Ring:
    """What every rank sends to the next one and receives from the previous one."""

    def __init__(self, comm: Communicator, draw: Draw):
        self.comm, self.channel = comm, draw.variant % NUM_CHANNELS
        self.next, self.previous = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        shape = (draw.length, 3)
        self.sent = pattern(shape, draw.dtype, draw.key, comm.rank)
        self.received = poison(shape, draw.dtype)
        self._expected = pattern(shape, draw.dtype, draw.key, self.previous)

    def check(self) -> None:
        assert_same(self.received, self._expected, "from the previous rank")


def over_a_ring(name: str, form: str, start: Callable[[Ring], list[Any]]) -> None:
    @operation(name, form, "shape dtype")
    def prepare(comm: Communicator, draw: Draw) -> Call:
        ring = Ring(comm, draw)
        return Call(lambda: start(ring), ring.check)


def one_after_the_other(ring: Ring, send: Callable[[], None], recv: Callable[[], None]) -> list[Any]:
    """Rank 0 begins; all others receive before they send."""
    for step in (send, recv) if ring.comm.rank == 0 else (recv, send):
        step()
    return []


def batch(ring: Ring) -> list[Any]:
    ops = [Send(ring.sent, ring.next, ring.channel), Recv(ring.received, ring.previous, ring.channel)]
    return [ring.comm.batch_p2p(ops[:: 1 if ring.channel % 2 else -1], async_op=True)]


def batch_of_torch(ring: Ring) -> list[Any]:
    ends = (facade.isend, ring.sent, ring.next), (facade.irecv, ring.received, ring.previous)
    return facade.batch_isend_irecv(
        [facade.P2POp(op, tensor, group=ring.comm, group_peer=peer) for op, tensor, peer in ends]
    )


over_a_ring("batch_p2p", "ring", batch)
over_a_ring(
    "isend, irecv",
    "ring",
    lambda ring: [
        ring.comm.isend(ring.sent, ring.next, ring.channel),
        ring.comm.irecv(ring.received, ring.previous, ring.channel),
    ],
)
over_a_ring(
    "send, recv",
    "chain",
    lambda ring: one_after_the_other(
        ring,
        lambda: ring.comm.send(ring.sent, ring.next),
        lambda: ring.comm.recv(ring.received, ring.previous),
    ),
)
over_a_ring(
    "distributed.send, recv",
    "chain",
    lambda ring: one_after_the_other(
        ring,
        lambda: facade.send(ring.sent, group=ring.comm, group_dst=ring.next),
        lambda: facade.recv(ring.received, group=ring.comm, group_src=ring.previous),
    ),
)
over_a_ring(
    "distributed.isend, irecv",
    "ring",
    lambda ring: [
        facade.irecv(ring.received, group=ring.comm, group_src=ring.previous),
        facade.isend(ring.sent, group=ring.comm, group_dst=ring.next),
    ],
)
over_a_ring("distributed.batch_isend_irecv", "ring", batch_of_torch)


# ---- collectives -------------------------------------------------------------------------------------------


def _broadcast(comm: Communicator, draw: Draw, call: Callable[[torch.Tensor, int], Any]) -> Call:
    source = draw.variant % comm.size
    expected = pattern((draw.length, 3), draw.dtype, draw.key, source)
    tensor = expected.clone() if comm.rank == source else poison((draw.length, 3), draw.dtype)
    return Call(lambda: [call(tensor, source)], lambda: assert_same(tensor, expected, "broadcast"))


@operation("broadcast", "collective")
def broadcast(comm: Communicator, draw: Draw) -> Call:
    return _broadcast(comm, draw, lambda tensor, source: comm.broadcast(tensor, source, async_op=True))


@operation("distributed.broadcast", "collective")
def facade_broadcast(comm: Communicator, draw: Draw) -> Call:
    return _broadcast(
        comm,
        draw,
        lambda tensor, source: facade.broadcast(tensor, group=comm, group_src=source, async_op=True),
    )


@operation("barrier", "collective", "")
def barrier(comm: Communicator, draw: Draw) -> Call:
    return Call(lambda: works_of(comm.barrier()), lambda: None)


@operation("distributed.barrier", "collective", "")
def facade_barrier(comm: Communicator, draw: Draw) -> Call:
    return Call(lambda: works_of(facade.barrier(comm, async_op=bool(draw.variant % 2))), lambda: None)


def _rows(draw: Draw, source: int, destination: int) -> int:
    """Uneven numbers of rows that all ranks know, including zeros."""
    return draw.length * ((source + 2 * destination + draw.variant) % 4)


class Lists:
    """A tensor from every rank for every rank."""

    def __init__(self, comm: Communicator, draw: Draw):
        me, everybody = comm.rank, range(comm.size)

        def tensor(source: int, destination: int) -> torch.Tensor:
            shape = (_rows(draw, source, destination), 2)
            return pattern(shape, draw.dtype, draw.key, source, destination)

        self.inputs = [tensor(me, rank) for rank in everybody]
        self.expected = [tensor(rank, me) for rank in everybody]
        self.outputs = [poison(tuple(wanted.shape), draw.dtype) for wanted in self.expected]

    def check(self) -> None:
        check_tensors(self.outputs, self.expected, "outputs")


@operation("Communicator.all_to_all", "collective", "shape dtype")
def all_to_all_lists(comm: Communicator, draw: Draw) -> Call:
    lists = Lists(comm, draw)
    return Call(lambda: [comm.all_to_all(lists.inputs, lists.outputs, async_op=True)], lists.check)


@operation("distributed.all_to_all", "collective", "shape dtype")
def facade_all_to_all(comm: Communicator, draw: Draw) -> Call:
    lists = Lists(comm, draw)
    return Call(lambda: works_of(facade.all_to_all(lists.outputs, lists.inputs, comm)), lists.check)


@operation("distributed.all_to_all_single", "collective")
def all_to_all_single(comm: Communicator, draw: Draw) -> Call:
    lists = Lists(comm, draw)
    source, expected = torch.cat(lists.inputs), torch.cat(lists.expected)
    output = poison(tuple(expected.shape), draw.dtype)
    sizes = [len(tensor) for tensor in lists.expected], [len(tensor) for tensor in lists.inputs]
    return Call(
        lambda: [facade.all_to_all_single(output, source, *sizes, group=comm, async_op=True)],
        lambda: assert_same(output, expected, "output"),
    )


@operation("exchange", "collective")
def exchange(comm: Communicator, draw: Draw) -> Call:
    """An uneven all-to-all of two dims, into memory that peers may write directly."""
    whole_shape = (comm.size + draw.variant % 3, draw.length + comm.size, 2)
    scatter, gather = (remainder_first(length, comm.size) for length in whole_shape[:2])
    whole = pattern(whole_shape, draw.dtype, draw.key)
    source = whole.split(gather, 1)[comm.rank].contiguous()
    expected = whole.split(scatter, 0)[comm.rank]
    output = comm.empty(list(expected.shape), draw.dtype)
    spec = (tuple(source.shape), draw.dtype, scatter, gather)
    plan = _C.plan_all_to_all(comm.rank, comm.size, [spec], 0, 1)
    return Call(
        lambda: [comm.exchange(plan, [source], [output], async_op=True)],
        lambda: assert_same(output, expected, "output"),
    )


class Gathered:
    """A tensor of every rank for all; they differ in length by rank and variant."""

    def __init__(self, comm: Communicator, draw: Draw):
        self.lengths = [draw.length + (rank * draw.variant) % 3 for rank in range(comm.size)]
        self.expected = [
            pattern((length, 2), draw.dtype, draw.key, rank) for rank, length in enumerate(self.lengths)
        ]
        self.mine = self.expected[comm.rank]


@operation("distributed.all_gather", "collective", "shape dtype")
def all_gather(comm: Communicator, draw: Draw) -> Call:
    gathered = Gathered(comm, draw)
    outputs = [poison((length, 2), draw.dtype) for length in gathered.lengths]
    return Call(
        lambda: [facade.all_gather(outputs, gathered.mine, comm, async_op=True)],
        lambda: check_tensors(outputs, gathered.expected, "tensor_list"),
    )


@operation("distributed.all_gather_into_tensor", "collective", "shape dtype")
def all_gather_into_tensor(comm: Communicator, draw: Draw) -> Call:
    total = draw.length * comm.size + draw.variant % comm.size
    expected = pattern((total, 2), draw.dtype, draw.key)
    mine = expected.split(remainder_first(total, comm.size))[comm.rank].contiguous()
    output = poison((total, 2), draw.dtype)
    return Call(
        lambda: [facade.all_gather_into_tensor(output, mine, comm, async_op=True)],
        lambda: assert_same(output, expected, "output_tensor"),
    )


# ---- reductions --------------------------------------------------------------------------------------------


def small_numbers(shape: tuple[int, ...], draw: Draw, rank: int) -> torch.Tensor:
    """Whole numbers whose sums every dtype can represent."""
    return (pattern(shape, torch.uint8, draw.key, rank) % 8).to(draw.dtype)


@operation("distributed.all_reduce", "collective", "shape dtype")
def all_reduce(comm: Communicator, draw: Draw) -> Call:
    everybody = [small_numbers((draw.length, 3), draw, rank) for rank in range(comm.size)]
    tensor = poison((draw.length, 3), draw.dtype)

    def start() -> list[Any]:
        tensor.copy_(everybody[comm.rank])
        return [facade.all_reduce(tensor, group=comm, async_op=True)]

    return Call(start, lambda: assert_same(tensor, sum(everybody[1:], everybody[0]), "tensor"))


@operation("distributed.reduce_scatter", "collective", "dtype")
def reduce_scatter(comm: Communicator, draw: Draw) -> Call:
    """The ranks' results differ in length."""
    shapes = [(draw.length + rank % 2, 2) for rank in range(comm.size)]
    pieces = [small_numbers(shape, draw, comm.rank) for shape in shapes]
    mine = [small_numbers(shapes[comm.rank], draw, rank) for rank in range(comm.size)]
    expected = sum(mine[1:], mine[0])
    output = poison(shapes[comm.rank], draw.dtype)
    return Call(
        lambda: [facade.reduce_scatter(output, pieces, group=comm, async_op=True)],
        lambda: assert_same(output, expected, "output"),
    )


@operation("distributed.reduce_scatter_tensor", "collective", "shape dtype")
def reduce_scatter_tensor(comm: Communicator, draw: Draw) -> Call:
    everybody = [small_numbers((comm.size * draw.length, 2), draw, rank) for rank in range(comm.size)]
    output = poison((draw.length, 2), draw.dtype)
    expected = sum(everybody[1:], everybody[0]).chunk(comm.size)[comm.rank] if draw.length else output
    return Call(
        lambda: [facade.reduce_scatter_tensor(output, everybody[comm.rank], group=comm, async_op=True)],
        lambda: assert_same(output, expected, "output"),
    )
