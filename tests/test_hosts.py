"""Two hosts on one machine: routes, killed ranks and hosts, cut links, addresses, torchrun; see hosts.py.

Each operation, and each fault in the middle of it, over hosts: reliability/test_over_hosts.py.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from hosts import MASTER_PORT, HostGroup, HostPlan, HostPool, address
from patterns import assert_same, pattern, poison
from ranks import Outcome, RankFailure
from relay_cases import Traffic, same_bytes, topology_of
from scripts import REPOSITORY

from pipecomm_ext import (
    Communicator,
    PipeCommError,
    PipeCommPeerLost,
    PipeCommTimeout,
    Recv,
    Send,
    StageRelay,
)

pytestmark = pytest.mark.timed

# What "auto" makes of a communicator over several hosts: as a whole, inside a host, and between two.
WHOLE, INSIDE, BETWEEN = "mixed", "shm", "c10d"

HOST_OF = (0, 0, 1, 1)
NUM_RANKS = len(HOST_OF)
VICTIM = 3
LOST_S = 2.0  # until all know of a dead rank
TIMEOUT_S = 1.0  # of communicators whose peers fall silent
AFTER_TIMEOUT_S = 1.0
LARGE = 1 << 24  # elements of a message of 64 MiB


# ---- what works --------------------------------------------------------------------------------------------


def test_each_pair_has_a_route(host_pool):
    for rank, (pid, transport, routes) in enumerate(host_pool.run(NUM_RANKS, routes_of, deadline=20)):
        print(f"rank {rank}: {transport}, {routes}")
        assert pid < 100  # of a namespace of its own
        assert transport == WHOLE
        for peer, (kind, reason) in routes.items():
            assert kind == (INSIDE if HOST_OF[peer] == HOST_OF[rank] else BETWEEN), (rank, peer, reason)
            if kind == "c10d":
                assert "different PID namespaces" in reason or "different hosts" in reason, reason


def routes_of(world):
    comm = world.comm
    comm.barrier()
    peers = [rank for rank in range(world.size) if rank != world.rank]
    return os.getpid(), comm.transport, {peer: comm.route(peer) for peer in peers}


def test_ranks_of_one_host_share_memory(host_pool):
    assert host_pool.run(NUM_RANKS, shares_memory, deadline=20) == ["shm"] * NUM_RANKS


def shares_memory(world) -> str:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    with Communicator(groups[HOST_OF[world.rank]], device="cpu", transport="shm") as comm:
        received = poison((1000,), torch.float32)
        sent = pattern((1000,), torch.float32, world.rank)
        comm.batch_p2p([Send(sent, 1 - comm.rank), Recv(received, 1 - comm.rank)])
        assert_same(received, pattern((1000,), torch.float32, world.rank ^ 1))
        return comm.transport


def test_shared_memory_between_hosts_is_refused(host_pool):
    outcomes = host_pool.attempt(NUM_RANKS, asks_for_shared_memory, deadline=20)
    for outcome in outcomes:
        assert outcome.status == "raised", str(outcome)
        assert re.search(r"ranks \d and \d are (in different PID namespaces|on different hosts)",
                         outcome.error.text), outcome  # fmt: skip


def asks_for_shared_memory(world) -> None:
    comm = Communicator(world.group, device="cpu", transport="shm", timeout=5)
    try:
        comm.barrier()
    finally:
        comm.close()


@pytest.mark.parametrize("algorithm", ["sharded", "direct", "auto"])
@pytest.mark.parametrize("layout", ["replicated", ("sharded", 0)], ids=str)
def test_a_relay_between_stages_that_are_hosts(host_pool, algorithm, layout):
    host_pool.run(NUM_RANKS, relays, algorithm, layout, deadline=30)


def relays(world, algorithm: str, layout) -> None:
    topology = topology_of(world, [2, 2])
    comm = world.shared_comm(channels=6, timeout=20)
    relay = StageRelay(topology, algorithm=algorithm, layout=layout, grad_reduce="mean", communicator=comm)
    for step, shape in enumerate([(7, 3), (64, 1000)]):
        traffic = Traffic(topology, [layout, layout], "mean", shape, torch.float32, step)
        sends = [relay.send_forward(traffic.sent_forward(), async_op=True)]
        activation = relay.recv_forward(shape, torch.float32)
        sends.append(relay.send_backward(traffic.sent_backward(), async_op=True))
        gradient = relay.recv_backward(shape, torch.float32)
        for work in sends:
            work.wait(20)
        assert same_bytes(activation, traffic.received_forward())
        assert same_bytes(gradient, traffic.received_backward())


def test_large_messages_over_a_slow_link(host_pool):
    with host_pool.disposable(NUM_RANKS, exchanges_once, LARGE // 4) as world:
        world.limit_rate(0, "1gbit")
        world.limit_rate(1, "1gbit")
        outcomes = world.collect(deadline=30)
    assert [outcome.status for outcome in outcomes] == ["returned"] * NUM_RANKS, RankFailure("", outcomes)


def exchanges_once(world, numel: int) -> None:
    comm = world.fresh_comm(timeout=20)
    ring_exchange(comm, numel)()


def ring_exchange(comm: Communicator, numel: int) -> Callable[[], None]:
    """From each rank to the next one, and checked."""
    following, previous = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    sent, expected = (torch.arange(numel, dtype=torch.int32) + rank for rank in (comm.rank, previous))
    received = torch.empty_like(sent)

    def run() -> None:
        received.zero_()
        comm.batch_p2p([Send(sent, following), Recv(received, previous)])
        assert torch.equal(received, expected)

    return run


# ---- what breaks -------------------------------------------------------------------------------------------


@dataclass
class Ending:
    """The error of a rank; times are CLOCK_MONOTONIC."""

    kind: type
    text: str
    origin: int | None
    ended_at: float
    close_s: float


def works_until_it_fails(world, work: str, timeout_s: float) -> Ending:
    comm = Communicator(world.group, device="cpu", timeout=timeout_s)
    run = {
        "large messages": ring_exchange(comm, LARGE) if work == "large messages" else None,
        "small messages": ring_exchange(comm, 100),
        "barriers": comm.barrier,
    }[work]
    run()
    world.mark("running")
    try:
        while True:
            run()
    except PipeCommError as error:
        ended_at = time.monotonic()
        text, origin, kind = str(error), error.origin_rank, type(error)
    comm.close()
    world.mark("ended")
    return Ending(kind, text, origin, ended_at, time.monotonic() - ended_at)


WORKS = ["large messages", "small messages", "barriers"]


def endings_of(
    pool: HostPool, work: str, timeout_s: float, strike: Callable[[HostGroup], float], survivors: list[int]
) -> tuple[float, list[Ending]]:
    """When it was struck, and how the survivors ended."""
    with pool.disposable(NUM_RANKS, works_until_it_fails, work, timeout_s) as world:
        for rank in range(NUM_RANKS):
            world.await_mark(rank, "running", 20)
        time.sleep(0.1)
        struck_at = strike(world)
        for rank in survivors:
            world.await_mark(rank, "ended", timeout_s + 8)
        outcomes: list[Outcome] = world.collect(deadline=0.5)  # a stopped rank needs no longer
    for rank in survivors:
        if outcomes[rank].status != "returned":
            raise RankFailure(f"rank {rank}", outcomes)
    endings = [outcomes[rank].value for rank in survivors]
    for rank, ending in zip(survivors, endings, strict=True):
        print(
            f"rank {rank}: {ending.kind.__name__} of rank {ending.origin} after "
            f"{ending.ended_at - struck_at:.2f} s, close() {ending.close_s:.2f} s: {ending.text}"
        )
        assert ending.close_s < 3.0, ending
    return struck_at, endings


@pytest.mark.parametrize("work", WORKS)
def test_a_killed_rank_is_known_on_both_hosts(host_pool, work):
    struck_at, endings = endings_of(
        host_pool, work, 20.0, lambda world: world.signal(VICTIM, signal.SIGKILL), [0, 1, 2]
    )
    for ending in endings:
        assert ending.kind is PipeCommPeerLost and ending.origin == VICTIM, ending
        assert f"rank {VICTIM}" in ending.text
        assert ending.ended_at - struck_at < LOST_S, ending


@pytest.mark.parametrize("work", WORKS)
def test_a_host_of_which_all_processes_are_killed_is_known(host_pool, work):
    struck_at, endings = endings_of(host_pool, work, 20.0, lambda world: world.kill_host(1), [0, 1])
    for ending in endings:
        assert ending.kind is PipeCommPeerLost and ending.origin in (2, 3), ending
        assert ending.ended_at - struck_at < LOST_S, ending


def check_silence(struck_at: float, endings: list[Ending], silent: Callable[[int], set[int]]) -> None:
    """All end by their timeout and name whom they waited for; that may be a rank that waits itself."""
    named = []
    for rank, ending in enumerate(endings):
        assert ending.kind is PipeCommTimeout, ending
        assert ending.ended_at - struck_at < TIMEOUT_S + AFTER_TIMEOUT_S, ending
        named.append({int(number) for number in re.findall(r"ranks? (\d)", ending.text)} - {rank})
        assert named[rank], ending
    assert any(named[rank] & silent(rank) for rank in range(len(endings))), endings


def kill_host_and_link(world: HostGroup) -> float:
    struck_at = world.cut_link(1)
    world.kill_host(1)
    return struck_at


@pytest.mark.parametrize("work", ["large messages", "barriers"])
def test_a_host_that_vanishes_ends_all_waits_by_their_timeout(host_pool, work):
    struck_at, endings = endings_of(host_pool, work, TIMEOUT_S, kill_host_and_link, [0, 1])
    check_silence(struck_at, endings, lambda rank: {2, 3})


@pytest.mark.parametrize("work", WORKS)
def test_a_cut_link_ends_all_waits_by_their_timeout(host_pool, work):
    struck_at, endings = endings_of(host_pool, work, TIMEOUT_S, lambda world: world.cut_link(1), [0, 1, 2, 3])
    check_silence(struck_at, endings, lambda rank: {0, 1} if rank >= 2 else {2, 3})


def test_a_timeout_tells_of_a_host_that_confirms_nothing(host_pool):
    cut = "its host confirms nothing that is sent to it: it or the network may be down"
    _, endings = endings_of(host_pool, "large messages", 3.0, lambda world: world.cut_link(1), [0, 1, 2, 3])
    told = [(ending, re.search(rf"rank (\d) is connected, but {cut}", ending.text)) for ending in endings]
    assert any(match for _, match in told), endings
    for ending, match in told:
        assert match is None or HOST_OF[int(match[1])] != HOST_OF[ending.origin], ending


def waits_for_a_silent_host(world) -> Ending:
    os.environ.update(PIPECOMM_HEARTBEAT_S="1", PIPECOMM_HEARTBEAT_LIMIT_S="2")
    comm = Communicator(world.group, device="cpu", timeout=20)
    ring_exchange(comm, 100)()
    world.mark("running")
    try:
        comm.recv(torch.empty(1), (comm.rank + 2) % NUM_RANKS)
        raise AssertionError("nobody has sent anything")
    except PipeCommError as error:
        ended_at = time.monotonic()
        text, origin, kind = str(error), error.origin_rank, type(error)
    comm.close()
    return Ending(kind, text, origin, ended_at, time.monotonic() - ended_at)


def test_a_host_that_stays_silent_is_lost_by_its_heartbeat(host_pool):
    """Long before the timeout; nothing is under way that would be confirmed."""
    with host_pool.disposable(NUM_RANKS, waits_for_a_silent_host) as world:
        for rank in range(NUM_RANKS):
            world.await_mark(rank, "running", 20)
        time.sleep(0.3)
        struck_at = world.cut_link(1)
        outcomes = world.collect(deadline=12)
    for rank, outcome in enumerate(outcomes):
        assert outcome.status == "returned", outcome
        ending = outcome.value
        print(f"rank {rank}: after {ending.ended_at - struck_at:.2f} s: {ending.text}")
        assert ending.kind is PipeCommPeerLost, ending
        assert HOST_OF[ending.origin] != HOST_OF[rank] and 1.0 < ending.ended_at - struck_at < 6.0, ending


@pytest.mark.parametrize("work", ["large messages", "barriers"])
def test_a_rank_that_is_stopped_ends_all_waits_by_their_timeout(host_pool, work):
    struck_at, endings = endings_of(
        host_pool, work, TIMEOUT_S, lambda world: world.signal(VICTIM, signal.SIGSTOP), [0, 1, 2]
    )
    check_silence(struck_at, endings, lambda rank: {VICTIM})


# ---- addresses ---------------------------------------------------------------------------------------------


def connects_without_interface(world) -> tuple[str, float]:
    """torch's own group needs GLOO_SOCKET_IFNAME where names are wrong; the communicator is on its own."""
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    began_at = time.monotonic()
    try:
        comm = Communicator(world.group, device="cpu", timeout=10)
        try:
            ring_exchange(comm, 1000)()
            return "connected", time.monotonic() - began_at
        finally:
            comm.close()
    except PipeCommError as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - began_at


