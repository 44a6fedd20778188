"""Operations of several exchanges, with computations between and after them, behind one handle.

A reduction is written as a generator that yields the Work of each exchange and is resumed once that is done.
Any thread that waits for or polls its handle resumes it; `finish_in_background` makes a thread do so.

With CUDA tensors "done" is an order of streams: after a wait on a stream, an exchange is done for everything
enqueued there later. An asynchronous operation computes on its communicator's own stream, whichever thread
resumes it; a wait for the handle makes the current stream wait for that one. On the caller's stream it would
delay what is enqueued there before the wait, on which other ranks may depend.
"""

from __future__ import annotations

import contextlib
import datetime
import math
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch

from ..core.extension import _C
from ..errors import PipeCommError, PipeCommTimeout

_SLICE_S = 0.001  # pause of the thread before it polls all handles again
_LEAST_S = 0.001  # in which a wait sees that its operation is done


def deadline_of(timeout: float | datetime.timedelta | None) -> float:
    """Returns the time, by time.monotonic(), at which a wait that begins now has lasted too long."""
    seconds = None if timeout is None else _C.timeout_seconds(timeout)
    return math.inf if seconds is None else time.monotonic() + seconds


def timeout_until(deadline: float) -> float | None:
    """Returns the timeout of a wait that ends at that time, also if it has passed."""
    return None if deadline == math.inf else max(_LEAST_S, deadline - time.monotonic())


class Line:
    """The operations of a communicator whose exchanges after the first have a channel of their own: all ranks
    post those of an operation after those of earlier ones, in the order of the first exchanges.

    `levels` returns the levels of the group's hosts (see levels.py). `compares_shapes`: ranks with other
    shapes are refused in reductions and gathers; else only numbers of elements are compared.
    """

    def __init__(
        self, channel: int, levels: Callable[[], Any] = lambda: None, compares_shapes: bool = True
    ) -> None:
        self.channel, self.levels, self.compares_shapes = channel, levels, compares_shapes
        self.lock = threading.Lock()
        self.last: Continuation | None = None

    def has_posted_all(self) -> bool:
        """Whether none of its operations still has to post an exchange. Does not wait for other ranks."""
        return self.last is None or self.last.has_posted_all()


class Continuation(_C.Work):
    """The generator is begun at once, so that the call raises its first errors.
    With a `line`, its `num_later` exchanges after the first wait for those of earlier operations in the line.
    With a `stream`, the generator runs there, ordered after what the caller's stream has enqueued so far."""

    def __init__(
        self,
        steps: Iterator[_C.Work],
        line: Line | None = None,
        stream: torch.cuda.Stream | None = None,
        num_later: int = 1,
    ) -> None:
        super().__init__()
        self._steps, self._num_later = steps, num_later
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._previous: Continuation | None = None
        self._late: PipeCommTimeout | None = None  # of the last wait for an exchange whose timeout has passed
        self._num_done = 0
        self._line = line
        self._stream = stream
        self._event: Any = None  # torch.cuda.Event, after all that the operation has enqueued
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(stream.device))
        with line.lock if line is not None else contextlib.nullcontext():
            self._current = self._next()
            self._number = 0 if self._current is None else self._current.number
            if line is not None and self._current is not None:
                self._previous, line.last = line.last, self

    def wait(self, timeout: float | datetime.timedelta | None = None) -> None:
        """Waits until all is done. Idempotent, from any thread.

        Raises:
            PipeCommTimeout: the timeout has passed; the operation stays in flight.
            PipeCommError: the operation's own error, if it failed.
        """
        if self._current is not None:
            deadline = deadline_of(timeout)
            try:
                is_done = self._run(deadline)
            except BaseException:  # a signal handler's; perhaps no other thread continues the operation
                if self._line is not None:
                    finish_in_background(self)
                raise
            if not is_done:
                raise self._still_in_flight(timeout)
        if self._error is not None:
            raise self._error
        if self._event is not None and self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(self._event)

    def synchronize(self) -> None:
        """Blocks the host until all is done."""
        self.wait()
        if self._event is not None:
            self._event.synchronize()

    def is_completed(self) -> bool:
        """Whether the operation has ended, well or not. Does not wait for other ranks."""
        return self.poll() and (self._event is None or self._event.query())

    @property
    def number(self) -> int:
        """That of the first exchange."""
        return self._number

    def _still_in_flight(self, timeout: object) -> PipeCommTimeout:
        """What a wait raises whose timeout has passed: it names what the exchange in flight waits for."""
        error, self._late = self._late, None
        if error is None and (current := self._current) is not None:  # others took the time
            try:
                current.wait(_SLICE_S)
            except PipeCommTimeout as of_exchange:
                error = of_exchange
        if error is None:
            return PipeCommTimeout("the operation has not ended within the timeout of the wait")
        error.args = (re.sub(r"\S+ s of wait\(\)", f"{timeout} s of wait()", str(error)),)
        return error

    def poll(self) -> bool:
        """Runs the steps that need no wait; returns whether no step is left."""
        return self._current is None or self._run(None)

    def has_posted_all(self) -> bool:
        """Whether it and those before it in the line have posted all exchanges. Does not wait for others."""
        is_posted = self._current is None or self._run(None, until_posted=True)
        return is_posted and (self._previous is None or self._run_those_before(None))

    @property
    def device(self) -> torch.device | None:
        return None if self._stream is None else self._stream.device

    def rest(self) -> None:
        """Waits a moment, without disturbing threads that wait for the exchange in flight."""
        time.sleep(_SLICE_S)

    def _run(self, deadline: float | None, until_posted: bool = False) -> bool:
        """Continues until all is done (or all exchanges are posted), or until the deadline; None: until it
        would have to wait. Returns whether it is done."""
        if deadline is None:
            if not self._lock.acquire(blocking=False):
                return False
        elif not self._lock.acquire(timeout=_left(deadline)):
            return False
        try:
            while self._current is not None and not (until_posted and self._num_done >= self._num_later):
                if deadline is None and not self._current.is_completed():
                    return False
                if not self._step(self._current, deadline):
                    return False
            return True
        finally:
            self._lock.release()

    def _step(self, current: _C.Work, deadline: float | None) -> bool:
        try:
            with _on(self._stream):
                if deadline is not None and deadline != math.inf:
                    try:
                        current.wait(timeout_until(deadline))
                    except PipeCommTimeout as late:
                        if not current.is_completed():
                            self._late = late.with_traceback(None)  # which would keep this object
                            return False
                current.wait()
        except Exception as error:
            if deadline is not None and not isinstance(error, PipeCommError):
                raise  # a signal handler's: the operation stays in flight
            self._end(error)
            return True
        if not self._run_those_before(deadline):
            return False
        try:
            self._current = self._next()
            self._num_done += 1
        except BaseException as error:  # also an interrupt: the steps that it has cut short cannot go on
            self._end(error)
            if not isinstance(error, Exception):
                raise
        return True

    def _end(self, error: BaseException) -> None:
        self._error, self._current, self._steps = error, None, iter(())
        self._run_those_before(None)  # else later operations follow them, as if this one had not failed

    def _next(self) -> _C.Work | None:
        with _on(self._stream):
            current = next(self._steps, None)
            if current is None and self._stream is not None:
                self._event = self._stream.record_event()
        return current

    def _run_those_before(self, deadline: float | None) -> bool:
        waiting = []
        previous = self._previous
        while previous is not None:
            waiting.append(previous)
            previous = previous._previous
        for other in reversed(waiting):
            if not other._run(deadline, until_posted=True):
                return False
        self._previous = None
        return True


