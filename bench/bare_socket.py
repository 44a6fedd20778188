"""Two TCP sockets and nothing else: the minimum time of a message over TCP (`%bound` of tcp)."""

from __future__ import annotations

import os
import select
import socket

import torch
import torch.distributed as dist

NAME = "socket"


def is_possible() -> bool:
    """Collective: whether all ranks are on one host, whose loopback they then use."""
    hosts: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    return len(set(hosts)) == 1


class BareSockets:
    """Moves the bytes of a tensor to one rank and from another, without headers, order or deadlines.

    Collective. Ranks without peers (None) only take part in the exchange of ports.
    """

    def __init__(self, destination: int | None, source: int | None):
        rank = dist.get_rank()
        with socket.create_server(("127.0.0.1", 0)) as server:
            ports: list[int] = [0] * dist.get_world_size()
            dist.all_gather_object(ports, server.getsockname()[1])
            if destination is not None:
                self._out = _tuned(socket.create_connection(("127.0.0.1", ports[destination])))
                self._out.send(rank.to_bytes(4, "little"))
            if source is not None:
                self._in = _tuned(server.accept()[0])
                sender = int.from_bytes(self._in.recv(4, socket.MSG_WAITALL), "little")
                if sender != source:
                    raise RuntimeError(f"rank {sender} has connected, not rank {source}")
        self._spins = dist.get_world_size() <= len(os.sched_getaffinity(0))

    def exchange(self, sent: torch.Tensor | None, received: torch.Tensor | None) -> None:
        """Returns once the kernel has taken all sent bytes, and all others have come. Both are contiguous."""
        outgoing, incoming = _bytes_of(sent), _bytes_of(received)
        while outgoing or incoming:
            if not self._spins:
                select.select([self._in] if incoming else [], [self._out] if outgoing else [], [])
            try:
                if outgoing:
                    outgoing = outgoing[self._out.send(outgoing, socket.MSG_DONTWAIT) :]
            except BlockingIOError:
                pass
            try:
                if incoming:
                    incoming = incoming[self._in.recv_into(incoming, 0, socket.MSG_DONTWAIT) :]
            except BlockingIOError:
                pass


def _tuned(connection: socket.socket) -> socket.socket:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _bytes_of(tensor: torch.Tensor | None) -> memoryview:
    return memoryview(b"") if tensor is None else memoryview(tensor.view(-1).view(torch.uint8).numpy())
