"""When a rank ends, in any way, messages posted to it fail at once; tensors that have no memory."""

from __future__ import annotations

import contextlib
import gc
import signal
import time
from collections.abc import Iterator

import pytest
import torch
from patterns import assert_same, pattern
from ranks import assert_within, on_ranks

import pipecomm_ext
from pipecomm_ext import Communicator, PipeCommAborted, PipeCommMismatch

AT_ONCE_S = 2.0
TRANSPORTS = pytest.mark.parametrize("transport", ["tcp", "shm"])
MANY_BYTES = 1 << 20  # more than fits into a ring or a packet


def large() -> torch.Tensor:
    return torch.ones(MANY_BYTES // 4)


# What the ending rank has posted, and the call in which the other one waits.
POSTED = {
    "a receive": (
        lambda comm: comm.irecv(torch.zeros(4), 0),
        lambda comm: comm.send(torch.ones(4), 1),
    ),
    "a large send": (lambda comm: comm.isend(large(), 0), lambda comm: comm.recv(large(), 1)),
    "a large all-to-all": (
        lambda comm: comm.all_to_all([large(), large()], [large(), large()], async_op=True),
        lambda comm: comm.all_to_all([large(), large()], [large(), large()]),
    ),
}


@on_ranks(2)
@TRANSPORTS
@pytest.mark.parametrize("posted", POSTED)
def test_a_communicator_dropped_in_the_middle(world, transport, posted):
    comm = Communicator(world.group, device="cpu", transport=transport)  # no other reference
    with world.breaking():
        if world.rank == 1:
            work = POSTED[posted][0](comm)
            del work, comm
            gc.collect()
        world.meet()
        if world.rank == 0:
            started_at = time.monotonic()
            with pytest.raises(PipeCommAborted, match="rank 1: its communicator was dropped") as caught:
                POSTED[posted][1](comm)
            assert_within(AT_ONCE_S, time.monotonic() - started_at)
            assert caught.value.origin_rank == 1


class Interrupted(Exception):
    pass


@contextlib.contextmanager
def interrupted_soon() -> Iterator[None]:
    """Interrupts a block, while it waits, by an exception of a signal handler."""

    def interrupt(*_):
        raise Interrupted

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(Interrupted):
            yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@on_ranks(2)
@TRANSPORTS
def test_a_close_that_is_interrupted(world, transport):
    with world.broken_comm(transport=transport) as comm:
        if world.rank == 1:
            with interrupted_soon(), comm:
                comm.irecv(torch.zeros(4), 0)  # the end of the block waits for it
            assert comm.closed
        world.meet()
        if world.rank == 0:
            started_at = time.monotonic()
            with pytest.raises(PipeCommAborted, match=r"rank 1: its close\(\) was interrupted"):
                comm.send(torch.ones(4), 1)
            assert_within(AT_ONCE_S, time.monotonic() - started_at)


def summed(comm, numel: int = 5) -> None:
    tensor = torch.full((numel,), 1.0 + comm.rank)
    comm.all_reduce(tensor)
    assert_same(tensor, torch.full((numel,), 3.0))


def scattered(comm) -> None:
    piece = torch.zeros(3)
    comm.reduce_scatter(piece, torch.full((6,), 1.0 + comm.rank))
    assert_same(piece, torch.full((3,), 3.0))


def gathered(comm) -> None:
    whole = torch.zeros(4)
    comm.all_gather(whole, torch.full((2,), float(comm.rank)))
    assert_same(whole, torch.tensor([0.0, 0, 1, 1]))


def exchanged(comm) -> None:
    outputs = [torch.zeros(2), torch.zeros(2)]
    comm.all_to_all([torch.full((2,), float(comm.rank))] * 2, outputs)
    assert_same(torch.stack(outputs), torch.tensor([[0.0, 0], [1, 1]]))


def told(comm) -> None:
    tensor = torch.full((2,), float(comm.rank))
    comm.broadcast(tensor, 1)
    assert_same(tensor, torch.ones(2))


def met(comm) -> None:
    comm.barrier()


def met_in_time(comm) -> None:
    comm.barrier(timeout=60)


@on_ranks(2)
@TRANSPORTS
@pytest.mark.parametrize("call", [summed, scattered, gathered, exchanged, told, met, met_in_time])
def test_what_a_signal_interrupts_is_not_refused(world, transport, call):
    """It has been posted, so the other rank's call and later ones find their messages."""
    comm = world.fresh_comm(transport=transport)
    call(comm)
    world.meet()
    if world.rank == 0:
        with interrupted_soon():
            call(comm)
    world.meet()
    if world.rank == 1:
        call(comm)
    for _ in range(3):
        call(comm)


@on_ranks(2)
@TRANSPORTS
def test_a_reduction_in_two_parts_that_a_signal_interrupts(world, transport):
    """The rank takes no part in the second one, and the other rank is informed; the next call works."""
    numel = 100_000
    comm = world.fresh_comm(transport=transport)
    summed(comm, numel)
    world.meet()
    if world.rank == 0:
        with interrupted_soon():
            summed(comm, numel)
    world.meet()
    if world.rank == 1:
        with pytest.raises(PipeCommMismatch, match="refused by rank 0: an exception ended its first part"):
            summed(comm, numel)
    for _ in range(3):
        summed(comm, numel)


@on_ranks(2)
@pytest.mark.parametrize("num_bytes", [0, 20])
def test_storage_that_was_freed_or_shrunk_is_refused(world, num_bytes):
    comm, peer = world.comm, 1 - world.rank

    def make() -> torch.Tensor:
        tensor = torch.zeros(3, 4)
        tensor.untyped_storage().resize_(num_bytes)
        return tensor

    for call in (lambda: comm.send(make(), peer), lambda: comm.recv(make(), peer)):
        with pytest.raises(ValueError, match=f"needs 48 bytes of its storage, which has {num_bytes}; "):
            call()
    with pytest.raises((ValueError, PipeCommMismatch), match="its memory has been freed or resized"):
        pipecomm_ext.all_to_all(make().reshape(1, 3, 4) if world.rank else torch.zeros(1, 3, 4), comm)
    comm.barrier()


@on_ranks(2)
def test_tensors_that_stand_for_zeros(world):
    """They are sent as zeros, and refused as results."""
    comm, peer = world.comm, 1 - world.rank
    zeros = torch._efficientzerotensor((2, 3))
    received = pattern((2, 3), torch.float32)
    comm.batch_p2p([pipecomm_ext.Send(zeros, peer), pipecomm_ext.Recv(received, peer)])
    assert_same(received, torch.zeros(2, 3))
    with pytest.raises(ValueError, match="stands for zeros and has no memory"):
        comm.recv(torch._efficientzerotensor((2, 3)), peer)
    x = torch.ones(1, 2, 4, requires_grad=True)
    y = pipecomm_ext.all_to_all(x, comm)
    y.backward(torch._efficientzerotensor(y.shape))
    assert_same(x.grad, torch.zeros(1, 2, 4))
    comm.barrier()


TRANSFORMS = {
    "vmap": lambda f, x: torch.vmap(f)(x),
    "grad": lambda f, x: torch.func.grad(lambda x: f(x[0]).sum())(x),
    "hessian": lambda f, x: torch.func.hessian(lambda x: f(x[0]).sum())(x),
    "jvp": lambda f, x: torch.func.jvp(lambda x: f(x[0]), (x,), (x,)),
    "functionalize": lambda f, x: torch.func.functionalize(lambda x: f(x[0]))(x),
}
CALLS = {
    "all_to_all": lambda x, comm: pipecomm_ext.all_to_all(x, comm),
    "gather": lambda x, comm: pipecomm_ext.gather_forward_split_backward(x, comm, 1),
}


@on_ranks(2)
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", CALLS)
def test_tensors_inside_a_transform_are_refused_on_all_ranks(world, transform, name):
    comm, call = world.comm, CALLS[name]
    x = torch.ones(3, 1, 2, 4)
    if world.rank == 0:
        with pytest.raises(TypeError, match="inside a transform"):
            TRANSFORMS[transform](lambda x: call(x, comm), x)
    else:
        with pytest.raises(PipeCommMismatch, match="refused by rank 0: TypeError: .* inside a transform"):
            call(x[0], comm)
    with pytest.raises(TypeError, match="inside a transform"):
        comm.recv(torch._to_functional_tensor(torch.zeros(3)), 1 - world.rank)
    comm.barrier()
