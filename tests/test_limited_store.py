"""Calls of a store that end within a limit, whatever the store does. test_store.py tests communicators.

`Slate` is a store with programmable behaviour.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist
from ranks import assert_within, die_with, fork_context
from scripts import run_program
from test_store import stores

from pipecomm_ext import PipeCommError
from pipecomm_ext.core.limited_store import LimitedStore, StoreIsSilent

DEADLINE_S = 60
ANY_BYTES = bytes(range(256))
BACKTRACE = (
    "\nException raised from recvBytes at Utils.hpp:790 (most recent call first):\nframe #0: f() + 0x9d"
)

pytestmark = pytest.mark.timeout(DEADLINE_S)


class Slate(dist.Store):
    """A store written in Python. `before` is called before each of its calls; clones share the values."""

    def __init__(self, values: dict[str, bytes] | None = None, before: Callable[[], object] = lambda: None):
        super().__init__()
        self.values = {} if values is None else values
        self.before = before

    def check(self, keys):
        self.before()
        return all(key in self.values for key in keys)

    def get(self, key):
        return self.values[key]

    def set(self, key, value):
        self.before()
        self.values[key] = value

    def compare_set(self, key, expected, desired):
        self.before()
        if self.values.get(key, b"") == expected:
            self.values[key] = desired
        return self.values.get(key, expected)

    def add(self, key, amount):
        self.before()
        self.values[key] = b"%d" % (int(self.values.get(key, b"0")) + amount)
        return int(self.values[key])


class Cloned(Slate):
    """`failing`: the connections that fail, numbered in the order in which they are made."""

    def __init__(self, failing: set[int], made: list[Slate] | None = None, values=None):
        self.made = [] if made is None else made
        self.number, self.failing = len(self.made), failing
        self.made.append(self)
        super().__init__(values, self.reach)

    def reach(self):
        if self.number in self.failing:
            raise RuntimeError(f"connection {self.number} is broken")

    def clone(self):
        return Cloned(self.failing, self.made, self.values)


def fail(error: BaseException):
    raise error


@contextlib.contextmanager
def silent_store(**arguments):
    """A store that answers once the event is set, and its LimitedStore."""
    answers = threading.Event()
    store = Slate(before=lambda: answers.wait(DEADLINE_S))
    try:
        yield LimitedStore(store, rank=0, **arguments), store, answers
    finally:
        answers.set()


# ---- results ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("kind", ["tcp", "file", "hash", "prefix", "python", "prefix of python"])
def test_values_are_any_bytes(tmp_path, kind, in_background):
    slate = Slate()  # a PrefixStore does not keep it
    store = {
        "tcp": lambda: dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False),
        "file": lambda: dist.FileStore(str(tmp_path / "store"), 1),
        "hash": dist.HashStore,
        "prefix": lambda: dist.PrefixStore("group", dist.HashStore()),
        "python": lambda: slate,
        "prefix of python": lambda: dist.PrefixStore("group", slate),
    }[kind]()
    limited = LimitedStore(store, 0, in_background)
    assert limited.find("none", 20) is None
    for value in (ANY_BYTES, b"", b"\xff\x00"):
        limited.set("key", value, 20)
        assert limited.find("key", 20) == value
    assert limited.compare_set("first", b"", ANY_BYTES, 20) == ANY_BYTES
    assert limited.compare_set("first", b"", b"other", 20) == ANY_BYTES
    assert limited.compare_set("first", b"wrong", b"other", 20) == ANY_BYTES
    assert limited.compare_set("first", ANY_BYTES, ANY_BYTES[::-1], 20) == ANY_BYTES[::-1]
    assert limited.find("first", 20) == ANY_BYTES[::-1]
    assert [limited.add("number", amount, 20) for amount in (1, 5, -2)] == [1, 6, 4]


def test_many_threads_may_call():
    limited = LimitedStore(dist.HashStore(), rank=0)
    with ThreadPoolExecutor(8) as pool:
        numbers = sorted(pool.map(lambda _: limited.add("number", 1, DEADLINE_S), range(400)))
    assert numbers == list(range(1, 401))


# ---- errors -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (RuntimeError(f"Broken pipe{BACKTRACE}"), "Broken pipe"),
        (RuntimeError(f"first line\nsecond line{BACKTRACE}"), "first line\nsecond line"),
        (dist.DistStoreError("wait timeout after 3000ms, keys: /k"), "wait timeout after 3000ms, keys: /k"),
        (TimeoutError("late"), "TimeoutError: late"),  # the store's own
        (SystemExit("enough"), "SystemExit: enough"),
    ],
)
def test_an_error_of_the_store_has_its_text(error, text):
    store = Slate(before=lambda: fail(error))
    limited = LimitedStore(store, rank=0)
    calls = (
        lambda: limited.find("key", 20),
        lambda: limited.set("key", b"value", 20),
        lambda: limited.compare_set("key", b"", b"value", 20),
        lambda: limited.add("key", 1, 20),
    )
    for call in calls:
        with pytest.raises(RuntimeError) as caught:
            call()
        assert type(caught.value) is RuntimeError and str(caught.value) == text
    store.before = lambda: None
    assert limited.find("key", 20) is None  # the thread lives


def say_what_breaks() -> None:
    """A program that loses its store."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    limited = LimitedStore(dist.TCPStore("127.0.0.1", store.port, is_master=False), rank=0)
    limited.set("key", b"value", 20)
    del store
    try:
        limited.find("key", 20)
    except RuntimeError as error:
        print(f"told: {str(error)!r}", flush=True)


