"""How links are made beside other work of the device, what they take, and what is left when a rank ends."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from gpu_world import DEADLINE_S, nccl_comm
from patterns import assert_same, pattern, poison
from ranks import on_ranks

from pipecomm_ext import Recv, Send


def resources() -> dict[str, int]:
    """What this process and its host have in use now."""
    own, shm = Path("/proc/self"), os.statvfs("/dev/shm")
    return {
        "threads": len(os.listdir(own / "task")),
        "descriptors": len(os.listdir(own / "fd")),
        "shm MiB": (shm.f_blocks - shm.f_bfree) * shm.f_frsize >> 20,
        "device MiB": (torch.cuda.mem_get_info()[1] - torch.cuda.mem_get_info()[0]) >> 20,
    }


def connect_one_channel_after_the_other(world) -> list[dict[str, float]]:
    """What there was after each of them; the first entry is without any."""
    comm, peer = nccl_comm(world, channels=4), 1 - world.rank
    used = [resources() | {"communicators": 0, "ms": 0}]
    for channel in range(4):
        began = time.monotonic()
        received = torch.zeros(8, device="cuda")
        comm.batch_p2p([Send(torch.ones(8, device="cuda"), peer, channel), Recv(received, peer, channel)])
        assert received.tolist() == [1.0] * 8
        took_ms = round(1000 * (time.monotonic() - began))
        comm.barrier()
        used.append(resources() | {"communicators": comm.nccl_usage[0], "ms": took_ms})
    return used


def test_what_a_link_takes(ranks):
    """The figures are printed (pytest -rP); that a link costs no more than NCCL says is checked."""
    used = ranks.run(2, connect_one_channel_after_the_other, deadline=DEADLINE_S)[0]
    for row in used:
        print(row)
    num_comms = used[-1]["communicators"] - used[1]["communicators"]
    assert num_comms > 0
    for kind, limit in (("threads", 4), ("descriptors", 24), ("device MiB", 2 * 64)):
        assert used[-1][kind] - used[1][kind] <= limit * num_comms, (kind, used)


@on_ranks(2, deadline=DEADLINE_S)
def test_a_channel_is_connected_while_another_one_waits(world):
    """Rank 0 has a kernel that waits on channel 0 when its peer, which uses channel 1 first, asks for it."""
    comm, peer = nccl_comm(world, channels=3, timeout=25), 1 - world.rank
    tensors = [pattern(1 << 20, torch.uint8, channel).cuda() for channel in range(2)]
    comm.barrier()
    if world.rank == 0:
        received = [poison(1 << 20, torch.uint8).cuda() for _ in range(2)]
        works = [comm.irecv(received[channel], peer, channel) for channel in (0, 1)]
    else:
        received = tensors
        time.sleep(3)
        works = [comm.isend(tensors[channel], peer, channel) for channel in (1, 0)]
    for work in works:
        work.synchronize()
    for channel in range(2):
        assert_same(received[channel].cpu(), pattern(1 << 20, torch.uint8, channel), channel)


@on_ranks(2, deadline=DEADLINE_S)
def test_a_peer_connects_beside_a_capture(world):
    """In the strictest mode, which is torch's default; neither the capture nor the link breaks."""
    comm, numbers, graph = nccl_comm(world, channels=3, timeout=40), torch.zeros(8, device="cuda"), None
    before = comm.nccl_usage[0]
    comm.barrier()
    if world.rank == 0:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="global"):
            numbers += 1
            time.sleep(8)
            numbers += 1
        graph.replay()
        assert numbers.tolist() == [2.0] * 8
    else:
        time.sleep(2)
        comm.connect([0], channels=[1])
    until = time.monotonic() + 40
    while comm.nccl_usage[0] == before and not comm.failure and time.monotonic() < until:
        time.sleep(0.01)
    assert comm.nccl_usage[0] > before, comm.failure
    comm.barrier()


@on_ranks(2, deadline=DEADLINE_S)
def test_a_collective_of_torch_in_the_opposite_order(world):
    """Before a message larger than NCCL's buffers on one rank, behind it on the other one. The first message
    has to connect the ranks while the collective waits on the device."""
    comm, group, side = nccl_comm(world, timeout=25), dist.new_group(backend="nccl"), torch.cuda.Stream()
    total = torch.ones(1 << 20, device="cuda")
    large = torch.full((64 << 20,), world.rank, dtype=torch.uint8, device="cuda")
    dist.all_reduce(total, group=group)
    torch.cuda.synchronize()
    comm.barrier()
    for _ in range(5):
        if world.rank == 1:
            dist.all_reduce(total, group=group)
        with torch.cuda.stream(side):
            work = comm.isend(large, 1) if world.rank == 0 else comm.irecv(large, 0)
        if world.rank == 0:
            dist.all_reduce(total, group=group)
        work.synchronize()
        torch.cuda.synchronize()
    assert not large.any() and total[0].item() == 2.0**6


def end_right_after_a_small_message(world) -> bool | None:
    comm, numbers = nccl_comm(world), pattern(1000, torch.uint8, 0)
    if world.rank == 0:
        comm.isend(numbers.cuda(), 1).synchronize()
        comm.close()
        os._exit(0)
    time.sleep(15)  # as a stage that computes
    received = poison(1000, torch.uint8).cuda()
    comm.irecv(received, 0).synchronize()
    return torch.equal(received.cpu(), numbers)


def test_a_message_outlives_its_sender(ranks):
    """Which had ended before its receiver asked for it."""
    with ranks.disposable(2, end_right_after_a_small_message) as world:
        outcome = world.collect(deadline=DEADLINE_S)[1]
    assert outcome.value is True, str(outcome)
