"""Receives from any source.

The engine matches only receives that name their source. So if a send is not received soon, its rank writes
into the store of the group how many messages it has sent with this tag to that rank, and a receive from any
source looks there for a rank that has sent more than this one has received. A program without such receives
writes nothing if its sends match soon.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

from ..communicator.continuation import deadline_of, finish_in_background, timeout_until
from ..core.rendezvous import stores_of
from ..errors import PipeCommTimeout
from .endpoint import Endpoint

_PATIENCE_S = 0.01  # after which a send without a receive is written to the store
_IDLE_S = 1.0  # without a pending send, after which the thread stops watching
_STORE_LIMIT_S = 5.0
_LONGEST_REST_S = 0.02


class SendWatch:
    """Writes to the store which sends of this rank wait for their receives."""

    is_patient = True

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._num_sent: Counter[tuple[int, int]] = Counter()  # by destination and tag
        self._told: Counter[tuple[int, int]] = Counter()
        self._pending: deque[tuple[Any, tuple[int, int], float]] = deque()
        self._lock = threading.Lock()
        self._is_watched = False
        self._last_at = 0.0

    def add(self, work: Any, dst: int, tag: int) -> None:
        """Adds a send that has just been posted. One that a CUDA graph has captured is only counted."""
        key = (dst, tag)
        with self._lock:
            while self._pending and self._pending[0][0].is_completed():
                self._pending.popleft()
            self._num_sent[key] += 1
            if work.is_captured:
                return
            self._last_at = time.monotonic()
            self._pending.append((work, key, self._last_at))
            is_watched, self._is_watched = self._is_watched, True
        if not is_watched:
            finish_in_background(self)

    def poll(self) -> bool:
        """Whether no send has been pending for a while."""
        now = time.monotonic()
        with self._lock:
            self._pending = deque(send for send in self._pending if not send[0].is_completed())
            if not self._pending and now - self._last_at > _IDLE_S:
                self._is_watched = False
                return True
            late = {key: self._num_sent[key] for _, key, at in self._pending if now - at > _PATIENCE_S}
        for key, count in late.items():
            if self._told[key] == count:
                continue
            try:
                self._endpoint.check_usable()
                _, background = stores_of(self._endpoint.group)
                background.set(_key(*key, self._endpoint.rank), str(count).encode(), _STORE_LIMIT_S)
            except Exception:  # the store is gone; receivers notice, too
                self._is_watched = False  # until the next send
                return True
            self._told[key] = count
        return False

    def rest(self) -> None:
        time.sleep(_PATIENCE_S / 2)


class AnySource:
    """A receive that has no source yet. Has the methods of a Work. Fails if it finds no source within the
    group's timeout."""

    def __init__(
        self,
        endpoint: Endpoint,
        tag: int,
        num_received: Counter[tuple[int, int]],
        lock: threading.Lock,
        receive_from: Callable[[int], Any],
        receive_own: Callable[[], Any],
    ) -> None:
        self.source: int | None = None
        self._endpoint, self._tag, self._num_received, self._posting = endpoint, tag, num_received, lock
        self._receive_from, self._receive_own = receive_from, receive_own
        self._give_up_at = deadline_of(endpoint.timeout)
        self._work: Any = None
        self._error: Exception | None = None
        self._lock = threading.Lock()

    def wait(self, timeout: Any = None) -> None:
        deadline, rest_s = deadline_of(timeout), 0.0005
        while not self._find():
            if time.monotonic() > deadline:
                raise self._found_none()
            time.sleep(rest_s)
            rest_s = min(2 * rest_s, _LONGEST_REST_S)
        if self._error is not None:
            raise self._error
        self._work.wait(timeout_until(deadline))

    def _found_none(self) -> PipeCommTimeout:
        rank = self._endpoint.rank
        return PipeCommTimeout(
            f"rank {rank}: recv from any source: no rank has sent anything with tag {self._tag} within the "
            "timeout",
            op="recv",
            rank=rank,
            origin_rank=rank,
        )

    def is_completed(self) -> bool:
        return self._find() and (self._error is not None or self._work.is_completed())

    def rest(self) -> None:
        time.sleep(0.002)

    def _find(self) -> bool:
        """Whether the source is known and the receive posted, or the search has failed."""
        if self._work is not None or self._error is not None:
            return True
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if self._work is None and self._error is None:
                self._look()
        except Exception as error:
            self._error = error
        finally:
            self._lock.release()
        return self._work is not None or self._error is not None

    def _look(self) -> None:
        self._endpoint.check_usable()
        me, tag = self._endpoint.rank, self._tag
        with self._posting:
            self._work = self._receive_own()
            if self._work is not None:
                self.source = me
                return
        front, _ = stores_of(self._endpoint.group)
        for src in range(self._endpoint.size):
            said = None if src == me else front.find(_key(me, tag, src), _STORE_LIMIT_S)
            with self._posting:
                if said is not None and int(said) > self._num_received[src, tag]:
                    self.source = src
                    self._work = self._receive_from(src)
                    return
        if time.monotonic() > self._give_up_at:
            raise self._found_none()


def _key(dst: int, tag: int, src: int) -> str:
    return f"pipecomm/sent/{dst}/{tag}/{src}"
