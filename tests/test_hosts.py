"""Two hosts on one machine: routes, killed hosts, cut links, addresses, torchrun; see hosts.py.

Each operation, and each fault in the middle of it, over hosts: reliability/test_over_hosts.py.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hosts import INTERFACE, MASTER_PORT, HostGroup, HostPlan, HostPool, address, rank_environment
from patterns import assert_same, pattern, poison
from processes import running, start_of
from ranks import Outcome, RankFailure, assert_within
from relay_cases import Traffic, same_bytes, topology_of
from scripts import REPOSITORY, run_on_ranks
from test_backend import IS_NEW_ENOUGH

from pipecomm_ext import (
    Communicator,
    PipeCommError,
    PipeCommPeerLost,
    PipeCommTimeout,
    Recv,
    Send,
    StageRelay,
)

sys.path.insert(0, str(REPOSITORY / "examples"))

# What "auto" chooses for a communicator over several hosts: as a whole, within a host, and between two.
WHOLE, INSIDE, BETWEEN = "mixed", "shm", "tcp"

HOST_OF = (0, 0, 1, 1)
NUM_RANKS = len(HOST_OF)
LOST_S = 2.0  # until all ranks know of a dead host
TIMEOUT_S = 2.0  # of communicators whose peers fall silent
AFTER_TIMEOUT_S = 1.0
LARGE = 1 << 24  # elements of a message of 64 MiB


# ---- what works --------------------------------------------------------------------------------------------


def test_each_pair_has_a_route(host_pool):
    for rank, (pid, transport, routes) in enumerate(host_pool.run(NUM_RANKS, routes_of)):
        print(f"rank {rank}: {transport}, {routes}")
        assert pid < 100  # of a namespace of its own
        assert transport == WHOLE
        for peer, (kind, reason) in routes.items():
            assert kind == (INSIDE if HOST_OF[peer] == HOST_OF[rank] else BETWEEN), (rank, peer, reason)
            if kind == "tcp":
                assert "different PID namespaces" in reason or "different hosts" in reason, reason


def routes_of(world):
    comm = world.comm
    comm.barrier()
    peers = [rank for rank in range(world.size) if rank != world.rank]
    return os.getpid(), comm.transport, {peer: comm.route(peer) for peer in peers}


def test_ranks_of_one_host_share_memory(host_pool):
    assert host_pool.run(NUM_RANKS, shares_memory) == ["shm"] * NUM_RANKS


def shares_memory(world) -> str:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    with Communicator(groups[HOST_OF[world.rank]], device="cpu", transport="shm") as comm:
        received = poison((1000,), torch.float32)
        sent = pattern((1000,), torch.float32, world.rank)
        comm.batch_p2p([Send(sent, 1 - comm.rank), Recv(received, 1 - comm.rank)])
        assert_same(received, pattern((1000,), torch.float32, world.rank ^ 1))
        return comm.transport


def test_shared_memory_between_hosts_is_refused(host_pool):
    outcomes = host_pool.attempt(NUM_RANKS, asks_for_shared_memory)
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
    host_pool.run(NUM_RANKS, relays, algorithm, layout)


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


def test_reductions_and_gathers_cross_the_network_once_per_host(host_pool):
    for sent_bytes in host_pool.run(NUM_RANKS, reduces_and_counts):
        for what, (own_bytes, needed_bytes) in sent_bytes.items():
            assert needed_bytes <= own_bytes < 1.5 * needed_bytes, (what, own_bytes, needed_bytes)


def reduces_and_counts(world) -> dict[str, tuple[int, int]]:
    """Returns how many bytes this rank's host has sent in each call, and how many it must send."""
    comm, size, rank = world.comm, world.size, world.rank
    tensor, ones = torch.empty(1 << 20), torch.ones(1 << 20)
    piece = torch.empty(len(tensor) // size)
    half = tensor.nbytes // 2
    group = dist.new_group(backend="pipecomm") if IS_NEW_ENOUGH else None
    calls = {
        "all_reduce": (tensor, tensor.nbytes, lambda: comm.all_reduce(tensor.fill_(rank))),
        "reduce_scatter": (piece, half, lambda: comm.reduce_scatter(piece, rank * ones)),
        "all_gather": (tensor, half, lambda: comm.all_gather(tensor, piece.fill_(6))),
        "all_reduce of the backend": (
            tensor,
            tensor.nbytes,
            lambda: dist.all_reduce(tensor.fill_(rank), group=group, async_op=rank % 2 == 0),
        ),
        "reduce_scatter of the backend": (
            piece,
            half,
            lambda: dist.reduce_scatter_tensor(piece, rank * ones, group=group, async_op=rank % 2 == 0),
        ),
        "all_gather of the backend": (
            tensor,
            half,
            lambda: dist.all_gather_into_tensor(tensor, piece.fill_(6), group=group, async_op=rank % 2 == 0),
        ),
    }
    counted = {}
    for what, (result, needed_bytes, call) in calls.items():
        if "backend" in what and group is None:
            continue
        for _ in range(2):  # the first call makes connections
            dist.barrier()
            before = sent_by_this_host()
            dist.barrier()  # no rank has begun
            if (work := call()) is not None:
                work.wait()
            dist.barrier()
            counted[what] = sent_by_this_host() - before, needed_bytes
        assert torch.equal(result, torch.full_like(result, 6)), what  # 0 + 1 + 2 + 3
    return counted


def sent_by_this_host() -> int:
    with open("/proc/net/dev", encoding="ascii") as table:
        [line] = [line for line in table if line.strip().startswith(INTERFACE)]
    return int(line.partition(":")[2].split()[8])


def test_large_messages_over_a_slow_link(host_pool):
    with host_pool.disposable(NUM_RANKS, exchanges_once, LARGE // 4) as world:
        world.limit_rate(0, "1gbit")
        world.limit_rate(1, "1gbit")
        outcomes = world.collect()
    assert [outcome.status for outcome in outcomes] == ["returned"] * NUM_RANKS, RankFailure("", outcomes)


def exchanges_once(world, numel: int) -> None:
    comm = world.fresh_comm(timeout=20)
    ring_exchange(comm, numel)()


def ring_exchange(comm: Communicator, numel: int) -> Callable[[], None]:
    """Sends from each rank to the next one, and checks the data."""
    following, previous = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    sent, expected = (torch.arange(numel, dtype=torch.int32) + rank for rank in (comm.rank, previous))
    received = torch.empty_like(sent)

    def run() -> None:
        received.zero_()
        comm.batch_p2p([Send(sent, following), Recv(received, previous)])
        assert torch.equal(received, expected)

    return run


# ---- what breaks -------------------------------------------------------------------------------------------


class Work(NamedTuple):
    """The operations that a communicator of its own repeats until it fails."""

    what: str
    timeout_s: float
    heartbeat: bool = False


@dataclass
class Ending:
    """The error of a rank."""

    kind: type
    text: str
    origin: int | None
    ended_at: float  # the test's side counts from the strike
    close_s: float


def communicator_for(world, work: Work) -> Communicator:
    beats = {"PIPECOMM_HEARTBEAT_S": "1", "PIPECOMM_HEARTBEAT_LIMIT_S": "2"} if work.heartbeat else {}
    group = world.group
    if work.what == "large messages in pairs":
        group = [dist.new_group([0, 2]), dist.new_group([1, 3])][world.rank % 2]
    with mock.patch.dict(os.environ, beats):
        return Communicator(group, device="cpu", timeout=work.timeout_s)


def steps_of(comm: Communicator, work: Work) -> tuple[Callable[[], None], Callable[[], None]]:
    """A step that works once, and the step that is then run until it fails."""
    if work.what == "barriers":
        return comm.barrier, comm.barrier
    exchange = ring_exchange(comm, LARGE if work.what.startswith("large") else 100)
    if work.what == "silence":
        return exchange, lambda: comm.recv(torch.empty(1), (comm.rank + 2) % NUM_RANKS)
    return exchange, exchange


def until_it_fails(comm: Communicator, run: Callable[[], None]) -> Ending:
    try:
        while True:
            run()
    except PipeCommError as error:
        ended_at = time.monotonic()
        text, origin, kind = str(error), error.origin_rank, type(error)
    comm.close()
    return Ending(kind, text, origin, ended_at, time.monotonic() - ended_at)


def work_until_all_fail(world, works: list[Work]) -> list[Ending]:
    """Runs all at the same time, in a thread each: the fault hits a world once for all of them."""
    comms = [communicator_for(world, work) for work in works]
    steps = [steps_of(comm, work) for comm, work in zip(comms, works, strict=True)]
    for first, _ in steps:
        dist.barrier(world.group)
        first()
    dist.barrier(world.group)
    world.mark("running")
    with ThreadPoolExecutor(len(works)) as threads:
        endings = list(threads.map(until_it_fails, comms, [run for _, run in steps]))
    world.mark("ended")
    return endings


def endings_of(
    pool: HostPool, works: list[Work], strike: Callable[[HostGroup], float], survivors: list[int]
) -> list[list[Ending]]:
    """How each work ended on the survivors, with times since the fault; nothing of the world is left."""
    with pool.disposable(NUM_RANKS, work_until_all_fail, works) as world:
        pids = [world.pid(rank) for rank in range(NUM_RANKS)]
        pids += [pid for host in world.hosts for pid in (host.pid, host.first_pid)]
        world.await_marks("running")
        time.sleep(0.1)
        starts = {pid: start_of(pid) for pid in pids}
        assert running(starts) == pids
        struck_at = strike(world)
        for rank in survivors:
            world.await_mark(rank, "ended")
        for rank in set(range(NUM_RANKS)) - set(survivors):  # one that is stopped would never answer
            with contextlib.suppress(ProcessLookupError):
                world.signal(rank, signal.SIGKILL)
        outcomes: list[Outcome] = world.collect()
    for rank in survivors:
        if outcomes[rank].status != "returned":
            raise RankFailure(f"rank {rank}", outcomes)
    await_end(starts)
    ended = [list(endings) for endings in zip(*(outcomes[rank].value for rank in survivors), strict=True)]
    for work, endings in zip(works, ended, strict=True):
        print(work)
        for rank, ending in zip(survivors, endings, strict=True):
            ending.ended_at -= struck_at
            print(
                f"rank {rank}: {ending.kind.__name__} of rank {ending.origin} after {ending.ended_at:.2f} s, "
                f"close() {ending.close_s:.2f} s: {ending.text}"
            )
            assert_within(3.0, ending.close_s, ending)
    return ended


def await_end(starts: dict[int, str | None]) -> None:
    until = time.monotonic() + 60
    while left := running(starts):
        assert time.monotonic() < until, left
        time.sleep(0.02)


def every_work(timeout_s: float) -> list[Work]:
    return [Work(what, timeout_s) for what in ("large messages", "small messages", "barriers")]


def test_a_host_of_which_all_processes_are_killed_is_known(host_pool):
    for endings in endings_of(host_pool, every_work(20.0), lambda world: world.kill_host(1), [0, 1]):
        for ending in endings:
            assert ending.kind is PipeCommPeerLost and ending.origin in (2, 3), ending
            assert_within(LOST_S, ending.ended_at, ending)


def check_silence(endings: list[Ending], silent: Callable[[int], set[int]]) -> None:
    """Checks that all end by their timeout and name the rank they waited for, which may wait itself."""
    named = []
    for rank, ending in enumerate(endings):
        assert ending.kind is PipeCommTimeout, ending
        assert_within(TIMEOUT_S + AFTER_TIMEOUT_S, ending.ended_at, ending)
        named.append({int(number) for number in re.findall(r"ranks? (\d)", ending.text)} - {rank})
        assert named[rank], ending
    assert any(named[rank] & silent(rank) for rank in range(len(endings))), endings


def test_a_cut_link_ends_all_waits_by_their_timeout_or_heartbeat(host_pool):
    works = [
        *every_work(TIMEOUT_S),
        Work("large messages in pairs", 3.0),
        Work("silence", 20.0, heartbeat=True),
    ]
    *timely, patient, silent = endings_of(host_pool, works, lambda world: world.cut_link(1), [0, 1, 2, 3])
    for endings in timely:
        check_silence(endings, lambda rank: {0, 1} if rank >= 2 else {2, 3})
    # A timeout names a host that acknowledges nothing, once that is certain. Of a pair, at least one has sent
    # unacknowledged data; in a ring, a rank that only receives may fail first and inform the others.
    cut = "its host confirms nothing that is sent to it: it or the network may be down"
    told = [(ending, re.search(rf"rank (\d) is connected, but {cut}", ending.text)) for ending in patient]
    assert any(match for _, match in told), patient
    for ending, match in told:
        assert match is None or int(match[1]) != ending.origin, ending
    # A heartbeat finds the silent host long before the timeout; nothing in flight would be acknowledged.
    for rank, ending in enumerate(silent):
        assert ending.kind is PipeCommPeerLost, ending
        assert HOST_OF[ending.origin] != HOST_OF[rank] and ending.ended_at > 1.0, ending
        assert_within(6.0, ending.ended_at, ending)


# ---- addresses ---------------------------------------------------------------------------------------------


def connects_without_interface(world) -> float:
    """torch's own group needs GLOO_SOCKET_IFNAME where names are wrong; the communicator does not."""
    with mock.patch.dict(os.environ):
        os.environ.pop("GLOO_SOCKET_IFNAME", None)
        began_at = time.monotonic()
        with Communicator(world.group, device="cpu", timeout=10) as comm:
            ring_exchange(comm, 1000)()
        return time.monotonic() - began_at


def test_a_name_that_resolves_to_the_right_interface(host_pool):
    print(host_pool.run(NUM_RANKS, connects_without_interface))


def test_a_name_that_resolves_to_loopback():
    """127.0.1.1, as Debian has it in /etc/hosts; with the interface named, and without."""
    plan = HostPlan(2, resolves_itself_to_loopback=True)
    with HostPool(plan, plan) as pool:
        pool.run(NUM_RANKS, exchanges_once, 1000)
        print(pool.run(NUM_RANKS, connects_without_interface))


# ---- torchrun ----------------------------------------------------------------------------------------------


def test_training_over_two_hosts(host_pool, tmp_path):
    arguments = [
        "--layers", 4, "--hidden", 32, "--seq-len", 16, "--batch-size", 8, "--microbatches", 4,
        "--steps", 4, "--verify", "--out", tmp_path,
    ]  # fmt: skip
    output = run_on_ranks(host_pool, NUM_RANKS, "train_text", *arguments)
    assert "pipeline   4 stages" in output, output
    assert "verify     equal to the unsplit model in 4 steps" in output, output
    assert re.search(rf"^transport +{WHOLE}: ", output, re.MULTILINE), output


def starts_torchrun(world, folder: str, variables: list[str]) -> None:
    """On the first rank of each host: torchrun, whose ranks write their environments into files."""
    from torch.distributed import run

    if world.rank not in (0, 2):
        return
    torchrun = [
        "--nnodes", 2, "--nproc-per-node", 2, "--node-rank", HOST_OF[world.rank],
        "--master-addr", address(0), "--master-port", MASTER_PORT + 1,
        "--no-python", "sh", "-c", 'env > "$0/$RANK"', folder,
    ]  # fmt: skip
    with mock.patch.dict(os.environ):
        for name in variables:
            os.environ.pop(name, None)
        run.main([*map(str, torchrun)])


@pytest.mark.slow
def test_torchrun_gives_its_ranks_what_those_of_hosts_have(host_pool, tmp_path):
    """So tests that pass on them also pass under torchrun on several machines."""
    environments = [
        rank_environment(host, host_pool.plans, rank, NUM_RANKS) for rank, host in enumerate(HOST_OF)
    ]
    with host_pool.disposable(NUM_RANKS, starts_torchrun, str(tmp_path), list(environments[0])) as world:
        outcomes = world.collect()
    assert [outcome.status for outcome in outcomes] == ["returned"] * NUM_RANKS, RankFailure("", outcomes)
    for rank, ours in enumerate(environments):
        given = (tmp_path / str(rank)).read_text(encoding="utf-8").splitlines()
        ours |= {"MASTER_PORT": str(MASTER_PORT + 1)}
        del ours["GLOO_SOCKET_IFNAME"]  # the user's
        assert {f"{name}={value}" for name, value in ours.items()} <= set(given), given
