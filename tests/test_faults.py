"""When ranks die, leave or wait too long, all others learn of it in time, and of its origin.

Faults in each operation, on three ranks, are in reliability/: here are other worlds and other moments.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from patterns import assert_same, pattern, poison
from ranks import Outcome, assert_within, on_ranks

from pipecomm_ext import (
    Communicator,
    PipeCommAborted,
    PipeCommError,
    PipeCommPeerLost,
    PipeCommTimeout,
    Recv,
    Send,
)
from pipecomm_ext.transports import routes

DETECTION_LIMIT_S = 2.0
VICTIM = 1

# ---- a rank dies -----------------------------------------------------------------------------------------


def run_until_killed(world, scene):
    """The body of all ranks: runs `scene` until the victim is gone; survivors report what they got."""
    comm = Communicator(world.group, device="cpu", timeout=20)
    try:
        comm.barrier()
        scene(world, comm)
        raise AssertionError("no error reached this rank")
    except PipeCommError as error:
        raised_at = time.monotonic()
        try:
            comm.barrier()
            raise AssertionError("a failed communicator was usable")
        except PipeCommError as again:
            assert again.origin_rank == error.origin_rank, str(again)
            assert_within(0.2, time.monotonic() - raised_at, again)
        comm.close()
        assert_within(3, time.monotonic() - raised_at, "close() after a failure")
        return {
            "type": type(error),
            "text": str(error),
            "origin_rank": error.origin_rank,
            "raised_at": raised_at,
        }


def die(world):
    """The victim's end, by the parent's signal."""
    world.mark("dies")
    time.sleep(60)


def before_a_message(world, comm):
    if world.rank == VICTIM:
        die(world)
    comm.recv(torch.ones(1000), VICTIM) if world.rank == 0 else comm.barrier()


def in_the_middle_of(world, comm, sender, receiver):
    """256 MB; the receiver reports to the parent as soon as the first bytes have arrived."""
    if world.rank == sender:
        comm.send(torch.ones(2**28, dtype=torch.uint8), receiver)
    elif world.rank == receiver:
        buffer = torch.zeros(2**28, dtype=torch.uint8)
        work = comm.irecv(buffer, sender)
        while buffer[0] == 0:
            time.sleep(0.001)
        world.mark("flows")
        if world.rank == VICTIM:
            os.kill(os.getpid(), signal.SIGKILL)
        work.wait()
    comm.barrier()


def in_the_middle_of_its_send(world, comm):
    in_the_middle_of(world, comm, sender=VICTIM, receiver=0)


def in_the_middle_of_its_recv(world, comm):
    in_the_middle_of(world, comm, sender=0, receiver=VICTIM)


def while_idle(world, comm):
    if world.rank == VICTIM:
        die(world)
    time.sleep(1.0)
    comm.barrier()


def while_others_talk(world, comm):
    """Two ranks that never exchange messages with the victim learn of it, too."""
    if world.rank == VICTIM:
        die(world)
    peer = 2 - world.rank
    while True:
        comm.batch_p2p([Send(torch.ones(100), peer), Recv(torch.ones(100), peer)])


def assert_survivors_know(outcomes: list[Outcome], died_at: float) -> None:
    assert outcomes[VICTIM].status == "died", outcomes[VICTIM]
    survivors = [outcome for outcome in outcomes if outcome.rank != VICTIM]
    for outcome in survivors:
        assert outcome.status == "returned", "\n".join(map(str, outcomes))
        report = outcome.value
        assert issubclass(report["type"], PipeCommPeerLost), report
        assert report["origin_rank"] == VICTIM and f"rank {VICTIM}" in report["text"], report
        assert_within(DETECTION_LIMIT_S, report["raised_at"] - died_at, f"rank {outcome.rank}: {report}")


@pytest.mark.parametrize(
    ("size", "scene"),
    [(2, before_a_message), (5, before_a_message), (3, while_idle), (3, while_others_talk)],
)
def test_a_death_reaches_all(ranks, size, scene):
    with ranks.disposable(size, run_until_killed, scene) as world:
        world.await_mark(VICTIM, "dies")
        time.sleep(0.05)  # for the others to be in their calls
        died_at = world.signal(VICTIM, signal.SIGKILL)
        assert_survivors_know(world.collect(), died_at)


@pytest.mark.parametrize("scene", [in_the_middle_of_its_send, in_the_middle_of_its_recv])
def test_a_death_in_the_middle_of_256_mb_reaches_all(ranks, scene):
    receiver = 0 if scene is in_the_middle_of_its_send else VICTIM
    with ranks.disposable(3, run_until_killed, scene) as world:
        died_at = world.await_mark(receiver, "flows")
        if receiver != VICTIM:
            died_at = world.signal(VICTIM, signal.SIGKILL)
        assert_survivors_know(world.collect(), died_at)


# ---- a rank is late or silent ----------------------------------------------------------------------------


@on_ranks(3)
def test_a_rank_that_never_joins_is_named(world):
    # A group of its own: communicators of one group are counted, and later tests count on world.group.
    group = dist.new_group(list(range(3)))
    if world.rank != VICTIM:
        comm = Communicator(group, device="cpu", timeout=0.5)  # does not wait
        with pytest.raises(PipeCommTimeout, match="rank 1 has not made its communicator"):
            comm.barrier()
    world.meet()
    if world.rank != VICTIM:
        with Communicator(group, device="cpu", timeout=0.2) as comm:
            with pytest.raises(PipeCommTimeout, match=r"ranks \[1\] of 3 have not joined after 0.2 s"):
                _ = comm.transport
            with pytest.raises(PipeCommTimeout, match=r"ranks \[1\] of 3 have not joined after 0.2 s"):
                comm.route(VICTIM)
    world.meet()
    group = dist.new_group(list(range(3)))
    with Communicator(group, device="cpu", channels=3, timeout=10) as comm:
        comm.barrier()


@on_ranks(3)
def test_a_late_rank_hears_what_became_of_its_communicator(world):
    group = dist.new_group(list(range(3)))
    if world.rank == VICTIM:
        time.sleep(0.5)
    with Communicator(group, device="cpu", timeout=20) as comm:
        if world.rank == 0:
            comm.abort("enough")
        with pytest.raises(PipeCommAborted, match="enough"):
            comm.barrier()


WAYS = ["shm", "tcp", "mixed"]


def comm_over(world, group, way, timeout=20):
    """A Communicator whose ranks share memory, use sockets, or both: ranks 0 and 1 are then on one host."""
    original = routes.place
    if way == "mixed":
        routes.place = lambda: {**original(), "boot_id": f"host {world.rank // 2}"}
    try:
        return Communicator(group, device="cpu", transport="auto" if way == "mixed" else way, timeout=timeout)
    finally:
        routes.place = original


@on_ranks(3)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("absent", [0, 2])
@pytest.mark.parametrize("kind", [PipeCommTimeout, PipeCommAborted])
def test_a_rank_that_comes_when_all_have_failed_and_closed_hears_the_first_cause(world, way, absent, kind):
    """No rank is left that could report it; the error is not "rank 1 has closed its communicator"."""
    group = dist.new_group(list(range(3)))
    if world.rank == absent:
        dist.barrier()
    with comm_over(world, group, way, timeout=0.3 if kind is PipeCommTimeout else 20) as comm:
        if kind is PipeCommAborted and world.rank == 1:
            comm.abort("enough")
        with pytest.raises(
            kind, match="enough" if kind is PipeCommAborted else "barrier timed out"
        ) as caught:
            comm.barrier()
        assert world.rank != absent or caught.value.origin_rank != absent
        with pytest.raises(kind):
            comm.send(torch.ones(1), (world.rank + 1) % 3)
    if world.rank != absent:
        dist.barrier()


@on_ranks(3)
@pytest.mark.parametrize("way", WAYS)
def test_a_rank_that_comes_when_all_have_closed_hears_that(world, way):
    group = dist.new_group(list(range(3)))
    if world.rank == 2:
        dist.barrier()
    with comm_over(world, group, way) as comm:
        if world.rank == 2:
            for peer in (0, 1, 0):  # each message fails separately: the communicator has not failed
                with pytest.raises(PipeCommPeerLost, match=f"rank {peer} has closed its communicator"):
                    comm.send(torch.ones(1), peer)
    if world.rank != 2:
        dist.barrier()


@on_ranks(2)
def test_an_idle_communicator_outlives_its_timeout(world):
    """The timeout applies to operations; silence is not a failure."""
    comm = world.fresh_comm(timeout=1)
    time.sleep(1.2)
    world.meet()
    comm.barrier()


# ---- waits that expire, communicators that end -----------------------------------------------------------


@on_ranks(2)
def test_an_expired_wait_concerns_the_caller_only(world):
    """The error names the pending message; the operation stays in flight and can be waited for again."""
    peer = 1 - world.rank
    received = poison((2, 3), torch.int32)
    work = world.comm.irecv(received, peer, channel=1)
    pending = rf"waiting for recv #\d+ on channel 1 from rank {peer} of int32\[2, 3\] \(24 B\); it stays"
    for timeout in (0.05, timedelta(milliseconds=50)):
        started_at = time.monotonic()
        with pytest.raises(PipeCommTimeout, match=pending) as caught:
            work.wait(timeout=timeout)
        assert time.monotonic() - started_at > 0.04
        error = caught.value
        assert (error.rank, error.origin_rank, error.peer, error.channel) == (world.rank, world.rank, peer, 1)
        assert (error.op, error.shape, error.dtype) == ("p2p", (2, 3), "int32") and error.seq >= 0
    assert not work.is_completed()
    world.meet()
    world.comm.send(pattern((2, 3), torch.int32, world.rank), peer, channel=1)
    work.wait()
    assert_same(received, pattern((2, 3), torch.int32, peer))
    world.comm.barrier()


@on_ranks(2)
def test_an_expired_wait_names_at_most_four_messages(world):
    peer = 1 - world.rank
    received = [poison(1, torch.int32) for _ in range(6)]
    work = world.comm.batch_p2p([Recv(tensor, peer) for tensor in received], async_op=True)
    with pytest.raises(PipeCommTimeout, match=r"(recv #\d+ on .*){4} and 2 more; it stays") as caught:
        work.wait(timeout=0.05)
    assert str(caught.value).count("recv #") == 4
    world.meet()
    world.comm.batch_p2p([Send(pattern(1, torch.int32, number), peer) for number in range(6)])
    work.wait()
    for number, tensor in enumerate(received):
        assert_same(tensor, pattern(1, torch.int32, number))


@on_ranks(2, 3)
def test_both_ends_sending_ends_by_the_communicator_timeout(world):
    """All ranks fail with the origin's timeout; later calls raise it at once; abort and close are quick."""
    with world.broken_comm(timeout=2) as comm:
        started_at = time.monotonic()
        with pytest.raises(PipeCommTimeout) as caught:
            if world.rank < 2:
                comm.send(torch.ones(4), 1 - world.rank)
            else:
                comm.recv(torch.ones(4), 0)
        assert_within(2 + 1, time.monotonic() - started_at)
        assert caught.value.origin_rank in range(world.size)
        assert caught.value.rank == world.rank
        if caught.value.origin_rank == world.rank:
            assert re.search(r"timed out .* \(limit 2\.0 s\), .* pending", str(caught.value)), caught.value
        following = (world.rank + 1) % world.size
        for call in (lambda: comm.send(torch.ones(4), following), comm.barrier):
            with pytest.raises(PipeCommTimeout) as again:
                call()
            assert again.value.origin_rank == caught.value.origin_rank
        started_at = time.monotonic()
        comm.abort()
        comm.abort("twice")
        comm.close()
        comm.close()
        assert comm.closed
        assert_within(3, time.monotonic() - started_at)


