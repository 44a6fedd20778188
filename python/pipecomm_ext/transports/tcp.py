"""The portable transport: TCP between any hosts, for tensors of any device. It connects ranks on first use,
and is also the control plane of `nccl`.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from ..core import environment
from ..core.environment import Number, Secret, Variable
from ..core.extension import _C
from ..core.host import network_namespace
from .transport import Costs, Transport

_HEARTBEAT = Variable(
    "PIPECOMM_HEARTBEAT_S",
    Number(1, 3600, "seconds"),
    "idle time before a keep-alive probe is sent to a rank of another host",
    10,
    on_wire=False,
)
_HEARTBEAT_LIMIT = Variable(
    "PIPECOMM_HEARTBEAT_LIMIT_S",
    Number(2, 86400, "seconds"),
    "time without an answer to keep-alive probes after which a rank of another host is lost",
    60,
    on_wire=False,
)
_SECRET = Variable(
    "PIPECOMM_SECRET",
    Secret(),
    "shared by the ranks alone: without it no program passes for a rank, even if it reads the store",
    on_wire=False,
)
_LOOPBACK = "127.0.0.1"


class Tcp(Transport):
    name = "tcp"
    devices = ("cpu", "cuda")
    variables = (_HEARTBEAT, _HEARTBEAT_LIMIT, _SECRET)
    costs = Costs(300e-6, 1.2e9, 1.2e9)  # measured over loopback, where every message costs both ends

    def status(self) -> tuple[bool, str]:
        return True, "any torch.distributed group"


def key_of(token: str) -> bytes:
    """Returns the key by which ranks prove that they belong to a communicator; `token` is in the store."""
    return hmac.digest(environment.secret(_SECRET), bytes.fromhex(token), "sha256")


def listen(connections: _C.Connections, settings: Mapping[str, Any], store: dist.Store) -> dict[str, Any]:
    """Starts listening for other ranks, and returns this rank's addresses as its facts."""
    connections.listen(
        os.environ.get("GLOO_SOCKET_IFNAME", ""),
        heartbeat_s=settings[_HEARTBEAT.name],
        heartbeat_limit_s=settings[_HEARTBEAT_LIMIT.name],
    )
    return {
        "network": network_namespace(),
        "hosts": _by_promise(connections.hosts, store),
        "port": connections.port,
    }


def hosts_of(other: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    """Returns the addresses of a rank. Within one network namespace, the loopback always works."""
    if all(own[key] is not None and own[key] == other[key] for key in ("boot_id", "network")):
        return [_LOOPBACK, *other["hosts"]]
    return other["hosts"] or [_LOOPBACK]


def _by_promise(hosts: Sequence[str], store: dist.Store) -> list[str]:
    """Sorts `hosts`, first the one from which this process reaches the store, which all ranks reach."""
    first, base = None, store
    while isinstance(base, dist.PrefixStore):
        base = base.underlying_store
    if name := getattr(base, "host", None):
        with contextlib.suppress(OSError):
            family = socket.getaddrinfo(name, None, type=socket.SOCK_DGRAM)[0][0]
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((name, 9))  # sends nothing
                first = probe.getsockname()[0]
    return sorted(hosts, key=lambda host: host != first)
