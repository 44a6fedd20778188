"""How the ranks of a group agree on a communicator before any of them allocates anything for it.

All traffic here goes through the store of the torch group, as JSON with a size cap: nothing is unpickled from
a peer.
"""

from __future__ import annotations

import datetime
import json
import secrets
import time
import weakref
from typing import Any

import torch.distributed as dist

from .errors import PipeCommMismatch, PipeCommTimeout

_MAX_RECORD_BYTES = 1 << 20

# How many communicators each group has made: the number is part of the store keys, and equal on all ranks
# because construction is collective.
_num_made: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


class Rendezvous:
    """One construction, seen by one rank: `gather` is collective, every rank gets the same list or error."""

    def __init__(self, group: dist.ProcessGroup, timeout: float | None, what: str = "Communicator") -> None:
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self._group, self._what = group, what
        self._number = _num_made.get(group, 0)
        _num_made[group] = self._number + 1
        # The deadline covers the whole construction, whatever the number of stages.
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._timeout = timeout
        store = dist.distributed_c10d._get_process_group_store(group)
        self.store = dist.PrefixStore(f"pipecomm/{group.group_name}/{self._number}", store)

    def gather(self, stage: str, record: dict[str, Any]) -> list[dict[str, Any]]:
        """Every rank's record, in rank order.

        A record with the key "error" makes all ranks raise: the rank itself its own exception, which it holds
        back until its word is out, the others PipeCommMismatch naming it.
        """
        data = json.dumps(record)
        self.store.set(f"{stage}/{self.rank}", data)
        records = [record if rank == self.rank else self._get(stage, rank) for rank in range(self.size)]
        for rank, other in enumerate(records):
            if rank != self.rank and "error" in other:
                raise PipeCommMismatch(
                    f"rank {self.rank}: {self._what} was refused by rank {rank}: {other['error']}",
                    op=self._what,
                    rank=self.rank,
                    peer=rank,
                    origin_rank=rank,
                )
        return records

    def shared_random(self) -> int:
        """The same random 32-bit number on all ranks."""
        return self.gather("epoch", {"epoch": secrets.randbits(32)})[0]["epoch"]

    def remaining(self) -> float | None:
        return None if self._deadline is None else max(0.001, self._deadline - time.monotonic())

    def _get(self, stage: str, rank: int) -> dict[str, Any]:
        key = f"{stage}/{rank}"
        try:
            remaining = self.remaining()
            limit = (
                datetime.timedelta(days=3650) if remaining is None else datetime.timedelta(seconds=remaining)
            )
            self.store.wait([key], limit)
            data = self.store.get(key)
        except RuntimeError as error:  # DistStoreError is one, and FileStore raises the plain one
            # The next attempt meets the ranks that were late for this one.
            _num_made[self._group] = self._number
            missing = [r for r in range(self.size) if not self.store.check([f"{stage}/{r}"])]
            raise PipeCommTimeout(
                f"rank {self.rank}: {self._what}: ranks {missing} of {self.size} have not joined after "
                f"{self._timeout} s; construction is collective: every rank of the group must make it, in "
                "the same order",
                op=self._what,
                rank=self.rank,
                peer=missing[0] if missing else None,
                origin_rank=self.rank,
            ) from error
        if len(data) > _MAX_RECORD_BYTES:
            raise PipeCommMismatch(
                f"rank {self.rank}: record of rank {rank} has {len(data)} bytes, too many", op=self._what
            )
        return json.loads(data)