@on_ranks(2)
def test_a_closed_communicator_refuses(world):
    comm = world.fresh_comm()
    comm.close()
    for call in (lambda: comm.send(torch.ones(4), 1 - world.rank), comm.barrier, lambda: comm.batch_p2p([])):
        with pytest.raises(PipeCommAborted, match="closed"):
            call()


class Mute(KeyError):
    def __str__(self) -> str:
        raise RuntimeError("no text")


LEFT_BY = {
    "KeyError: 'the data loader broke'": KeyError("the data loader broke"),
    r"OSError: no such file: caf\udce9.bin": OSError("no such file: caf\udce9.bin"),  # of a name in Latin-1
    "Mute: its text cannot be made (RuntimeError)": Mute(),
}


@on_ranks(2, 3)
@pytest.mark.parametrize("text", LEFT_BY)
def test_leaving_by_an_exception_aborts_all(world, text):
    """Waiting peers get a PipeCommAborted that names the origin and its reason, for any text."""
    with world.broken_comm() as comm:
        if world.rank == 1:
            with pytest.raises(type(LEFT_BY[text])) as left_by, comm:
                raise LEFT_BY[text]
            assert left_by.value is LEFT_BY[text]
        else:
            with (
                pytest.raises(PipeCommAborted, match=f"rank 1: {re.escape(text)}") as caught,
                comm,
            ):
                comm.recv(torch.ones(4), 1)
            assert caught.value.origin_rank == 1 and caught.value.rank == world.rank


