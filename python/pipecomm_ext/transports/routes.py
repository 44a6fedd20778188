"""How the ranks of a communicator reach each other: the record that each one publishes, and what follows from
the records of any two.
"""

from __future__ import annotations

import functools
import os
import secrets
import threading
import warnings
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ..core.extension import _C
from ..core.host import num_local_ranks, place, usable_cores
from ..core.levels import Levels, levels_among
from ..core.rendezvous import Rendezvous
from ..errors import PipeCommError
from . import shm, tcp

MIXED = "mixed"
Introduction = _C.Introduction


def draw() -> dict[str, Any]:
    """Draws random numbers that one rank chooses for all: the name of the communicator's traffic, and a token
    that tells its ranks from strangers.
    """
    return {"epoch": secrets.randbits(32), "token": secrets.token_hex(32)}


class Routes:
    """The routes of one rank of a communicator, over shared memory, TCP or both.

    All ranks draw the same conclusions from the records. If only one end of a pair finds an obstacle (it
    cannot map the other rank's memory), the engine keeps that and informs the other end.
    """

    def __init__(
        self,
        meeting: Rendezvous,
        channels: int,
        settings: Mapping[str, Any],
        shared: Mapping[str, Any],
        *,
        uses_memory: bool,
        uses_tcp: bool,
    ) -> None:
        """`shared`: what one rank has drawn for all, see `draw`."""
        self._meeting, self._channels, self._settings = meeting, channels, settings
        self._uses_memory, self._uses_tcp = uses_memory, uses_tcp
        # The connections, which Python's collector cannot look into, must not keep this object alive.
        look_up = weakref.WeakMethod(self._look_up)
        self.connections = _C.Connections(
            meeting.rank,
            meeting.size,
            shared["epoch"],
            tcp.key_of(shared["token"]),
            lambda peer: method(peer) if (method := look_up()) else None,
            meeting.say_farewell,
            num_local_ranks(),
        )
        self.record: dict[str, Any] = {"pid": os.getpid(), "cores": f"{usable_cores():x}", **place()}
        if meeting.size > 1:
            if uses_tcp:
                self.record |= self._listen(settings)
            if uses_memory:
                facts = shm.Shm().local_facts(torch.device("cpu"))
                shm.create_memory(self.connections, meeting.size, self._channels, settings, facts)
                self.record["shm"] = facts
                if facts["obstacle"] and not uses_tcp:
                    raise ValueError(
                        f'transport="shm" is not possible: rank {meeting.rank}: {facts["obstacle"]}; '
                        'use "auto" or "tcp"'
                    )
        self._lock = threading.Lock()
        self._records: dict[int, dict[str, Any]] = {meeting.rank: self.record}
        self._known_hosts: dict[tuple[int, ...], list[list[int]]] = {}
        self._num_sharing = 1
        self._has_warned = False

    def _listen(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        rank = self._meeting.rank
        try:
            return tcp.listen(self.connections, settings, self._meeting.store)
        except ValueError:
            raise
        except Exception as error:
            text = f"rank {rank}: could not listen for the other ranks: {error}"
            raise PipeCommError(text, op="Communicator", rank=rank) from error

    # ---- what follows from the records

    def obstacle(self, one: int, other: int) -> str | None:
        """Why two ranks cannot share memory, or None. Waits until both have published their records."""
        if not self._uses_memory:
            return "asked for" if self._uses_tcp else None
        ranks = sorted((one, other))
        return shm.obstacle(ranks, [self._sharing(self._record_of(rank)) for rank in ranks])

    def transport_among(self, ranks: Iterable[int]) -> str:
        """Returns the transport between any two of these ranks: "shm", "tcp" or "mixed"."""
        hosts = self._hosts(tuple(sorted(ranks)))
        if len(hosts) <= 1:
            return "shm" if self._uses_memory else "tcp"
        return MIXED if any(len(host) > 1 for host in hosts) else "tcp"

    def are_all_known(self) -> bool:
        """Whether `transport_among` would return for all ranks without waiting."""
        with self._lock:
            return len(self._records) == self._meeting.size

    def reason(self) -> str:
        """Returns why `transport_among` all ranks is what it is."""
        everybody = tuple(range(self._meeting.size))
        hosts = self._hosts(everybody)
        if len(hosts) == 1:
            if len(everybody) == 1:
                return "the only rank is on this host"
            return f"all {len(everybody)} ranks are on this host"
        obstacle = self.obstacle(hosts[0][0], hosts[1][0])
        if all(len(host) == 1 for host in hosts):
            return f"the portable transport (TCP), because {obstacle}"
        parts = " | ".join(", ".join(map(str, host)) for host in hosts)
        return f"shared memory among ranks {parts}, else TCP, because {obstacle}"

    @functools.cached_property
    def levels(self) -> Levels | None:
        """The levels of the ranks' hosts. Waits until all have published their records."""
        places = [self._record_of(rank) for rank in range(self._meeting.size)]
        return levels_among(self._meeting.rank, places)

    def num_cores(self) -> int | None:
        """The cores that the ranks may use together if all share memory, else None."""
        everybody = tuple(range(self._meeting.size))
        if self._meeting.size == 1 or self.transport_among(everybody) != "shm":
            return None
        cores = 0
        for rank in everybody:
            cores |= int(self._record_of(rank)["cores"], 16)
        return cores.bit_count()

    def _hosts(self, ranks: tuple[int, ...]) -> list[list[int]]:
        """Groups the ranks that share memory on a host; a rank that shares none is a group by itself."""
        if ranks in self._known_hosts:
            return self._known_hosts[ranks]
        hosts: list[list[int]] = []
        for rank in ranks:
            host = next((host for host in hosts if self.obstacle(host[0], rank) is None), None)
            if host is None:
                hosts.append([rank])
            else:
                host.append(rank)
        self._known_hosts[ranks] = hosts
        return hosts

    @staticmethod
    def _sharing(record: Mapping[str, Any]) -> dict[str, Any]:
        return {**record["shm"], "boot_id": record["boot_id"], "pid_namespace": record["pid_namespace"]}

    def _record_of(self, rank: int) -> dict[str, Any]:
        with self._lock:
            if rank in self._records:
                return self._records[rank]
        record = self._meeting.wait_for(rank)
        with self._lock:
            return self._records.setdefault(rank, record)

    # ---- called by the engine when it needs a peer

    def _look_up(self, peer: int) -> Introduction | None:
        record = self._meeting.look_up(peer)
        if record is None:
            return None
        if "error" in record:
            return Introduction(refusal=self._meeting.refusal_text({peer: record}))
        if "farewell" in record:
            return Introduction(farewell=bytes.fromhex(record["farewell"]))
        with self._lock:
            self._records.setdefault(peer, record)
        own = self.record
        is_here = own["boot_id"] is not None and own["boot_id"] == record["boot_id"]
        is_watchable = is_here and own["pid_namespace"] == record["pid_namespace"] is not None
        introduction: dict[str, Any] = {
            "cores": int(record["cores"], 16) if is_here else 0,
            "pid": record["pid"] if is_watchable and record["pid"] != os.getpid() else 0,
        }
        if self._uses_tcp:
            introduction |= {"hosts": tcp.hosts_of(record, own), "port": record["port"]}
        if self._uses_memory:
            reason = self.obstacle(self._meeting.rank, peer) or self._shortage(record)
            if reason is None:
                memory = record["shm"]
                introduction |= {
                    "pid": record["pid"],
                    "memory_fd": memory["fd"],
                    "memory_inode": memory["inode"],
                    "window_bytes": memory["window_bytes"],
                }
            else:
                introduction["reason"] = reason
                if is_here and self._uses_tcp:
                    self._warn(reason)
        return Introduction(**introduction)

    def _shortage(self, record: Mapping[str, Any]) -> str | None:
        """Returns why memory does not suffice for one more peer that shares it, or None."""
        available_bytes = min(facts["shm"]["available_bytes"] for facts in (self.record, record))
        text = shm.shortage(self._num_sharing + 1, self._channels, self._settings, available_bytes)
        self._num_sharing += text is None
        return text

    def _warn(self, reason: str) -> None:
        """Warns once: users may not expect ranks on one host to use sockets."""
        if self._has_warned:
            return
        self._has_warned = True
        warnings.warn(
            f"pipecomm_ext moves CPU tensors over sockets (tcp), not through shared memory: {reason}",
            RuntimeWarning,
            stacklevel=2,
        )
