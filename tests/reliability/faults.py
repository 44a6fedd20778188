"""What can go wrong with a rank in the middle of any operation, and how all other ranks must react.

Each fault is a scene that all ranks run: the victim misbehaves, the others are in the operation. A rank
reports how it ended; expectations are stated with the scene. `Stage` is what a scene sees.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import operations_parallel  # noqa: F401  (fills the table)
import operations_pipeline  # noqa: F401  (fills the table)
import torch
from operations import NUM_CHANNELS, OPERATIONS, Draw, Operation

from pipecomm_ext import (
    Communicator,
    PipeCommAborted,
    PipeCommMismatch,
    PipeCommPeerLost,
    PipeCommTimeout,
)

VICTIM = 1
NUM_RANKS = 3
PATIENT_S = 20.0  # the timeout of communicators if something else must be faster
IMPATIENT_S = 1.0  # if the timeout must end the wait
FIRST_HEARS_S = 1.0  # until one rank knows of a dead peer
ALL_HEAR_S = 2.0  # until all do
AFTER_TIMEOUT_S = 1.0  # until all know that one rank's wait timed out
SMALL, LARGE = Draw(length=5), Draw(length=1 << 17)


@dataclass
class Stage:
    """One rank's part of a scene."""

    world: Any
    operation: Operation
    transport: str
    timeout_s: float = PATIENT_S
    comm: Any = None
    descriptors: list[int] = field(default_factory=list)  # of the communicator
    struck_at: float = 0.0

    @property
    def is_victim(self) -> bool:
        return self.world.rank == VICTIM

    def strike(self) -> None:
        """Marks where the fault begins."""
        self.struck_at = time.monotonic()

    def connect(self, **kwargs) -> Communicator:
        arguments = {"transport": self.transport, "channels": NUM_CHANNELS, "timeout": self.timeout_s}
        return Communicator(self.world.group, device="cpu", **{**arguments, **kwargs})

    def prepare(self, draw: Draw = SMALL, operation: Operation | None = None):
        return (operation or self.operation).prepare(self.comm, draw)

    def await_end(self) -> None:
        """Marks the point at which the parent causes the fault."""
        self.world.mark("here")
        time.sleep(60)


class Fault(NamedTuple):
    name: str
    scene: Callable[[Stage], None]
    expected: tuple[type, ...]  # how the others end; () means that they return
    # Of the error: "victim", "others" (a waiting rank finds a timeout), "either end" of a connection, "any".
    origin: str = "victim"
    victim: str = "lives"  # "lives", "dies", "stops"
    # What the parent does to the victim in new processes, and when. Other faults happen within warm ones.
    strike: Callable[[Any], float] | None = None
    begins_after_s: float = 0.0  # part of the wait that does not count as detection
    limit_s: float = ALL_HEAR_S
    timeout_s: float = PATIENT_S
    keeps: bool = False  # the same communicator must still work after it
    is_in_call: bool = True  # all others are in the operation when it happens, not between two
    concerns: Callable[[Operation, str], bool] = lambda operation, transport: True


FAULTS: dict[str, Fault] = {}


def fault(name: str, *expected: type, **facts):
    """Adds a scene to the table."""

    def register(scene: Callable[[Stage], None]):
        FAULTS[name] = Fault(name, scene, expected, **facts)
        return scene

    return register


# ---- the parent's part -------------------------------------------------------------------------------------


def when_all_are_there(world) -> None:
    world.await_marks("here")
    time.sleep(0.05)  # for the others to be in their calls


def kill(world) -> float:
    when_all_are_there(world)
    return world.signal(VICTIM, signal.SIGKILL)


def stop(world) -> float:
    when_all_are_there(world)
    return world.signal(VICTIM, signal.SIGSTOP)


def pause(world) -> float:
    stopped_at = stop(world)
    time.sleep(0.5)
    world.signal(VICTIM, signal.SIGCONT)
    return stopped_at


def await_exit(world) -> float:
    return world.await_mark(VICTIM, "exits")


# ---- a rank dies, or leaves --------------------------------------------------------------------------------


