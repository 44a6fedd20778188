"""What else happens around ranks: signals in every call, another user, a network of small packets."""

from __future__ import annotations

import os
import re
import signal
import subprocess

import pytest
import torch
from hosts import INTERFACE
from patterns import assert_same, pattern, poison
from ranks import on_ranks
from scripts import REPOSITORY
from tools import needs

from pipecomm_ext import Recv, Send

NOBODY = 65534


def exchange_all(comm, length: int, key: int) -> None:
    """A message between every two ranks, a broadcast and a barrier; all values are checked."""
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    received = {rank: poison(length, torch.float32) for rank in others}
    sends = [Send(pattern(length, torch.float32, key, comm.rank, rank), rank) for rank in others]
    comm.batch_p2p(sends + [Recv(received[rank], rank) for rank in others])
    for rank in others:
        assert_same(received[rank], pattern(length, torch.float32, key, rank, comm.rank))
    shared = pattern(length, torch.float32, key) if comm.rank == 0 else poison(length, torch.float32)
    comm.broadcast(shared, 0)
    assert_same(shared, pattern(length, torch.float32, key))
    comm.barrier()


@on_ranks(11)
@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_a_storm_of_signals(world, transport):
    """Every system call of the main thread is interrupted at some time; its handler runs Python."""
    num_signals = 0

    def handler(*_) -> None:
        nonlocal num_signals
        num_signals += 1

    old = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        comm = world.fresh_comm(transport=transport)
        for key in range(4):
            exchange_all(comm, 40_000 if key % 2 else 5, key)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    assert num_signals > 10


def test_ranks_of_two_users(host_pool):
    """They share no memory, since one could not open that of the other, and talk over TCP."""
    host_pool.run(4, exchange_as_two_users)


def exchange_as_two_users(world) -> None:
    """Ranks 0 and 1 are on one host, 2 and 3 on another."""
    world.fresh_comm().barrier()  # imports what the other user may not be able to read
    if world.rank == 1:
        os.seteuid(NOBODY)
    try:
        comm = world.fresh_comm(transport="auto")
        exchange_all(comm, 40_000, 1)
        routes = {peer: comm.route(peer) for peer in range(4) if peer != world.rank}
        for peer, (transport, _) in routes.items():
            assert transport == ("shm" if {peer, world.rank} == {2, 3} else "tcp"), routes
        assert world.rank > 1 or "user" in routes[1 - world.rank][1], routes
        comm.close()
    finally:
        if world.rank == 1:
            os.seteuid(0)


def test_packets_of_576_bytes(host_pool):
    """As some tunnels have; and of 9000 bytes at one end only."""
    [ip] = needs("ip")
    host_pool.run(4, exchange_with_mtu, ip)


def exchange_with_mtu(world, ip: str) -> None:
    is_first_of_host = world.rank % 2 == 0
    for sizes in ((576, 576), (9000, 1500)):
        if is_first_of_host:
            subprocess.run([ip, "link", "set", INTERFACE, "mtu", str(sizes[world.rank // 2])], check=True)
        world.meet()
        comm = world.fresh_comm(transport="tcp")
        exchange_all(comm, 5, 1)
        exchange_all(comm, 1 << 18, 2)
        world.meet()
    if is_first_of_host:
        subprocess.run([ip, "link", "set", INTERFACE, "mtu", "1500"], check=True)


def test_no_wait_looks_at_the_time_of_day() -> None:
    """Clocks may jump: deadlines are of the monotonic clock, and the time of day is for records alone."""
    for_records = {"csrc/bindings/flight.cpp", "runtime/recorder.py", "core/flight.py"}
    wall_clock = re.compile(r"system_clock|gettimeofday|CLOCK_REALTIME|\btime\.time\(")
    paths = [path for folder in ("csrc", "python") for path in (REPOSITORY / folder).rglob("*.*")]
    found = {
        str(path.relative_to(REPOSITORY))
        for path in paths
        if path.suffix in (".py", ".h", ".cpp", ".cu") and wall_clock.search(path.read_text(encoding="utf-8"))
    }
    assert {name.removeprefix("python/pipecomm_ext/") for name in found} == for_records
