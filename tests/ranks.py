"""Real rank processes for tests: a warm pool that all tests reuse, and disposable worlds for fault tests.

    def body(world, count): ...                   # module-level; runs on every rank
    ranks.run(4, body, 10)                        # results in rank order; a failing rank raises RankFailure
    ranks.attempt(2, body, 10)                    # Outcomes: exceptions are results (type, text, attributes)
    with ranks.disposable(3, body, 10) as world:  # fresh processes of one test, which may be signalled
        world.await_marks("posted")               # all ranks have called world.mark("posted")
        world.signal(1, signal.SIGKILL)
        outcomes = world.collect(deadline=5)

    @on_ranks(2, 3)                                # the same as one test function per rank count
    def test_ring(world): ...

A body breaks a communicator, or anything that uses one, between two meetings of all ranks:

    with world.broken_comm(timeout=20) as comm:    # made and connected before, closed after them
        comm.abort("enough") if world.rank == 0 else pytest.raises(PipeCommAborted, comm.barrier)
    with world.breaking(), pytest.raises(...):     # the same around an executor's step, say
        executor.step(...)

Each world size has its own processes, forked from a server that has imported torch, and joined once in a gloo
default group over a FileStore, and is stopped between two tests. A world that dies, hangs past its deadline
or fails unexpectedly is killed, reported with the stacks of all its threads, and replaced for the next test.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import functools
import gc
import importlib
import inspect
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
from processes import state_of

DEFAULT_DEADLINE_S = 100.0  # much longer than any body takes: it only ends hangs
START_DEADLINE_S = 100.0  # until new processes have joined their world: not part of a body's deadline
MAX_CALLS_OF_A_WORLD = 150
MAX_WARM_RANKS = 16  # worlds of 1 to 5 ranks, or of 8 and some; a new one takes a tenth of a second
GROUP_TIMEOUT_S = 200.0  # of the gloo group itself: too long to decide any test
GRACE_S = 3.0  # for the other ranks of a world in which one rank has died, or failed unexpectedly
STACKS_SIGNAL = signal.SIGUSR2
STACKS_LIMIT_S = 5.0  # for a rank that hangs to begin to write its stacks
LOG_TAIL_BYTES = 8000
# Modules that ranks would otherwise import themselves, which takes seconds each time: some with the first
# backward(), the first step of an optimizer or the first torch.compile.
PRELOADED = [
    "torch",
    "torch.distributed",
    "numpy",
    "pytest",
    "pipecomm_ext",
    "torch.fx.experimental.symbolic_shapes",
    "torch._dynamo",
    "torch._functorch.aot_autograd",
    "torch._inductor.compile_fx",
]


@dataclass(frozen=True)
class RaisedError:
    """An exception of a rank, as data."""

    type: type[BaseException]
    text: str
    attributes: dict[str, Any]
    traceback: str


@dataclass
class Outcome:
    """How one rank ended: "returned", "raised", "died" or "hung". Times are CLOCK_MONOTONIC."""

    rank: int
    status: str = "hung"
    value: Any = None
    error: RaisedError | None = None
    exit_code: int | None = None
    ended_at: float = 0.0
    log: str = ""

    def __str__(self) -> str:
        how = {
            "returned": lambda: "returned",
            "raised": lambda: f"raised\n{self.error.traceback}",
            "died": lambda: f"died with exit code {self.exit_code}",
            "hung": lambda: "did not finish",
        }[self.status]()
        return f"--- rank {self.rank} {how}" + (f"\nlog:\n{self.log}" if self.log else "")


class RankFailure(AssertionError):
    """A rank failed, died or hung; the text shows every rank, `outcomes` holds them in rank order."""

    def __init__(self, title: str, outcomes: list[Outcome]):
        super().__init__("\n".join([title, *map(str, outcomes)]))
        self.outcomes = outcomes


JUDGES_TIMES = os.environ.get("PIPECOMM_TEST_FAULTS") == "all"


def assert_within(limit_s: float, took_s: float, what: object = "") -> None:
    """Asserts a promised time, but only in `make faults`, on a machine that does nothing else.

    A machine that runs a test suite may stall for seconds. There, only the kind of an error shows that it
    came before the end of a wait.
    """
    assert not JUDGES_TIMES or took_s < limit_s, f"took {took_s:.2f} s, not {limit_s} s: {what}"


# ---- the rank's side --------------------------------------------------------------------------------------

_made: dict[tuple, Any] = {}
_kept_groups: set[Any] = set()


def _groups_of_torch() -> set[Any]:
    from torch.distributed.distributed_c10d import _world

    return set(_world.pg_map)


def keep_groups() -> None:
    """Keeps torch's existing groups for later tests, for callers that cache them."""
    _kept_groups.update(_groups_of_torch())


