"""The portable transport: TCP between any hosts, for tensors of any device."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from ..core.extension import _C
from . import sockets
from .transport import Construction, Costs, Made, Transport, host_engine


class C10d(Transport):
    name = "c10d"
    devices = ("cpu", "cuda")
    variables = (sockets.HEARTBEAT, sockets.HEARTBEAT_LIMIT)
    costs = Costs(300e-6, 1.2e9, 1.2e9)  # measured over loopback, where every message costs both ends

    def status(self) -> tuple[bool, str]:
        if dist.is_available():
            return True, "any torch.distributed group"
        return False, "torch was built without torch.distributed"

    def make(self, construction: Construction, facts: Any) -> Made:
        way = {"cpu": "the portable transport (TCP)", "cuda": "staged through host memory over TCP"}
        return Made(connect(construction), way[construction.device.type])


def connect(construction: Construction) -> _C.Communicator:
    """The communicator over TCP. Collective."""
    meeting, settings = construction.meeting, construction.settings
    return host_engine(construction, sockets.connect(meeting, construction.epoch, settings))
