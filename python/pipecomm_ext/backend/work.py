"""The handle that torch gets for a call."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._C._distributed_c10d import Work as TorchWork

from ..communicator.continuation import deadline_of, finish_in_background, timeout_until, work_on
from ..core.extension import _C
from ..errors import PipeCommError, PipeCommMismatch, PipeCommTimeout

_NONE = timedelta(0)  # torch's value for a wait without a timeout of its own
_futures_lock = threading.Lock()


class Handle(Protocol):
    """An object that waits for a call: a Work of the engine, a Continuation, ..."""

    def wait(self, timeout: Any = None) -> Any: ...
    def is_completed(self) -> bool: ...


def has_ended(handle: Handle) -> bool:
    """Whether a call has ended. One that a CUDA graph has captured has no end of its own, and counts as
    ended: the graph keeps the order."""
    return getattr(handle, "is_captured", False) or handle.is_completed()


class Together:
    """Several handles as one."""

    def __init__(self, handles: Sequence[Handle]) -> None:
        self._handles = handles

    def wait(self, timeout: Any = None) -> None:
        deadline = deadline_of(timeout)
        for handle in self._handles:
            handle.wait(timeout_until(deadline))

    def is_completed(self) -> bool:
        return all([handle.is_completed() for handle in self._handles])


class BackendWork(TorchWork):
    """The handle of a call. It may be dropped, and the call is done all the same; it may be waited for twice.

    `what` is the call in words, for errors; `limit` how long `wait` waits, None: as the communicator does.
    """

    _future: Any = None
    _is_settled = False

    def __init__(
        self,
        handle: Handle,
        outputs: list[Tensor],
        limit: timedelta | None,
        rank: int,
        what: str,
        number: int = 0,
    ) -> None:
        TorchWork.__init__(self)
        self._handle, self.outputs, self._limit = handle, outputs, limit
        self._rank, self._what, self._number = rank, what, number

    def wait(self, timeout: timedelta | float | None = _NONE) -> bool:
        """Waits until the call is done; returns True.

        Raises:
            PipeCommTimeout: the timeout has passed; the call stays in flight.
            PipeCommError: the call has failed.
        """
        try:
            self._handle.wait(self._limit if timeout is None or timeout == _NONE else timeout)
        except BaseException as error:
            self.is_completed()  # its future may have ended; a timeout or a signal handler ends only the wait
            if isinstance(error, PipeCommError):
                raise self._explained(error) from None
            raise
        if self._future is not None:
            self._settle(None)
        return True

    def synchronize(self) -> None:
        self.wait()

    block_current_stream = synchronize

    def is_completed(self) -> bool:
        """Whether the call has ended, well or not. Its future has ended then, too."""
        if not has_ended(self._handle):
            return False
        if self._future is not None:
            self._settle(self._outcome())
        return True

    def is_success(self) -> bool:
        return has_ended(self._handle) and self._outcome() is None

    def exception(self) -> BaseException | None:
        return self._outcome() if has_ended(self._handle) else None

    def result(self) -> list[Tensor]:
        return self.outputs

    def get_future(self) -> Any:
        """Returns a future that has the list of tensors once the call is done, even if no thread waits."""
        with _futures_lock:
            is_new = self._future is None
            if is_new:
                devices: list[Any] = [tensor.device for tensor in self.outputs[:1] if tensor.is_cuda]
                self._future = torch.futures.Future(devices=devices)
        if is_new and not self.is_completed():
            finish_in_background(self)
        return self._future

    def source_rank(self) -> int:
        source = getattr(self._handle, "source", None)
        if source is None:
            raise RuntimeError("only a receive that has ended has a source rank")
        return source

    _source_rank = source_rank

    def _get_sequence_number(self) -> int:
        return self._number

    # ---- for the background thread

    @property
    def device(self) -> torch.device | None:
        return self.outputs[0].device if self.outputs else None

    def poll(self) -> bool:
        """Whether the call has ended. Callbacks of its future may wait for calls that the background thread
        has to end, so another thread runs them."""
        try:
            if not has_ended(self._handle):
                return False
            error = self._outcome()
        except Exception as raised:  # the device has failed
            error = raised
        if self._future is not None and self._claims_future():
            _in_new_thread(self.device, self._complete, error)
        return True

    def rest(self) -> None:
        time.sleep(0.001)

    # ---- details

    def _outcome(self) -> BaseException | None:
        """The error of a call that has ended."""
        try:
            self._handle.wait()
        except Exception as error:
            return self._explained(error) if isinstance(error, PipeCommError) else error
        return None

    def _claims_future(self) -> bool:
        """Whether the calling thread is the one that completes the future."""
        with _futures_lock:
            is_settled, self._is_settled = self._is_settled, True
        return not is_settled

    def _settle(self, error: BaseException | None) -> None:
        """Completes the future, or waits until the thread that does so has (its callbacks may still run)."""
        if self._future is None:
            return
        if self._claims_future():
            self._complete(error)
        elif not self._future.done():
            with contextlib.suppress(Exception):  # its error is that of the call
                self._future.wait()

    def _complete(self, error: BaseException | None) -> None:
        if error is None:
            self._future.set_result(self.outputs)
        else:
            self._future.set_exception(error)

    def _explained(self, error: PipeCommError) -> PipeCommError:
        return explained(error, self._rank, self._what)


def _in_new_thread(device: torch.device | None, function: Callable[..., None], *args: Any) -> None:
    def run() -> None:
        _C.leave_behind()
        with contextlib.suppress(Exception):  # of a device that has failed: callers get the future's error
            work_on(device)
        function(*args)

    try:
        threading.Thread(target=run, name="pipecomm future", daemon=True).start()
    except RuntimeError:  # no thread can be started, for example while the interpreter ends
        function(*args)


def explained(error: PipeCommError, rank: int, what: str) -> PipeCommError:
    """Adds to an error which call of torch's it came from."""
    if isinstance(error, PipeCommTimeout):
        note = f"; the timeout of {what} on rank {rank} has passed"
    elif isinstance(error, PipeCommMismatch):
        note = f"; rank {rank} called {what}"
    else:
        return error
    if note not in str(error):
        error.args = (f"{error}{note}",)
    return error


class ReceiveWork(BackendWork):
    """The handle of a receive whose source is known."""

    def __init__(self, *args: Any, source: int) -> None:
        super().__init__(*args)
        self._source = source

    def source_rank(self) -> int:
        return self._source

    _source_rank = source_rank
