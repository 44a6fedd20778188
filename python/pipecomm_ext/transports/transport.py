"""The interface of a transport, of which `transports.TRANSPORTS` lists one instance for each."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch

from ..core.environment import Variable


@dataclass(frozen=True)
class Costs:
    """The basis on which a relay chooses its route: the time of one hop, and the bytes per second that one
    rank sends or receives, between the stages of a pipeline and within one.
    """

    hop_s: float
    link_bytes_per_s: float
    stage_bytes_per_s: float
    core_bytes_per_s: float = math.inf  # copied by one core of the host, where cores move the bytes


class Transport(ABC):
    """One way to move bytes between ranks."""

    name: str
    devices: tuple[str, ...]  # kinds of tensors that it moves
    costs: Costs
    waits_on_device = False  # a message occupies the device from its post until the other end joins
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
