"""Which objects may outlive which: communicators, handles, tensors, and processes forked from a rank."""

from __future__ import annotations

import faulthandler
import gc
import os
import resource
import signal
import tempfile
import threading
import time
import traceback
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from patterns import assert_same, pattern, poison
from ranks import assert_within, on_ranks
from scripts import TESTS, Script

from pipecomm_ext import Communicator, PipeCommError, Recv, Send
from pipecomm_ext.communicator.communicator import open_communicators
from pipecomm_ext.communicator.registry import close_all, get_communicator
from pipecomm_ext.core.limited_store import _Call
from pipecomm_ext.core.rendezvous import Rendezvous
from pipecomm_ext.transports.routes import Routes

TRANSPORTS = pytest.mark.parametrize("transport", ["tcp", "shm"])
HANG_LIMIT_S = 60


def run_forked(body, meanwhile=None) -> None:
    """Runs `body` in a forked child, and `meanwhile` here; fails with its stacks if it hangs or crashes."""
    gc.collect()  # a child that collects torch's groups of earlier tests joins threads that it does not have
    with tempfile.TemporaryFile("w+", encoding="utf-8") as said:
        child = os.fork()
        if child == 0:
            faulthandler.enable(said)
            faulthandler.dump_traceback_later(HANG_LIMIT_S, exit=True, file=said)
            status = 1
            try:
                body()
                status = 0
            except BaseException:
                traceback.print_exc(file=said)
                said.flush()
            finally:
                os._exit(status)
        if meanwhile is not None:
            meanwhile()
        exit_code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        said.seek(0)
        assert exit_code == 0, f"the child ended with {exit_code}\n{said.read()}"


@on_ranks(2)
def test_a_forked_child_that_makes_a_communicator(world):
    world.fresh_comm()  # the group's store has been used

    def child() -> None:
        told = "rank [01]: Communicator: this process was forked.*make a new group and Communicator here"
        with pytest.raises(PipeCommError, match=told):
            Communicator(world.group)

    run_forked(child)


@on_ranks(2)
@TRANSPORTS
def test_a_forked_child_leaves_the_connections_of_its_parent_alone(world, transport):
    comm = world.fresh_comm(transport=transport)
    other = 1 - world.rank
    received = poison(1000, torch.int32)
    pending = comm.irecv(received, other)
    comm.barrier()
    held = [Communicator(world.group, device="cpu", transport=transport)]

    def child() -> None:
        for call in (comm.barrier, pending.wait, lambda: comm.send(torch.zeros(3), other)):
            with pytest.raises(PipeCommError, match="was forked"):
                call()
        comm.abort("in the child")
        close_all()  # as at the end of the interpreter
        held.clear()  # the last reference
        gc.collect()

    run_forked(child)
    comm.send(pattern(1000, torch.int32, world.rank), other)
    pending.wait()
    assert_same(received, pattern(1000, torch.int32, other), "after the fork")
    held.pop().close()


@on_ranks(2)
def test_a_forked_child_has_results_of_its_own(world):
    """As of all other tensors: what one process writes, or a peer of it, no other one sees."""
    shape = (300, 1000)
    comms = [world.fresh_comm(transport="shm") for _ in range(2)]
    received = [comm.empty(shape, torch.uint8) for comm in comms]
    gathered = [comm.empty((2, *shape), torch.uint8) for comm in comms]
    expected = torch.stack([pattern(shape, torch.uint8, rank) for rank in range(2)])
    for comm, tensor, both in zip(comms, received, gathered, strict=True):
        comm.batch_p2p([Send(pattern(shape, torch.uint8, 7), 1 - world.rank), Recv(tensor, 1 - world.rank)])
        comm.all_gather(both, pattern(shape, torch.uint8, world.rank))
    comms[1].close()  # its results outlive it
    changed, changes = os.pipe()

    def child() -> None:
        assert os.read(changed, 1) == b"x"
        for tensor in received:
            assert_same(tensor, pattern(shape, torch.uint8, 7), "in the child")
        for tensor in gathered:
            assert_same(tensor, expected, "in the child")
            tensor.zero_()
        assert comms[0].empty(shape, torch.uint8).zero_().numel() == 300_000  # ordinary memory
        gathered.clear()

    def change() -> None:
        comms[0].batch_p2p(
            [Send(pattern(shape, torch.uint8, 9), 1 - world.rank), Recv(received[0], 1 - world.rank)]
        )
        received[1].zero_()
        os.write(changes, b"x")

    run_forked(child, meanwhile=change)
    for tensor in gathered:
        assert_same(tensor, expected, "in the parent")
    assert_same(received[0], pattern(shape, torch.uint8, 9), "in the parent")
    os.close(changed), os.close(changes)


@on_ranks(2)
def test_a_fork_without_memory_for_copies_of_results(world):
    """The child cannot use the results, and all else goes on."""
    comm = world.fresh_comm(transport="shm")
    results = [comm.empty([64 << 20], torch.uint8).fill_(1) for _ in range(2)]
    ordinary = torch.ones(1000)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm", encoding="utf-8") as sizes:
        num_bytes = int(sizes.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (num_bytes + (32 << 20), limits[1]))
    try:
        child = os.fork()
        if child == 0:
            faulthandler.disable()
            is_right = ordinary.eq(1).all()
            os._exit(int(results[0][0]) if is_right else 1)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGSEGV
    assert all(result.eq(1).all() for result in results)
    comm.barrier()