@fault("kill -9 before the call", PipeCommPeerLost, victim="dies", strike=kill)
def killed_before(stage: Stage) -> None:
    if stage.is_victim:
        stage.await_end()
    call = stage.prepare()
    stage.world.mark("here")
    call.run()


@fault("kill -9 in the middle", PipeCommPeerLost, victim="dies", strike=kill, is_in_call=False)
def killed_within(stage: Stage) -> None:
    call = stage.prepare(LARGE)
    call.run()
    stage.world.mark("here")
    while True:
        for work in call.start():
            work.wait()


@fault("kill -9 after the call", PipeCommPeerLost, victim="dies", strike=kill)
def killed_after(stage: Stage) -> None:
    call = stage.prepare()
    call.run()
    if stage.is_victim:
        stage.await_end()
    stage.world.mark("here")
    call.run()


@fault("exit without close()", PipeCommPeerLost, victim="dies", strike=await_exit)
def exits(stage: Stage) -> None:
    call = stage.prepare()
    if stage.is_victim:
        time.sleep(0.05)
        stage.world.mark("exits")
        os._exit(3)
    call.run()


@fault("close() while others call", PipeCommPeerLost, origin="any")
def closes(stage: Stage) -> None:
    call = stage.prepare()
    if stage.is_victim:
        time.sleep(0.05)
        stage.strike()
        stage.comm.close()
        return
    call.run()


@fault("an exception leaves the with block", PipeCommAborted)
def raises(stage: Stage) -> None:
    call = stage.prepare()
    if not stage.is_victim:
        call.run()
    with contextlib.suppress(KeyError), stage.comm:
        time.sleep(0.05)
        stage.strike()
        raise KeyError("the data loader broke")


@fault("Ctrl-C in a wait", PipeCommAborted)
def interrupted(stage: Stage) -> None:
    """The victim waits in the operation, the others for a message of it."""
    if not stage.is_victim:
        stage.comm.recv(torch.ones(2), VICTIM, NUM_CHANNELS - 1)
    call = stage.prepare()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.1, lambda: (stage.strike(), os.kill(os.getpid(), signal.SIGINT)))
    try:
        with contextlib.suppress(KeyboardInterrupt), stage.comm:
            timer.start()
            call.run()
    finally:
        timer.join()
        signal.signal(signal.SIGINT, signal.SIG_IGN)


@fault(
    "connections are cut",
    PipeCommPeerLost,
    origin="either end",
    concerns=lambda op, transport: transport == "tcp",
)
def cut(stage: Stage) -> None:
    """All connections of the victim's communicator are shut down, while all are in the operation."""
    call = stage.prepare()
    if stage.is_victim:
        threading.Timer(0.05, cut_connections, [stage]).start()
        time.sleep(0.2)
    call.run()


def cut_connections(stage: Stage) -> None:
    stage.strike()
    store_port = int(os.environ.get("MASTER_PORT", "0"))  # its connection serves later communicators, too
    for descriptor in stage.descriptors:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            if connection.getpeername()[1:2] != (store_port,):  # a socket that listens has no peer
                connection.shutdown(socket.SHUT_RDWR)


# ---- a rank is silent, or late -----------------------------------------------------------------------------

SILENT = {
    "origin": "others",
    "timeout_s": IMPATIENT_S,
    "begins_after_s": IMPATIENT_S,
    "limit_s": AFTER_TIMEOUT_S,
}
ANY_SILENT = {**SILENT, "origin": "any"}


@fault("SIGSTOP for good", PipeCommTimeout, victim="stops", strike=stop, **SILENT)
def stopped(stage: Stage) -> None:
    call = stage.prepare()
    stage.world.mark("here")
    if stage.is_victim:
        time.sleep(60)
    call.run()


@fault("SIGSTOP and SIGCONT", strike=pause)
def paused(stage: Stage) -> None:
    calls = [stage.prepare(Draw(key, 600)) for key in range(3)]
    stage.world.mark("here")
    for call in calls:
        time.sleep(0.1)
        call.run()


