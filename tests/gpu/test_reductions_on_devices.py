"""Reductions of CUDA tensors, by NCCL's own functions and by exchanges: the sums of one process, whichever
stream and thread resumes them."""

from __future__ import annotations

import itertools
import time

import pytest
import torch
import torch.distributed as dist
from gpu_world import (
    DEADLINE_S,
    comm_on,
    comm_over,
    finish,
    nccl_comm,
    on_devices,
    over_transports,
    take_device,
)
from patterns import awaited
from ranks import on_ranks
from test_backend import group_of, needs_new_torch

from pipecomm_ext import PipeCommMismatch
from pipecomm_ext.communicator import reductions

ReduceOp = dist.ReduceOp
LONG_CYCLES = 200_000_000  # about a tenth of a second


def numbers(length: int, dtype: torch.dtype, rank: int) -> torch.Tensor:
    """Small whole ones, whose sums and products are exact in every dtype."""
    return ((torch.arange(length) * 7 + rank) % 3).to(dtype)


def truth(name: str, length: int, dtype: torch.dtype, size: int) -> torch.Tensor:
    everybody = torch.stack([numbers(length, torch.int64, rank) for rank in range(size)])
    combine = {"SUM": torch.sum, "PRODUCT": torch.prod, "MIN": torch.amin, "MAX": torch.amax}
    return combine[name](everybody, 0).to(dtype)


@on_ranks(2, 3, deadline=DEADLINE_S)
@over_transports
@on_devices
def test_reductions_and_gathers(world, device, over):
    comm, size, rank = comm_over(world, device, over), world.size, world.rank
    dtypes = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
    dtypes += [torch.int8, torch.uint8, torch.int32, torch.uint32, torch.int64, torch.uint64, torch.int16]
    for dtype, length, async_op in itertools.product(dtypes, (0, 1, 30_003), (False, True)):
        for name in ("SUM", "PRODUCT", "MIN", "MAX"):
            tensor = numbers(length, dtype, rank).to(device)
            awaited(comm.all_reduce(tensor, getattr(ReduceOp, name), async_op=async_op))
            assert torch.equal(tensor.cpu(), truth(name, length, dtype, size)), (dtype, length, name)
        whole = numbers(length * size, dtype, rank).to(device)
        part = torch.empty(length, dtype=dtype, device=device)
        awaited(comm.reduce_scatter(part, whole, async_op=async_op))
        expected = truth("SUM", length * size, dtype, size)
        assert torch.equal(part.cpu(), expected.view(size, length)[rank]), (dtype, length)
        awaited(comm.all_gather(whole, part, async_op=async_op))
        assert torch.equal(whole.cpu(), expected), (dtype, length)


@on_ranks(2, 3, deadline=DEADLINE_S)
@over_transports
@on_devices
def test_what_nccl_reduces_and_what_is_exchanged(world, device, over):
    comm, size, rank = comm_over(world, device, over), world.size, world.rank

    def reduced(tensor: torch.Tensor, op) -> torch.Tensor:
        tensor = tensor.to(device)
        comm.all_reduce(tensor, op)
        return tensor

    def scattered(lengths) -> torch.Tensor:
        pieces = [torch.full((n,), float(rank + other), device=device) for other, n in enumerate(lengths)]
        output = torch.empty(lengths[rank], device=device)
        comm.reduce_scatter(output, pieces)
        return output

    def check(result: torch.Tensor, expected: torch.Tensor, name: str, tolerance: float = 0) -> None:
        assert comm.flight_record()[-1]["op"] == name
        torch.testing.assert_close(result.cpu(), expected, rtol=tolerance, atol=tolerance)

    total = size * (size - 1) // 2
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        mine, mean = torch.full((5,), float(rank), dtype=dtype), torch.full((5,), total / size, dtype=dtype)
        check(reduced(mine, ReduceOp.AVG), mean, "all_reduce", 1e-2)
    doubled = dist._make_nccl_premul_sum(2.0)
    check(reduced(torch.full((5,), float(rank)), doubled), torch.full((5,), 2.0 * total), "all_reduce")
    for dtype in (torch.complex64, torch.complex128):
        mine = torch.tensor([rank + 1j], dtype=dtype)
        expected = torch.tensor([total + size * 1j], dtype=dtype)
        check(reduced(mine.clone(), ReduceOp.SUM), expected, "all_reduce")
        check(reduced(mine.clone(), ReduceOp.AVG), expected / size, "all_reduce", 1e-5)
        check(reduced(mine.clone(), ReduceOp.PRODUCT), _product(size).to(dtype), "all_reduce")
    flags = torch.tensor([rank == 1, False])
    check(reduced(flags, ReduceOp.SUM), torch.tensor([True, False]), "all_reduce")
    check(reduced(torch.tensor([1 << rank]), ReduceOp.BOR), torch.tensor([(1 << size) - 1]), "all_reduce")
    strided = torch.full((5, 4), float(rank)).t()[::2]
    check(reduced(strided, ReduceOp.SUM), torch.full((2, 5), float(total)), "all_reduce")
    expected = float(total + size * rank)
    check(scattered([3] * size), torch.full((3,), expected), "reduce_scatter")
    check(scattered(range(1, size + 1)), torch.full((rank + 1,), expected), "reduce_scatter")