@on_ranks(2)
@TRANSPORTS
def test_a_handle_may_be_the_last_owner_of_a_communicator(world, transport):
    """The communicator then ends where the handle is dropped, while its threads drop tensors of Python."""
    gc.freeze()  # collecting torch's objects takes a fifth of a second each time
    for round_idx in range(10):
        comm = Communicator(world.group, device="cpu", transport=transport)
        other = 1 - world.rank
        # Non-contiguous: the engine keeps the tensor itself, and soon has its only reference.
        work = comm.irecv(poison((64, 64), torch.int64).t(), other)
        comm.isend(pattern((64, 64), torch.int64, world.rank), other)
        if round_idx % 2 == 0:
            work.wait()
        comm.barrier()
        open_communicators.discard(comm)
        del comm
        gc.collect()
        del work
        gc.collect()
    gc.unfreeze()


@on_ranks(2)
@pytest.mark.parametrize("collector", ["its own thread", "the thread of the store"])
@TRANSPORTS
def test_a_communicator_may_end_on_any_thread(world, transport, collector):
    """On the one where Python's collector runs: also one that the communicator has to join, or needs."""
    owner, name = {
        "its own thread": (Routes, "_look_up"),
        "the thread of the store": (_Call, "run"),
    }[collector]
    called, is_armed, ended_on = getattr(owner, name), threading.Event(), []

    def call(self, *args):
        result = called(self, *args)
        if is_armed.is_set():
            is_armed.clear()
            gc.collect()
        return result

    if world.rank == 0:
        with mock.patch.object(owner, name, call):
            comm = Communicator(world.group, device="cpu", transport=transport)
            comm.irecv(torch.zeros(3), 1)  # looks for rank 1, which has not joined yet
            weakref.finalize(comm, lambda: ended_on.append(threading.current_thread()))
            open_communicators.discard(comm)
            cycle = [comm]
            cycle.append(cycle)
            del comm, cycle
            is_armed.set()
            until = time.monotonic() + HANG_LIMIT_S
            while not ended_on and time.monotonic() < until:
                time.sleep(0.01)
        assert ended_on and ended_on[0] is not threading.main_thread(), ended_on
        world.meet()
    else:
        world.meet()
        began_at = time.monotonic()
        with (
            Communicator(world.group, device="cpu", transport=transport) as comm,
            pytest.raises(PipeCommError),
        ):
            comm.recv(torch.zeros(3), 0)
        assert_within(2.0, time.monotonic() - began_at)
    world.comm.barrier()


def end_on_another_thread_and_exit(transport: str) -> None:
    """A program that ends just after Python's collector has ended communicators on threads of their own."""
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  (registers the backend)

    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=2)
    gc.disable()
    called, collected = Routes._look_up, threading.Event()

    def look_up(self, *args):
        result = called(self, *args)
        if gc.collect():
            collected.set()
        return result

    with mock.patch.object(Routes, "_look_up", look_up):
        for _ in range(3):
            collected.clear()
            comm = Communicator(device="cpu", transport=transport)
            comm.irecv(torch.zeros(3), 1)
            open_communicators.discard(comm)
            cycle = [comm]
            cycle.append(cycle)
            ended = weakref.ref(comm)
            del comm, cycle
            while ended() is not None:
                collected.wait(HANG_LIMIT_S)


@pytest.mark.slow
@TRANSPORTS
def test_a_program_may_exit_while_a_communicator_ends(transport):
    program = f"import test_lifetime; test_lifetime.end_on_another_thread_and_exit({transport!r})"
    with Script("-c", program, folder=TESTS) as one, Script("-c", program, folder=TESTS) as other:
        assert [script.finish(100) for script in (one, other)] == [(0, "")] * 2


@on_ranks(2)
def test_errors_survive_texts_cut_within_a_character(world):
    comm = world.fresh_comm()
    reason = "é" * 5000  # two bytes each, and the limit on the wire is even: shift by one
    for text in (reason, "x" + reason):
        if world.rank == 0:
            with pytest.raises(ValueError), comm.collective("broadcast"):
                raise ValueError(text)
        else:
            with pytest.raises(PipeCommError, match="éé") as caught:
                comm.broadcast(torch.zeros(3), 0)
            assert caught.value.origin_rank == 0
    comm.barrier()


@on_ranks(2)
def test_communicators_of_a_group_share_one_connection_to_its_store(world):
    """Connecting to a TCPStore requires a lookup of names, which may take seconds."""
    connections = set()
    for number in range(3):
        meeting = Rendezvous(world.group, 10, "a test of the store", str(number))
        meeting.publish({"number": number})
        meeting.wait_for(1 - world.rank)
        assert meeting.look_up(1 - world.rank) == {"number": number}
        connections.add(meeting._background)
    assert len(connections) == 1


@on_ranks(2)
def test_communicators_of_destroyed_groups_end(world):
    """So do their threads and those of torch's group: ranks of a long job may make and destroy many."""
    numbers = []
    for _ in range(6):
        group = dist.new_group([0, 1])
        comm = get_communicator(group)
        comm.barrier()
        dist.destroy_process_group(group)
        last = weakref.ref(group)
        del group, comm
        numbers.append(len(os.listdir("/proc/self/task")))
    get_communicator(dist.new_group([0, 1]))
    gc.collect()
    assert last() is None and numbers[-1] <= numbers[1]