def once_a_test(make: Callable) -> Callable:
    """functools.cache until the end of a test, for objects that hold torch's groups."""

    @functools.wraps(make)
    def cached(*args):
        if (key := (make, *args)) not in _made:
            _made[key] = make(*args)
        return _made[key]

    return cached


class World:
    """What a test body sees: this rank, its group, and communicators over it."""

    def __init__(self, rank: int, size: int, device: str, pipe: Connection):
        self.rank, self.size, self.device = rank, size, device
        self._pipe = pipe
        self._shared: dict[tuple, Any] = {}
        self._fresh: list[Any] = []

    @property
    def group(self):
        import torch.distributed as dist

        return dist.group.WORLD

    @property
    def comm(self):
        """The Communicator that all tests of this world share; a test that breaks one takes broken_comm()."""
        return self.shared_comm()

    def shared_comm(self, **kwargs):
        """A Communicator with these arguments, made collectively at first use, or once one is closed."""
        key = tuple(sorted(kwargs.items()))
        if key not in self._shared or self._shared[key].closed:
            self._shared[key] = self._make_comm(kwargs)
        return self._shared[key]

    def fresh_comm(self, **kwargs):
        """A new Communicator, closed (or, if the body raised, aborted) after the test."""
        self._fresh.append(self._make_comm(kwargs))
        return self._fresh[-1]

    def meet(self) -> None:
        """Returns once all ranks have called it; over gloo, so that no communicator is involved."""
        import torch.distributed as dist

        dist.barrier(self.group)

    @contextlib.contextmanager
    def breaking(self) -> Iterator[None]:
        """Wraps, on all ranks, what makes a communicator fail: the failure finds no rank still in a
        constructor or an earlier call, and no rank continues or closes before all have seen theirs."""
        self.meet()
        yield
        self.meet()

    @contextlib.contextmanager
    def broken_comm(self, **kwargs) -> Iterator[Any]:
        """A fresh_comm that is connected, in a block that breaks it."""
        comm = self.fresh_comm(**kwargs)
        comm.barrier()
        with self.breaking():
            yield comm
        comm.close()

    def _make_comm(self, kwargs: dict[str, Any]):
        import pipecomm_ext

        return pipecomm_ext.Communicator(self.group, **{"device": self.device, **kwargs})

    def mark(self, name: str) -> None:
        """Reports to the parent that this point is reached (see RankGroup.await_mark)."""
        self._pipe.send_bytes(pickle.dumps(("mark", name, time.monotonic())))

    def tidy(self) -> None:
        """Destroys torch's groups of the last test, once no rank is in that test any more.

        torch < 2.14 may reuse the name of a group that only its members made, and ranks of the later one find
        old addresses.
        """
        import torch
        import torch.distributed as dist

        for group in _groups_of_torch() - {dist.group.WORLD} - _kept_groups:
            if torch.__version__ >= "2.14" or group.group_name.isdigit():
                dist.destroy_process_group(group)

    def end_test(self, failed: bool) -> None:
        fresh, self._fresh = self._fresh, []
        _made.clear()
        for comm in fresh:
            comm.abort("the test body raised") if failed else comm.close()


@dataclass(frozen=True)
class _Call:
    """A function by name, so that a decorated test can name its own body."""

    module: str
    qualname: str
    args: tuple
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, function: Callable, args: tuple, kwargs: dict[str, Any]) -> _Call:
        if "<" in function.__qualname__:
            raise ValueError(f"{function.__qualname__} is not module-level: ranks import it by name")
        return cls(function.__module__, function.__qualname__, args, kwargs)

    def __call__(self, world: World) -> Any:
        target = functools.reduce(getattr, self.qualname.split("."), importlib.import_module(self.module))
        return getattr(target, "rank_body", target)(world, *self.args, **self.kwargs)


def _describe(error: BaseException) -> RaisedError:
    kind = next(base for base in type(error).__mro__ if _can_pickle(base))
    attributes = {
        name: value
        for name in dir(error)
        if not name.startswith("__") and not callable(value := getattr(error, name)) and _can_pickle(value)
    }
    return RaisedError(kind, str(error), attributes, "".join(traceback.format_exception(error)))