def _product(size: int) -> torch.Tensor:
    return torch.stack([torch.tensor([rank + 1j]) for rank in range(size)]).prod(0)


@needs_new_torch
@on_ranks(2, 3, deadline=DEADLINE_S)
@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
@on_devices
def test_the_backend(world, device, async_op):
    take_device(world, device)
    group, size, rank = group_of(world.size), world.size, world.rank
    total, length = size * (size - 1) // 2, 20_001
    tensor = torch.full((length,), float(rank), device=device)
    awaited(dist.all_reduce(tensor, group=group, async_op=async_op))
    assert torch.all(tensor == total)
    awaited(dist.reduce(tensor.fill_(rank), size - 1, ReduceOp.SUM, group, async_op))
    assert torch.all(tensor == (total if rank == size - 1 else rank))
    whole, piece = torch.full((size, length), float(rank), device=device), torch.empty(length, device=device)
    awaited(dist.reduce_scatter_tensor(piece, whole, group=group, async_op=async_op))
    assert torch.all(piece == total)
    awaited(dist.reduce_scatter(piece, list(whole), ReduceOp.MAX, group, async_op))
    assert torch.all(piece == size - 1)
    awaited(dist.all_gather_into_tensor(whole, piece.fill_(rank), group, async_op))
    assert torch.equal(whole[:, 0].cpu(), torch.arange(size).float()) and torch.all(whole == whole[:, :1])
    tensors = [torch.full((4,), float(rank), device=device), torch.full((3,), rank, device=device)]
    with dist._coalescing_manager(group, async_ops=async_op) as works:
        for each in tensors:
            dist.all_reduce(each, group=group)
    if async_op:
        works.wait()
    assert all(torch.all(each == total) for each in tensors)


@needs_new_torch
@on_ranks(2, deadline=DEADLINE_S)
@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
def test_a_barrier_of_the_backend_waits_for_the_device(world, async_op):
    take_device(world, "cuda")
    group, is_done = group_of(2), torch.cuda.Event()
    dist.all_reduce(torch.ones(4, device="cuda"), group=group)
    torch.cuda._sleep(LONG_CYCLES)
    is_done.record()
    awaited(dist.barrier(group, async_op=async_op))
    assert is_done.query()


@needs_new_torch
@on_ranks(2, deadline=DEADLINE_S)
def test_threads_of_the_library_disturb_no_capture_and_no_other_device(world):
    """They continue an all-reduce of several exchanges
    while this thread captures, and complete its future."""
    take_device(world, "cuda")
    group, other_device = group_of(2), (torch.cuda.current_device() + 1) % torch.cuda.device_count()
    has_context = [torch._C._cuda_hasPrimaryContext(device) for device in (other_device, 0)]
    given, computed = torch.zeros(1000, device="cuda"), torch.zeros(1000, device="cuda")
    for round_idx in range(3):
        tensor = torch.full((100_000,), world.rank + 1, dtype=torch.int16, device="cuda")
        if world.rank == 1:
            time.sleep(0.1)  # so that rank 0 captures while the call is in flight
        future = dist.all_reduce(tensor, group=group, async_op=True).get_future()
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.stream(side):  # torch.cuda.graph() would first wait for the device
            graph.capture_begin()
            time.sleep(0.3)
            computed.copy_(given * 2)
            graph.capture_end()
        future.wait()
        given.fill_(round_idx)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.all(tensor == 3) and torch.all(computed == 2 * round_idx)
    assert has_context == [torch._C._cuda_hasPrimaryContext(device) for device in (other_device, 0)]


@on_ranks(2, deadline=DEADLINE_S)
@on_devices
def test_operators_that_differ(world, device):
    comm = comm_on(world, device)
    comm.all_reduce(torch.ones(4, device=device))
    with world.breaking(), pytest.raises(PipeCommMismatch, match=r"of float32\[4\]"):
        tensor = torch.ones(4, device=device)
        comm.all_reduce(tensor, ReduceOp.MAX if world.rank == 1 else ReduceOp.SUM)
        comm.barrier()  # NCCL's call is compared in parallel with it, so it may have returned


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
@pytest.mark.parametrize("dtype", [torch.float32, torch.int16], ids=str)  # by NCCL, by exchanges
@pytest.mark.parametrize("length", [1000, reductions.MAX_WHOLE_BYTES])
def test_captured(world, device, async_op, dtype, length):
    comm, tensor = nccl_comm(world), torch.zeros(length, dtype=dtype, device=device)
    part, whole = tensor.new_zeros(length // 2), tensor.new_zeros(length)

    def step() -> None:
        awaited(comm.all_reduce(tensor, async_op=async_op))
        awaited(comm.reduce_scatter(part, tensor, async_op=async_op))
        awaited(comm.all_gather(whole, part, async_op=async_op))
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
        total = 2 * round_idx + 1
        assert torch.all(tensor == 3 * total) and torch.all(whole == 2 * total), round_idx
    graph.reset()
