"""Makes a communicator: checks the arguments, compares them with those of the rank that came first, publishes
the record of this rank, chooses the transport.
"""

from __future__ import annotations

import datetime
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ..core import environment, flight
from ..core.checked import whole_number
from ..core.extension import _C
from ..core.process_groups import StoreGroup, device_of
from ..core.rendezvous import Rendezvous
from ..errors import PipeCommMismatch, PipeCommTimeout, summary_of
from ..transports import FORMER_NAMES, TRANSPORTS, Routes, draw, nccl

DEFAULT_TIMEOUT_S = 600.0
MAX_CHANNELS = 15


@dataclass(frozen=True)
class Made:
    """The parts of a communicator."""

    engine: _C.Communicator
    meeting: Rendezvous
    routes: Routes
    device: torch.device
    channels: int
    timeout_s: float
    id: str
    requested: str
    transport: str | None  # of all pairs; None: each has its own
    reason: str


def make(
    group: dist.ProcessGroup | StoreGroup,
    device: str | torch.device | None,
    transport: str,
    channels: int,
    timeout: float | datetime.timedelta | None,
    check: str,
    purpose: str,
) -> Made:
    """Makes this rank's part of a communicator. Waits for other ranks only where `auto` has to find out
    whether all of them can use NCCL.

    Communicators of one `purpose` meet in the order in which each rank makes them.
    """
    limit: float | None = DEFAULT_TIMEOUT_S
    error: Exception | None = None
    arguments: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    local: dict[str, str] = {}
    own_device = torch.device("cpu")
    try:
        limit = limit if timeout is None else _C.timeout_seconds(timeout)
        settings = environment.read()
        own_device = device_of(group, device)
        arguments, local = _arguments(own_device, transport, channels, limit, check, settings)
        flight.start(settings["PIPECOMM_FLIGHT_DIR"])
    except Exception as wrong:
        error = wrong
    meeting = Rendezvous(group, limit, purpose=purpose)
    try:
        if error is not None:
            raise error
        requested = arguments["transport"]
        shared = meeting.propose(arguments, draw())
        routes = Routes(
            meeting,
            arguments["channels"],
            settings,
            shared,
            uses_memory=own_device.type == "cpu" and requested in ("auto", "shm"),
            uses_tcp=requested in ("auto", "nccl", "tcp"),
        )
        record = {**routes.record, "nccl": local}
        engine, name, reason = _engine(meeting, routes, record, own_device, arguments, settings)
    except (PipeCommMismatch, PipeCommTimeout):
        raise  # the others know of it, have reported it, or may be in time for the next attempt
    except Exception as failed:
        meeting.refuse(summary_of(failed))
        raise
    return Made(
        engine=engine,
        meeting=meeting,
        routes=routes,
        device=own_device,
        channels=arguments["channels"],
        timeout_s=math.inf if limit is None else limit,
        id=f"{shared['epoch']:08x}",
        requested=requested,
        transport=name,
        reason=reason,
    )


def _engine(
    meeting: Rendezvous,
    routes: Routes,
    record: Mapping[str, Any],
    device: torch.device,
    arguments: Mapping[str, Any],
    settings: Mapping[str, Any],
) -> tuple[_C.Communicator, str | None, str]:
    """Returns the extension's communicator, the name of its transport if all pairs have the same, and why.

    Publishes the `record` of this rank once nothing can fail any more, or earlier where the ranks have to
    choose together.
    """
    requested = arguments["transport"]
    if device.type == "cuda" and requested == "nccl":
        # For ranks that ask for NCCL, NCCL itself reports whether it accepts a shared GPU.
        engine = nccl.engine(meeting, routes.connections, device, arguments, settings)
        meeting.publish(record)
        return engine, "nccl", "asked for"
    if device.type == "cuda" and requested == "auto":
        meeting.publish(record)
        problem = meeting.first_problem(nccl.problem_among(meeting, record["nccl"]))
        if not problem:
            engine = nccl.engine(meeting, routes.connections, device, arguments, settings)
            return engine, "nccl", "CUDA tensors, and every rank has NCCL and a GPU of its own"
        warnings.warn(
            "pipecomm_ext stages CUDA tensors through host memory (tcp), which is many times slower "
            f'than NCCL: {problem}; transport="tcp" asks for it and is silent',
            RuntimeWarning,
            stacklevel=4,  # of Communicator()
        )
        reason = f"staged through host memory over TCP, because NCCL cannot be used: {problem}"
    else:
        reason = "asked for"
    engine = _C.Communicator(
        routes.connections,
        rank=meeting.rank,
        size=meeting.size,
        channels=arguments["channels"],
        timeout=math.inf if arguments["timeout"] is None else arguments["timeout"],
        num_threads=torch.get_num_threads(),
        checks=arguments["check"] != "off",
        device=str(device),
        num_sms=settings.get("PIPECOMM_PACK_SMS") or 0,
    )
    meeting.publish(record)
    if device.type == "cuda":
        return engine, "tcp", reason
    return (engine, None, "") if requested == "auto" else (engine, requested, reason)


def _arguments(
    device: torch.device,
    transport: str,
    channels: int,
    limit: float | None,
    check: str,
    settings: Mapping[str, Any],
) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns the arguments, which must be equal on all ranks, and this rank's facts for NCCL."""
    names = ("auto", *sorted(TRANSPORTS))
    if isinstance(transport, str):
        transport = FORMER_NAMES.get(transport, transport)
    if transport not in names:
        raise ValueError(f"transport must be one of {', '.join(names)}, not {transport!r}")
    if check not in environment.CHECKS:
        raise ValueError(f"check must be one of {', '.join(environment.CHECKS)}, not {check!r}")
    channels = whole_number(channels, "channels")
    if not 1 <= channels <= MAX_CHANNELS:
        raise ValueError(f"channels must be 1 to {MAX_CHANNELS}, not {channels}")
    requested = settings["PIPECOMM_TRANSPORT"] if transport == "auto" else transport
    kind = device.type
    if requested != "auto":
        row = TRANSPORTS[requested]
        if kind not in row.devices:
            raise ValueError(f'transport="{requested}" is not supported for {kind} tensors; use "tcp"')
        is_usable, problem = row.status()
        if not is_usable:
            raise ValueError(f'transport="{requested}" cannot be used: {problem}; use "tcp"')
    local = TRANSPORTS["nccl"].local_facts(device) if kind == "cuda" and requested != "tcp" else {}
    if requested == "nccl" and local["problem"]:
        raise ValueError(f'transport="nccl" cannot be used: {local["problem"]}; use "tcp"')
    arguments = {
        "device": kind,
        "transport": requested,
        "channels": channels,
        "timeout": limit,
        "check": settings["PIPECOMM_CHECK"] if check == "auto" else check,
        **environment.on_wire(settings),
    }
    return arguments, local
