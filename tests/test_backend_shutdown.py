"""The end of groups of the backend "pipecomm" with calls in flight."""

from __future__ import annotations

import time
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from test_backend import both, ended

from pipecomm_ext import PipeCommError

PATIENCE = mock.patch("pipecomm_ext.backend.endpoint._PATIENCE_S", 0.2)


@both(2, 3)
def test_reductions_in_flight_are_finished(world):
    """Those that nobody waits for, of one exchange and of several, with copies at their end."""
    total = sum(range(1, world.size + 1))
    for _ in range(5):
        group = dist.new_group(list(range(world.size)), backend="pipecomm", timeout=timedelta(seconds=60))
        tensors = [torch.ones(10), torch.ones(300_000), torch.ones(100, 300).t(), torch.ones(2, 10).t()]
        tensors.append(torch.eye(4).to_sparse())
        for tensor in tensors:
            tensor *= world.rank + 1
        works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
        futures = [work.get_future() for work in works[1:3]]
        dist.destroy_process_group(group)
        for tensor in tensors[:-1]:
            assert (tensor == total).all()
        assert tensors[-1].to_dense().trace() == 4 * total
        for work in works:
            assert work.wait()
        torch.futures.wait_all(futures)


@both(2, 3)
def test_receives_that_nobody_matches_do_not_hold_up_the_end(world):
    """Although the other ranks end the group only afterwards, and continue with it before."""
    everyone = list(range(world.size))
    group = dist.new_group(everyone, backend="pipecomm", timeout=timedelta(seconds=90))
    dist.barrier(group)
    if world.rank == 0:
        works = [
            dist.irecv(torch.zeros(2), 1, group, tag=5),
            dist.irecv(torch.zeros(2, 2).t(), 1, group, tag=20),
        ]
        began = time.monotonic()
        with PATIENCE:
            dist.destroy_process_group(group)
        assert time.monotonic() - began < 45
        for work in works:
            with pytest.raises(PipeCommError):
                work.wait()
    dist.barrier()
    if world.rank == 0:
        return
    if world.size == 3:
        messages = torch.full((2,), float(world.rank)), torch.zeros(2)
        ops = zip((dist.isend, dist.irecv), messages, strict=True)
        for work in [op(message, 3 - world.rank, group) for op, message in ops]:
            ended(work)
        assert messages[1].eq(3 - world.rank).all()
    dist.destroy_process_group(group)


@both(2)
def test_the_end_waits_for_messages_that_are_matched_late(world):
    group = dist.new_group([0, 1], backend="pipecomm", timeout=timedelta(seconds=90))
    dist.barrier(group)
    got = torch.zeros(50_000)
    if world.rank == 0:
        dist.isend(torch.ones(50_000), 1, group)
        dist.irecv(torch.zeros(2), 1, group, tag=5)  # does not cut the send short
    else:
        time.sleep(1.0)
        dist.recv(got, 0, group)
        assert (got == 1).all()
    with PATIENCE:
        dist.destroy_process_group(group)
