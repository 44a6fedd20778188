"""CUDA tensors over TCP: staged through pinned host memory. Any number of ranks on one GPU."""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from gpu_world import DEADLINE_S, comm_over
from patterns import assert_same, pattern, poison
from ranks import on_ranks

from pipecomm_ext import _C, Recv, Send

staged = functools.partial(comm_over, device="cuda", over="tcp")


@on_ranks(2, 3, deadline=DEADLINE_S)
def test_messages_and_collectives(world):
    comm = staged(world)
    following, previous = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for numel in (0, 5, 300_000):
            sent = pattern(numel, torch.bfloat16, world.rank).cuda()
            table = poison((numel, 2), torch.bfloat16).cuda()
            torch.cuda._sleep(20_000_000)
            table.zero_()  # pending when the receive is posted
            comm.batch_p2p([Send(sent, following), Recv(table[:, 1], previous)], async_op=True).wait()
            assert_same(table[:, 1].contiguous().cpu(), pattern(numel, torch.bfloat16, previous), numel)
            assert not table[:, 0].any()
    segments = [[(2 * rank, 2)] for rank in range(world.size)]
    plan = _C.plan_gather(world.rank, world.size, ((2, 3), torch.int32), 0, segments)
    output = torch.zeros(2 * world.size, 3, dtype=torch.int32, device="cuda")
    comm.exchange(plan, [pattern((2, 3), torch.int32, world.rank).cuda()], [output])
    expected = torch.cat([pattern((2, 3), torch.int32, rank) for rank in range(world.size)])
    assert_same(output.cpu(), expected, "gather")
    tensor = torch.full((3,), world.rank, device="cuda")
    comm.broadcast(tensor, 1)
    assert tensor.tolist() == [1, 1, 1]


@on_ranks(2, deadline=DEADLINE_S)
def test_strided_receives_are_there_for_every_stream(world):
    """Read on a side stream that has waited for nothing but the operation, which another thread ended."""
    comm, peer, side = staged(world), 1 - world.rank, torch.cuda.Stream()
    table, seen = torch.zeros(3, 5, device="cuda"), torch.zeros(1000, 3, device="cuda")
    for step in range(1000):
        sent = torch.full((3, 2), float(step * 2 + world.rank), device="cuda")[:, 1]
        works = [comm.isend(sent, peer), comm.irecv(table[:, step % 5], peer)]
        for work in works:
            work.wait()
        with torch.cuda.stream(side):
            seen[step] = table[:, step % 5]
        side.synchronize()  # the next receive may write the same column
    expected = torch.arange(1000).mul(2).add(peer).float()[:, None].expand(1000, 3)
    assert_same(seen.cpu(), expected.contiguous(), "columns")


@on_ranks(2, deadline=DEADLINE_S)
def test_captures_are_refused(world):
    comm, peer = staged(world), 1 - world.rank
    tensor = torch.ones(3, device="cuda")
    captured = torch.zeros(3, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.add_(tensor)
        with pytest.raises(ValueError, match="cannot be captured in a CUDA graph"):
            comm.isend(tensor, peer)
    graph.replay()
    assert captured.tolist() == [1, 1, 1]
    received = torch.zeros(3, device="cuda")
    comm.batch_p2p([Send(tensor, peer), Recv(received, peer)])
    assert received.tolist() == [1, 1, 1]


@on_ranks(2, deadline=DEADLINE_S)
def test_staging_beside_a_capture_of_another_thread(world):
    """In the strictest mode, with pinned memory that is fresh."""
    comm, peer, device = staged(world), 1 - world.rank, torch.cuda.current_device()
    numbers, captured = torch.full((1 << 20,), float(world.rank)).cuda(), torch.zeros(3, device="cuda")
    received = torch.empty_like(numbers)
    torch.cuda.synchronize()

    def exchange():
        torch.cuda.set_device(device)
        with torch.cuda.stream(torch.cuda.Stream()):
            comm.batch_p2p([Send(numbers, peer), Recv(received, peer)])

    graph = torch.cuda.CUDAGraph()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(torch.cuda.set_device, device).result()
        with torch.cuda.graph(graph, capture_error_mode="global"):
            captured.add_(1)
            pool.submit(exchange).result()
            captured.add_(1)
    graph.replay()
    assert captured.tolist() == [2, 2, 2] and received.eq(peer).all()


@on_ranks(2, deadline=DEADLINE_S)
def test_a_communicator_keeps_its_device(world):
    comm = staged(world)
    own = torch.device("cuda", torch.cuda.current_device())
    assert comm.device == own and comm.empty([2], torch.float32).device == own
    if torch.cuda.device_count() < 2:
        return
    elsewhere = torch.zeros(2, device=f"cuda:{1 - own.index}")
    with pytest.raises(ValueError, match=f"but the communicator is for {own} tensors"):
        comm.isend(elsewhere, 1 - world.rank)
    torch.cuda.set_device(elsewhere.device)
    mine = torch.full((2,), float(world.rank), device=own)
    comm.broadcast(mine, 0)
    assert mine.tolist() == [0, 0] and comm.empty([2], torch.float32).device == own
