"""What breaks communication libraries: order, threads, streams, peers that close, others that use the GPU."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import threading
import time

import pytest
import torch
import torch.distributed as dist
from gpu_world import DEADLINE_S, comm_on, comm_over, finish, nccl_comm, on_devices, over_transports
from patterns import assert_same, pattern, poison
from ranks import on_ranks

from pipecomm_ext import _C, PipeCommError, Recv, Send

# More than NCCL buffers: 32 MiB between two GPUs (8 thread blocks, 8 steps of 512 KiB), 2 MiB over sockets.
LARGE = {0: 1 << 18, 1: 8 << 20}.get(torch.cuda.device_count(), 64 << 20)


@on_ranks(2, 3, deadline=DEADLINE_S)
@on_devices
@pytest.mark.parametrize("order", ["receive first", "send first", "by parity"])
def test_messages_of_one_channel_in_any_order(world, device, order):
    """Round a ring, large and small, every rank in the same order or neighbours in opposite ones."""
    comm = comm_on(world, device)
    following, previous = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    is_receive_first = order == "receive first" or (order == "by parity" and world.rank % 2 == 0)
    for round_idx, numel in enumerate((LARGE, 3, LARGE)):
        sent = pattern(numel, torch.uint8, world.rank, round_idx).to(device)
        received = poison(numel, torch.uint8).to(device)
        posts = [lambda: comm.irecv(received, previous), lambda: comm.isend(sent, following)]  # noqa: B023
        works = [post() for post in (posts if is_receive_first else posts[::-1])]
        for work in works:
            work.wait()
        assert_same(received.cpu(), pattern(numel, torch.uint8, previous, round_idx), round_idx)


@on_ranks(3, deadline=DEADLINE_S)
@on_devices
def test_both_neighbours_in_any_order(world, device):
    """Each rank of a ring exchanges large messages with both, one call each, in an order of its own."""
    comm = comm_on(world, device)
    neighbours = [(world.rank + step) % world.size for step in (1, -1)]
    for round_idx, order in enumerate(itertools.permutations(range(4))):
        order = order[world.rank :] + order[: world.rank]
        sent = pattern(LARGE, torch.uint8, world.rank, round_idx).to(device)
        received = [poison(LARGE, torch.uint8).to(device) for _ in neighbours]
        posts = [functools.partial(comm.isend, sent, peer) for peer in neighbours]
        posts += [
            functools.partial(comm.irecv, into, peer) for into, peer in zip(received, neighbours, strict=True)
        ]
        for work in [posts[idx]() for idx in order]:
            work.wait()
        for into, peer in zip(received, neighbours, strict=True):
            assert_same(into.cpu(), pattern(LARGE, torch.uint8, peer, round_idx), round_idx)


@on_ranks(2, deadline=DEADLINE_S)
@on_devices
def test_many_lengths(world, device):
    """As sequences of variable length have them: nothing grows with their number, each is right."""
    comm, peer = comm_on(world, device), 1 - world.rank
    for length in range(150):
        sent = pattern((length, 3), torch.bfloat16, world.rank).to(device)
        received = poison((length, 3), torch.bfloat16).to(device)
        comm.batch_p2p([Send(sent, peer), Recv(received, peer)], async_op=True).wait()
        assert_same(received.cpu(), pattern((length, 3), torch.bfloat16, peer), length)


@on_ranks(2, deadline=DEADLINE_S)
@on_devices
def test_two_threads_with_streams_of_their_own(world, device):
    comm, peer = comm_on(world, device), 1 - world.rank
    errors = []

    def exchange(channel: int) -> None:
        stream = torch.cuda.stream(torch.cuda.Stream()) if device == "cuda" else contextlib.nullcontext()
        try:
            with stream:
                for round_idx in range(30):
                    sent = pattern(5000, torch.int16, world.rank, channel, round_idx).to(device)
                    received = poison(5000, torch.int16).to(device)
                    ops = [Send(sent, peer, channel), Recv(received, peer, channel)]
                    comm.batch_p2p(ops, async_op=True).wait()
                    expected = pattern(5000, torch.int16, peer, channel, round_idx)
                    assert_same(received.cpu(), expected, (channel, round_idx))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=exchange, args=(channel,)) for channel in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors


@on_ranks(2, deadline=DEADLINE_S)
def test_waiting_on_another_stream_than_that_of_the_call(world):
    comm, peer = nccl_comm(world), 1 - world.rank
    streams = [torch.cuda.Stream() for _ in range(2)]
    for round_idx in range(20):
        with torch.cuda.stream(streams[0]):
            torch.cuda._sleep(20_000_000)
            sent = torch.full((1 << 20,), float(round_idx + world.rank), device="cuda")
            received = torch.zeros(1 << 20, device="cuda")
            work = comm.batch_p2p([Send(sent, peer), Recv(received, peer)], async_op=True)
        with torch.cuda.stream(streams[1]):
            work.wait()
            assert received.sum().item() == (round_idx + peer) * (1 << 20)  # read on this stream
        streams[0].synchronize()


@on_ranks(2, deadline=DEADLINE_S)
@on_devices
@over_transports
def test_small_strided_receives_are_there_after_the_wait(world, device, over):
    """Also for a stream that waits for no other, if other threads of ours received them."""
    comm, peer = comm_over(world, device, over), 1 - world.rank
    stream = torch.cuda.stream(torch.cuda.Stream()) if device == "cuda" else contextlib.nullcontext()
    table = torch.zeros(3, 5, dtype=torch.int64, device=device)
    with stream:
        for round_idx in range(200):
            work = comm.irecv(table[:, 2], peer)
            comm.send(torch.full((3,), 2 * round_idx + world.rank, device=device), peer)
            work.wait()
            assert table[:, 2].tolist() == [2 * round_idx + peer] * 3
    assert not table[:, :2].any() and not table[:, 3:].any()


@on_ranks(2, deadline=DEADLINE_S)
def test_posting_does_not_sleep(world):
    """The fastest of many batches: a sleep of 50 us for each NCCL group takes 70 us or more."""
    comm, peer = nccl_comm(world), 1 - world.rank
    sent, received = (torch.zeros(64, device="cuda") for _ in range(2))
    ops = [Send(sent, peer), Recv(received, peer)]
    times = []
    for _ in range(300):
        began = time.perf_counter()
        work = comm.batch_p2p(ops, async_op=True)
        times.append(time.perf_counter() - began)
        work.synchronize()
    assert min(times) < 60e-6, sorted(times)[:10]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@on_ranks(1, deadline=DEADLINE_S)
def test_another_device_than_the_current_one(world):
    torch.cuda.set_device(0)
    comm = world.fresh_comm(device="cuda:1", transport="nccl", timeout=60)
    sent = pattern((30, 5), torch.float32).to("cuda:1")
    received = torch.zeros(30, 5, device="cuda:1")
    comm.batch_p2p([Send(sent, 0), Recv(received, 0)])
    assert torch.equal(sent, received) and torch.cuda.current_device() == 0
    assert comm.empty((3,), torch.float32).device == torch.device("cuda:1")
    with pytest.raises(ValueError):
        comm.send(torch.zeros(3, device="cuda:0"), 0)


@on_ranks(2, deadline=DEADLINE_S)
def test_beside_nccl_of_torch(world):
    """Collectives of torch's on the current stream and ours on another one, all the time."""
    comm, peer = nccl_comm(world), 1 - world.rank
    group = dist.new_group(backend="nccl")
    side = torch.cuda.Stream()
    total = torch.zeros(1 << 18, device="cuda")
    for round_idx in range(30):
        with torch.cuda.stream(side):
            sent = torch.full((1 << 18,), float(round_idx + world.rank), device="cuda")
            received = torch.zeros(1 << 18, device="cuda")
            work = comm.batch_p2p([Send(sent, peer), Recv(received, peer)], async_op=True)
        total.fill_(float(world.rank + 1))
        dist.all_reduce(total, group=group)
        with torch.cuda.stream(side):
            work.wait()
            assert torch.all(received == round_idx + peer)
        assert torch.all(total == 3.0)


