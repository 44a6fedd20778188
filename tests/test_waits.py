"""Waits that a timeout or an exception of a signal handler ends: the operation stays in flight."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from test_backend import both, group_of
from test_gone import interrupted_soon

from pipecomm_ext import PipeCommMismatch, PipeCommTimeout
from pipecomm_ext.communicator.continuation import Continuation, Line

TRANSPORTS = pytest.mark.parametrize("transport", ["tcp", "shm"])
MOMENT = timedelta(microseconds=1)
LIMIT_S = 30.0
NUMEL = 100_000  # a reduction takes two exchanges


def ones_of(rank: int) -> torch.Tensor:
    return torch.full((NUMEL,), 1.0 + rank)


# Asynchronous calls of 2 ranks: each returns a handle, the result, and the value of all its elements.


def summed(comm):
    tensor = ones_of(comm.rank)
    return comm.all_reduce(tensor, async_op=True), tensor, 3


def scattered(comm):
    piece = torch.zeros(NUMEL)
    return comm.reduce_scatter(piece, ones_of(comm.rank).repeat(2), async_op=True), piece, 3


def gathered(comm):
    columns = torch.zeros(NUMEL, 2).t()
    return comm.all_gather(columns, torch.full((NUMEL,), 3.0), async_op=True), columns, 3


def summed_in_group(group):
    tensor = ones_of(group.rank())
    return dist.all_reduce(tensor, group=group, async_op=True), tensor, 3


def summed_sparsely(group):
    tensor = ones_of(group.rank()).to_sparse()
    return dist.all_reduce(tensor, group=group, async_op=True), tensor, 3


def scattered_together(group):
    pieces = [torch.zeros(NUMEL) for _ in range(2)]
    with dist.distributed_c10d._coalescing_manager(group, async_ops=True) as manager:
        for piece in pieces:
            dist.reduce_scatter_single(piece, ones_of(group.rank()).repeat(2), group=group)
    return manager.works[0], pieces[1], 3


def told_by_any(group):
    if group.rank() == 1:
        return dist.isend(tensor := torch.full((NUMEL,), 3.0), 0, group), tensor, 3
    return dist.irecv(tensor := torch.zeros(NUMEL), group=group), tensor, 3


CALLS = pytest.mark.parametrize("call", [summed, scattered, gathered])
CALLS_OF_GROUPS = pytest.mark.parametrize(
    "call", [summed_in_group, summed_sparsely, scattered_together, told_by_any]
)


def within(is_so) -> None:
    until = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.001)


def has_value(result: torch.Tensor, value: float) -> bool:
    return bool((result.to_dense() == value).all())


def wait_for_moments(world, call, of) -> None:
    """Rank 0 waits again and again, before and while rank 1 takes part."""
    for _ in range(5):
        if world.rank == 1:
            world.meet()
        work, result, value = call(of)
        if world.rank == 0:
            with pytest.raises(PipeCommTimeout):
                work.wait(MOMENT)
            world.meet()
        while True:
            try:
                work.wait(MOMENT)
                break
            except PipeCommTimeout:
                time.sleep(0.0001)
        assert has_value(result, value)


@on_ranks(2)
@TRANSPORTS
@CALLS
def test_waits_that_time_out(world, transport, call):
    wait_for_moments(world, call, world.shared_comm(transport=transport))


@both(2)
@CALLS_OF_GROUPS
def test_waits_of_groups_that_time_out(world, call):
    wait_for_moments(world, call, group_of(2))


def interrupt_a_wait(world, call, of) -> None:
    """Rank 0's wait is interrupted before rank 1 takes part; it ends without another wait on rank 0."""
    if world.rank == 1:
        world.meet()
    work, result, value = call(of)
    if world.rank == 0:
        with interrupted_soon():
            work.wait()
        world.meet()
    else:
        work.wait()
    world.meet()
    work.wait()
    assert has_value(result, value)
    work, result, value = call(of)
    work.wait()
    assert has_value(result, value)


@on_ranks(2)
@TRANSPORTS
@CALLS
def test_a_wait_that_a_signal_interrupts(world, transport, call):
    interrupt_a_wait(world, call, world.shared_comm(transport=transport))


@both(2)
@CALLS_OF_GROUPS
def test_a_wait_of_a_group_that_a_signal_interrupts(world, call):
    interrupt_a_wait(world, call, group_of(2))


