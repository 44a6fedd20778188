"""How a communicator over NCCL is made: whether it can be, its options, and the ids that its ranks share."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from typing import Any

import torch

from . import _C
from .rendezvous import Rendezvous

# Argument of _C.DeviceCommunicator -> environment variable. What is not set is NCCL's choice.
_OPTIONS = {
    "max_ops_per_group": "PIPECOMM_NCCL_MAX_OPS_PER_GROUP",
    "min_ctas": "PIPECOMM_NCCL_MIN_CTAS",
    "max_ctas": "PIPECOMM_NCCL_MAX_CTAS",
    "channels_per_net_peer": "PIPECOMM_NCCL_CHANNELS_PER_NET_PEER",
    "traffic_class": "PIPECOMM_NCCL_TRAFFIC_CLASS",
    "num_sms": "PIPECOMM_PACK_SMS",
}


def options(settings: Mapping[str, Any]) -> dict[str, int]:
    """The arguments of _C.DeviceCommunicator that follow from `environment.read()`."""
    chosen = {argument: settings[variable] for argument, variable in _OPTIONS.items()}
    return {argument: value for argument, value in chosen.items() if value is not None}


def local_facts() -> dict[str, str]:
    """What this rank adds to the choice: why it cannot use NCCL ("" if it can), and which GPU it has."""
    problem = _C.nccl_problem()
    if problem or not torch.cuda.is_available():
        return {"problem": problem or "this process sees no CUDA device", "gpu": ""}
    # NCCL takes ranks that have different NCCL_HOSTID for ranks of different hosts, and from 2.30 on lets
    # ranks share a GPU if it is told to.
    host = os.environ.get("NCCL_HOSTID", platform.node())
    if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1":
        host += f"/{os.getpid()}"
    return {"problem": "", "gpu": f"{host}/{torch.cuda.get_device_properties().uuid}"}


def problem_of(everybody: list[dict[str, str]]) -> str:
    """Why the ranks with these `local_facts` cannot use NCCL together, or ""."""
    seen: dict[str, int] = {}
    for rank, facts in enumerate(everybody):
        if facts["problem"]:
            return f"rank {rank}: {facts['problem']}"
        first = seen.setdefault(facts["gpu"], rank)
        if first != rank:
            return f"ranks {first} and {rank} have the same GPU"
    return ""


def make(
    meeting: Rendezvous,
    backend: Any,
    *,
    epoch: int,
    channels: int,
    timeout: float,
    check: str,
    options: dict[str, int],
) -> _C.DeviceCommunicator:
    """Collective. `backend` is the c10d backend of the control plane, None for a single rank."""
    record: dict[str, Any] = {"ids": []}
    error: Exception | None = None
    if meeting.rank == 0 and meeting.size > 1:
        try:
            record = {"ids": [id.hex() for id in _C.nccl_unique_ids(_C.nccl_num_ids(channels))]}
        except RuntimeError as failed:
            error, record = failed, {"error": str(failed)}
    everybody = meeting.gather("nccl_ids", record)
    if error is not None:
        raise error
    return _C.DeviceCommunicator(
        backend=backend,
        rank=meeting.rank,
        size=meeting.size,
        epoch=epoch,
        channels=channels,
        timeout=timeout,
        check=check,
        device_idx=torch.cuda.current_device(),
        nccl_ids=[bytes.fromhex(id) for id in everybody[0]["ids"]],
        **options,
    )
