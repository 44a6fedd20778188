"""Ranks on one host through shared memory: which ranks use it, what it costs, and that nothing of it remains.

cpp/test_shm.cpp tests the transfers, also in random programs.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import time
import warnings
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from patterns import assert_same, pattern, poison
from ranks import assert_within, on_ranks

from pipecomm_ext import (
    _C,
    Communicator,
    PipeCommError,
    PipeCommMismatch,
    PipeCommPeerLost,
    PipeCommTimeout,
    Recv,
    Send,
)
from pipecomm_ext.core import host
from pipecomm_ext.transports import routes
from pipecomm_ext.transports import shm as shared_memory

NUM_KILLS = int(os.environ.get("PIPECOMM_TEST_KILLS", "3"))


@contextmanager
def environment(name, value):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(name, value)
        yield


@contextmanager
def replaced(holder, name, value):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(holder, name, value)
        yield


def shm_comm(world, **kwargs):
    return world.fresh_comm(transport="shm", **kwargs)


def descriptors_and_maps() -> tuple[int, int]:
    """Open descriptors, and shared segments mapped."""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        num_maps = sum("memfd:pipecomm" in line for line in maps)
    return len(os.listdir("/proc/self/fd")), num_maps


# ---- which ranks use it ----------------------------------------------------------------------------------


@on_ranks(1, 2, 3)
def test_auto_takes_shared_memory_on_one_host(world):
    with environment("PIPECOMM_TRANSPORT", "auto"), warnings.catch_warnings():
        warnings.simplefilter("error")
        comm = world.fresh_comm()
    assert comm.transport == "shm"
    everybody = "the only rank is" if world.size == 1 else f"all {world.size} ranks are"
    assert comm.transport_reason == f"{everybody} on this host"


@on_ranks(2)
def test_the_environment_chooses(world):
    for name in ("shm", "tcp"):
        with environment("PIPECOMM_TRANSPORT", name):
            comm = world.fresh_comm()
        assert (comm.transport, comm.transport_reason) == (name, "asked for")


def check_routes(world, transport, obstacles, warns=True):
    """Checks what auto chooses with `obstacles` between pairs of ranks, and that shm alone fails."""
    own = {peer: cause for pair, cause in obstacles.items() if world.rank in pair for peer in pair}
    own.pop(world.rank, None)
    expected = warns and bool(own)
    with environment("PIPECOMM_TRANSPORT", "auto"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        comm = Communicator(world.group, device="cpu")
        tensor = torch.full((70_000,), float(world.rank))
        comm.broadcast(tensor, 1)
        assert tensor.eq(1).all()
        for peer in range(world.size):
            if peer != world.rank:
                way, reason = comm.route(peer)
                assert way == ("tcp" if peer in own else "shm")
                assert own.get(peer, "both ranks are on this host") in reason
        comm.barrier()
        until = time.monotonic() + 60  # the peer may have connected before this rank has looked it up
        while expected and not caught and time.monotonic() < until:
            time.sleep(0.01)
    told = [str(entry.message) for entry in caught if entry.category is RuntimeWarning]
    assert [any(cause in text for cause in own.values()) for text in told] == [True] * expected, told
    assert comm.transport == transport
    with pytest.raises(
        (ValueError, PipeCommMismatch), match=r'transport="shm" is not possible: .*use "auto" or "tcp"'
    ) as error:
        with Communicator(world.group, device="cpu", transport="shm", timeout=20) as alone:
            alone.barrier()
    assert any(cause in str(error.value) for cause in obstacles.values())
    return comm


@on_ranks(3)
def test_too_little_memory_on_one_rank(world):
    little = (16 << 20) if world.rank == 2 else 1 << 40
    cause = "only 16 MiB of memory are available"
    with replaced(shared_memory, "available_bytes", lambda: little):
        comm = check_routes(world, "mixed", {(0, 2): cause, (1, 2): cause})
    assert cause in comm.transport_reason
    comm.close()


@on_ranks(2)
def test_ranks_that_are_pinned_have_the_cores_of_all(world):
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[world.rank % len(cores)]})
    try:
        with Communicator(world.group, device="cpu", transport="shm", timeout=20) as comm:
            comm.barrier()
            assert comm.num_cores == min(world.size, len(cores))
    finally:
        os.sched_setaffinity(0, cores)


@on_ranks(2)
def test_who_asks_sees_what_has_come(world):
    """A message without a waiter wakes no thread, but the next query finds it."""
    with Communicator(world.group, device="cpu", transport="shm", timeout=20) as comm:
        comm.barrier()
        num_seen = 0
        for round_number in range(50):
            data = torch.full((5,), -1.0)
            work = comm.irecv(data, 0) if world.rank == 1 else None
            world.meet()
            if world.rank == 0:
                sent = comm.isend(torch.full((5,), float(round_number)), 1)
            world.meet()
            if world.rank == 1:
                num_seen += work.is_completed()
                work.wait()
                assert data.tolist() == [float(round_number)] * 5
            else:
                sent.wait()
    if world.rank == 1:
        assert num_seen >= 40  # not all: the thread of the watchdog may have taken it, and not be done yet


def test_cores_are_a_bit_each():
    for cores in (0, 5, (1 << 5000) - 1):
        _C.Introduction(cores=cores)
    with pytest.raises(ValueError, match="cores must not be negative"):
        _C.Introduction(cores=-5)


@pytest.mark.parametrize(
    ("variables", "number"),
    [
        ({"LOCAL_WORLD_SIZE": "5"}, 5),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "3", "LOCAL_WORLD_SIZE": "many"}, 3),
        ({"MPI_LOCALNRANKS": "0"}, 1),
        ({}, 1),
    ],
)
def test_ranks_of_this_host(monkeypatch, variables, number):
    for name in ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert host.num_local_ranks() == number


@on_ranks(3)
def test_without_a_launcher_all_ranks_may_be_here(world):
    assert host.num_local_ranks() == world.size


def placed(**changes):
    """Pretends that this process is somewhere else."""
    return replaced(routes, "place", lambda: {**host.place(), **changes})


@on_ranks(2, 3)
def test_another_host(world):
    """The last rank is on another host."""
    last, mine = world.size - 1, range(world.size - 1)
    with placed(boot_id=f"host {world.rank == last}"):
        causes = {(peer, last): f"ranks {peer} and {last} are on different hosts" for peer in mine}
        comm = check_routes(world, "tcp" if world.size == 2 else "mixed", causes, warns=False)
    way = (
        "the portable transport (TCP),"
        if world.size == 2
        else "shared memory among ranks 0, 1 | 2, else TCP,"
    )
    assert comm.transport_reason == f"{way} because ranks 0 and {last} are on different hosts"
    assert comm.num_cores is None or world.size == 3
    comm.close()


@on_ranks(3)
def test_another_pid_namespace(world):
    with placed(pid_namespace=f"pid:[{world.rank // 2}]"):
        causes = {(peer, 2): f"ranks {peer} and 2 are in different PID namespaces" for peer in (0, 1)}
        check_routes(world, "mixed", causes).close()


class NoMemory(_C.Connections):
    def create_memory(self, *args):
        raise RuntimeError("memfd_create: Operation not permitted")


@on_ranks(3)
def test_one_rank_that_cannot_create_memory(world):
    gc.collect()  # communicators that earlier tests left to the collector still map their segments
    before = descriptors_and_maps()[1]
    cause = "rank 1: memfd_create: Operation not permitted"
    with replaced(_C, "Connections", NoMemory if world.rank == 1 else _C.Connections):
        check_routes(world, "mixed", {(0, 1): cause, (1, 2): cause}).close()
    gc.collect()
    assert descriptors_and_maps()[1] <= before


@on_ranks(3)
def test_one_rank_that_cannot_map_memory(world):
    """Only that rank knows it: the others learn it from its connection."""

    def elsewhere(**facts):
        return _C.Introduction(**{**facts, "memory_fd": 1_000_000} if "memory_fd" in facts else facts)

    gc.collect()
    before = descriptors_and_maps()[1]
    original = _C.Introduction
    with replaced(routes, "Introduction", elsewhere if world.rank == 1 else original):
        comm = Communicator(world.group, device="cpu", transport="auto")
        tensor = torch.full((70_000,), float(world.rank))
        comm.broadcast(tensor, 1)
        comm.barrier()
    assert tensor.eq(1).all()
    ways = {peer: comm.route(peer)[0] for peer in range(3) if peer != world.rank}
    assert ways == {peer: "tcp" if 1 in (peer, world.rank) else "shm" for peer in ways}, [
        comm.route(p) for p in ways
    ]
    if world.rank == 1:
        assert "opening the shared memory of rank 0: No such file" in comm.route(0)[1]
    comm.close()
    del comm
    gc.collect()
    assert descriptors_and_maps()[1] <= before


@on_ranks(2)
def test_a_constructor_that_fails_leaves_nothing_open(world):
    def broken(*args, **kwargs):
        raise RuntimeError("no engine")

    gc.collect()
    before = descriptors_and_maps()
    if world.rank == 1:
        with replaced(_C, "Communicator", broken), pytest.raises(RuntimeError, match="no engine"):
            Communicator(world.group, device="cpu", timeout=20)
    else:
        with Communicator(world.group, device="cpu", timeout=20) as comm:
            with pytest.raises(PipeCommMismatch, match="refused by rank 1: RuntimeError: no engine"):
                comm.barrier()
        del comm
    gc.collect()
    # Fewer, if what an earlier test has left behind has ended meanwhile.
    assert all(now <= was for now, was in zip(descriptors_and_maps(), before, strict=True))


@on_ranks(2)
@pytest.mark.parametrize("value", ["1e6", "", "-1", "65535", str((1 << 30) + 1)])
def test_wrong_ring_sizes(world, value):
    with environment("PIPECOMM_SHM_RING_BYTES", value if world.rank == 1 else "1048576"):
        if world.rank == 1:
            with pytest.raises(ValueError, match="PIPECOMM_SHM_RING_BYTES must be"):
                Communicator(world.group, device="cpu", transport="shm")
        else:
            comm = Communicator(world.group, device="cpu", transport="shm")
            with pytest.raises(PipeCommMismatch, match="refused by rank 1: ValueError: PIPECOMM_SHM_RING"):
                comm.barrier()


@on_ranks(2)
def test_ring_sizes_must_agree(world):
    with (
        environment("PIPECOMM_SHM_RING_BYTES", str(1 << (20 + world.rank))),
        pytest.raises(PipeCommMismatch, match=r"disagree about PIPECOMM_SHM_RING_BYTES: \d+ .* \d+"),
    ):
        Communicator(world.group, device="cpu", transport="shm").barrier()


def test_only_the_right_memory_is_mapped():
    """Each wrong one is detected when the peer is added."""

    def connections(rank=0, epoch=1, channels=1, lookup=lambda rank: None, ring_bytes=65536):
        made = _C.Connections(rank, 2, epoch, bytes(32), lookup, lambda farewell: None)
        made.create_memory(channels, ring_bytes, 0)
        return made

    def refusal(fd, inode=None, timeout_s=20.0, farewell=None):
        inode = inode or os.fstat(fd).st_ino
        met = _C.Introduction(pid=os.getpid(), memory_fd=fd, memory_inode=inode, farewell=farewell)
        comm = _C.Communicator(connections(lookup=lambda rank: met), 0, 2, 1, timeout_s, 1)
        try:
            with pytest.raises((PipeCommMismatch, PipeCommTimeout, PipeCommPeerLost)) as error:
                comm.isend(torch.zeros(1), 1).wait()
            return str(error.value)
        finally:
            comm.close()

    right = connections(rank=1)
    assert os.fstat(right.memory_fd).st_mode & 0o777 == 0o600
    assert os.fstat(right.memory_fd).st_ino == right.memory_inode
    assert "has not answered through shared memory" in refusal(right.memory_fd, timeout_s=0.3)
    for other in (connections(), connections(rank=1, epoch=2)):
        assert "rank 1 has the wrong header" in refusal(other.memory_fd)
    other = connections(rank=1, channels=2)
    assert "rank 1 has the wrong size" in refusal(other.memory_fd)
    plain = os.memfd_create("pipecomm")
    try:
        assert "rank 1 is not sealed" in refusal(plain)
        # The rank has closed its memory, and its descriptor number is reused.
        assert "lost the connection to rank 1" in refusal(plain, inode=right.memory_inode)
        assert "rank 1 has closed its communicator" in refusal(plain, right.memory_inode, farewell=b"")
    finally:
        os.close(plain)
    with pytest.raises(ValueError, match="ring bytes must be a multiple of 4096"):
        connections(ring_bytes=70000)


# ---- moving data -----------------------------------------------------------------------------------------


@on_ranks(2, 4)
def test_transfers_go_on_while_the_caller_computes(world):
    """No thread calls into the library after posting."""
    comm = shm_comm(world)
    peers = [peer for peer in range(world.size) if peer != world.rank]
    numel = 2_000_000
    received = {peer: poison(numel, torch.uint8) for peer in peers}
    work = comm.batch_p2p(
        [Recv(received[peer], peer) for peer in peers]
        + [Send(pattern(numel, torch.uint8, world.rank, peer), peer) for peer in peers],
        async_op=True,
    )
    until = time.monotonic() + 20
    while not work.is_completed() and time.monotonic() < until:
        torch.ones(1000).sum()
    assert work.is_completed()
    for peer in peers:
        assert_same(received[peer], pattern(numel, torch.uint8, peer, world.rank), peer)


@on_ranks(2)
def test_waiting_costs_no_cpu(world):
    comm = shm_comm(world)
    comm.barrier()
    tensor = torch.zeros(4)
    before = time.process_time()
    if world.rank == 0:
        comm.recv(tensor, 1)
        assert time.process_time() - before < 0.3
    else:
        time.sleep(0.8)
        comm.send(torch.ones(4), 0)


# ---- results ---------------------------------------------------------------------------------------------


@on_ranks(2)
def test_received_messages_may_lie_in_results(world):
    comm = shm_comm(world)
    for num_bytes in (100, 100_000, 5_000_000):
        tensor = comm.empty([num_bytes], torch.uint8)
        if world.rank == 0:
            tensor.copy_(pattern(num_bytes, torch.uint8, num_bytes))
            comm.send(tensor, 1)
        else:
            comm.recv(tensor, 0)
            assert_same(tensor, pattern(num_bytes, torch.uint8, num_bytes))


@on_ranks(2)
def test_results_are_used_again_and_outlive_the_communicator(world):
    comm = shm_comm(world)
    first = comm.empty([1 << 20], torch.float32)
    address = first.data_ptr()
    second = comm.empty([1 << 20], torch.float32)
    assert second.data_ptr() != address
    del first
    third = comm.empty([3, 1 << 18], torch.float32)
    assert third.data_ptr() == address
    assert comm.empty([0, 7], torch.bool).shape == (0, 7)
    with pytest.raises(ValueError, match="lengths >= 0"):
        comm.empty([-1], torch.float32)
    comm.close()
    third.fill_(3.0)
    assert third.sum().item() == 3 * third.numel()
    with pytest.raises(RuntimeError, match="storage that is not resizable"):
        third.view(-1).resize_(1 << 20)
    third.share_memory_()
    assert (third == 3).all() and third.data_ptr() != address


def end_in_the_middle_of_a_payload(world, end):
    """Rank 1 is stopped while it writes a result of rank 0, and goes on once rank 0 is done with that."""
    num_bytes = 96 << 20
    comm = shm_comm(world, timeout=3)
    comm.barrier()
    pids = [None] * world.size
    dist.all_gather_object(pids, os.getpid(), group=world.group)
    if world.rank == 1:
        tensor = torch.ones(num_bytes, dtype=torch.uint8)
        world.meet()
        with pytest.raises(PipeCommTimeout):
            while True:
                comm.send(tensor, 0)
        world.meet()
        return
    tensor = comm.empty([num_bytes], torch.uint8)
    address, is_whole = tensor.data_ptr(), True
    world.meet()
    while is_whole:  # the message came before the signal
        tensor.zero_()
        work = comm.irecv(tensor, 1)
        while tensor[4 << 20] == 0 and not work.is_completed():
            pass
        os.kill(pids[1], signal.SIGSTOP)
        is_whole = bool(tensor[-1] == 1)
        if is_whole:
            os.kill(pids[1], signal.SIGCONT)
            work.wait()
    try:
        with pytest.raises(PipeCommTimeout):
            work.wait()
        if end == "closed":
            comm.close()
        else:
            del work, tensor
            gc.collect()
            tensor = comm.empty([num_bytes], torch.uint8)
            assert tensor.data_ptr() != address
        tensor.zero_()
    finally:
        os.kill(pids[1], signal.SIGCONT)
    world.meet()
    assert not tensor.any()


@pytest.mark.parametrize("end", ["closed", "used for another tensor"])
def test_no_payload_comes_after_the_end(ranks, end):
    with ranks.disposable(2, end_in_the_middle_of_a_payload, end) as world:
        outcomes = world.collect()
    assert all(outcome.status == "returned" for outcome in outcomes), outcomes


# ---- deaths and ends -------------------------------------------------------------------------------------

SIZES = [0, 1, 127, 128, 129, 4096, 32767, 32768, 32769, 70_000, 300_000]


def exchange_at_random(comm, rng) -> None:
    """Messages of any size between all pairs, or a broadcast, or a barrier: all ranks draw the same."""
    kind, num_bytes = rng.choice(["messages"] * 8 + ["broadcast", "barrier"]), rng.choice(SIZES)
    if kind == "barrier":
        comm.barrier()
    elif kind == "broadcast":
        comm.broadcast(torch.ones(num_bytes), rng.randrange(comm.size))
    else:
        peers = [peer for peer in range(comm.size) if peer != comm.rank]
        sends = [Send(pattern(num_bytes, torch.uint8, comm.rank, peer), peer) for peer in peers]
        recvs = [Recv(poison(num_bytes, torch.uint8), peer) for peer in peers]
        comm.batch_p2p(sends + recvs)
        for recv in recvs:
            assert_same(recv.tensor, pattern(num_bytes, torch.uint8, recv.peer, comm.rank))


def work_until_a_peer_dies(world, seed):
    with Communicator(world.group, device="cpu", transport="shm") as comm:
        comm.barrier()  # which starts what serves the group
    del comm
    gc.collect()
    num_descriptors, num_maps = descriptors_and_maps()
    num_threads = len(os.listdir("/proc/self/task"))
    comm = Communicator(world.group, device="cpu", transport="shm", timeout=20)
    comm.barrier()
    world.mark("works")
    rng = random.Random(seed)
    try:
        while True:
            exchange_at_random(comm, rng)
    except PipeCommError as error:
        raised_at = time.monotonic()
        kind, text, origin = type(error), str(error), error.origin_rank
    comm.close()
    del comm
    gc.collect()
    left = descriptors_and_maps()
    # gloo, which the group uses, has closed its own connection to the dead rank meanwhile.
    assert left[0] <= num_descriptors and left[1] == num_maps, (left, num_descriptors, num_maps)
    assert len(os.listdir("/proc/self/task")) <= num_threads
    return kind, text, origin, raised_at


@pytest.mark.timeout(30 + 10 * NUM_KILLS)
def test_kill_at_random_moments(ranks):
    """PIPECOMM_TEST_KILLS=200 for the long form."""
    rng = random.Random(7)
    for round_idx in range(NUM_KILLS):
        size = rng.randrange(2, 5)
        victim = rng.randrange(size)
        with ranks.disposable(size, work_until_a_peer_dies, round_idx) as world:
            world.await_marks("works")
            time.sleep(rng.random() * 0.05)
            killed_at = world.signal(victim, signal.SIGKILL)
            outcomes = world.collect()
        assert outcomes[victim].status == "died"
        for outcome in outcomes:
            if outcome.rank == victim:
                continue
            assert outcome.status == "returned", str(outcome)
            kind, text, origin, raised_at = outcome.value
            assert kind is PipeCommPeerLost and origin == victim and f"rank {victim}" in text, text
            assert_within(1.0, raised_at - killed_at, f"round {round_idx}: {text}")


@on_ranks(3)
def test_only_its_own_memory_stays_open_and_only_with_the_communicator(world):
    def open_memory():
        """The inodes of the memory that is open."""
        links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
        ours = [link for link in links if os.path.islink(link) and "memfd:pipecomm" in os.readlink(link)]
        return {os.stat(link).st_ino for link in ours}

    before = open_memory()
    comm = shm_comm(world)
    comm.barrier()
    assert len(open_memory() - before) == 1
    comm.close()
    assert not open_memory() - before
