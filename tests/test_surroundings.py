"""The environment of ranks: signals in every call, another user, a network of small packets, and clocks that
jump.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hosts import INTERFACE
from patterns import assert_same, pattern, poison
from ranks import assert_within, on_ranks
from scripts import REPOSITORY
from tools import compile_library, needs

from pipecomm_ext import Communicator, PipeCommTimeout, Recv, Send

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
    """Every system call of the main thread is interrupted at some time; the signal handler runs Python."""
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
    """They share no memory, since one could not open that of the other, and use TCP."""
    host_pool.run(4, exchange_as_two_users)


def exchange_as_two_users(world) -> None:
    """Ranks 0 and 1 are on one host, 2 and 3 on another."""
    world.fresh_comm().barrier()  # imports files that the other user may not be able to read
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
    """As in some tunnels; and packets of 9000 bytes at one end only."""
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


TRANSPORTS = ("tcp", "shm")
CLOCK_TIMEOUT_S, CLOCK_LATE_S = 1.0, 1.0
A_DAY_S = 86_400


@pytest.mark.slow
def test_clocks_that_jump(tmp_path):
    """By a day, back and forth, 50 times a second: in all that two ranks do, waits end when they should."""
    library = compile_library(Path(__file__).with_name("jumping_clock.cpp"))
    store = str(tmp_path / "store")
    program = f"import test_surroundings; test_surroundings.play_while_clocks_jump({store!r})"
    subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parent,
        env={**os.environ, "LD_PRELOAD": str(library), "GLOO_SOCKET_IFNAME": "lo"},
        check=True,
        timeout=200,
    )


def play_while_clocks_jump(store: str) -> None:
    """A program of two ranks."""
    child = os.fork()
    rank = int(child == 0)
    try:
        dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=2)
        seen = []
        for _ in range(20):
            seen.append(time.time())
            time.sleep(0.01)
        assert max(seen) - min(seen) > A_DAY_S
        for transport in TRANSPORTS:
            with Communicator(device="cpu", transport=transport, timeout=CLOCK_TIMEOUT_S) as comm:
                for key in range(30):
                    exchange_all(comm, 40_000 if key % 2 else 5, key)
                began_at = time.monotonic()
                with pytest.raises(PipeCommTimeout):
                    comm.recv(torch.zeros(3), 1 - rank)
                took_s = time.monotonic() - began_at
                assert took_s > 0.9 * CLOCK_TIMEOUT_S
                assert_within(CLOCK_TIMEOUT_S + CLOCK_LATE_S, took_s)
            dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        if rank == 1:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os.kill(child, signal.SIGKILL)
        raise
    if rank == 1:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def test_no_wait_looks_at_the_time_of_day() -> None:
    """Clocks may jump: deadlines use the monotonic clock, and the time of day is only for records."""
    for_records = {"csrc/bindings/flight.cpp", "runtime/recorder.py", "core/flight.py"}
    wall_clock = re.compile(r"system_clock|gettimeofday|CLOCK_REALTIME|\btime\.time\(")
    paths = [path for folder in ("csrc", "python") for path in (REPOSITORY / folder).rglob("*.*")]
    found = {
        str(path.relative_to(REPOSITORY))
        for path in paths
        if path.suffix in (".py", ".h", ".cpp", ".cu") and wall_clock.search(path.read_text(encoding="utf-8"))
    }
    assert {name.removeprefix("python/pipecomm_ext/") for name in found} == for_records
