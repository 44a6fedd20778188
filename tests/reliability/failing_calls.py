"""Every call of the library that can fail, failing: the n-th of each kind on one rank, for n = 1, 2, ...

A program (PROGRAMS) is played by all ranks again and again. On the victim, the first call of a kind fails,
then the second one, until the program makes no further call of that kind. Each time, all ranks end soon,
those that return have the right results, and an error of another rank names the victim. failing_calls.cpp
makes calls of the extension fail; the package's own calls of `os` and `threading` fail here.

python tests/reliability/failing_calls.py    # plays all, and writes the counts into docs/reliability.md
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import itertools
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).resolve().parents[1]))

import operations_parallel  # noqa: F401  (fills the table)
import operations_pipeline  # noqa: F401  (fills the table)
import torch
import torch.distributed as dist
from operations import NUM_CHANNELS, OPERATIONS, Draw
from patterns import assert_same, pattern
from ranks import RankPool, assert_within
from tools import compile_library

from pipecomm_ext import _C, Communicator, PipeCommError
from pipecomm_ext.core.tensor_specs import specs_of

VICTIM, NUM_RANKS = 1, 3
TIMEOUT_S = 30.0  # of communicators
SOON_S = 15.0  # all ranks have ended, whatever failed
TRANSPORTS = ("tcp", "shm")
SOURCE = Path(__file__).with_name("failing_calls.cpp")

# The order is that of failing_calls.cpp. How often a rank sleeps and polls depends on timing: each of these
# calls fails once, but they are not counted.
COUNTED = ("thread", "memory", "system call")
KINDS = (*COUNTED, "sleep")
# Part of the text of the victim's error.
SAYS = {
    "thread": "cannot start a thread: Resource temporarily unavailable; raise|can't start new thread",
    "memory": "allocate|bad_alloc|memory",
    "system call": "could not listen|queue of events|memfd|fchmod|memory of rank|shared memory|pidfd_open"
    "|/proc|affinity",
    "sleep": "$nothing",
}


@functools.cache
def load(library: Path) -> ctypes.CDLL:
    calls = ctypes.CDLL(str(library))
    calls.watch.restype = calls.call_fails.restype = ctypes.c_bool
    calls.arm_function.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_int]
    for function in (calls.imports, calls.watched, calls.last):
        function.restype = ctypes.c_char_p
    assert calls.watch(_C.__file__.encode(), None)
    libc10 = Path(torch.__file__).parent / "lib" / "libc10.so"  # allocates tensors
    assert calls.watch(str(libc10).encode(), b"posix_memalign")
    return calls


class Injector:
    """Makes calls of this rank fail within a `with injector:` block; without a library, none.

    `kind`: of KINDS, or the name of one function, whose calls fail with `error`.
    """

    def __init__(self, library: Path | None, kind: str, nth: int, error: int = 0):
        self._calls, self._error = None if library is None else load(library), error
        if self._calls and kind in KINDS:
            self._calls.arm(KINDS.index(kind), nth)
        elif self._calls:
            self._calls.arm_function(kind.encode(), nth, error)

    def __enter__(self) -> None:
        if self._calls:
            self._calls.set_paused(False)

    def __exit__(self, *exc_info: object) -> None:
        if self._calls:
            self._calls.set_paused(True)

    def end(self) -> tuple[int, str]:
        """How many calls have failed, and the name of the last one."""
        if not self._calls:
            return 0, ""
        self._calls.disarm()
        return self._calls.failures(), self._calls.last().decode()

    @contextlib.contextmanager
    def functions_of_python(self) -> Iterator[None]:
        """Also counts the calls that the package itself makes."""
        with contextlib.ExitStack() as stack:
            for owner, name, error in PYTHON_CALLS if self._calls else ():
                stack.enter_context(mock.patch.object(owner, name, self._failing(owner, name, error)))
            yield

    def _failing(self, owner: Any, name: str, error: Exception) -> Callable:
        function = getattr(owner, name)
        kind = KINDS.index("system call" if isinstance(error, OSError) else "thread")
        if self._error:
            error = os_error(self._error)

        @functools.wraps(function)
        def call(*args, **kwargs):
            caller = sys._getframe(1).f_globals.get("__name__", "")
            if caller.startswith("pipecomm_ext.") and self._calls.call_fails(kind, name.encode()):
                raise error
            return function(*args, **kwargs)

        return call


def os_error(number: int) -> OSError:
    return OSError(number, os.strerror(number))


PYTHON_CALLS = [
    (threading.Thread, "start", RuntimeError("can't start new thread")),
    (os, "memfd_create", os_error(errno.EMFILE)),
    (os, "pidfd_open", os_error(errno.EMFILE)),
    (os, "stat", os_error(errno.EACCES)),
    (os, "listdir", os_error(errno.EMFILE)),
    (os, "readlink", os_error(errno.EACCES)),
    (os, "sched_getaffinity", os_error(errno.EPERM)),
    (Path, "read_text", os_error(errno.EMFILE)),
]


# ---- programs ----------------------------------------------------------------------------------------------

Connect = Callable[[], Communicator]
PROGRAMS: dict[str, Callable[[Connect, Injector], None]] = {}
SMALL, LARGE = Draw(length=5), Draw("large", length=1 << 15)


def program(name: str):
    def register(play: Callable[[Connect, Injector], None]):
        PROGRAMS[name] = play
        return play

    return register


@program("construction")
def construction(connect: Connect, injector: Injector) -> None:
    with injector, injector.functions_of_python():
        comm = connect()
    with comm:
        comm.barrier()


@program("close")
def close(connect: Connect, injector: Injector) -> None:
    comm = connect()
    OPERATIONS["batch_p2p"].prepare(comm, LARGE).run()
    with injector:
        comm.close()


def calls(name: str, *operations: str) -> None:
    """Adds a program that runs these operations, with small and with large tensors."""

    @program(name)
    def play(connect: Connect, injector: Injector) -> None:
        with connect() as comm:
            for operation, draw in itertools.product(operations, (SMALL, LARGE)):
                call = OPERATIONS[operation].prepare(comm, draw)
                with injector:
                    for work in call.start():
                        work.wait()
                call.check()
            comm.barrier()


@program("exchange after another")
def follow(connect: Connect, injector: Injector) -> None:
    """A second exchange is to follow the first one, which waits for rank 0: its channel needs a thread."""
    with connect() as comm:
        inputs = [pattern((5,), torch.float32, comm.rank, rank) for rank in range(comm.size)]
        outputs = [[torch.empty(5) for _ in inputs] for _ in range(2)]
        plan = _C.plan_all_to_all_list(comm.rank, comm.size, specs_of(inputs, ""), specs_of(inputs, ""))
        comm.barrier()
        if comm.rank == 0:
            comm.recv(torch.empty(1), VICTIM, channel=2)
            time.sleep(0.1)
        with injector:
            first = comm.exchange(plan, inputs, outputs[0], async_op=True, channel=0)
            if comm.rank == VICTIM:
                comm.isend(torch.ones(1), 0, channel=2)
            second = comm.exchange(plan, inputs, outputs[1], async_op=True, channel=1, after=first)
            second.wait()
        for received in outputs:
            for rank, tensor in enumerate(received):
                assert_same(tensor, pattern((5,), torch.float32, rank, comm.rank), f"from rank {rank}")


calls("point to point", "batch_p2p", "isend, irecv", "send, recv")
calls("broadcast, barrier", "broadcast", "barrier")
calls("exchange plan", "exchange", "Communicator.all_to_all")
calls("all-to-all", "all_to_all", "all_to_all_many", "ulysses_attention")
calls("split and gather", "gather_forward_split_backward", "split_forward_gather_backward")
calls(
    "relay between stages", "StageRelay.send_forward, recv_forward", "StageRelay.send_backward, recv_backward"
)
calls("pipeline messages", "P2PCommunicator.send_forward_recv_backward, send_backward_recv_forward")
calls("pipeline step", "schedules.Executor.step")


# ---- playing them ------------------------------------------------------------------------------------------


@dataclass
class Report:
    """How a rank ended a program."""

    took_s: float
    error: str | None  # type and text
    is_ours: bool
    num_failures: int = 0
    failed: str = ""


def play(
    world,
    library: Path | None,
    run: Callable[[Connect, Injector], None],
    transport: str,
    kind: str,
    nth: int,
    error_number: int = 0,
) -> Report:
    injector = Injector(library if world.rank == VICTIM else None, kind, nth, error_number)
    error: Exception | None = None

    def connect() -> Communicator:
        return Communicator(
            world.group, device="cpu", transport=transport, channels=NUM_CHANNELS, timeout=TIMEOUT_S
        )

    began_at = time.monotonic()
    try:
        run(connect, injector)
    except AssertionError:
        raise
    except Exception as caught:
        error = caught
    took_s = time.monotonic() - began_at
    text = None if error is None else f"{type(error).__name__}: {error}"
    return Report(took_s, text, isinstance(error, (PipeCommError, ValueError)), *injector.end())


def check(kind: str, reports: list[Report]) -> None:
    """Checks what must hold, whatever has failed."""
    victim = reports[VICTIM]
    assert_within(SOON_S, max(report.took_s for report in reports))
    assert not any(report.error and report.error.startswith("PipeCommTimeout") for report in reports)
    if victim.error is None or not victim.num_failures:
        assert all(report.error is None for report in reports)
        return
    assert re.search(SAYS[kind], victim.error)
    for rank, report in enumerate(reports):
        if rank != VICTIM and report.error is not None:
            assert report.is_ours and f"rank {VICTIM}" in report.error


def gather(world, report: Report) -> list[Report]:
    reports: list[Any] = [None] * world.size
    dist.all_gather_object(reports, report, group=world.group)
    return reports


def play_all(world, library: Path, name: str, transport: str) -> dict[str, int]:
    """Makes each call of each kind fail once; returns the number of these failures by kind."""
    counts = dict.fromkeys(COUNTED, 0)
    run = PROGRAMS[name]
    play(world, None, run, transport, KINDS[0], 1)  # makes what is made at first use
    for kind in KINDS:
        for nth in itertools.count(1):
            doing = f"{name}, {transport}, {kind} {nth}"
            print(doing, file=sys.stderr, flush=True)  # for the log of a rank that hangs or dies
            report = play(world, library, run, transport, kind, 0 if kind == "sleep" else nth)
            reports = gather(world, report)
            try:
                check(kind, reports)
            except AssertionError as error:
                raise AssertionError(f"{doing}: {reports}") from error
            if kind == "sleep" or not reports[VICTIM].num_failures:
                break
            counts[kind] += 1
    return counts


# ---- the table in docs/reliability.md ----------------------------------------------------------------------

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reliability.md"
BEGIN, END = "<!-- counted by tests/reliability/failing_calls.py -->\n", "<!-- end of the failing calls -->\n"
Counts = dict[tuple[str, str], dict[str, int]]  # by program and transport


def table(counts: Counts) -> str:
    """The lines of the page between BEGIN and END."""
    lines = ["", "| Program | " + " | ".join(TRANSPORTS) + " |", "|---" * (1 + len(TRANSPORTS)) + "|"]
    lines += [
        f"| {name} | " + " | ".join(cell(counts[name, t]) for t in TRANSPORTS) + " |" for name in PROGRAMS
    ]
    totals = [sum(sum(counts[name, t].values()) for name in PROGRAMS) for t in TRANSPORTS]
    each = " and ".join(f"{total} over {t}" for total, t in zip(totals, TRANSPORTS, strict=True))
    return "\n".join([*lines, "", f"{sum(totals)} failing calls: {each}.", "", ""])


def cell(counts: dict[str, int]) -> str:
    return ", ".join(f"{kind} {count}" for kind, count in counts.items() if count) or "none"


def documented() -> Counts:
    """The counts in the page, by program and transport."""
    rows = re.findall(
        r"^\| (.*?) \| (.*?) \| (.*?) \|$",
        PAGE.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0],
        re.M,
    )
    counts: Counts = {}
    for name, *cells in rows[1:]:
        for transport, text in zip(TRANSPORTS, cells, strict=True):
            found = re.findall(r"([a-z ]+?) (\d+)(?:, |$)", text)
            counts[name, transport] = dict.fromkeys(COUNTED, 0) | {kind: int(count) for kind, count in found}
    return counts


def count(pool: RankPool, library: Path, name: str, transport: str) -> dict[str, int]:
    """Plays a program on ranks of a pool; see play_all."""
    return pool.run(NUM_RANKS, play_all, library, name, transport, deadline=100)[0]


def main() -> None:
    """Plays everything and writes the table into the page."""
    library, counts = compile_library(SOURCE), {}
    with RankPool() as pool:
        for name, transport in itertools.product(PROGRAMS, TRANSPORTS):
            counts[name, transport] = count(pool, library, name, transport)
            print(f"{name}, {transport}: {cell(counts[name, transport])}", flush=True)
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    PAGE.write_text(before + BEGIN + table(counts) + END + rest.split(END)[1], encoding="utf-8")


if __name__ == "__main__":
    main()
