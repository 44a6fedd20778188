"""How the ranks of a group agree on what they make, through the store of the torch group.

All traffic is JSON of limited size: nothing that a peer sends is unpickled. No call waits for the store
itself longer than it may wait for the other ranks.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import torch.distributed as dist

from ..errors import PipeCommError, PipeCommMismatch, PipeCommTimeout, summary_of
from .limited_store import LimitedStore, StoreIsSilent, UsedAfterFork
from .process_groups import StoreGroup, place_in

_SHORT_LIMIT_S = 1.0  # of a store call in the background or of a rank that fails; the least limit of any call
_LONGEST_REST_S = 0.1  # between two checks for records of other ranks
_MAX_RECORD_BYTES = 1 << 20
_COMMON, _RECORD = "common", "record"  # stages
# Keys of a choice, see `first_problem`.
_PROBLEM, _HAS_TOLD, _NUM_TOLD, _VERDICT, _NAME = "problem", "has_told", "num_told", "verdict", "name"
_NO_PROBLEM = "none"
# Replaces the record of a rank that has given up; the rank may publish again.
_WITHDRAWN = b"withdrawn"

T = TypeVar("T")
Method = TypeVar("Method", bound=Callable[..., Any])

# The store of each group, for callers and for background threads. These have a connection of their own, since
# a thread of the program that waits in a TCPStore blocks all others.
_stores: weakref.WeakKeyDictionary[Any, tuple[LimitedStore, LimitedStore]] = weakref.WeakKeyDictionary()
_stores_lock = threading.Lock()


def stores_of(group: dist.ProcessGroup | StoreGroup) -> tuple[LimitedStore, LimitedStore]:
    """Returns the store of the group, for callers and for background threads."""
    with _stores_lock:
        if group not in _stores:
            rank, _, store = place_in(group)
            _stores[group] = (LimitedStore(store, rank), LimitedStore(store, rank, in_background=True))
        return _stores[group]


def close_stores(group: StoreGroup) -> None:
    """Ends the threads that call the store of a group that has ended."""
    with _stores_lock:
        stores = _stores.pop(group, ())
    for store in stores:
        store.close()


def _place_of(store: dist.Store) -> str:
    """Where a store is, for errors."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if isinstance(store, dist.TCPStore):
        return f"{store.host}:{store.port}"
    return getattr(store, "path", type(store).__name__)


# The number of constructions of each group, by what is made. It is part of the store keys, and equal on all
# ranks because they construct in the same order.
_num_made: weakref.WeakKeyDictionary[Any, dict[str, int]] = weakref.WeakKeyDictionary()