@both(2)
def test_a_sparse_reduction_that_a_signal_interrupts(world):
    """The rank takes no part in its second exchange, and the other rank is informed; the next call works."""
    group = group_of(2)
    dist.barrier(group)  # connects the ranks
    tensor = ones_of(world.rank).to_sparse()
    if world.rank == 0:
        with interrupted_soon():
            dist.all_reduce(tensor, group=group)
        world.meet()
    else:
        world.meet()
        with pytest.raises(PipeCommMismatch, match="refused by rank 0: Interrupted"):
            dist.all_reduce(tensor, group=group)
    work, result, value = summed_sparsely(group)
    work.wait()
    assert has_value(result, value)


def reduce_twice(world, group, first, second, later_s: float = 0.0):
    """A signal interrupts the second call of rank 0, which waits for rank 1 until then; returns the first."""
    if world.rank == 1:
        world.meet()
        time.sleep(later_s)
    work = dist.all_reduce(first, group=group, async_op=True)
    if world.rank == 0:
        with interrupted_soon():
            dist.all_reduce(second, group=group)
        world.meet()
    else:
        dist.all_reduce(second, group=group)
    return work


@pytest.mark.parametrize("is_sparse", [False, True], ids=["dense", "sparse"])
@both(2)
def test_a_signal_interrupts_a_reduction_that_follows_another_one(world, is_sparse):
    """It stays in flight as the first one does: both ranks get the sums of both."""
    group = group_of(2)
    dist.barrier(group)
    first, second = (times * ones_of(world.rank) for times in (1, 10))
    if is_sparse:
        first, second = first.to_sparse(), second.to_sparse()
    reduce_twice(world, group, first, second).wait()
    last, result, value = summed_in_group(group)
    last.wait()
    dist.barrier(group)
    assert has_value(first, 3) and has_value(result, value)
    within(lambda: has_value(second, 30))


@both(2)
def test_a_shutdown_posts_the_rest_of_what_a_signal_has_interrupted(world):
    group = dist.new_group([0, 1], backend="pipecomm", timeout=timedelta(seconds=LIMIT_S))
    dist.barrier(group)
    first, second = ones_of(world.rank), 10 * ones_of(world.rank)
    work = reduce_twice(world, group, first, second, later_s=0.1)  # rank 0 closes meanwhile
    dist.destroy_process_group(group)
    work.wait()
    assert has_value(first, 3) and has_value(second, 30)


class Exchange:
    """Ends once a wait for it has timed out."""

    number = 0

    def __init__(self, is_done: bool) -> None:
        self.is_done = is_done

    def wait(self, timeout: float | None = None) -> None:
        assert timeout is None or timeout > 0
        if not self.is_done:
            assert timeout is not None
            self.is_done = True
            raise PipeCommTimeout("not yet")

    def is_completed(self) -> bool:
        return self.is_done


def test_a_deadline_that_passes_during_a_step_or_as_an_exchange_ends():
    ended = []

    def steps():
        yield Exchange(is_done=True)
        time.sleep(0.02)
        yield Exchange(is_done=False)
        ended.append(True)

    handle = Continuation(steps())
    handle.wait(0.01)
    assert ended


def test_a_wait_that_times_out_names_what_it_waits_for_though_that_ends_then():
    class Slow(Exchange):
        num_waits = 0

        def wait(self, timeout: float | None = None) -> None:
            self.num_waits += 1
            if self.num_waits == 1:
                raise PipeCommTimeout(f"a swap is not done after {timeout} s of wait()", op="swap")

    slow = Slow(is_done=False)
    with pytest.raises(PipeCommTimeout, match=r"a swap is not done after 0.01 s of wait\(\)") as caught:
        Continuation(iter([slow])).wait(0.01)
    assert caught.value.op == "swap" and slow.num_waits == 1


def test_operations_after_one_that_failed_follow_those_before_it():
    line, posted = Line(0), []

    class Failing(Exchange):
        def wait(self, timeout: float | None = None) -> None:
            raise PipeCommMismatch("other shapes")

    def begun(name: str, exchange: Exchange) -> Continuation:
        def steps():
            yield exchange
            posted.append(name)
            yield Exchange(is_done=True)

        return Continuation(steps(), line)

    waiting = Exchange(is_done=False)
    first, failed = begun("first", waiting), begun("failed", Failing(is_done=True))
    with pytest.raises(PipeCommMismatch):
        failed.wait()
    assert not line.has_posted_all()
    last = begun("last", Exchange(is_done=True))
    waiting.is_done = True
    last.wait()
    assert posted == ["first", "last"] and line.has_posted_all()
    first.wait()
