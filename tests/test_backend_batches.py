"""Batches of the backend "pipecomm" do not touch other messages, after an error and of other threads."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from patterns import assert_same, pattern, poison
from test_backend import both, ended, group_of


@both(1, 2, 3)
def test_batches(world):
    """Many messages, of any tag and of any strides, with one from any source, and some to the rank itself."""
    group, size, rank = group_of(world.size), world.size, world.rank
    following, previous = (rank + 1) % size, (rank - 1) % size
    received = [poison((3, 2), torch.float32) for _ in range(4)]
    peers = [following, following, following, rank]
    ops = [
        dist.P2POp(dist.isend, pattern((2, 3), torch.float32, rank, idx), peer, group, 40 * idx)
        for idx, peer in enumerate(peers)
    ]
    sources = [previous, previous, previous, rank]
    for idx, peer in enumerate(sources):
        ops.append(dist.P2POp(dist.irecv, received[idx].t(), peer, group, 40 * idx))
    works = dist.batch_isend_irecv(ops)
    assert len(works) == len(ops)
    for work in works:
        ended(work)
    for idx, peer in enumerate(sources):
        assert_same(received[idx].t(), pattern((2, 3), torch.float32, peer, idx))


@both(2)
def test_a_batch_that_raises_does_not_touch_later_messages(world):
    group, peer, rank = group_of(2), 1 - world.rank, world.rank
    wrong = torch.ones(3).to_sparse()
    for call in (dist.isend, dist.irecv):
        with pytest.raises((TypeError, ValueError, RuntimeError)):
            dist.batch_isend_irecv([dist.P2POp(call, wrong, peer, group)])
        got = poison(2, torch.float32)
        if rank == 0:
            work = dist.isend(torch.full((2,), 7.0), peer, group)
        else:
            work = dist.irecv(got, peer, group)
        assert work.wait(timedelta(seconds=30))
        assert rank == 0 or got.tolist() == [7.0, 7.0]
    with pytest.raises(KeyError), dist.distributed_c10d._coalescing_manager(group):
        raise KeyError
    dist.barrier(group)


def in_threads(*bodies) -> None:
    errors: list[BaseException] = []

    def run(body) -> None:
        try:
            body()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors


@both(2)
def test_threads_make_batches_beside_each_other_and_beside_other_calls(world):
    group, peer, rank = group_of(2), 1 - world.rank, world.rank

    def batches(tag: int) -> None:
        for idx in range(50):
            got = torch.empty(4)
            ops = [
                dist.P2POp(dist.isend, torch.full((4,), float(tag * 1000 + idx)), peer, group, tag),
                dist.P2POp(dist.irecv, got, peer, group, tag),
            ]
            for work in dist.batch_isend_irecv(ops):
                work.wait()
            assert got.tolist() == [tag * 1000 + idx] * 4

    def messages(tag: int) -> None:
        for idx in range(50):
            got = torch.full((2,), float(idx))
            if rank == 0:
                dist.send(got, peer, group, tag)
            else:
                dist.recv(got.zero_(), peer, group, tag)
            assert got.tolist() == [idx] * 2

    def collectives() -> None:
        for _ in range(50):
            dist.all_reduce(total := torch.ones(3), group=group)
            assert total.tolist() == [2.0] * 3

    in_threads(lambda: batches(1), lambda: batches(2), lambda: messages(3), collectives)