@pytest.mark.slow
def test_a_backtrace_of_torch_is_cut_off():
    program = "import test_limited_store; test_limited_store.say_what_breaks()"
    output = run_program(program, TORCH_SHOW_CPP_STACKTRACES="1")
    [told] = re.findall("^told: (.*)$", output, re.MULTILINE)  # torch may log the same with a backtrace
    assert "onnection" in told and "Exception raised" not in told and r"\n" not in told


def test_there_is_no_thread_for_it(monkeypatch):
    monkeypatch.setattr(threading.Thread, "start", lambda self: fail(RuntimeError("can't start new thread")))
    with pytest.raises(PipeCommError, match="rank 3: cannot start a thread: .*; raise the limit") as caught:
        LimitedStore(Slate(), rank=3)
    assert caught.value.rank == caught.value.origin_rank == 3


# ---- silence ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_background", [False, True])
def test_a_silent_store_is_waited_for_no_longer_than_the_limit(in_background):
    with silent_store(in_background=in_background) as (limited, store, answers):
        began_at = time.monotonic()
        with pytest.raises(StoreIsSilent, match="^the store does not answer$"):
            limited.set("left behind", b"", 0.3)
        with pytest.raises(StoreIsSilent, match="^the store does not answer$"):
            limited.set("not begun", b"", 0.3)
        assert_within(1.5, time.monotonic() - began_at)
        assert store.values == {}
        answers.set()
        limited.set("key", b"", DEADLINE_S)
        assert sorted(store.values) == ["key", "left behind"]


def test_in_the_background_a_silent_store_is_not_waited_for_once_more():
    with silent_store(in_background=True) as (limited, _, answers):
        began_at = time.monotonic()
        with pytest.raises(StoreIsSilent):
            limited.find("key", 2)
        limit_s = 2 + (time.monotonic() - began_at)
        for _ in range(5):
            with pytest.raises(StoreIsSilent):
                limited.find("key", 2)
        assert_within(limit_s, time.monotonic() - began_at)
        threading.Timer(0.05, answers.set).start()
        assert limited.find("key", DEADLINE_S) is None


def answer_within_half_a_second(pipe, lifeline) -> None:
    die_with(lifeline)
    limited = LimitedStore(Slate(before=lambda: time.sleep(0.5)), rank=0)
    pipe.send("calls")
    try:
        pipe.send(limited.find("key", 1.0))
    except StoreIsSilent as error:
        pipe.send(str(error))


def test_a_process_that_was_stopped_has_not_used_up_its_limit():
    context = fork_context()
    pipe, its_pipe = context.Pipe()
    its_lifeline, lifeline = context.Pipe(duplex=False)
    process = context.Process(target=answer_within_half_a_second, args=(its_pipe, its_lifeline), daemon=True)
    process.start()
    try:
        assert pipe.poll(DEADLINE_S) and pipe.recv() == "calls"
        time.sleep(0.1)
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(2)
        os.kill(process.pid, signal.SIGCONT)
        assert pipe.poll(DEADLINE_S) and pipe.recv() is None
    finally:
        process.kill()
        process.join()
        lifeline.close()


# ---- connections of its own -------------------------------------------------------------------------------


