"""How the ranks of a group agree on what they are about to make, before any of them allocates memory for it.

All traffic goes through the store of the torch group, as JSON of limited size: nothing that a peer sends is
unpickled.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import secrets
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch.distributed as dist

from ..errors import PipeCommMismatch, PipeCommTimeout

# A limit where torch wants one and we want none.
FOREVER = datetime.timedelta(days=3650)
_MAX_RECORD_BYTES = 1 << 20
# In the place of a record whose rank has given up; it may come again.
_WITHDRAWN = b"withdrawn"

T = TypeVar("T")

# The number of constructions of each group. It is part of the store keys, and equal on all ranks because
# construction is collective.
_num_made: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


class Rendezvous:
    """One construction, as one rank sees it. Its methods are collective: all ranks get the same result or
    error.

    `what` names in errors what is made; `timeout` (seconds, None: no limit) is for all stages together.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: float | None, what: str = "Communicator") -> None:
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self._group, self._what = group, what
        self._number = _num_made.get(group, 0)
        _num_made[group] = self._number + 1
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._timeout = timeout
        self._own_keys: list[str] = []
        store = dist.distributed_c10d._get_process_group_store(group)
        self.store = dist.PrefixStore(f"pipecomm/{group.group_name}/{self._number}", store)

    def gather(self, stage: str, record: dict[str, Any]) -> list[dict[str, Any]]:
        """Every rank's record, in rank order.

        A record with the key "error" is the refusal of its rank: all others raise PipeCommMismatch that names
        it. The rank itself is to raise its own exception afterwards; `agree` does.
        """
        self._own_keys.append(f"{stage}/{self.rank}")
        self.store.set(self._own_keys[-1], json.dumps(record))
        records = [record if rank == self.rank else self._get(stage, rank) for rank in range(self.size)]
        refusals = [rank for rank, other in enumerate(records) if rank != self.rank and "error" in other]
        if refusals:
            texts = [f"by rank {rank}: {records[rank]['error']}" for rank in refusals]
            raise self._mismatch(refusals[0], f"{self._what} was refused {', and '.join(texts)}")
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

    def shared_random(self) -> int:
        """A random 32-bit number, the same on all ranks."""
        return self.gather("epoch", {"epoch": secrets.randbits(32)})[0]["epoch"]

    def remaining(self) -> datetime.timedelta:
        """The time that is left, FOREVER if there is no limit."""
        if self._deadline is None:
            return FOREVER
        return datetime.timedelta(seconds=max(0.001, self._deadline - time.monotonic()))

    def _mismatch(self, rank: int, text: str) -> PipeCommMismatch:
        return PipeCommMismatch(
            f"rank {self.rank}: {text}", op=self._what, rank=self.rank, peer=rank, origin_rank=rank
        )

    def _get(self, stage: str, rank: int) -> dict[str, Any]:
        key = f"{stage}/{rank}"
        try:
            self.store.wait([key], self.remaining())
            while (data := self.store.get(key)) == _WITHDRAWN:
                if self._deadline is not None and time.monotonic() > self._deadline:
                    raise RuntimeError(f"rank {rank} has given up")
                time.sleep(0.01)
        except RuntimeError as error:  # DistStoreError is one, and FileStore raises the plain one
            missing = [r for r in range(self.size) if not self.store.check([f"{stage}/{r}"])] or [rank]
            # The next attempt meets the ranks that were late for this one. They must read what it says then.
            _num_made[self._group] = self._number
            with contextlib.suppress(RuntimeError):
                for own_key in self._own_keys:
                    self.store.set(own_key, _WITHDRAWN)  # type: ignore[arg-type]  # bytes, too
            raise PipeCommTimeout(
                f"rank {self.rank}: {self._what}: ranks {missing} of {self.size} have not joined after "
                f"{self._timeout} s; construction is collective: every rank of the group must make it, in "
                "the same order",
                op=self._what,
                rank=self.rank,
                peer=missing[0],
                origin_rank=self.rank,
            ) from error
        if len(data) > _MAX_RECORD_BYTES:
            raise PipeCommMismatch(
                f"rank {self.rank}: record of rank {rank} has {len(data)} bytes, too many", op=self._what
            )
        return json.loads(data)
