"""The backend and the library's threads with handles that raise when they are asked: those of calls that a
CUDA graph has captured, and those of a device that has failed. They are stubs; tests/gpu has real ones."""

from __future__ import annotations

import contextlib
import threading
import time
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch

from pipecomm_ext import _C
from pipecomm_ext.backend.any_source import SendWatch
from pipecomm_ext.backend.endpoint import Endpoint
from pipecomm_ext.backend.work import BackendWork
from pipecomm_ext.communicator.continuation import finish_in_background
from pipecomm_ext.communicator.traced import done_work

LIMIT_S = 60.0


class Captured:
    """As the Work of a captured operation within its capture."""

    is_captured = True
    num_waits = 0

    def wait(self, timeout=None) -> None:
        self.num_waits += 1

    def is_completed(self) -> bool:
        raise ValueError("p2p was captured in a CUDA graph")


class Posted:
    is_captured = False
    is_done = threading.Event()

    def wait(self, timeout=None) -> None: ...
    def is_completed(self) -> bool:
        self.is_done.set()
        return True


class Handle:
    """What the background thread polls; `answer` is what it gets, or an error."""

    def __init__(self, answer: bool | Exception, device: torch.device | None = None) -> None:
        self.answer, self.device = answer, device
        self.is_polled = threading.Event()

    def poll(self) -> bool:
        self.is_polled.set()
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def rest(self) -> None:
        time.sleep(0.001)


def test_the_future_of_a_captured_call_has_ended():
    """The stream that is current then waits for the call, as for every future."""
    handle, outputs = Captured(), [torch.zeros(2)]
    work = BackendWork(handle, outputs, None, 0, "all_reduce")
    future = work.get_future()
    assert future.done() and future.value() is outputs and handle.num_waits == 1
    assert work.wait() and work.is_completed() and work.is_success() and work.exception() is None


def test_captured_sends_are_not_watched():
    watch = SendWatch(cast(Any, object()))  # asked for its store only if a send is pending
    watch.add(Captured(), 1, 0)
    for _ in range(2):
        watch.add(Posted(), 1, 0)
    assert Posted.is_done.wait(LIMIT_S)
    assert watch._num_sent[1, 0] == 3


def test_a_handle_that_cannot_be_polled_does_not_stop_the_others():
    failed, other = (
        Handle(RuntimeError("CUDA error: an illegal memory access was encountered")),
        Handle(False),
    )
    finish_in_background(other)
    finish_in_background(failed)
    assert failed.is_polled.wait(LIMIT_S)
    other.is_polled.clear()
    assert other.is_polled.wait(LIMIT_S)
    other.answer = True


def test_a_future_gets_the_error_of_its_device():
    class Failed:
        def wait(self, timeout=None) -> None: ...
        def is_completed(self) -> bool:
            if threading.current_thread() is threading.main_thread():
                return False
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    future = BackendWork(Failed(), [torch.zeros(2)], None, 0, "all_reduce").get_future()
    with pytest.raises(RuntimeError, match="an illegal memory access"):
        future.wait()


def test_a_thread_of_the_library_works_on_the_device_of_the_handle(monkeypatch):
    calls = []

    def note(*args) -> None:
        calls.append((threading.current_thread().name, *args))

    monkeypatch.setattr(torch.cuda, "set_device", note)
    monkeypatch.setattr(_C, "relax_captures", note)
    handle = Handle(True, torch.device("cuda", 1))
    finish_in_background(handle)
    assert handle.is_polled.wait(LIMIT_S)
    assert calls == [("pipecomm finish", torch.device("cuda", 1)), ("pipecomm finish",)]


def test_the_handle_of_a_call_that_has_ended_is_not_captured():
    assert not done_work().is_captured


def test_a_barrier_waits_for_each_device_that_captures_nothing():
    current, waited = [0], []

    @contextlib.contextmanager
    def on(device: torch.device):
        before, current[0] = current[0], cast(int, device.index)
        yield
        current[0] = before

    def stream_of(device: torch.device | None = None):
        return SimpleNamespace(
            synchronize=lambda: waited.append(current[0] if device is None else device.index)
        )

    endpoint = object.__new__(Endpoint)
    endpoint._connections = cast(Any, {torch.device("cuda", idx): None for idx in range(3)})
    captures = mock.patch("torch.cuda.is_current_stream_capturing", lambda: current[0] == 1)
    with captures, mock.patch("torch.cuda.device", on), mock.patch("torch.cuda.current_stream", stream_of):
        endpoint.wait_for_devices()
    assert waited == [0, 2]
