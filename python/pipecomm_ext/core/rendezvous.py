"""How the ranks of a group agree on what they make, through the store of the torch group.

All traffic is JSON of limited size: nothing that a peer sends is unpickled.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch.distributed as dist

from ..errors import PipeCommMismatch, PipeCommTimeout

# A limit where torch wants one and we want none.
FOREVER = datetime.timedelta(days=3650)
_MAX_RECORD_BYTES = 1 << 20
_COMMON, _RECORD = "common", "record"  # stages
# Keys of a choice, see `first_problem`.
_PROBLEM, _HAS_TOLD, _NUM_TOLD, _VERDICT, _NAME = "problem", "has_told", "num_told", "verdict", "name"
_NO_PROBLEM = "none"
# In the place of a record whose rank has given up; it may come again.
_WITHDRAWN = b"withdrawn"

T = TypeVar("T")

# What threads in the background look into: a thread that waits in a TCPStore keeps all others out of it. One
# for each group, since to connect takes a lookup of names, which may take seconds.
_clones: weakref.WeakKeyDictionary[Any, dist.Store] = weakref.WeakKeyDictionary()
_clones_lock = threading.Lock()


def _clone_of(group: dist.ProcessGroup) -> dist.Store:
    with _clones_lock:
        if group not in _clones:
            store = dist.distributed_c10d._get_process_group_store(group)
            clone = getattr(store, "clone", None)
            _clones[group] = clone() if clone else store
        return _clones[group]


# The number of constructions of each group, by what is made. It is part of the store keys, and equal on all
# ranks because they construct in the same order.
_num_made: weakref.WeakKeyDictionary[Any, dict[str, int]] = weakref.WeakKeyDictionary()


class Rendezvous:
    """One construction, as one rank sees it. Ranks construct what has the same name in the same order: the
    first constructions of all ranks are one, and so on.

    A rank that waits for nobody calls `propose` and `publish`, and later `look_up`. The other methods are
    collective: all ranks get the same result or error.

    `what` names in errors what is made, which `purpose` tells from others of the kind; `timeout` (seconds,
    None: no limit) is for all that waits.
    """

    def __init__(
        self, group: dist.ProcessGroup, timeout: float | None, what: str = "Communicator", purpose: str = ""
    ) -> None:
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self._group, self._what = group, what
        self._name = f"{what}/{purpose}"
        num_made = _num_made.setdefault(group, {})
        self._number = num_made.get(self._name, 0)
        num_made[self._name] = self._number + 1
        self._timeout = timeout
        self._restart()
        self._background_store: dist.Store | None = None
        self._record: dict[str, Any] | None = None  # of this rank, once it is published
        self._own_keys: list[str] = []
        store = dist.distributed_c10d._get_process_group_store(group)
        self._prefix = f"pipecomm/{group.group_name}/{self._name}/{self._number}"
        self.store = dist.PrefixStore(self._prefix, store)

    # ---- waits for nobody

    def propose(self, arguments: dict[str, Any], chosen: dict[str, Any]) -> dict[str, Any]:
        """What the first rank has `chosen` that came here: `chosen` if it is this one.

        Raises PipeCommMismatch if its arguments were not equal to these; the others hear of it.
        """
        own = {"rank": self.rank, "arguments": arguments, "chosen": chosen}
        first = self._parsed(self.store.compare_set(_COMMON, "", json.dumps(own)), self.rank)
        for name, value in json.loads(json.dumps(arguments)).items():
            if first["arguments"].get(name) != value:
                values = (
                    f"{first['arguments'].get(name)!r} on rank {first['rank']}, {value!r} on rank {self.rank}"
                )
                text = f"ranks disagree about {name}: {values}"
                self.publish({"error": text})
                raise self._mismatch(first["rank"], f"{self._what}: {text}")
        return first["chosen"]

    def publish(self, record: Mapping[str, Any]) -> None:
        """Shows the others the record of this rank, or with the key "error" why it refuses."""
        self._set(_RECORD, record)
        if "error" in record:
            self.store.set(_VERDICT, json.dumps({"rank": self.rank, **record}))
        else:
            self._record = dict(record)

    def look_up(self, rank: int) -> dict[str, Any] | None:
        """The record that `rank` has published, None if it has not yet. May be called by any one thread."""
        store, key = self._in_background(), f"{_RECORD}/{rank}"
        if not store.check([key]) or (data := store.get(key)) == _WITHDRAWN:
            return None
        return self._parsed(data, rank)

    def say_farewell(self, farewell: bytes) -> None:
        """Adds to the record of this rank how it has ended. May be called by any thread."""
        if self._record is None:
            return  # it has refused
        store, key = self._in_background(), f"{_RECORD}/{self.rank}"
        store.set(key, json.dumps({**self._record, "farewell": farewell.hex()}))
        store.check([key])  # set() of a TCPStore does not wait until it is there

    def _in_background(self) -> dist.Store:
        if self._background_store is None:
            self._background_store = dist.PrefixStore(self._prefix, _clone_of(self._group))
        return self._background_store

    def wait_for(self, rank: int) -> dict[str, Any]:
        """The record of `rank`, which all ranks publish sooner or later.

        Raises:
            PipeCommMismatch: that rank refuses.
            PipeCommTimeout: it has published nothing within the timeout, which begins now.
        """
        self._restart()
        key = f"{_RECORD}/{rank}"
        try:
            self.store.wait([key], self.remaining())
        except RuntimeError as error:
            raise self._missing([rank], "every rank of the group must make it, in the same order") from error
        return self._agreed({rank: self._parsed(self.store.get(key), rank)})[rank]

    def refusal_text(self, refusals: Mapping[int, Mapping[str, Any]]) -> str:
        texts = [f"by rank {rank}: {record['error']}" for rank, record in refusals.items()]
        return f"{self._what} was refused {', and '.join(texts)}"

    # ---- collective

    def first_problem(self, problem: str) -> str:
        """The problem of the first rank that has one, "" if none has: the same on all ranks, each of which
        looks into the store a few times, however many there are.
        """
        if problem:
            self.store.compare_set(_PROBLEM, "", problem)
        own_key = f"{_HAS_TOLD}/{self.rank}"
        if not self.store.check([own_key]):  # else in an attempt before
            self.store.set(own_key, "")
            if self.store.add(_NUM_TOLD, 1) == self.size:
                found = self.store.compare_set(_PROBLEM, "", _NO_PROBLEM).decode()
                outcome = {"problem": "" if found == _NO_PROBLEM else found}
                self.store.set(_VERDICT, json.dumps(outcome))  # which wakes those that wait
        verdict = self._read(_VERDICT, self.rank)
        if "error" in verdict:
            raise self._mismatch(verdict["rank"], self.refusal_text({verdict["rank"]: verdict}))
        return verdict["problem"]

    def taken_by(self, name: str) -> int:
        """The first rank that has asked for this name."""
        return int(self.store.compare_set(f"{_NAME}/{name}", "", str(self.rank)))

    def gather(self, stage: str, record: dict[str, Any]) -> list[dict[str, Any]]:
        """Every rank's record, in rank order.

        A record with the key "error" is the refusal of its rank: all others raise PipeCommMismatch that names
        it. The rank itself is to raise its own exception afterwards; `agree` does.
        """
        self._set(stage, record)
        records = {rank: record if rank == self.rank else self._get(stage, rank) for rank in range(self.size)}
        return list(self._agreed(records).values())

    def _agreed(self, records: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
        refusals = {r: record for r, record in records.items() if r != self.rank and "error" in record}
        if refusals:
            raise self._mismatch(min(refusals), self.refusal_text(refusals))
        return records

    def agree(
        self, stage: str, facts: dict[str, Any], error: Exception | None, *, private: Sequence[str] = ()
    ) -> list[dict[str, Any]]:
        """Every rank's facts, which must be equal but for the keys `private`.

        Raises `error` if there is one: this rank has found its own arguments wrong, and the others get to
        hear of it. Facts that differ raise PipeCommMismatch on all ranks.
        """
        try:
            refusal = {"error": f"{type(error).__name__}: {error}"}
            everybody = self.gather(stage, facts if error is None else refusal)
        finally:
            if error is not None:
                raise error
        for key, value in everybody[0].items():
            for rank, other in enumerate(everybody):
                if key not in private and other[key] != value:
                    values = f"{value!r} on rank 0, {other[key]!r} on rank {rank}"
                    raise self._mismatch(rank, f"{self._what}: ranks disagree about {key}: {values}")
        return everybody

    def make(self, stage: str, make: Callable[[], T]) -> T:
        """What `make` returns, once it has returned on all ranks. A rank where it raises raises that, all
        others PipeCommMismatch with the reason.
        """
        made: T | None = None
        error: Exception | None = None
        try:
            made = make()
        except Exception as failed:
            error = failed
        try:
            self.agree(stage, {}, error)
        except Exception:
            made = None  # ends now, and not with the traceback
            raise
        return cast(T, made)  # without an error

    def remaining(self) -> datetime.timedelta:
        """The time that is left, FOREVER if there is no limit."""
        if self._deadline is None:
            return FOREVER
        return datetime.timedelta(seconds=max(0.001, self._deadline - time.monotonic()))

    def _restart(self) -> None:
        self._deadline = None if self._timeout is None else time.monotonic() + self._timeout

    def _mismatch(self, rank: int, text: str) -> PipeCommMismatch:
        return PipeCommMismatch(
            f"rank {self.rank}: {text}", op=self._what, rank=self.rank, peer=rank, origin_rank=rank
        )

    def _get(self, stage: str, rank: int) -> dict[str, Any]:
        return self._read(f"{stage}/{rank}", rank)

    def _read(self, key: str, rank: int) -> dict[str, Any]:
        """What comes under this key, for which `rank` is the last to be waited for."""
        try:
            self.store.wait([key], self.remaining())
            while (data := self.store.get(key)) == _WITHDRAWN:
                if self._deadline is not None and time.monotonic() > self._deadline:
                    raise RuntimeError(f"rank {rank} has given up")
                time.sleep(0.01)
        except RuntimeError as error:  # DistStoreError is one, and FileStore raises the plain one
            keys = key.rpartition("/")[0] or _HAS_TOLD
            missing = [r for r in range(self.size) if not self.store.check([f"{keys}/{r}"])] or [rank]
            # The next attempt meets the ranks that were late for this one. They must read what it says then.
            _num_made[self._group][self._name] = self._number
            with contextlib.suppress(RuntimeError):
                for own_key in self._own_keys:
                    self.store.set(own_key, _WITHDRAWN)  # type: ignore[arg-type]  # bytes, too
                self.store.set(_COMMON, "")
            advice = "construction is collective: every rank of the group must make it, in the same order"
            raise self._missing(missing, advice) from error
        return self._parsed(data, rank)

    def _missing(self, ranks: list[int], advice: str) -> PipeCommTimeout:
        return PipeCommTimeout(
            f"rank {self.rank}: {self._what}: ranks {ranks} of {self.size} have not joined after "
            f"{self._timeout} s; {advice}",
            op=self._what,
            rank=self.rank,
            peer=ranks[0],
            origin_rank=self.rank,
        )

    def _set(self, stage: str, record: Mapping[str, Any]) -> None:
        self._own_keys.append(f"{stage}/{self.rank}")
        self.store.set(self._own_keys[-1], json.dumps(dict(record)))

    def _parsed(self, data: bytes, rank: int) -> dict[str, Any]:
        if len(data) > _MAX_RECORD_BYTES:
            raise PipeCommMismatch(
                f"rank {self.rank}: record of rank {rank} has {len(data)} bytes, too many", op=self._what
            )
        return json.loads(data)
