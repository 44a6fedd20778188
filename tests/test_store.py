"""A store that does not answer blocks no constructor, no close and no exit.

The store is a process of its own, like torchrun's agent; rank 1 of the group never joins.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import assert_within, die_with, fork_context
from scripts import TESTS, Script

from pipecomm_ext import Communicator, PipeCommError, PipeCommTimeout, get_communicator
from pipecomm_ext.core.limited_store import LimitedStore

TRANSPORTS = ("tcp", "shm", "auto")
STRIKES = {"stopped": signal.SIGSTOP, "killed": signal.SIGKILL}
CASES = [(transport, strike) for transport in TRANSPORTS for strike in STRIKES]
TIMEOUT_S, CLOSE_S, SPARE_S = 2.5, 3.0, 1.0
SILENT = "the store of the group does not answer"


def serve(pipe, lifeline) -> None:
    die_with(lifeline)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    time.sleep(1000)


@contextlib.contextmanager
def stores(num: int) -> Iterator[list[tuple[int, int]]]:
    """Starts stores; yields the pid and the port of each."""
    context = fork_context()
    processes, found, kept = [], [], []
    try:
        for _ in range(num):
            pipe, its_pipe = context.Pipe()
            its_lifeline, lifeline = context.Pipe(duplex=False)
            processes.append(context.Process(target=serve, args=(its_pipe, its_lifeline), daemon=True))
            processes[-1].start()
            kept += [pipe, lifeline, its_lifeline]
        for process, pipe in zip(processes, kept[::3], strict=True):
            assert pipe.poll(60)
            found.append((process.pid, pipe.recv()))
        yield found
    finally:
        for process in processes:
            process.kill()
            process.join()


def join(port: int) -> None:
    """Makes a group of two ranks, of which this is the first. Only its store is used."""
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  (registers the backend)

    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=100))
    dist.init_process_group("fake", store=store, rank=0, world_size=2)


def lose_the_store(world, found):
    """Each rank runs a different case."""
    (transport, strike), (pid, port) = CASES[world.rank], found[world.rank]
    dist.destroy_process_group()
    join(port)
    arguments = {"device": "cpu", "transport": transport, "timeout": TIMEOUT_S}
    comm = Communicator(**arguments)
    work = comm.irecv(torch.zeros(3), 1)
    time.sleep(0.1)  # it looks for rank 1
    os.kill(pid, STRIKES[strike])
    with pytest.raises(PipeCommTimeout, match=f"rank 1 has not made its communicator, .*{SILENT}"):
        work.wait()
    began_at = time.monotonic()
    comm.close()
    assert_within(CLOSE_S, time.monotonic() - began_at, "close()")
    began_at, timeout_s = time.monotonic(), 0.5 if strike == "stopped" else TIMEOUT_S
    with pytest.raises(
        PipeCommError, match=rf"rank 0: Communicator: {SILENT} \(127.0.0.1:{port}\)"
    ) as caught:
        Communicator(**{**arguments, "timeout": timeout_s})
    assert_within(timeout_s + SPARE_S, time.monotonic() - began_at, "the constructor")
    assert (type(caught.value) is PipeCommTimeout) == (strike == "stopped")
    with pytest.raises(ValueError, match="transport must be one of"):  # not the store's error
        Communicator(**{**arguments, "transport": "by hand"})
    if strike == "stopped":
        os.kill(pid, signal.SIGCONT)
        with Communicator(**{**arguments, "timeout": 20}) as comm:  # everything works as before
            assert comm.known_transport == transport


def test_a_store_that_is_lost(ranks):
    with stores(len(CASES)) as found, ranks.disposable(len(CASES), lose_the_store, found) as world:
        outcomes = world.collect(give_up_on=("raised", "died"))
        assert all(outcome.status == "returned" for outcome in outcomes), "\n".join(map(str, outcomes))


def retry_when_the_store_answers(world, found):
    """Rank 1 is late, and was not affected. Both start with the first attempt, and meet."""
    [(pid, port)] = found
    dist.destroy_process_group()
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=100))
    dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)
    arguments = {"device": "cpu", "timeout": 5}
    if world.rank == 0:
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(PipeCommTimeout, match=SILENT):
            Communicator(**arguments)
        os.kill(pid, signal.SIGCONT)
    world.meet()
    with Communicator(**arguments) as comm:
        comm.barrier()


def test_a_rank_that_tries_again_meets_one_that_was_late(ranks):
    with stores(1) as found, ranks.disposable(2, retry_when_the_store_answers, found) as world:
        outcomes = world.collect(give_up_on=("raised", "died"))
        assert all(outcome.status == "returned" for outcome in outcomes), "\n".join(map(str, outcomes))


def end_without_a_store(pid: int, port: int, strike: str, begins: str) -> None:
    """A program: its communicators, all of which look for rank 1, are closed when it ends."""
    join(port)
    comms = [get_communicator(device="cpu")]
    comms += [Communicator(device="cpu", transport=transport, timeout=60) for transport in TRANSPORTS]
    for comm in comms:
        comm.connect()
    time.sleep(0.1)
    os.kill(pid, STRIKES[strike])
    print(time.monotonic(), flush=True)
    if begins == "raises":
        raise OSError("no such file: caf\udce9.bin")


@pytest.mark.slow
def test_a_program_ends_without_its_store():
    endings = [("stopped", "ends"), ("stopped", "raises"), ("killed", "raises")]
    program = (
        "import sys, test_store; test_store.end_without_a_store(*map(int, sys.argv[1:3]), *sys.argv[3:])"
    )
    with stores(len(endings)) as found, contextlib.ExitStack() as stack:
        programs = [
            stack.enter_context(Script("-c", program, *store, *ending, folder=TESTS))
            for store, ending in zip(found, endings, strict=True)
        ]
        for script, (strike, ending) in zip(programs, endings, strict=True):
            exit_code, output = script.finish(100)
            took_s = time.monotonic() - float(output.split()[0])
            assert exit_code == (1 if ending == "raises" else 0), output
            assert ("OSError: no such file" in output) == (ending == "raises"), output
            assert "terminate called" not in output and "Exception ignored" not in output, output
            assert_within(2 * CLOSE_S, took_s, f"{strike}, {ending}")


class Relay:
    """Forwards connections to a store, until it breaks them all."""

    def __init__(self, port: int):
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port, self._to, self._open = self._listener.getsockname()[1], port, []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it is closed
            while True:
                near = self._listener.accept()[0]
                far = socket.create_connection(("127.0.0.1", self._to))
                self._open += [near, far]
                for source, target in ((near, far), (far, near)):
                    threading.Thread(target=self._forward, args=(source, target), daemon=True).start()

    @staticmethod
    def _forward(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):  # it is broken
            while data := source.recv(65536):
                target.sendall(data)

    def break_all(self) -> None:
        for each in self._open:
            each.shutdown(socket.SHUT_RDWR)
        self._open.clear()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.break_all()


def test_a_connection_to_the_store_that_breaks():
    """As by a firewall after hours of idling: calls that may be repeated are made once more."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    relay = Relay(store.port)
    client = dist.TCPStore("127.0.0.1", relay.port, is_master=False)
    limited = LimitedStore(client, rank=0, in_background=True)
    for number in range(3):
        limited.set("farewell", b"%d" % number, 20)
        relay.break_all()
        assert limited.find("farewell", 20) == b"%d" % number
        relay.break_all()
    with pytest.raises(RuntimeError):
        limited.add("number", 1, 20)  # might count twice
    assert limited.add("number", 1, 20) == 1
    relay.close()