def _of_an_attempt(method: Method) -> Method:
    """Wraps a method that a construction waits for. After a timeout, the next attempt of this rank has the
    same number, so it meets the ranks that were late, and those to which the store has answered."""

    @functools.wraps(method)
    def call(self: Rendezvous, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except PipeCommTimeout:
            _num_made[self._group][self._name] = self._number
            self._record = None  # a farewell of this attempt must not reach the next one
            raise

    return cast(Method, call)


class Rendezvous:
    """One construction, as one rank sees it. All ranks make the constructions of one name in the same order:
    the first ones of all ranks belong together, and so on.

    A rank that does not wait for others calls `propose` and `publish`, and later `look_up`. The other methods
    are collective: all ranks get the same result or error.

    Errors call the object `what`; `purpose` tells it from others of its kind. `timeout` (seconds, None: no
    limit) limits all waits. A store that does not answer by then raises PipeCommTimeout, one that cannot be
    reached PipeCommError.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | StoreGroup,
        timeout: float | None,
        what: str = "Communicator",
        purpose: str = "",
    ) -> None:
        self.rank, self.size, self.store = place_in(group)
        self._group, self._what = group, what
        self._name = f"{what}/{purpose}"
        num_made = _num_made.setdefault(group, {})
        self._number = num_made.get(self._name, 0)
        num_made[self._name] = self._number + 1
        self._prefix = f"pipecomm/{group.group_name}/{self._name}/{self._number}"
        self._timeout = timeout
        self._restart()
        self._record: dict[str, Any] | None = None  # of this rank, once it is published
        self._own_keys: list[str] = []

    @functools.cached_property
    def _stores(self) -> tuple[LimitedStore, LimitedStore]:
        return stores_of(self._group)

    @property
    def _front(self) -> LimitedStore:
        return self._stores[0]

    @property
    def _background(self) -> LimitedStore:
        return self._stores[1]

    # ---- does not wait for other ranks

    def publish_with_group(self, record: Mapping[str, Any]) -> None:
        """Publishes the record of this rank by the store's own call, without a limit, as torch does while it
        makes a group. Starts no thread, since many groups are never used further."""
        self.store.set(f"{self._prefix}/{_RECORD}/{self.rank}", _json(dict(record)).decode())

    @_of_an_attempt
    def propose(self, arguments: dict[str, Any], chosen: dict[str, Any]) -> dict[str, Any]:
        """Returns what the first rank to call this has `chosen`.

        Raises PipeCommMismatch if that rank's `arguments` were not equal; the others learn of it.
        """
        own = {"rank": self.rank, "arguments": arguments, "chosen": chosen}
        first = self._parsed(self._compare_set(_COMMON, own), self.rank)
        for name, value in json.loads(json.dumps(arguments)).items():
            if first["arguments"].get(name) != value:
                values = (
                    f"{first['arguments'].get(name)!r} on rank {first['rank']}, {value!r} on rank {self.rank}"
                )
                text = f"ranks disagree about {name}: {values}"
                self.refuse(text)
                raise self._mismatch(first["rank"], f"{self._what}: {text}")
        return first["chosen"]

    @_of_an_attempt
    def publish(self, record: Mapping[str, Any]) -> None:
        """Publishes the record of this rank."""
        self._set(_RECORD, record)
        self._record = dict(record)

    def refuse(self, text: str) -> None:
        """Publishes why this rank takes no part, if the store answers; the caller raises its error anyway."""
        self._record = None  # a farewell must not replace the refusal
        refusal = {"rank": self.rank, "error": text}
        with contextlib.suppress(PipeCommError):
            self._set(_RECORD, refusal, _SHORT_LIMIT_S)
            self._ask(self._front.set, _VERDICT, _json(refusal), limit_s=_SHORT_LIMIT_S)

    def look_up(self, rank: int) -> dict[str, Any] | None:
        """Returns the record that `rank` has published, None if it has not yet. Takes at most a second; any
        thread may call it.
        """
        data = self._ask(self._background.find, f"{_RECORD}/{rank}", limit_s=_SHORT_LIMIT_S)
        return None if data is None or data == _WITHDRAWN else self._parsed(data, rank)

    def say_farewell(self, farewell: bytes) -> None:
        """Adds to the record of this rank how it ended. Takes at most a second; any thread may call it."""
        if self._record is None:
            return  # it has refused
        record = {**self._record, "farewell": farewell.hex()}
        key = f"{_RECORD}/{self.rank}"
        self._ask(self._background.set, key, _json(record), limit_s=_SHORT_LIMIT_S)

    def wait_for(self, rank: int) -> dict[str, Any]:
        """Waits for the record of `rank`. All ranks publish one sooner or later.

        Raises:
            PipeCommMismatch: that rank refuses.
            PipeCommTimeout: it has published nothing within the timeout, which begins now.
        """
        self._restart()
        data = self._await(f"{_RECORD}/{rank}")
        if data is None:
            raise self._missing([rank], "every rank of the group must make it, in the same order")
        return self._agreed({rank: self._parsed(data, rank)})[rank]

    def refusal_text(self, refusals: Mapping[int, Mapping[str, Any]]) -> str:
        texts = [f"by rank {rank}: {record['error']}" for rank, record in refusals.items()]
        return f"{self._what} was refused {', and '.join(texts)}"

    # ---- collective

    @_of_an_attempt
    def first_problem(self, problem: str) -> str:
        """Returns the problem of the first rank that has one, "" if none has: the same on all ranks. Each
        rank makes a few calls of the store, however many ranks there are.
        """
        if problem:
            self._compare_set(_PROBLEM, problem)
        own_key = f"{_HAS_TOLD}/{self.rank}"
        if self._find(own_key) is None:  # else set in an earlier attempt
            self._ask(self._front.set, own_key, b"")
            if self._ask(self._front.add, _NUM_TOLD, 1) == self.size:
                found = json.loads(self._compare_set(_PROBLEM, _NO_PROBLEM))
                outcome = {"problem": "" if found == _NO_PROBLEM else found}
                self._ask(self._front.set, _VERDICT, _json(outcome))
        verdict = self._read(_VERDICT, self.rank)
        if "error" in verdict:
            raise self._mismatch(verdict["rank"], self.refusal_text({verdict["rank"]: verdict}))
        return verdict["problem"]

    @_of_an_attempt
    def taken_by(self, name: str) -> int:
        """Returns the first rank that has asked for this name."""
        return json.loads(self._compare_set(f"{_NAME}/{name}", self.rank))

    @_of_an_attempt
    def gather(self, stage: str, record: dict[str, Any]) -> list[dict[str, Any]]:
        """Returns every rank's record, in rank order.

        A record with the key "error" is the refusal of its rank: all others raise a PipeCommMismatch that
        names it. The rank itself must raise its own exception afterwards; `agree` does.
        """
        self._set(stage, record)
        records = {rank: record if rank == self.rank else self._get(stage, rank) for rank in range(self.size)}
        return list(self._agreed(records).values())

    def _agreed(self, records: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
        refusals = {r: record for r, record in records.items() if r != self.rank and "error" in record}
        if refusals:
            raise self._mismatch(min(refusals), self.refusal_text(refusals))
        return records

    def agree(self, stage: str, facts: dict[str, Any], error: Exception | None) -> list[dict[str, Any]]:
        """Returns every rank's facts, which must be equal.

        Raises `error` if there is one: this rank's own arguments are wrong, and the others learn of it. Facts
        that differ raise PipeCommMismatch on all ranks.
        """
        try:
            everybody = self.gather(stage, facts if error is None else {"error": summary_of(error)})
        finally:
            if error is not None:
                raise error
        for key, value in everybody[0].items():
            for rank, other in enumerate(everybody):
                if other[key] != value:
                    values = f"{value!r} on rank 0, {other[key]!r} on rank {rank}"
                    raise self._mismatch(rank, f"{self._what}: ranks disagree about {key}: {values}")
        return everybody

    def _restart(self) -> None:
        self._deadline = math.inf if self._timeout is None else time.monotonic() + self._timeout

    def _mismatch(self, rank: int, text: str) -> PipeCommMismatch:
        return PipeCommMismatch(
            f"rank {self.rank}: {text}", op=self._what, rank=self.rank, peer=rank, origin_rank=rank
        )

    def _get(self, stage: str, rank: int) -> dict[str, Any]:
        return self._read(f"{stage}/{rank}", rank)

    def _read(self, key: str, rank: int) -> dict[str, Any]:
        """Waits for the value of this key. An error names `rank` if no other rank is missing."""
        if (data := self._await(key)) is not None:
            return self._parsed(data, rank)
        keys = key.rpartition("/")[0] or _HAS_TOLD
        missing = [r for r in range(self.size) if self._find(f"{keys}/{r}") is None] or [rank]
        # The ranks that were late must read the records of the next attempt.
        with contextlib.suppress(PipeCommError):
            for own_key in self._own_keys:
                self._ask(self._front.set, own_key, _WITHDRAWN)
            self._ask(self._front.set, _COMMON, b"")
        advice = "construction is collective: every rank of the group must make it, in the same order"
        raise self._missing(missing, advice)

    def _await(self, key: str) -> bytes | None:
        """Waits for the value of this key; returns None after the timeout."""
        rest_s = 0.001
        while (data := self._find(key)) is None or data == _WITHDRAWN:
            if time.monotonic() > self._deadline:
                return None
            time.sleep(rest_s)
            rest_s = min(2 * rest_s, _LONGEST_REST_S)
        return data

    def _missing(self, ranks: list[int], advice: str) -> PipeCommTimeout:
        return PipeCommTimeout(
            f"rank {self.rank}: {self._what}: ranks {ranks} of {self.size} have not joined after "
            f"{self._timeout} s; {advice}",
            op=self._what,
            rank=self.rank,
            peer=ranks[0],
            origin_rank=self.rank,
        )

    def _set(self, stage: str, record: Mapping[str, Any], limit_s: float | None = None) -> None:
        self._own_keys.append(f"{stage}/{self.rank}")
        self._ask(self._front.set, self._own_keys[-1], _json(dict(record)), limit_s=limit_s)

    def _find(self, key: str) -> bytes | None:
        return self._ask(self._front.find, key)

    def _compare_set(self, key: str, value: Any) -> bytes:
        """Sets the key to `value` unless it is set; returns its value."""
        return self._ask(self._front.compare_set, key, b"", _json(value))

    def _ask(self, call: Callable[..., T], key: str, *args: Any, limit_s: float | None = None) -> T:
        """Calls the store, within a limit (None: what is left of the timeout)."""
        if limit_s is None:
            limit_s = max(_SHORT_LIMIT_S, self._deadline - time.monotonic())
        who, place = f"rank {self.rank}: {self._what}", _place_of(self.store)
        mine: dict[str, Any] = {"op": self._what, "rank": self.rank, "origin_rank": self.rank}
        try:
            return call(f"{self._prefix}/{key}", *args, limit_s=limit_s)
        except StoreIsSilent:
            raise PipeCommTimeout(
                f"{who}: the store of the group does not answer ({place}): nothing came within "
                f"{limit_s:.1f} s; is its process stopped, or its host cut off?",
                **mine,
            ) from None
        except UsedAfterFork:
            raise PipeCommError(
                f"{who}: this process was forked after the group was first used, and has no part in its "
                "store; make a new group and Communicator here",
                **mine,
            ) from None
        except RuntimeError as error:
            text = f"{who}: the store of the group does not answer ({place}): {error}"
            raise PipeCommError(text, **mine) from error

    def _parsed(self, data: bytes, rank: int) -> dict[str, Any]:
        if len(data) > _MAX_RECORD_BYTES:
            raise PipeCommMismatch(
                f"rank {self.rank}: record of rank {rank} has {len(data)} bytes, too many", op=self._what
            )
        return json.loads(data)


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()
