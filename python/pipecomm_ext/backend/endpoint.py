"""What one rank holds of one group: its communicators, its timeout, and how many calls it has made."""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
import weakref
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..communicator import Communicator, communicator_for
from ..communicator.communicator import close_patiently
from ..communicator.continuation import Continuation, Line, deadline_of, finish_in_background, timeout_until
from ..core.host import place
from ..core.levels import MIN_RANKS, Levels, levels_among
from ..core.process_groups import StoreGroup
from ..core.rendezvous import Rendezvous, close_stores
from ..errors import PipeCommAborted, PipeCommError

# The number of tags from 0 on with their own channel, and of channels that all other tags share; one more is
# for the later exchanges of reductions and gathers. For CUDA tensors each channel takes memory.
_CHANNELS = {"cpu": (11, 3), "cuda": (2, 1)}
_PATIENCE_S = 3.0  # of a shutdown with receives that no rank has matched


@dataclass
class Connection:
    """The communicator of a device."""

    communicator: Communicator
    num_own_tags: int
    num_shared: int
    line: Line  # of reductions and gathers

    def channel_of(self, tag: int) -> tuple[int, int]:
        """The channel of a tag, and a number that the ends compare, so that tags on one channel never mix."""
        if 0 <= tag < self.num_own_tags:
            return tag, 0
        return self.num_own_tags + tag % self.num_shared, (tag << 1 | 1) & (2**64 - 1)


class _Hosts:
    """The hosts of a group's ranks. Each rank publishes its own with the group, since a call that must not
    wait for calls of other ranks may need them. It does not refer to the Endpoint: a line keeps it."""

    def __init__(self, group: StoreGroup, timeout_s: float | None) -> None:
        self._rank, self._size = group.rank, group.size
        self._rendezvous = Rendezvous(group, timeout_s, "process group", "hosts")
        if group.size >= MIN_RANKS:
            self._rendezvous.publish_with_group(place())

    @functools.cached_property
    def _levels(self) -> Levels | None:
        return levels_among(self._rank, [self._rendezvous.wait_for(rank) for rank in range(self._size)])

    def levels(self) -> Levels | None:
        """The levels of the ranks' hosts. Waits until all ranks have made the group."""
        return self._levels


class Endpoint:
    """Makes the communicator of a device at the first call for it, without waiting for other ranks."""

    def __init__(
        self, store: dist.Store, rank: int, size: int, name: str, ranks: list[int], timeout: timedelta
    ) -> None:
        self.group = StoreGroup(store, rank, size, name)
        self.rank, self.size, self.ranks = rank, size, ranks
        self.timeout = timeout
        self.num_collectives = 0
        self._connections: dict[torch.device, Connection] = {}
        self._lock = threading.Lock()
        self._unfinished: weakref.WeakSet[Continuation] = weakref.WeakSet()
        self._ended = ""
        self._hosts = _Hosts(self.group, self._timeout_s)

    @property
    def _timeout_s(self) -> float | None:
        return self.timeout.total_seconds() if self.timeout > timedelta(0) else None

    def check_usable(self) -> None:
        if self._ended:
            raise PipeCommAborted(f"rank {self.rank}: the process group is {self._ended}", rank=self.rank)

    def connection(self, device: torch.device) -> Connection:
        found = self._connections.get(device)
        return found if found is not None else self._connect(device)

    def _connect(self, device: torch.device) -> Connection:
        with self._lock:
            self.check_usable()
            if device not in self._connections:
                if device.type not in _CHANNELS:
                    raise ValueError(f"tensors must be on the CPU or on a CUDA device, not on {device}")
                num_own, num_shared = _CHANNELS[device.type]
                self._connections[device] = Connection(
                    communicator_for(
                        f"backend {device.type}",
                        self.group,
                        device,
                        num_own + num_shared + 1,
                        timeout=self._timeout_s,
                    ),
                    num_own,
                    num_shared,
                    Line(
                        num_own + num_shared,
                        self._hosts.levels if device.type == "cpu" else lambda: None,
                        compares_shapes=False,  # as every backend of torch
                    ),
                )
            return self._connections[device]

    def limit(self, timeout: timedelta | None) -> timedelta | None:
        """Returns how long to wait for a call with this timeout (negative: none was given); None: the
        communicator's timeout."""
        if timeout is not None and timeout.total_seconds() > 0:
            return timeout
        return self.changed_timeout

    changed_timeout: timedelta | None = None  # another one than the communicators have

    def set_timeout(self, timeout: timedelta) -> None:
        self.timeout = timeout
        if self._connections:  # their own timeouts stay
            self.changed_timeout = timeout

    def wait_for_devices(self) -> None:
        """Waits until the current streams of the group's CUDA devices have done their work, except within the
        capture of a CUDA graph."""
        for device in list(self._connections):
            if device.type == "cuda":
                with torch.cuda.device(device):
                    if not torch.cuda.is_current_stream_capturing():
                        torch.cuda.current_stream().synchronize()

    def finish(self, continuation: Continuation) -> None:
        """Makes a thread continue a collective; a shutdown waits until it has posted all its exchanges."""
        with self._lock:
            self._unfinished.add(continuation)
        finish_in_background(continuation)

    def shutdown(self) -> None:
        """Waits for what is in flight, and closes. Idempotent."""
        communicators = self._end("shut down")
        with self._lock:
            unfinished, deadline = list(self._unfinished), deadline_of(self.timeout)
            # Also what a signal handler has interrupted.
            lasts = [connection.line.last for connection in self._connections.values()]
            unfinished += [last for last in lasts if last is not None]
        for continuation in unfinished:
            with contextlib.suppress(Exception):  # which the call's own handle raises
                continuation.wait(timeout_until(deadline))
        for communicator in communicators:
            try:
                close_patiently(communicator, _PATIENCE_S)
            except PipeCommError as error:
                if communicator.failure is None:
                    warnings.warn(f"process group {self.group.group_name}: {error}", stacklevel=3)
        close_stores(self.group)

    def abort(self, reason: str = "the process group was aborted") -> None:
        """Makes every call in flight fail, on all ranks."""
        for communicator in self._end("aborted"):
            with contextlib.suppress(PipeCommError):
                communicator.abort(reason)
            with contextlib.suppress(PipeCommError):
                communicator.close()
        close_stores(self.group)

    def _end(self, how: str) -> list[Communicator]:
        with self._lock:
            self._ended = self._ended or how
            connections = list(self._connections.values())
        return [connection.communicator for connection in connections]

    @property
    def failure(self) -> Any:
        return next(filter(None, (c.communicator.failure for c in self._connections.values())), None)
