"""Reductions of CUDA tensors: the sums of one process, whichever stream and thread resumes them."""

from __future__ import annotations

import itertools
import time

import pytest
import torch
import torch.distributed as dist
from gpu_world import DEADLINE_S, comm_over, finish, nccl_comm, on_devices, over_transports
from ranks import on_ranks

from pipecomm_ext.communicator import reductions

ReduceOp = dist.ReduceOp
LONG_CYCLES = 200_000_000  # about a tenth of a second


def numbers(length: int, dtype: torch.dtype, rank: int) -> torch.Tensor:
    """Small whole ones, whose sums and products are exact in every dtype."""
    return ((torch.arange(length) * 7 + rank) % 3).to(dtype)


def truth(name: str, length: int, dtype: torch.dtype, size: int) -> torch.Tensor:
    everybody = torch.stack([numbers(length, torch.int64, rank) for rank in range(size)])
    found = {"SUM": everybody.sum(0), "PRODUCT": everybody.prod(0), "MAX": everybody.amax(0)}[name]
    return found.to(dtype)


@on_ranks(2, 3, deadline=DEADLINE_S)
@over_transports
@on_devices
def test_reductions_and_gathers(world, device, over):
    comm, size, rank = comm_over(world, device, over), world.size, world.rank
    dtypes = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.uint8, torch.int64]
    for dtype, length, async_op in itertools.product(dtypes, (0, 1, 30_003), (False, True)):
        for name in ("SUM", "PRODUCT", "MAX"):
            tensor = numbers(length, dtype, rank).to(device)
            work = comm.all_reduce(tensor, getattr(ReduceOp, name), async_op=async_op)
            if async_op:
                work.wait()
            assert torch.equal(tensor.cpu(), truth(name, length, dtype, size)), (dtype, length, name)
        whole = numbers(length * size, dtype, rank).to(device)
        part = torch.empty(length, dtype=dtype, device=device)
        work = comm.reduce_scatter(part, whole, async_op=async_op)
        if async_op:
            work.wait()
        expected = truth("SUM", length * size, dtype, size)
        assert torch.equal(part.cpu(), expected.view(size, length)[rank]), (dtype, length)
        work = comm.all_gather(whole, part, async_op=async_op)
        if async_op:
            work.wait()
        assert torch.equal(whole.cpu(), expected), (dtype, length)


@on_ranks(2, deadline=DEADLINE_S)
@over_transports
@on_devices
def test_a_message_before_the_wait_is_not_held_up(world, device, over):
    """Rank 1 begins the reduction only once it has the message, which rank 0 sends after it has begun. (Over
    NCCL the first collective of a kind waits for all ranks: they compare it.)"""
    comm = comm_over(world, device, over)
    for length in (1000, 1 << 20):
        tensor, message = torch.ones(length, device=device), torch.zeros(length, device=device)
        comm.all_reduce(tensor.clone(), async_op=True).wait()
        if world.rank == 0:
            work = comm.all_reduce(tensor, async_op=True)
            time.sleep(0.2)  # the thread looks at it
            comm.send(message + 7, 1)
        else:
            comm.recv(message, 0)
            assert torch.all(message == 7)
            work = comm.all_reduce(tensor, async_op=True)
        work.wait()
        assert torch.all(tensor == 2), length


@on_ranks(2, deadline=DEADLINE_S)
@pytest.mark.parametrize("device", ["cuda"])
def test_streams(world, device):
    """Begun behind long work of one stream, waited for on two others, while the thread looks, too."""
    comm = nccl_comm(world)
    streams = [torch.cuda.Stream() for _ in range(3)]
    for round_idx, name in itertools.product(range(4), ("all_reduce", "reduce_scatter", "dropped")):
        with torch.cuda.stream(streams[0]):
            source = torch.zeros(50_000, device=device)
            torch.cuda._sleep(LONG_CYCLES)
            source += round_idx + 1
            target = torch.zeros(25_000, device=device)
            if name == "reduce_scatter":
                work = comm.reduce_scatter(target, source, async_op=True)
                del source
            else:
                work, target = comm.all_reduce(source, async_op=True), source
            torch.empty(50_000, device=device).fill_(-1)  # where freed memory would be
        if name == "dropped":
            del work
            comm.barrier()
            until = time.monotonic() + 30
            while not torch.all(target == 2 * (round_idx + 1)) and time.monotonic() < until:
                time.sleep(0.01)
        else:
            assert not work.is_completed()
            for stream in streams[1:]:
                with torch.cuda.stream(stream):
                    work.wait()
                    copy = target.clone()
                    stream.synchronize()
                    assert torch.all(copy == 2 * (round_idx + 1)), (name, round_idx)
            assert work.is_completed()
        assert torch.all(target == 2 * (round_idx + 1)), (name, round_idx)
    finish(device)


@on_ranks(2, deadline=DEADLINE_S)
@pytest.mark.parametrize("device", ["cuda"])
@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("length", [1000, reductions.MAX_WHOLE_BYTES])
def test_captured(world, device, async_op, length):
    comm, tensor = nccl_comm(world), torch.zeros(length, device=device)

    def step() -> None:
        work = comm.all_reduce(tensor, async_op=async_op)
        if async_op:
            work.wait()
        tensor.mul_(3)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for round_idx in range(3):
        tensor.fill_(world.rank + round_idx)
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.all(tensor == 3 * (2 * round_idx + 1)), round_idx
    graph.reset()