def connect_without_interface(plan: HostPlan) -> None:
    with HostPool(plan, plan) as pool:
        answers = pool.run(NUM_RANKS, connects_without_interface, deadline=30)
    print(answers)
    assert [answer for answer, _ in answers] == ["connected"] * NUM_RANKS


def test_a_name_that_resolves_to_the_right_interface():
    connect_without_interface(HostPlan(2))


def test_a_name_that_resolves_to_loopback():
    """127.0.1.1, as Debian has it in /etc/hosts."""
    connect_without_interface(HostPlan(2, resolves_itself_to_loopback=True))


def test_a_name_that_resolves_to_loopback_with_the_interface_named():
    plan = HostPlan(2, resolves_itself_to_loopback=True)
    with HostPool(plan, plan) as pool:
        pool.run(NUM_RANKS, exchanges_once, 1000, deadline=30)


# ---- the hosts themselves ----------------------------------------------------------------------------------


def idles(world) -> None:
    time.sleep(100)


def test_nothing_of_hosts_is_left(host_pool):
    with host_pool.disposable(NUM_RANKS, idles) as world:
        pids = [world.pid(rank) for rank in range(NUM_RANKS)]
        pids += [pid for host in world.hosts for pid in (host.pid, host.first_pid)]
        assert all(os.path.exists(f"/proc/{pid}") for pid in pids)
    until = time.monotonic() + 5
    while left := [pid for pid in pids if os.path.exists(f"/proc/{pid}")]:
        assert time.monotonic() < until, left
        time.sleep(0.02)