def test_what_may_be_asked_twice_is_asked_over_a_new_clone():
    store = Cloned(failing={1})
    limited = LimitedStore(store, rank=0, in_background=True)
    limited.set("key", b"value", 20)  # connection 1 fails, 2 is made
    assert len(store.made) == 3
    store.failing.add(2)
    assert limited.find("key", 20) == b"value"
    assert len(store.made) == 4
    store.failing.add(3)
    with pytest.raises(RuntimeError, match="^connection 3 is broken$"):
        limited.add("number", 1, 20)  # might count twice
    assert limited.add("number", 1, 20) == 1  # the next call has a new one
    assert len(store.made) == 5
    store.failing |= {4, 5}
    with pytest.raises(RuntimeError, match="^connection 5 is broken$"):
        limited.find("key", 20)  # no third try
    assert len(store.made) == 6


def test_a_store_that_has_no_clone_is_called_itself():
    limited = LimitedStore(Slate(), rank=0, in_background=True)
    limited.set("key", b"value", 20)
    assert limited.find("key", 20) == b"value"


def test_in_the_foreground_there_is_one_connection_and_one_try():
    store = Cloned(failing={0})
    limited = LimitedStore(store, rank=0)
    with pytest.raises(RuntimeError, match="^connection 0 is broken$"):
        limited.find("key", 20)
    assert len(store.made) == 1


# ---- signals, forks, ends ---------------------------------------------------------------------------------


def test_a_signal_interrupts_a_caller():
    # Background processes of a shell ignore this signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with silent_store() as (limited, _, answers):
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            limited.find("key", DEADLINE_S)
        signal.signal(signal.SIGINT, before)
        answers.set()
        assert limited.find("key", DEADLINE_S) is None


@pytest.mark.parametrize("is_silent", [False, True])
def test_a_forked_child_is_told_at_once(is_silent):
    with silent_store() as (limited, _, answers):
        if is_silent:
            with pytest.raises(StoreIsSilent):
                limited.find("key", 0.1)
        else:
            answers.set()
            limited.find("key", DEADLINE_S)
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(DEADLINE_S // 3)
            try:
                limited.find("key", DEADLINE_S)
            except RuntimeError as error:
                del limited
                os._exit(0 if "was forked" in str(error) else 1)
            finally:
                os._exit(2)
        assert os.waitpid(child, 0)[1] == 0
        answers.set()
        assert limited.find("key", DEADLINE_S) is None


def test_it_ends_with_its_last_reference():
    store = Slate()
    limited, held = LimitedStore(store, rank=0), weakref.ref(store)
    worker = threading.enumerate()[-1]
    limited.set("key", b"value", 20)
    del limited, store
    assert held() is None  # no caller has to wait until the thread has ended
    worker.join(DEADLINE_S / 2)
    assert not worker.is_alive()


def test_a_call_that_is_left_behind_holds_nothing_but_the_store():
    answers = threading.Event()
    limited = LimitedStore(Slate(before=lambda: answers.wait(DEADLINE_S)), rank=0)
    worker, ended = threading.enumerate()[-1], weakref.ref(limited)
    with pytest.raises(StoreIsSilent):
        limited.find("key", 0.1)
    del limited
    assert ended() is None and worker.is_alive()
    answers.set()
    worker.join(DEADLINE_S / 2)
    assert not worker.is_alive()


def end_while_a_call_does(pid: int, port: int, strike: int) -> None:
    """A program whose store, silent before, answers or dies while the interpreter ends."""
    limited = LimitedStore(dist.TCPStore("127.0.0.1", port, is_master=False), rank=0)
    limited.set("key", b"value", 20)
    os.kill(pid, signal.SIGSTOP)
    while " T " not in Path(f"/proc/{pid}/stat").read_text(encoding="utf-8"):
        time.sleep(0.01)  # it stops once it is scheduled
    with pytest.raises(StoreIsSilent):
        limited.find("key", 0.2)

    class Last:
        """Ends with the modules."""

        def __del__(self, kill=os.kill, sleep=time.sleep, write=os.write):
            kill(pid, strike)
            sleep(0.5)
            write(1, b"has ended")

    sys.last = Last()  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize("strike", [signal.SIGCONT, signal.SIGKILL])
def test_a_call_that_ends_with_the_interpreter_does_not_abort_it(strike):
    program = "import sys, test_limited_store as t; t.end_while_a_call_does(*map(int, sys.argv[1:]))"
    with stores(1) as [(pid, port)]:
        output = run_program(program, pid, port, int(strike))  # with what torch may log
    assert output.endswith("has ended") and "terminate called" not in output
