"""A torch store whose calls end within a limit even if the store does not answer: its process may be stopped
or its host gone, and torch itself waits without a limit.
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

# How often a caller checks the time. If the process was stopped for longer, or got no processor, at most two
# of these count as waiting, so an answer that came meanwhile is still taken.
_SLICE_S = 0.05
# torch adds this to the text of an error if TORCH_SHOW_CPP_STACKTRACES is set.
_BACKTRACE = "\nException raised from "

T = TypeVar("T")


class StoreIsSilent(TimeoutError):
    """A call has not ended within its limit."""


class UsedAfterFork(RuntimeError):
    """The thread that makes the calls is in the process from which this one was forked."""


class LimitedStore:
    """A store whose calls raise StoreIsSilent after `limit_s`, and RuntimeError with the text of the store's
    error. Any thread may make them, but not in a process that was forked later (UsedAfterFork).

    One thread makes all calls of the store, one after the other. If a call does not end, that thread is left
    behind. It holds nothing but the store, and does not keep the process from ending. `in_background`: over a
    connection of its own, which other callers do not delay. Errors name `rank`.
    """

    def __init__(self, store: Any, rank: int, in_background: bool = False) -> None:
        self._is_closed = False
        self._line = _Line(store, in_background, needs_clone=in_background)
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        # Started now: the first call may be a farewell, when the ending interpreter starts no more threads.
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
        """Ends the thread after the calls already made. Later calls raise RuntimeError."""
        self._is_closed = True
        self._calls.put(None)

    __del__ = close

    def find(self, key: str, limit_s: float) -> bytes | None:
        """Returns the value of the key, None if there is no such key."""
        return self._ask(limit_s, lambda store: store.get(key) if store.check([key]) else None, repeats=True)

    def set(self, key: str, value: bytes, limit_s: float) -> None:
        """Sets the value of the key; returns once the store has it."""

        def call(store: Any) -> None:
            store.set(key, value)
            store.check([key])  # a TCPStore's `set` does not wait until the store has it

        self._ask(limit_s, call, repeats=True)

    def compare_set(self, key: str, expected: bytes, desired: bytes, limit_s: float) -> bytes:
        """Replaces the value `expected` (empty: none) by `desired`; returns the value afterwards."""
        return self._ask(limit_s, lambda store: store.compare_set(key, expected, desired))

    def add(self, key: str, amount: int, limit_s: float) -> int:
        return self._ask(limit_s, lambda store: store.add(key, amount))

    def _ask(self, limit_s: float, make: Callable[[Any], T], repeats: bool = False) -> T:
        """Returns what `make` returns. `repeats`: if it fails in the background, it is called once more."""
        if self._is_closed:
            raise RuntimeError("the group of this store has ended")
        if not self._worker.is_alive():
            raise UsedAfterFork("this process was forked after the store was first used")
        left_s = limit_s
        if self._line.in_background and (busy_since := self._line.busy_since) is not None:
            # The time that an earlier call has waited counts here, too, since many communicators may close.
            # Two slices remain in any case: this process may have been stopped.
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
    """State that the calls of one LimitedStore share."""

    store: Any
    in_background: bool
    needs_clone: bool
    busy_since: float | None = None  # start of a call that has not ended


class _Call:
    """A call that a thread waits for. No lock guards it: a signal could interrupt its holder."""

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
            except BaseException as error:  # of any kind: the thread has other calls to make
                self.error = _text_of(error)
                # The connection may have broken since the last call, for example after a long idle time.
                line.needs_clone = line.in_background
        line.busy_since = None


def _work(calls: queue.SimpleQueue[_Call | None]) -> None:
    _C.leave_behind()
    while (call := calls.get()) is not None:
        call.run()
        ended = call.ended
        del call  # and its reference to the store, which the caller may close once it has the answer
        ended.release()


def _text_of(error: BaseException) -> str:
    """Returns the text of a store's error; for torch's own errors without class and backtrace."""
    text = summary_of(error).partition(_BACKTRACE)[0]
    return text.removeprefix(f"{type(error).__name__}: ") if isinstance(error, RuntimeError) else text
