"""What happens to tensors while an operation on them is in flight: memory moved, versions."""

from __future__ import annotations

import sys
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy
import pytest
import torch
from patterns import assert_same, pattern
from ranks import on_ranks

from pipecomm_ext import PipeCommError, Recv

TRANSPORTS = pytest.mark.parametrize("transport", ["tcp", "shm"])


MOVES = {
    "share_memory_": lambda tensor: tensor.share_memory_(),
    "larger": lambda tensor: tensor.untyped_storage().resize_(2 * tensor.nbytes),
    "freed": lambda tensor: tensor.untyped_storage().resize_(0),
}
NUM_ELEMENTS = [64, 1 << 16, 1 << 22]


def churn():
    """Allocates and overwrites memory that has been freed."""
    return [torch.full((64,), float("nan")) for _ in range(200)]


def come_late(world, comm, sent: torch.Tensor, num_received: int) -> None:
    """Is the other end of messages of rank 0 whose memory moves, and then of one more."""
    world.meet()
    for _ in range(2):
        comm.send(sent, 0)
    for _ in range(num_received):
        received = torch.zeros(sent.numel())
        comm.recv(received, 0, channel=1)
        assert_same(received, sent)
    comm.send(sent, 0)


@on_ranks(2)
@TRANSPORTS
@pytest.mark.parametrize("num_elements", NUM_ELEMENTS)
@pytest.mark.parametrize("move", MOVES)
def test_storage_that_moves(world, transport, num_elements, move):
    """Nothing is damaged. The original data are sent; a receiver gets an error that the message is lost."""
    comm, peer = world.shared_comm(transport=transport), 1 - world.rank
    sent = pattern(num_elements, torch.float32)
    if world.rank == 0:
        targets = [torch.zeros(num_elements), torch.zeros(num_elements, 2)[:, 0]]
        receives, source = [comm.irecv(target, peer) for target in targets], sent.clone()
        sends = [comm.isend(source, peer, channel=1) for _ in range(2)]
        for tensor in (*targets, source):
            MOVES[move](tensor)
        used = churn()
        world.meet()
        for work in receives:
            with pytest.raises(PipeCommError, match="was reallocated .*so the message is lost"):
                work.wait()
        for work in sends:
            work.wait()
        assert all(bool(piece.isnan().all()) for piece in used)
        received = torch.zeros(num_elements)
        comm.recv(received, peer)
        assert_same(received, sent)
    else:
        come_late(world, comm, sent, num_received=2)
    comm.barrier()


@on_ranks(2)
@TRANSPORTS
def test_pinned_memory_is_freed_in_the_end(world, transport):
    """100 tensors of 4 MB each move in flight, and all are freed."""
    comm, peer = world.shared_comm(transport=transport), 1 - world.rank

    def resident_kb():
        return next(
            int(line.split()[1])
            for line in open("/proc/self/status", encoding="utf-8")
            if line.startswith("VmRSS")
        )

    before = resident_kb()
    for _ in range(100):
        tensor, received = torch.ones(1 << 20), torch.zeros(1 << 20)
        works = [comm.irecv(received, peer), comm.isend(tensor, peer)]
        tensor.untyped_storage().resize_(0)
        for work in works:
            work.wait()
        assert received[-1] == 1
    assert resident_kb() - before < 100_000


def borrowed(*shape: int) -> tuple[torch.Tensor, numpy.ndarray]:
    """A tensor of zeros, and the array that owns its memory. An operation can keep only torch's own."""
    array = numpy.zeros(shape, numpy.float32)
    return torch.from_numpy(array), array


@on_ranks(2)
@TRANSPORTS
@pytest.mark.parametrize("num_elements", NUM_ELEMENTS)
@pytest.mark.parametrize("wait", ["wait", "is_completed"])
def test_other_memory_that_moves_is_told_of(world, transport, num_elements, wait):
    """Also on the sender, since the memory may have been freed."""
    comm, peer = world.shared_comm(transport=transport), 1 - world.rank
    sent = pattern(num_elements, torch.float32)
    if world.rank == 0:
        (target, array), (strided, wide), (source, _) = tensors = [
            borrowed(num_elements),
            borrowed(num_elements, 2),
            borrowed(num_elements),
        ]
        source.copy_(sent)
        works = [comm.irecv(target, peer), comm.irecv(strided[:, 0], peer)]
        works.append(comm.isend(source, peer, channel=1))
        for tensor, _ in tensors:
            tensor.share_memory_()
        world.meet()
        for work in works:
            while wait == "is_completed" and not work.is_completed():
                time.sleep(0.001)
            for _ in range(2):
                with pytest.raises(PipeCommError, match="was reallocated .* so the message is lost; do that"):
                    work.wait()
        assert array.tobytes() == wide[:, 0].tobytes() == sent.numpy().tobytes()
        received = torch.zeros(num_elements)
        comm.recv(received, peer)
        assert_same(received, sent)
    else:
        come_late(world, comm, sent, num_received=1)
    comm.barrier()


