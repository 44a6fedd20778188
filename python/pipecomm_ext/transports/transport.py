"""The interface of a transport, of which `transports.TRANSPORTS` lists one instance for each."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..core.environment import Variable
from ..core.extension import _C
from ..core.rendezvous import Rendezvous


@dataclass(frozen=True)
class Costs:
    """A relay chooses its route by these: the time of one hop, and the bytes per second that one rank sends
    or receives, between the stages of a pipeline and within one.
    """

    hop_s: float
    link_bytes_per_s: float
    stage_bytes_per_s: float
    core_bytes_per_s: float = math.inf  # copied by one core of the host, where cores move the bytes


@dataclass(frozen=True)
class Construction:
    """A communicator in the making, as one rank sees it; equal on all but for `meeting`, `settings` and the
    index of `device`.
    """

    meeting: Rendezvous
    epoch: int
    device: torch.device
    channels: int
    timeout_s: float
    check: str  # "auto", "full" or "off"
    settings: Mapping[str, Any]  # of environment.read()
    requested: str  # the name of a transport, or "auto"


@dataclass(frozen=True)
class Made:
    """The communicator of the extension, or None if these ranks cannot use the transport; and why."""

    engine: Any
    reason: str
    num_cores: int | None = None  # that the ranks may use together, if cores of one host move the bytes
    warning: str | None = None  # for users who get another transport than they would expect
    memory: str | None = None  # what the connections took of a device


class Transport(ABC):
    """One way to move bytes between ranks."""

    name: str
    devices: tuple[str, ...]  # kinds of tensors that it moves
    costs: Costs
    is_one_stream = False  # all messages of a channel are one order; else those of each pair and direction
    variables: tuple[Variable, ...] = ()  # environment variables that concern it alone

    @abstractmethod
    def status(self) -> tuple[bool, str]:
        """Whether this process can use it, and why (not)."""

    def local_facts(self, device: torch.device) -> dict[str, Any]:
        """What this rank contributes to the choice of a transport for tensors on `device`; goes to the other
        ranks as JSON.

        With a "problem" that is not empty, this rank refuses a user who asks for this transport.
        """
        return {}

    @abstractmethod
    def make(self, construction: Construction, facts: Sequence[Mapping[str, Any]]) -> Made:
        """Connects the ranks, whose `local_facts` these are. Collective, with the same outcome on all."""


def host_engine(construction: Construction, connections: _C.Connections) -> _C.Communicator:
    """The communicator that moves bytes by threads of the host. Collective: all ranks get theirs, or none."""
    meeting = construction.meeting
    return meeting.make(
        "engine",
        lambda: _C.Communicator(
            connections,
            rank=meeting.rank,
            size=meeting.size,
            channels=construction.channels,
            timeout=construction.timeout_s,
            num_threads=torch.get_num_threads(),
            checks=construction.check != "off",
            device=str(construction.device),
            num_sms=construction.settings.get("PIPECOMM_PACK_SMS") or 0,
        ),
    )