@on_ranks(2, deadline=DEADLINE_S)
@on_devices
def test_a_rank_that_closes_first(world, device):
    """The other one has a receive from it in flight, hears of it, and can close as well."""
    comm, peer = comm_on(world, device, timeout=100), 1 - world.rank
    tensor = torch.ones(4, device=device)
    comm.batch_p2p([Send(tensor, peer), Recv(torch.empty_like(tensor), peer)])
    began = time.monotonic()
    if world.rank == 0:
        comm.close()
    else:
        with pytest.raises(PipeCommError, match="rank 0 has closed"):
            comm.irecv(tensor, 0).synchronize()
        comm.close()
    finish(device)
    assert time.monotonic() - began < 60


@on_ranks(2, deadline=DEADLINE_S)
def test_a_least_number_of_thread_blocks(world):
    os.environ["PIPECOMM_NCCL_MIN_CTAS"] = "2"
    try:
        comm, peer = nccl_comm(world), 1 - world.rank
        received = torch.zeros(4, device="cuda")
        comm.batch_p2p([Send(torch.ones(4, device="cuda"), peer), Recv(received, peer)])
        assert received.tolist() == [1.0] * 4
    finally:
        del os.environ["PIPECOMM_NCCL_MIN_CTAS"]


@on_ranks(2, deadline=DEADLINE_S)
@pytest.mark.parametrize("device", ["cpu"])
def test_a_group_of_the_host_has_a_communicator_of_the_host(world, device):
    """Whether there is a GPU or not: nobody named one."""
    comm, peer = world.fresh_comm(device=None), 1 - world.rank
    assert comm.device.type == device
    received = torch.zeros(4)
    comm.batch_p2p([Send(torch.ones(4), peer), Recv(received, peer)])
    assert received.tolist() == [1.0] * 4


@on_ranks(2, deadline=DEADLINE_S)
@on_devices
@pytest.mark.parametrize("first_channel", [0, 1, None])
@pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
def test_an_exchange_sends_what_the_one_before_it_has_received(world, device, first_channel, is_async):
    """`after=` holds whatever orders the two are in."""
    comm, length = comm_on(world, device), 30_000
    spec, lengths = ((length,), torch.float32), [0, length] if world.rank == 0 else [length, 0]
    plan = _C.plan_all_to_all_single(world.rank, 2, spec, spec, lengths, lengths)
    for round_idx in range(5):
        mine = torch.full((length,), float(2 * round_idx + world.rank), device=device)
        theirs, returned = torch.full_like(mine, -1), torch.full_like(mine, -1)
        if world.rank == 1:
            time.sleep(0.02)
        first = comm.exchange(plan, [mine], [theirs], async_op=True, channel=first_channel)
        second = comm.exchange(plan, [theirs], [returned], async_op=is_async, channel=1, after=first)
        if second is not None:
            second.wait()
        finish(device)
        assert torch.equal(returned, mine), round_idx
