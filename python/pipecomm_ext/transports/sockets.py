"""TCP connections between the ranks, made when they are used: all of the transport `c10d`, and the control
plane of `nccl`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from ..core.environment import Number, Variable
from ..core.extension import _C
from ..core.host import network_namespace, place
from ..core.rendezvous import Rendezvous
from ..errors import PipeCommError

HEARTBEAT = Variable(
    "PIPECOMM_HEARTBEAT_S",
    Number(1, 3600, "seconds"),
    "silence after which a rank of another host is asked whether it is there",
    10,
    on_wire=False,
)
HEARTBEAT_LIMIT = Variable(
    "PIPECOMM_HEARTBEAT_LIMIT_S",
    Number(2, 86400, "seconds"),
    "silence after which it is lost (a cut that no end of the connection reports)",
    60,
    on_wire=False,
)
_LOOPBACK = "127.0.0.1"


def connect(meeting: Rendezvous, epoch: int, settings: Mapping[str, Any]) -> _C.C10dConnections:
    """What this rank needs to meet any other one, which has learnt how to meet this one. Collective."""
    problem, connections = None, None
    record: dict[str, Any] = {}
    try:
        connections = _C.C10dConnections(
            meeting.rank, meeting.size, epoch, os.environ.get("GLOO_SOCKET_IFNAME", "")
        )
        record = {
            "pid": os.getpid(),
            "network": network_namespace(),
            "hosts": _by_promise(connections.hosts, meeting.store),
            "port": connections.port,
            "token": secrets.token_hex(16),
            **place(),
        }
    except Exception as error:
        problem = f"could not listen for the other ranks: {error}"
        record = {"error": problem}
    try:
        everybody = meeting.gather("connected", record)
    finally:
        if problem is not None:  # this rank's own error, whatever the others say of it
            raise PipeCommError(f"rank {meeting.rank}: {problem}", op="Communicator", rank=meeting.rank)
    assert connections is not None
    on_this_host = [_are_equal(record, other, ("boot_id", "pid_namespace")) for other in everybody]
    connections.connect(
        token=bytes.fromhex(everybody[0]["token"]),
        contacts=[(_hosts_of(other, record), other["port"]) for other in everybody],
        pids=[
            other["pid"] if is_here and other["pid"] != os.getpid() else 0
            for other, is_here in zip(everybody, on_this_host, strict=True)
        ],
        num_local_ranks=sum(record["boot_id"] == other["boot_id"] for other in everybody),
        heartbeat_s=settings[HEARTBEAT.name],
        heartbeat_limit_s=settings[HEARTBEAT_LIMIT.name],
    )
    return connections


def _are_equal(one: Mapping[str, Any], other: Mapping[str, Any], keys: Sequence[str]) -> bool:
    return all(one[key] is not None and one[key] == other[key] for key in keys)


def _hosts_of(other: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    """Where to look for a rank. Within one network, the loopback is there whatever interfaces there are."""
    if _are_equal(own, other, ("boot_id", "network")):
        return [_LOOPBACK, *other["hosts"]]
    return other["hosts"] or [_LOOPBACK]


def _by_promise(hosts: Sequence[str], store: dist.Store) -> list[str]:
    """`hosts`, those first by which this process reaches the store: the others have reached it, too."""
    first, base = None, store
    while isinstance(base, dist.PrefixStore):
        base = base.underlying_store
    if name := getattr(base, "host", None):
        with contextlib.suppress(OSError), socket.socket(_family_of(name), socket.SOCK_DGRAM) as probe:
            probe.connect((name, 9))  # sends nothing
            first = probe.getsockname()[0]
    return sorted(hosts, key=lambda host: host != first)


def _family_of(name: str) -> socket.AddressFamily:
    return socket.getaddrinfo(name, None, type=socket.SOCK_DGRAM)[0][0]
