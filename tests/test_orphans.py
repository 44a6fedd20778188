"""A dead rank is detected even if its children hold its connections; a failed construction names the rank."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import stat
import subprocess
import sys
import time

import pytest
import torch
from ranks import assert_within, on_ranks

from pipecomm_ext import Communicator, PipeCommError, PipeCommMismatch, PipeCommPeerLost

TRANSPORTS = pytest.mark.parametrize("transport", ["tcp", "shm"])
CHILD_S = 100  # how long a child lives unless it is killed: longer than the communicator's timeout


def forked() -> int:
    if (pid := os.fork()) == 0:
        time.sleep(CHILD_S)
        os._exit(0)
    return pid


def executed() -> int:
    """Starts a program that inherits every inheritable descriptor."""
    return subprocess.Popen(
        [sys.executable, "-c", f"import time; time.sleep({CHILD_S})"], close_fds=False
    ).pid


CHILDREN = {"forked": forked, "executed": executed}


def die_before_a_child(world, transport, kind, dies_in_order):
    comm = Communicator(world.group, device="cpu", transport=transport, timeout=30)
    comm.barrier()  # a child holds the connections that are there when it is made
    if world.rank == 1:
        child = CHILDREN[kind]()
        comm.send(torch.tensor([child]), 0)
        if dies_in_order:
            comm.isend(torch.full((1 << 16,), 7), 0).wait()
            comm.close()
        os.kill(os.getpid(), signal.SIGKILL)
    child = torch.zeros(1, dtype=torch.int64)
    comm.recv(child, 1)
    try:
        if dies_in_order:
            last = torch.zeros(1 << 16, dtype=torch.int64)
            comm.recv(last, 1)
            assert (last == 7).all()
        with pytest.raises(
            PipeCommPeerLost, match="has closed" if dies_in_order else "rank 1, which died"
        ) as caught:
            comm.recv(torch.zeros(3), 1)
        assert caught.value.origin_rank == 1
        comm.close()
    finally:
        os.kill(int(child), signal.SIGKILL)


@TRANSPORTS
@pytest.mark.parametrize("kind", CHILDREN)
def test_a_death_is_noticed_although_a_child_lives(ranks, transport, kind):
    with ranks.disposable(2, die_before_a_child, transport, kind, False) as world:
        outcome = world.collect()[0]
        assert outcome.status == "returned", outcome


def die_beside_an_idle_rank(world, transport):
    comm = Communicator(world.group, device="cpu", transport=transport, timeout=30)
    comm.barrier()  # a child holds the connections that are there when it is made
    if world.rank == 1:
        dies_at = time.monotonic() + 1.0  # by then the communicators are idle
        comm.send(torch.tensor([forked(), dies_at], dtype=torch.float64), 0)
        time.sleep(dies_at - time.monotonic())
        os.kill(os.getpid(), signal.SIGKILL)
    facts = torch.zeros(2, dtype=torch.float64)
    comm.recv(facts, 1)
    child, dies_at = int(facts[0]), float(facts[1])
    try:
        while not comm.failure:
            time.sleep(0.005)
        assert_within(1.0, time.monotonic() - dies_at, "a death that no operation waits for")
        with pytest.raises(PipeCommPeerLost, match="rank 1, which died"):
            comm.recv(facts, 1)
        comm.close()
    finally:
        os.kill(child, signal.SIGKILL)


@TRANSPORTS
def test_an_idle_rank_notices_a_death_although_a_child_lives(ranks, transport):
    with ranks.disposable(2, die_beside_an_idle_rank, transport) as world:
        outcome = world.collect()[0]
        assert outcome.status == "returned", outcome


@TRANSPORTS
def test_last_messages_of_a_rank_whose_child_lives(ranks, transport):
    with ranks.disposable(2, die_before_a_child, transport, "forked", True) as world:
        outcome = world.collect()[0]
        assert outcome.status == "returned", outcome


@on_ranks(2)
def test_programs_do_not_inherit_connections(world):
    before = inherited_sockets()
    comm = world.fresh_comm(transport="tcp")
    comm.barrier()
    assert inherited_sockets() == before


def inherited_sockets():
    """The sockets that a program started by this process would inherit."""
    sockets = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            if os.get_inheritable(int(name)) and stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                sockets.add(int(name))
    return sockets


# ---- constructions that fail -------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_that_cannot_connect_says_so_and_the_others_hear_it(ranks, size):
    with ranks.disposable(size, make_without_descriptors) as world:
        outcomes = world.collect()
        assert all(outcome.status == "returned" for outcome in outcomes), "\n".join(map(str, outcomes))


def make_without_descriptors(world):
    """Rank 1 has no descriptors left."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    world.meet()
    if world.rank == 1:
        with open(os.devnull, encoding="utf-8") as next_free:
            few = next_free.fileno() + 2  # the store needs one
        resource.setrlimit(resource.RLIMIT_NOFILE, (few, limits[1]))
        try:
            with pytest.raises(PipeCommError, match="rank 1: .*Too many open files") as caught:
                Communicator(world.group, device="cpu", transport="tcp", timeout=30)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert not isinstance(caught.value, PipeCommMismatch)
    else:
        with pytest.raises(PipeCommMismatch, match="refused by rank 1: .*Too many open files"):
            Communicator(world.group, device="cpu", transport="tcp", timeout=30).barrier()
    world.meet()
    with Communicator(world.group, device="cpu", transport="tcp", timeout=30) as comm:
        comm.barrier()