def _can_pickle(value: Any) -> bool:
    try:
        pickle.dumps(value)
    except Exception:
        return False
    return True


def _answer(world: World, call_bytes: bytes) -> bytes:
    """Runs one call; returns the pickled ("returned", value, time) or ("raised", error, time)."""
    import torch

    torch.manual_seed(0)
    failed = True
    try:
        value = pickle.loads(call_bytes)(world)
        failed = False
        world.end_test(failed)
        return pickle.dumps(("returned", value, time.monotonic()))
    except BaseException as error:  # a rank must answer whatever its body raised, SystemExit included
        raised_at = time.monotonic()
        description = _describe(error)
    if failed:
        with contextlib.suppress(Exception):
            world.end_test(failed)
    return pickle.dumps(("raised", description, raised_at))


def die_with(lifeline: Connection) -> None:
    """Makes the kernel kill this process when the pipe's other end closes, even in native code that hangs."""
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, os.O_ASYNC)


def _rank_main(
    rank: int, size: int, device: str, directory: str, pipe: Connection, lifeline: Connection
) -> None:
    """A rank process of this machine's network."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    serve_rank(rank, size, device, directory, pipe, lifeline, f"file://{directory}/store")


def serve_rank(
    rank: int,
    size: int,
    device: str,
    directory: str,
    pipe: Connection,
    lifeline: Connection,
    init_method: str,
) -> None:
    """Joins a world as init_process_group does, then answers calls until the pipe closes."""
    die_with(lifeline)
    gc.freeze()  # a collection would copy the pages of everything that the server has imported
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # pytest handles Ctrl-C
    log = open(os.path.join(directory, f"rank{rank}.log"), "wb", buffering=0)
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    sys.stdout.reconfigure(line_buffering=True)
    faulthandler.enable(log)
    faulthandler.register(STACKS_SIGNAL, file=log, all_threads=True)

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method, rank=rank, world_size=size, timeout=timedelta(seconds=GROUP_TIMEOUT_S)
    )
    world = World(rank, size, device, pipe)
    world.mark("joined")
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            call_bytes = pipe.recv_bytes()
            world.tidy()
            pipe.send_bytes(_answer(world, call_bytes))


# ---- the parent's side ------------------------------------------------------------------------------------


def fork_context() -> Any:
    """Processes forked from a server that has torch imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


@dataclass
class RankProcess:
    process: Any
    pipe: Connection
    lifeline: Connection
    marks: dict[str, float] = field(default_factory=dict)


