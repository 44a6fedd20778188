"""A store of torch's whose calls end within a limit, whether or not it answers: its process may be stopped,
its host gone, and torch waits for it without one.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from ..errors import PipeCommError, summary_of
from .extension import _C

# A caller looks at the time this often. A process that is stopped for longer, or gets no processor, has
# waited for no more than two of these: what has come meanwhile still counts.
_SLICE_S = 0.05
# What torch adds to the text of an error if TORCH_SHOW_CPP_STACKTRACES is set.
_BACKTRACE = "\nException raised from "

T = TypeVar("T")


class StoreIsSilent(TimeoutError):
    """A call has not ended within its limit."""


class UsedAfterFork(RuntimeError):
    """The thread that makes the calls is in the process from which this one was forked."""


class LimitedStore:
    """A store whose calls raise StoreIsSilent when `limit_s` has passed, and RuntimeError with what the store
    raises. Any thread may make them, but not in a process that was forked later (UsedAfterFork).

    One thread makes all calls of the store, one after the other. If a call does not end, that thread is left
    behind. It holds nothing but the store, and does not keep the process from ending. `in_background`: over a
    connection of its own, which calls of others do not hold up. `rank` is named by errors.
    """

    def __init__(self, store: Any, rank: int, in_background: bool = False) -> None:
        self._is_closed = False
        self._line = _Line(store, in_background, needs_clone=in_background)
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        # Now, since the first call may be a farewell, when the interpreter ends and starts no more threads.
        self._worker = threading.Thread(target=_work, args=(self._calls,), name="pipecomm store", daemon=True)
        try:
            self._worker.start()
        except RuntimeError as error:
            raise PipeCommError(
                f"rank {rank}: cannot start a thread: {error}; raise the limit on threads (ulimit -u, or "
                "pids.max of the control group)",
                rank=rank,
                origin_rank=rank,
            ) from error

    def close(self) -> None:
        """Ends its thread, once what is asked for is done. Later calls raise RuntimeError."""
        self._is_closed = True
        self._calls.put(None)

    __del__ = close

    def find(self, key: str, limit_s: float) -> bytes | None:
        """What is under the key, None if there is no such key."""
        return self._ask(limit_s, lambda store: store.get(key) if store.check([key]) else None, repeats=True)

    def set(self, key: str, value: bytes, limit_s: float) -> None:
        """Returns once it is there."""

        def call(store: Any) -> None:
            store.set(key, value)
            store.check([key])  # a TCPStore's `set` does not wait until it is there

        self._ask(limit_s, call, repeats=True)

    def compare_set(self, key: str, expected: bytes, desired: bytes, limit_s: float) -> bytes:
        """What is under the key then: `desired` if it was `expected` (empty: if there was none)."""
        return self._ask(limit_s, lambda store: store.compare_set(key, expected, desired))

    def add(self, key: str, amount: int, limit_s: float) -> int:
        return self._ask(limit_s, lambda store: store.add(key, amount))

    def _ask(self, limit_s: float, make: Callable[[Any], T], repeats: bool = False) -> T:
        """What `make` returns. `repeats`: if it fails in the background, it is called once more."""
        if self._is_closed:
            raise RuntimeError("the group of this store has ended")
        if not self._worker.is_alive():
            raise UsedAfterFork("this process was forked after the store was first used")
        left_s = limit_s
        if self._line.in_background and (busy_since := self._line.busy_since) is not None:
            # A store that has been silent for that long is not waited for once more: many communicators may
            # close. But this process may have been stopped.
            left_s = max(limit_s - (time.monotonic() - busy_since), 2 * _SLICE_S)
        call = _Call(self._line, make, 2 if repeats and self._line.in_background else 1)
        self._calls.put(call)
        try:
            began_at = time.monotonic()
            while not call.ended.acquire(timeout=min(max(left_s, 0.0), _SLICE_S)):
                now = time.monotonic()
                left_s -= min(now - began_at, 2 * _SLICE_S)
                began_at = now
                if left_s <= 0:
                    raise StoreIsSilent("the store does not answer")
        finally:
            call.num_tries = 0  # if it has not begun, it never will
        if call.error is not None:
            raise RuntimeError(call.error)
        return call.result


@dataclass
class _Line:
    """What the calls of one LimitedStore share."""

    store: Any
    in_background: bool
    needs_clone: bool
    busy_since: float | None = None  # with a call that has not ended


class _Call:
    """A call that a thread waits for. No lock guards it: a signal could interrupt who holds one."""

    def __init__(self, line: _Line, make: Callable[[Any], Any], num_tries: int) -> None:
        self._line, self._make, self.num_tries = line, make, num_tries
        self.result: Any = None
        self.error: str | None = None
        self.ended = threading.Lock()
        self.ended.acquire()

    def run(self) -> None:
        line = self._line
        line.busy_since = time.monotonic()
        for _ in range(self.num_tries):
            if line.needs_clone:
                with contextlib.suppress(Exception):  # this call does without one; the next one tries again
                    line.store = line.store.clone()
                    line.needs_clone = False
            try:
                self.result, self.error = self._make(line.store), None
                break
            except BaseException as error:  # whatever it is, the thread has other calls to make
                self.error = _text_of(error)
                # The connection may have broken since the last call, as one that was idle for long does.
                line.needs_clone = line.in_background
        line.busy_since = None


def _work(calls: queue.SimpleQueue[_Call | None]) -> None:
    _C.leave_behind()
    while (call := calls.get()) is not None:
        call.run()
        ended = call.ended
        del call  # and with it the store: who has the answer may let go of it, and have it closed
        ended.release()


def _text_of(error: BaseException) -> str:
    """What a store says that fails: of errors of torch's, the bare text."""
    text = summary_of(error).partition(_BACKTRACE)[0]
    return text.removeprefix(f"{type(error).__name__}: ") if isinstance(error, RuntimeError) else text