@on_ranks(2)
@TRANSPORTS
def test_a_tensor_that_gets_another_storage_is_harmless(world, transport):
    """The operation continues with the storage that it began with, and keeps that alive."""
    comm, peer = world.shared_comm(transport=transport), 1 - world.rank
    sent, number = pattern(1 << 18, torch.float32), 1 << 18
    for change in (
        lambda tensor: setattr(tensor, "data", torch.zeros(3)),
        lambda tensor: tensor.set_(torch.zeros(3)),
    ):
        source, target = sent.clone(), torch.zeros(number)
        seen = target.view(number)
        works = [comm.irecv(target, peer), comm.isend(source, peer)]
        for tensor in (source, target):
            change(tensor)
        used = [torch.full((number,), float("nan")) for _ in range(20)]
        for work in works:
            work.wait()
        assert_same(seen, sent)
        assert target.equal(torch.zeros(3)) and all(bool(piece.isnan().all()) for piece in used)
    comm.barrier()


@on_ranks(2)
@TRANSPORTS
def test_what_an_operation_kept_goes_at_its_end(world, transport):
    """On any thread on which it ends, and even if nothing waits for it."""
    comm, peer = world.shared_comm(transport=transport), 1 - world.rank
    for num_elements in (16, 1 << 18):
        storages = []
        for _ in range(20):
            tensor, received = torch.ones(num_elements), torch.zeros(num_elements)
            comm.irecv(received, peer), comm.isend(tensor, peer)
            storages += [weakref.ref(each.untyped_storage()) for each in (tensor, received)]
        del tensor, received
        comm.barrier()
        deadline = time.monotonic() + 20
        while any(storage() is not None for storage in storages):
            assert time.monotonic() < deadline
            time.sleep(0.01)  # other threads put aside what the main thread then drops


@on_ranks(2)
@TRANSPORTS
def test_threads_that_wait_for_one_work(world, transport):
    """All see its end, and the version of what is received changes once there."""
    comm, peer = world.shared_comm(transport=transport), 1 - world.rank
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            for _ in range(100):
                tensors = [torch.zeros(8) for _ in range(4)]
                works = [comm.batch_p2p([Recv(tensor, peer) for tensor in tensors], async_op=True)]
                works += [comm.isend(torch.ones(8), peer) for _ in tensors]
                versions = [tensor._version for tensor in tensors]
                looks = [threads.submit(work.is_completed) for work in works for _ in range(2)]
                waits = [threads.submit(work.wait, 20) for work in works for _ in range(4)]
                assert [wait.result(60) for wait in waits] == [None] * len(waits)
                assert all(look.result(60) in (True, False) for look in looks)
                assert [tensor._version for tensor in tensors] == [version + 1 for version in versions]
    finally:
        sys.setswitchinterval(before)
    comm.barrier()


@on_ranks(2)
@TRANSPORTS
@pytest.mark.parametrize("operation", ["irecv", "batch", "broadcast", "all_to_all", "strided"])
def test_autograd_hears_when_the_data_land(world, transport, operation):
    """A tensor that is saved for backward between the call and the arrival has changed by then."""
    comm, peer = world.shared_comm(transport=transport), 1 - world.rank
    tensor = torch.zeros(8, 2)[:, 0] if operation == "strided" else torch.zeros(8)
    one = torch.ones(8)
    if world.rank == 0:
        work = {
            "irecv": lambda: comm.irecv(tensor, peer),
            "strided": lambda: comm.irecv(tensor, peer),
            "batch": lambda: comm.batch_p2p([Recv(tensor, peer)], async_op=True),
            "broadcast": lambda: comm.broadcast(tensor, peer, async_op=True),
            "all_to_all": lambda: comm.all_to_all([one, one], [torch.zeros(8), tensor], async_op=True),
        }[operation]()
        x = torch.ones(8, requires_grad=True)
        product = x * tensor
        version = tensor._version
        world.meet()
        work.wait()
        assert tensor._version > version and tensor.equal(one)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.sum().backward()
        (x * tensor).sum().backward()  # a tensor saved afterwards is valid
        assert x.grad.equal(one)
    else:
        world.meet()
        {
            "broadcast": lambda: comm.broadcast(one, 1),
            "all_to_all": lambda: comm.all_to_all([one, one], [torch.zeros(8), torch.zeros(8)]),
        }.get(operation, lambda: comm.send(one, peer))()
    comm.barrier()