def begin(
    comm: Any,
    steps: Iterator[_C.Work],
    tensors: Sequence[torch.Tensor],
    waits: bool,
    line: Line | None = None,
    num_later: int = 1,
) -> Continuation:
    """Begins an operation on a communicator. `tensors` are those that the steps use but have not made;
    `waits`: the caller waits for the handle at once. Within a capture, the call captures the whole operation.
    """
    if comm.device.type != "cuda" or waits:
        return Continuation(steps, line, num_later=num_later)
    if torch.cuda.is_current_stream_capturing():
        handle = Continuation(steps, line, num_later=num_later)
        handle.wait()
        return handle
    stream = _stream_of(comm)
    for tensor in tensors:
        tensor.record_stream(stream)
    return Continuation(steps, line, stream, num_later)


def _stream_of(comm: Any) -> torch.cuda.Stream:
    with _streams_lock:
        if comm not in _streams:
            _streams[comm] = torch.cuda.Stream(comm.device, priority=-1)
        return _streams[comm]


_streams: weakref.WeakKeyDictionary[Any, torch.cuda.Stream] = weakref.WeakKeyDictionary()
_streams_lock = threading.Lock()


def _on(stream: torch.cuda.Stream | None) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)


def _left(deadline: float) -> float:
    return -1 if deadline == math.inf else max(0.0, deadline - time.monotonic())


# ---- in the background -----------------------------------------------------------------------------------


class Pollable(Protocol):
    """An object that the thread polls until `poll` returns True or raises, on its `device` if it has one.
    `rest` waits a moment for progress; with `is_patient`, that of other objects is called instead."""

    def poll(self) -> bool: ...
    def rest(self) -> None: ...


class _Background:
    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._new: list[Pollable] = []
        self._thread: threading.Thread | None = None

    def add(self, handle: Pollable) -> None:
        with self._changed:
            self._new.append(handle)
            if self._thread is None or not self._thread.is_alive():  # a forked child has no such thread
                self._thread = threading.Thread(target=self._work, name="pipecomm finish", daemon=True)
                self._thread.start()
            else:
                self._changed.notify()

    def _work(self) -> None:
        _C.leave_behind()
        pending: list[Any] = []
        while True:
            with self._changed:
                while not self._new and not pending:
                    self._changed.wait()
                pending += self._new
                self._new.clear()
            pending = [handle for handle in pending if not _has_ended(handle)]
            if pending:
                _most_urgent(pending).rest()


def work_on(device: torch.device | None) -> None:
    """Prepares a thread of the library for calls on a device: none of them makes a context on device 0, or
    breaks the capture of a CUDA graph on another thread."""
    if device is not None and device.type == "cuda":
        torch.cuda.set_device(device)
        _C.relax_captures()


def _has_ended(handle: Pollable) -> bool:
    with contextlib.suppress(Exception):  # of a device that has failed, which poll() finds out, too
        work_on(getattr(handle, "device", None))
    try:
        return handle.poll()
    except Exception:  # its own threads get the error when they wait; other handles go on
        return True


def _most_urgent(pending: list[Any]) -> Any:
    """A function of its own, since a local variable of the thread would keep tensors that are done with."""
    return next((handle for handle in pending if not getattr(handle, "is_patient", False)), pending[0])


_background = _Background()


def finish_in_background(handle: Pollable) -> None:
    """Makes a thread poll `handle` until it is done, even if no other thread waits for it."""
    _background.add(handle)