class RankGroup:
    """The processes of one world, as the test process holds them."""

    def __init__(self, size: int, device: str, parent_directory: str):
        self.size = size
        self.num_calls = 0
        self._is_paused = False
        self.directory = Path(tempfile.mkdtemp(prefix=f"world{size}-", dir=parent_directory))
        self._ranks: list[RankProcess] = []
        self.reset()
        try:
            self._start_ranks(fork_context(), device)
            self.await_marks("joined", START_DEADLINE_S)
        except BaseException:
            self.close()
            raise

    def _start_ranks(self, context: Any, device: str) -> None:
        for rank in range(self.size):
            pipe, rank_pipe = context.Pipe()
            rank_lifeline, lifeline = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank_main,
                args=(rank, self.size, device, str(self.directory), rank_pipe, rank_lifeline),
                daemon=True,
            )
            process.start()
            rank_pipe.close()
            rank_lifeline.close()
            self._ranks.append(RankProcess(process, pipe, lifeline))

    def reset(self) -> None:
        self._outcomes: dict[int, Outcome] = {}
        for rank in self._ranks:
            rank.marks.clear()

    def submit(self, call: _Call) -> None:
        self.num_calls += 1
        self.reset()
        self._resume()
        call_bytes = pickle.dumps(call)
        for rank in self._ranks:
            with contextlib.suppress(BrokenPipeError):  # dead: collect() reports it
                rank.pipe.send_bytes(call_bytes)

    def pause(self) -> None:
        """Stops all ranks until the next call. Each of torch's groups has a thread that wakes up a hundred
        times a second, and idle worlds of all workers have hundreds of groups."""
        if not self._is_paused:
            self._is_paused = True
            self._signal_all(signal.SIGSTOP)

    def _resume(self) -> None:
        if self._is_paused:
            self._is_paused = False
            self._signal_all(signal.SIGCONT)

    def _signal_all(self, number: int) -> None:
        for rank in range(self.size):
            with contextlib.suppress(ProcessLookupError):
                self.signal(rank, number)

    def _receive(self, timeout_s: float) -> None:
        """Reads the reports and ends of ranks, waiting at most `timeout_s` for the first."""
        pending = {rank.pipe: idx for idx, rank in enumerate(self._ranks) if idx not in self._outcomes}
        for pipe in wait(pending, timeout_s):
            idx = pending[pipe]
            try:
                status, payload, at = pickle.loads(pipe.recv_bytes())
            except (EOFError, ConnectionResetError):
                process = self._ranks[idx].process
                process.join()
                self._outcomes[idx] = Outcome(
                    idx, "died", exit_code=process.exitcode, ended_at=time.monotonic()
                )
                continue
            if status == "mark":
                self._ranks[idx].marks[payload] = at
            elif status == "returned":
                self._outcomes[idx] = Outcome(idx, status, value=payload, ended_at=at)
            else:
                self._outcomes[idx] = Outcome(idx, status, error=payload, ended_at=at)

    def await_mark(self, rank: int, name: str, deadline: float = DEFAULT_DEADLINE_S) -> float:
        """Waits until the rank's body has called world.mark(name); returns the time of that call."""
        until = time.monotonic() + deadline
        marks = self._ranks[rank].marks
        while name not in marks:
            if rank in self._outcomes or time.monotonic() > until:
                raise RankFailure(f"rank {rank} never reached {name!r}", self.collect(deadline=0.0))
            self._receive(min(0.1, deadline))
        return marks[name]

    def await_marks(self, name: str, deadline: float = DEFAULT_DEADLINE_S) -> float:
        """Waits until all ranks' bodies have called world.mark(name); returns the time of the last call."""
        return max(self.await_mark(rank, name, deadline) for rank in range(self.size))

    def signal(self, rank: int, number: int) -> float:
        """Sends a signal to one rank; returns the time of doing so."""
        os.kill(self._ranks[rank].process.pid, number)
        return time.monotonic()

    def pid(self, rank: int) -> int:
        return self._ranks[rank].process.pid

    def collect(
        self, deadline: float = DEFAULT_DEADLINE_S, give_up_on: tuple[str, ...] = ()
    ) -> list[Outcome]:
        """Returns outcomes in rank order, after all ranks ended, or `deadline` seconds, or GRACE_S after the
        first rank that ended in one of the ways `give_up_on`. Ranks still busy then count as hung: see `log`.
        """
        until = time.monotonic() + deadline
        while len(self._outcomes) < self.size and (now := time.monotonic()) < until:
            self._receive(until - now)
            if any(outcome.status in give_up_on for outcome in self._outcomes.values()):
                until = min(until, time.monotonic() + GRACE_S)
                give_up_on = ()
        hung = [idx for idx in range(self.size) if idx not in self._outcomes]
        self._write_stacks(hung)
        for idx in hung:
            self._outcomes[idx] = Outcome(idx, ended_at=time.monotonic())
        outcomes = [self._outcomes[idx] for idx in range(self.size)]
        if any(outcome.status in ("died", "hung") for outcome in outcomes):
            for outcome in outcomes:
                outcome.log = self._log_tail(outcome.rank)
        return outcomes

    def _write_stacks(self, ranks: list[int]) -> None:
        """Makes these ranks write the stacks of their threads into their logs, except any that is stopped."""
        before = {rank: len(self._log(rank)) for rank in ranks}
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                self.signal(rank, STACKS_SIGNAL)
        until = time.monotonic() + STACKS_LIMIT_S
        while time.monotonic() < until and any(
            len(self._log(rank)) == size and state_of(self.pid(rank)) not in (None, "T")
            for rank, size in before.items()
        ):
            time.sleep(0.02)
        time.sleep(0.2 if ranks else 0.0)  # for their last lines

    def _log(self, rank: int) -> bytes:
        with contextlib.suppress(FileNotFoundError):
            return (self.directory / f"rank{rank}.log").read_bytes()
        return b""

    def _log_tail(self, rank: int) -> str:
        return self._log(rank)[-LOG_TAIL_BYTES:].decode(errors="replace")

    def close(self, grace_s: float = 0.0) -> None:
        """Ends all processes (by themselves within `grace_s`, else by SIGKILL) and removes the files."""
        for rank in self._ranks:
            rank.pipe.close()
        self._resume()
        until = time.monotonic() + grace_s
        for rank in self._ranks:
            rank.process.join(max(0.0, until - time.monotonic()))
            rank.process.kill()
            rank.process.join()
            rank.process.close()
            rank.lifeline.close()
        self._ranks.clear()
        shutil.rmtree(self.directory, ignore_errors=True)


