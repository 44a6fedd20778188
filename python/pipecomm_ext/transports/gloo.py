"""Connections between all ranks over gloo: all of the transport `c10d`, and the control plane of `nccl`."""

from __future__ import annotations

import os
import stat

import torch.distributed as dist

from ..core.extension import _C
from ..core.host import place
from ..core.rendezvous import FOREVER, Rendezvous
from ..errors import PipeCommError


def connect(meeting: Rendezvous, epoch: int) -> _C.C10dConnections:
    """Connections by a gloo backend of our own, whatever the backend of the user's group. Collective.

    The extension becomes the backend's only owner, so that closing a communicator closes the connections.
    """
    if meeting.size == 1:
        return _C.C10dConnections(None, 0, 1, epoch)
    store = dist.PrefixStore(f"gloo/{epoch}", meeting.store)

    def joined() -> dist.ProcessGroupGloo:
        return dist.ProcessGroupGloo(store, meeting.rank, meeting.size, meeting.remaining())

    problem, backend = None, None
    record = {"pid": os.getpid(), **place()}
    try:
        others_sockets = _inherited_sockets()
        backend = meeting.unless_refused("connected", joined)
        if backend is not None:
            # Deadlines are ours: an expired wait of gloo would close every connection.
            backend._set_default_timeout(FOREVER)
        for descriptor in _inherited_sockets() - others_sockets:
            os.set_inheritable(descriptor, False)  # a program that outlives this rank must not hold them
    except Exception as error:
        problem = f"could not connect: {error}"
        record = {"error": problem}
    try:
        everybody = meeting.gather("connected", record)
    finally:
        if problem is not None:  # this rank's own error, whatever the others say of it
            raise PipeCommError(f"rank {meeting.rank}: {problem}", op="Communicator", rank=meeting.rank)
    own_place = place()
    pids = {
        peer: other["pid"]
        for peer, other in enumerate(everybody)
        if None not in own_place.values()
        and other["pid"] != os.getpid()
        and all(other[key] == value for key, value in own_place.items())
    }
    return _C.C10dConnections(backend, meeting.rank, meeting.size, epoch, pids)


def _inherited_sockets() -> set[int]:
    """The sockets that a program started by this process would get. gloo makes its own so."""
    sockets = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.get_inheritable(int(name)) and stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                sockets.add(int(name))
        except OSError:  # closed meanwhile
            continue
    return sockets
