"""How a communicator is made: the arguments checked and compared between the ranks, the transport chosen."""

from __future__ import annotations

import datetime
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..core import environment, flight
from ..core.checked import whole_number
from ..core.extension import _C
from ..core.process_groups import device_of
from ..core.rendezvous import Rendezvous
from ..transports import TRANSPORTS, Construction, Made

DEFAULT_TIMEOUT_S = 600.0
MAX_CHANNELS = 15


def agree(
    group: dist.ProcessGroup,
    device: str | torch.device | None,
    transport: str,
    channels: int,
    timeout: float | datetime.timedelta | None,
    check: str,
) -> tuple[Construction, dict[str, list[dict[str, Any]]]]:
    """Checks the arguments of Communicator() and compares them between the ranks. Collective.

    Returns what the ranks have agreed on, and the transports to try, in order, with the `local_facts` of each
    rank.
    """
    limit: float | None = DEFAULT_TIMEOUT_S
    error: Exception | None = None
    facts: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    own_device = torch.device("cpu")
    try:
        limit = limit if timeout is None else _C.timeout_seconds(timeout)
        settings = environment.read()
        own_device = device_of(group, device)
        facts = _facts(own_device, transport, channels, limit, check, settings)
        flight.start(settings["PIPECOMM_FLIGHT_DIR"])
    except Exception as wrong:
        error = wrong
    meeting = Rendezvous(group, limit)
    everybody = meeting.agree("facts", facts, error, private=("local",))
    construction = Construction(
        meeting=meeting,
        epoch=meeting.shared_random(),
        device=own_device,
        channels=facts["channels"],
        timeout_s=math.inf if limit is None else limit,
        check=facts["check"],
        settings=settings,
        requested=facts["transport"],
    )
    return construction, {name: [record["local"][name] for record in everybody] for name in facts["local"]}


def choose(
    construction: Construction, candidates: Mapping[str, Sequence[Mapping[str, Any]]]
) -> tuple[str, Made, str]:
    """The first candidate (see `agree`) that connects the ranks: its name, what it made, why it was chosen.

    Collective, with the same choice on all ranks.
    """
    is_asked_for = construction.requested != "auto"
    obstacles: list[str] = []
    for name, facts in candidates.items():
        made = TRANSPORTS[name].make(construction, facts)
        if made.engine is not None:
            reason = "asked for" if is_asked_for else ", because ".join([made.reason, *obstacles])
            return name, made, f"{reason}; {made.memory}" if made.memory else reason
        obstacles.append(made.reason)
        if made.warning and not is_asked_for:
            warnings.warn(made.warning, RuntimeWarning, stacklevel=3)  # of Communicator()
    raise ValueError(
        f'transport="{construction.requested}" is not possible: {"; ".join(obstacles)}; use "auto" or "c10d"'
    )


def _facts(
    device: torch.device,
    transport: str,
    channels: int,
    limit: float | None,
    check: str,
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    """The facts that must be equal on all ranks, and under "local" this rank's for each transport to try."""
    names = ("auto", *sorted(TRANSPORTS))
    if transport not in names:
        raise ValueError(f"transport must be one of {', '.join(names)}, not {transport!r}")
    if check not in environment.CHECKS:
        raise ValueError(f"check must be one of {', '.join(environment.CHECKS)}, not {check!r}")
    channels = whole_number(channels, "channels")
    if not 1 <= channels <= MAX_CHANNELS:
        raise ValueError(f"channels must be 1 to {MAX_CHANNELS}, not {channels}")
    requested = settings["PIPECOMM_TRANSPORT"] if transport == "auto" else transport
    kind = device.type
    candidates = [
        row for row in TRANSPORTS.values() if kind in row.devices and requested in ("auto", row.name)
    ]
    if not candidates:
        raise ValueError(f'transport="{requested}" is not supported for {kind} tensors; use "c10d"')
    local = {row.name: row.local_facts(device) for row in candidates}
    if requested != "auto" and (problem := local[requested].get("problem")):
        raise ValueError(f'transport="{requested}" cannot be used: {problem}; use "c10d"')
    return {
        "local": local,
        "device": kind,
        "transport": requested,
        "channels": channels,
        "timeout": limit,
        "check": settings["PIPECOMM_CHECK"] if check == "auto" else check,
        **environment.on_wire(settings),
    }
