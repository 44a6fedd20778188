"""Broadcast, barrier, and the life of communicators: groups, independence, timeouts, no leaks."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import re
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from patterns import assert_same, pattern, poison
from ranks import on_ranks

from pipecomm_ext import Communicator, Recv, Send, get_communicator


@on_ranks(1, 2, 3, 4)
def test_broadcast_from_every_rank(world):
    dtypes = [torch.float32, torch.bool, torch.float8_e5m2, torch.complex128]
    for source, numel, dtype in itertools.product(range(world.size), (0, 1, 17, 100_003), dtypes):
        expected = pattern(numel, dtype, "broadcast", source)
        tensor = expected.clone() if world.rank == source else poison(numel, dtype)
        assert world.comm.broadcast(tensor, source) is None
        assert_same(tensor, expected, f"{numel} {dtype} from rank {source}")


@on_ranks(3)
def test_broadcasts_in_flight_and_into_strided_tensors(world):
    tensors, works = [], []
    for idx in range(6):
        source = idx % world.size
        tensor = poison((4, 6), torch.int64).t()
        if world.rank == source:
            tensor.copy_(pattern((6, 4), torch.int64, idx))
        tensors.append(tensor)
        works.append(world.comm.broadcast(tensor, source, async_op=True))
    for idx, work in reversed(list(enumerate(works))):
        work.wait()
        assert_same(tensors[idx], pattern((6, 4), torch.int64, idx), idx)


@on_ranks(1, 2, 4)
def test_nobody_leaves_a_barrier_before_the_last_has_come(world):
    world.comm.barrier()
    if world.rank == world.size - 1:
        time.sleep(0.2)
    came_at = time.monotonic()
    world.comm.barrier()
    left_at = time.monotonic()
    times = [None] * world.size
    dist.all_gather_object(times, (came_at, left_at), group=world.group)
    assert max(came for came, _ in times) <= min(left for _, left in times)


@on_ranks(2, 3)
def test_a_communicator_tells_what_it_is(world):
    comm = world.fresh_comm()
    assert (comm.rank, comm.size, comm.device) == (world.rank, world.size, torch.device("cpu"))
    assert not comm.closed
    assert comm.transport in ("tcp", "shm") and comm.transport_reason
    assert comm.known_transport == comm.transport and comm.transport_among([0]) == comm.transport
    comm.connect()
    comm.connect([world.size - 1, 0])
    comm.connect([0], channels=())
    comm.connect(channels=[comm.channels - 1])
    comm.connect([0], direction="send")
    comm.connect([0], together=True)
    comm.connect(channels=[0, 1], together=True)
    with pytest.raises(ValueError, match="exchanges have no direction"):
        comm.connect([0], together=True, direction="send")
    with pytest.raises(ValueError, match="'send', 'recv' or None, not 'both'"):
        comm.connect([0], direction="both")
    for channel in (-1, comm.channels):
        with pytest.raises(ValueError, match=rf"channel {channel} is not in 0\.\.{comm.channels - 1}"):
            comm.connect([0], channels=[channel])
    with pytest.raises(TypeError, match="channel must be an int, not str"):
        comm.connect([0], channels=["1"])
    assert comm.nccl_usage == (0, 0)
    for peer in range(world.size):
        way = ("self", "a message to oneself is a copy") if peer == world.rank else None
        kind, reason = comm.route(peer)
        assert (kind, reason) == way if way else (kind == comm.transport and reason), (peer, kind, reason)
    comm.barrier()  # the route to a rank that has closed is not the expected one
    comm.close()
    assert comm.closed
    comm.close()


@on_ranks(1)
def test_facts_of_a_communicator_cannot_be_changed(world):
    with Communicator(timeout=5) as comm:
        for name in ("timeout", "rank", "device", "speed"):
            with pytest.raises(AttributeError, match=f"the {name} of a Communicator cannot be changed"):
                setattr(comm, name, 1)
        assert comm.timeout == 5
    assert comm.closed


@on_ranks(2)
def test_the_default_communicator_is_one_and_comes_again_after_close(world):
    comm = get_communicator()
    assert get_communicator(world.group, "cpu") is comm
    comm.barrier()
    comm.close()
    again = get_communicator()
    assert again is not comm and not again.closed
    again.barrier()


@on_ranks(2)
def test_communicators_of_one_group_are_independent(world):
    """Messages of one never match those of another, whatever the order of use."""
    peer = 1 - world.rank
    comms = [world.fresh_comm() for _ in range(3)]
    order = [0, 1, 2] if world.rank == 0 else [2, 0, 1]
    sends = [comms[idx].isend(pattern(5, torch.int32, world.rank, idx), peer) for idx in order]
    for idx in reversed(order):
        received = poison(5, torch.int32)
        comms[idx].recv(received, peer)
        assert_same(received, pattern(5, torch.int32, peer, idx), idx)
    for send in sends:
        send.wait()


@on_ranks(2)
def test_timeouts_of_every_accepted_form(world):
    for timeout in (None, 5, 2.5, timedelta(seconds=3), float("inf")):
        with Communicator(world.group, timeout=timeout) as comm:
            comm.barrier()


def resources() -> tuple[int, int, int, int]:
    """(file descriptors, threads, mapped segments, resident bytes) of this process."""
    with open("/proc/self/statm", encoding="utf-8") as statm:
        resident = int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    with open("/proc/self/maps", encoding="utf-8") as maps:
        num_maps = sum("memfd:pipecomm" in line for line in maps)
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), num_maps, resident


def wakeups() -> dict[str, int]:
    """How often each thread of this process has gone to sleep."""
    counts = {}
    for path in Path("/proc/self/task").glob("*/status"):
        with contextlib.suppress(OSError):  # it has ended
            counts[path.parent.name] = int(re.search(r"^voluntary.*:\s*(\d+)", path.read_text(), re.M)[1])
    return counts


@on_ranks(2)
@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_an_idle_communicator_hardly_wakes_up(world, transport):
    """Each wake-up takes time from computation, and a process may have dozens of communicators."""
    others = wakeups()
    comm = world.fresh_comm(transport=transport)
    comm.barrier()
    time.sleep(0.5)  # it may get more work at once
    before = wakeups()
    time.sleep(1.0)
    after = wakeups()
    own = before.keys() - others.keys()
    assert own and sum(after[thread] - before[thread] for thread in own) < 12


@on_ranks(2)
@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_100_communicators_leak_nothing(world, transport):
    peer = 1 - world.rank

    def cycle(idx: int) -> None:
        with Communicator(world.group, device="cpu", transport=transport) as comm:
            received = torch.empty(25_000)
            comm.batch_p2p([Send(torch.full((25_000,), float(idx)), peer), Recv(received, peer)])
            comm.isend(torch.zeros(10), peer, channel=1)
            comm.recv(torch.zeros(10), peer, channel=1)
            assert received.eq(idx).all()

    for idx in range(20):
        cycle(idx)
    gc.collect()
    before = resources()
    for idx in range(100):
        cycle(idx)
    gc.collect()
    *counts, resident = resources()
    # Fewer, if what an earlier test has left behind has ended meanwhile.
    is_more = [now > was for now, was in zip(counts, before[:3], strict=True)]
    assert not any(is_more), f"(file descriptors, threads, segments): {before[:3]} -> {counts}"
    assert resident - before[3] < 4 << 20, f"{(resident - before[3]) / 2**20:.1f} MiB more resident memory"
