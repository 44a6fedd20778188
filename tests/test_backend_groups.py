"""Groups of the backend "pipecomm": parts of others, their unions, and their end."""

from __future__ import annotations

import gc
import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from test_backend import both


@both(3)
def test_subgroups_and_their_end(world):
    members = [0, 2]
    group = dist.new_group(members, backend="cpu:pipecomm,cuda:pipecomm")
    if world.rank in members:
        tensor = torch.full((2,), float(world.rank))
        dist.broadcast(tensor, 2, group)
        assert tensor.tolist() == [2.0, 2.0] and dist.get_backend(group) in (
            "pipecomm",
            "cpu:pipecomm,cuda:pipecomm",
        )
        assert group._get_sequence_number_for_group() == 1
        dist.destroy_process_group(group)
        group.shutdown()
        group.abort()
        with pytest.raises(RuntimeError):
            group.allreduce([tensor]).wait()
    mixed = dist.new_group(backend="cpu:pipecomm,cuda:gloo")
    tensor = torch.ones(2)
    dist.all_reduce(tensor, group=mixed)
    assert tensor.tolist() == [3.0, 3.0] and len(mixed._device_types) == 2


@pytest.mark.parametrize("debug", ["OFF", "DETAIL"])
@both(4)
def test_groups_are_split_and_merged(world, debug):
    """Through the methods that `dist.split_group` calls, which itself needs an accelerator."""
    limit = timedelta(seconds=50)
    before = dist.get_debug_level()
    dist.set_debug_level(getattr(dist.DebugLevel, debug))
    try:
        group = dist.new_group(range(world.size), backend="pipecomm", timeout=limit)
        mine = [rank for rank in range(world.size) if rank % 2 == world.rank % 2]
        part = group.split_group(mine, timeout=limit, group_desc="every other rank")
        tensor = torch.tensor([float(world.rank)])
        part.allreduce([tensor]).wait()
        assert (part.size(), mine[part.rank()], tensor.item()) == (2, world.rank, sum(mine))
        assert (group.split_group([1, 3], timeout=limit) is None) == (world.rank in (0, 2))
        mixed = dist.new_group(range(world.size), backend="cpu:pipecomm,cuda:gloo", timeout=limit)
        if world.rank not in mine[:1]:
            with pytest.raises(ValueError, match=f"rank {world.rank} splits a group for ranks"):
                mixed.split_group(mine[:1], timeout=limit)

        store = dist.PrefixStore(f"merging {group.group_name}", dist.distributed_c10d._get_default_store())
        whole = part.merge_remote_group(store, world.size, timeout=limit, group_name="whole")
        tensors = [torch.zeros(1) for _ in range(world.size)]
        whole.allgather([tensors], [torch.tensor([float(world.rank)])]).wait()
        assert sorted(map(torch.Tensor.item, tensors)) == list(range(world.size))
        assert tensors[whole.rank()].item() == world.rank
    finally:
        dist.set_debug_level(before)


def in_use() -> tuple[int, int]:
    """Threads and descriptors: fewer later, if what an earlier test has left ends meanwhile."""
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def is_more(now: tuple[int, int], before: tuple[int, int]) -> bool:
    return any(a > b for a, b in zip(now, before, strict=True))


@both(2)
def test_groups_that_have_ended_leave_no_thread_and_no_descriptor(world):
    counts = []
    gc.collect()
    gc.disable()  # they end with their last reference
    for _ in range(6):
        group = dist.new_group([0, 1], backend="pipecomm")
        numbers = torch.ones(4)
        dist.all_reduce(numbers, group=group)
        dist.all_reduce(numbers, group=group, async_op=True).wait()
        send = dist.isend(numbers, 1 - world.rank, group)
        dist.recv(torch.zeros(4), group=group)
        send.wait()
        dist.barrier(group)
        dist.destroy_process_group(group)
        del group, send
        until = time.monotonic() + 20
        while counts and is_more(in_use(), counts[0]) and time.monotonic() < until:
            time.sleep(0.01)
        counts.append(in_use())
    gc.enable()
    dist.barrier()
    assert not is_more(counts[-1], counts[0]), counts


@both(4)
def test_a_group_that_is_not_used_starts_no_thread(world):
    before = in_use()
    group = dist.new_group(range(world.size), backend="pipecomm")
    assert not is_more(in_use(), before)
    dist.destroy_process_group(group)
