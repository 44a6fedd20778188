"""What happens to tensors while an operation on them is in flight: memory moved, versions."""

from __future__ import annotations

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
    """Gets and overwrites memory that has been freed."""
    return [torch.full((64,), float("nan")) for _ in range(200)]


@on_ranks(2)
@TRANSPORTS
@pytest.mark.parametrize("num_elements", NUM_ELEMENTS)
@pytest.mark.parametrize("move", MOVES)
def test_storage_that_moves(world, transport, num_elements, move):
    """Nothing is damaged. What was there is sent; a receiver is told that the message is lost."""
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
        world.meet()
        for _ in range(2):
            comm.send(sent, peer)
        for _ in range(2):
            received = torch.zeros(num_elements)
            comm.recv(received, peer, channel=1)
            assert_same(received, sent)
        comm.send(sent, peer)
    comm.barrier()


@on_ranks(2)
@TRANSPORTS
def test_pinned_memory_is_freed_in_the_end(world, transport):
    """Of 100 tensors of 4 MB each that move in flight, none stays."""
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
        (x * tensor).sum().backward()  # what is saved afterwards is right
        assert x.grad.equal(one)
    else:
        world.meet()
        {
            "broadcast": lambda: comm.broadcast(one, 1),
            "all_to_all": lambda: comm.all_to_all([one, one], [torch.zeros(8), torch.zeros(8)]),
        }.get(operation, lambda: comm.send(one, peer))()
    comm.barrier()