class RankPool:
    """Warm worlds by size, and disposable ones."""

    def __init__(self, device: str = "cpu"):
        self.device = device
        self._directory = tempfile.mkdtemp(prefix="pipecomm-ranks-")
        self._worlds: dict[int, RankGroup] = {}

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *exc_info) -> None:
        self.close()

    def run(
        self, size: int, body: Callable, *args, deadline: float = DEFAULT_DEADLINE_S, **kwargs
    ) -> list[Any]:
        """Calls body(world, *args, **kwargs) on every rank of a world of `size`; returns results by rank.

        Raises RankFailure, and replaces the world, if a rank raises, dies or is not done after `deadline` s.
        """
        call = _Call.of(body, args, kwargs)
        outcomes = self._call(size, call, deadline, ok=("returned",))
        return [outcome.value for outcome in outcomes]

    def attempt(
        self, size: int, body: Callable, *args, deadline: float = DEFAULT_DEADLINE_S, **kwargs
    ) -> list[Outcome]:
        """Like run, but exceptions of ranks are results, and the world stays in use after them."""
        return self._call(size, _Call.of(body, args, kwargs), deadline, ok=("returned", "raised"))

    def rest(self) -> None:
        """Pauses all worlds until they are used again. Ends those that have run many tests, and, if many
        ranks are idle, those idle for longest."""
        num_ranks = 0
        for size, world in reversed(list(self._worlds.items())):  # the one that was used last first
            num_ranks += size
            if world.num_calls >= MAX_CALLS_OF_A_WORLD or num_ranks > MAX_WARM_RANKS:
                self._worlds.pop(size).close(grace_s=2.0)
            else:
                world.pause()

    def _new_world(self, size: int) -> RankGroup:
        return RankGroup(size, self.device, self._directory)

    def _call(self, size: int, call: _Call, deadline: float, ok: tuple[str, ...]) -> list[Outcome]:
        world = self._worlds.pop(size, None) or self._new_world(size)
        bad = tuple(status for status in ("raised", "died") if status not in ok)
        try:
            world.submit(call)
            outcomes = world.collect(deadline, give_up_on=bad)
            if not all(outcome.status in ok for outcome in outcomes):
                raise RankFailure(f"{call.qualname} failed in a world of {size}", outcomes)
        except BaseException:  # Ctrl-C and pytest's timeout included: the state of these ranks is unknown
            world.close()
            raise
        self._worlds[size] = world
        return outcomes

    @contextlib.contextmanager
    def disposable(self, size: int, body: Callable, *args, **kwargs) -> Iterator[RankGroup]:
        """Fresh processes that run `body` once, for tests that kill, stop or break ranks."""
        world = self._new_world(size)
        try:
            world.submit(_Call.of(body, args, kwargs))
            yield world
        finally:
            world.close()

    def close(self) -> None:
        for world in self._worlds.values():
            world.close(grace_s=2.0)
        self._worlds.clear()
        shutil.rmtree(self._directory, ignore_errors=True)


def on_ranks(*sizes: int, deadline: float = DEFAULT_DEADLINE_S) -> Callable[[Callable], Callable]:
    """Makes a body `test_x(world, ...)` a test that runs it on every rank of a world of each of `sizes`.

    Further parameters are pytest's (fixtures, parametrize); their values are pickled to the ranks.
    """

    def decorate(body: Callable) -> Callable:
        @functools.wraps(body)
        def test(ranks: RankPool, world_size: int, **kwargs) -> None:
            ranks.run(world_size, body, deadline=deadline, **kwargs)

        mine = list(inspect.signature(test, follow_wrapped=False).parameters.values())[:2]
        theirs = list(inspect.signature(body).parameters.values())[1:]
        test.__signature__ = inspect.Signature(mine + theirs)
        test.rank_body = body
        return pytest.mark.parametrize("world_size", sizes, ids=lambda size: f"{size}ranks")(test)

    return decorate