# ---- torchrun ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_torchrun_trains_over_two_hosts(host_pool, tmp_path):
    arguments = [
        "--layers", 4, "--hidden", 32, "--seq-len", 16, "--batch-size", 8, "--microbatches", 4,
        "--steps", 4, "--verify", "--device", "cpu", "--out", tmp_path,
    ]  # fmt: skip
    with host_pool.disposable(NUM_RANKS, idles) as world:
        nodes = []
        for host in (0, 1):
            torchrun = [
                sys.executable, "-m", "torch.distributed.run", "--nnodes", 2, "--nproc-per-node", 2,
                "--node-rank", host, "--master-addr", address(0), "--master-port", MASTER_PORT + 1,
                REPOSITORY / "examples" / "train_text.py", *arguments,
            ]  # fmt: skip
            nodes.append(
                subprocess.Popen(
                    world.command_on(host, *map(str, torchrun)),
                    env=os.environ | {"GLOO_SOCKET_IFNAME": "eth0"},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        try:
            outputs = [node.communicate(timeout=100)[0] for node in nodes]
        finally:
            for node in nodes:
                node.kill()
                node.wait()
    output = "".join(outputs)
    assert [node.returncode for node in nodes] == [0, 0], output
    assert "pipeline   4 stages" in output, output
    assert "verify     equal to the unsplit model in 4 steps" in output, output
    assert re.search(rf"^transport +{WHOLE}: ", output, re.MULTILINE), output