@fault("a slow rank", keeps=True)
def slow(stage: Stage) -> None:
    call = stage.prepare(Draw(length=600))
    if stage.is_victim:
        time.sleep(0.3)
    call.run()


@fault("a rank never calls", PipeCommTimeout, **SILENT)
def never_calls(stage: Stage) -> None:
    call = stage.prepare()
    stage.strike()
    if not stage.is_victim:
        call.run()
    time.sleep(2 * IMPATIENT_S)
    stage.comm.barrier()  # fails with the others' error


# ---- ranks disagree ----------------------------------------------------------------------------------------


def other_collective(operation: Operation) -> Operation:
    return OPERATIONS["broadcast" if "barrier" in operation.name else "barrier"]


def is_collective(operation: Operation, transport: str) -> bool:
    return operation.form == "collective"


def is_message(operation: Operation, transport: str) -> bool:
    return operation.form != "collective"


@fault("another operation", PipeCommMismatch, origin="any", keeps=True, concerns=is_collective)
def calls_another(stage: Stage) -> None:
    operation = other_collective(stage.operation) if stage.is_victim else None
    stage.strike()
    stage.prepare(operation=operation).run()


@fault("a collective instead of a message", PipeCommTimeout, concerns=is_message, **ANY_SILENT)
def calls_a_collective(stage: Stage) -> None:
    stage.strike()
    stage.prepare(operation=OPERATIONS["barrier"] if stage.is_victim else None).run()


@fault("another order", PipeCommMismatch, origin="any", keeps=True, concerns=is_collective)
def calls_in_another_order(stage: Stage) -> None:
    calls = [stage.prepare(), stage.prepare(operation=other_collective(stage.operation))]
    stage.strike()
    for call in reversed(calls) if stage.is_victim else calls:
        call.run()


def disagreement(what: str, draw: Draw) -> None:
    def compares(operation: Operation, transport: str) -> bool:
        return what in operation.compares

    @fault(f"another {what}", PipeCommMismatch, origin="any", concerns=compares)
    def disagrees(stage: Stage) -> None:
        """Ranks that it does not concern learn of it when another rank gives up."""
        call = stage.prepare(draw if stage.is_victim else SMALL)
        stage.strike()
        call.run()


disagreement("shape", Draw(length=7))
disagreement("dtype", Draw(length=5, dtype=torch.int32))
disagreement("plan", Draw(length=5, variant=1))

# ---- resources run out -------------------------------------------------------------------------------------


@contextlib.contextmanager
def limited(what: int, limit: int):
    before = resource.getrlimit(what)
    resource.setrlimit(what, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(what, before)


@fault("no descriptor is left", keeps=True)
def no_descriptors(stage: Stage) -> None:
    """An open communicator needs no more descriptors. (Modules that are imported on first use do.)"""
    stage.prepare().run()
    call = stage.prepare(Draw(length=6000))
    scope = limited(resource.RLIMIT_NOFILE, 3) if stage.is_victim else contextlib.nullcontext()
    with scope:
        for work in call.start():
            work.wait()
    call.check()


@fault("no shared memory is left", keeps=True, concerns=lambda op, transport: transport == "shm")
def no_shared_memory(stage: Stage) -> None:
    """Found while connecting: "shm" is refused on all ranks, "auto" connects to the victim and warns."""
    scope = limited(resource.RLIMIT_FSIZE, 8 << 20) if stage.is_victim else contextlib.nullcontext()
    with scope:
        try:
            stage.connect().barrier()
            raise AssertionError("shared memory without memory")
        except (ValueError, PipeCommMismatch) as error:
            assert f"rank {VICTIM}" in str(error) and 'use "auto" or "tcp"' in str(error), error
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fallback = stage.connect(transport="auto")
            fallback.barrier()
            until = time.monotonic() + PATIENT_S
            while stage.is_victim and not any("not through shared memory" in str(w.message) for w in caught):
                assert time.monotonic() < until
                time.sleep(0.01)  # the look-up warns, perhaps after the peers have connected
        assert fallback.transport != "shm" and f"rank {VICTIM}" in fallback.transport_reason
    stage.comm.close()
    stage.comm = fallback
    stage.prepare().run()