@on_ranks(2)
def test_abort_frees_a_waiting_thread(world):
    with world.broken_comm() as comm:
        if world.rank == 0:
            threading.Timer(0.1, comm.abort, args=("enough",)).start()
        with pytest.raises(PipeCommAborted, match="rank 0.*enough") as caught:
            comm.recv(torch.ones(4), 1 - world.rank)
        assert caught.value.origin_rank == 0
        with pytest.raises(PipeCommAborted, match="rank 0.*enough"):
            comm.barrier()


@on_ranks(2)
def test_a_message_that_meets_a_closed_peer_fails(world):
    """A send that will never be received ends when the peer closes, not at the deadline."""
    with world.broken_comm() as comm:
        if world.rank == 0:
            work = comm.isend(torch.ones(4), 1)
            with pytest.raises(PipeCommError, match=r"rank 1.*closed") as caught:
                work.wait()
            assert caught.value.peer == 1
        else:
            time.sleep(0.1)
            comm.close()


@on_ranks(3)
@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_what_a_peer_has_sent_before_it_closed_arrives(world, transport):
    """Even if nothing waits for it until then, and a long message from elsewhere keeps the transport busy."""
    with Communicator(world.group, device="cpu", transport=transport, timeout=20) as comm:
        long, short = torch.zeros(256 << 20, dtype=torch.uint8), torch.full((20_000,), float(world.rank))
        comm.barrier()
        if world.rank == 2:
            comm.send(long, 0)
        elif world.rank == 1:
            time.sleep(0.1)
            comm.send(short, 0)
        else:
            works = [comm.irecv(short, 1)]
            time.sleep(0.06)  # the long one has been announced
            works.append(comm.irecv(long, 2))
            while not works[1].is_completed():
                time.sleep(0.01)
            for work in works:
                work.wait()
            assert (short == 1).all()


@on_ranks(3)
@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_an_abort_that_is_followed_by_a_close_is_heard_as_an_abort(world, transport):
    """Even if two peers report it at once, and one of them has closed already."""
    for round_idx in range(12):
        comm = Communicator(world.group, device="cpu", transport=transport, timeout=20)
        world.meet()  # nothing else: the test is about how they connect and which closes first
        if world.rank == round_idx % world.size:
            comm.abort("enough")
        else:
            with pytest.raises(PipeCommAborted, match="enough") as caught:
                comm.barrier()
            assert caught.value.origin_rank == round_idx % world.size
        comm.close()
