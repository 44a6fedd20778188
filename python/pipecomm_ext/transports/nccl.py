"""NCCL between GPUs: whether these ranks can use it, its options, and the memory it takes."""

from __future__ import annotations

import math
import os
import platform
import warnings
from collections.abc import Mapping
from typing import Any

import torch

from ..core.accelerators import cuda_facts, nccl_facts
from ..core.environment import Number, Variable
from ..core.extension import _C, build_info
from ..core.rendezvous import Rendezvous
from .transport import Costs, Transport

engine_problem = _C.nccl_problem
kernel_problem = _C.cuda_kernel_problem
_CHOICE = "; else NCCL's choice"
_CTAS = Number(1, 64)
_NUM_QUEUES = 8  # CUDA's own choice
# Argument of _C.Communicator over NCCL -> the variable that sets it; an argument that is not set is left out.
_OPTIONS = {
    "min_ctas": Variable(
        "PIPECOMM_NCCL_MIN_CTAS", _CTAS, f"minimum number of CTAs of one NCCL operation{_CHOICE}"
    ),
    "max_ctas": Variable(
        "PIPECOMM_NCCL_MAX_CTAS",
        _CTAS,
        "maximum number of CTAs of one NCCL operation; else 4, within a host 16, and NCCL's choice for "
        "collectives of all ranks",
    ),
    "channels_per_net_peer": Variable(
        "PIPECOMM_NCCL_CHANNELS_PER_NET_PEER",
        Number(1, 64),
        f"NCCL channels to a rank of another host{_CHOICE}",
    ),
    "traffic_class": Variable(
        "PIPECOMM_NCCL_TRAFFIC_CLASS", Number(0, 255), f"network traffic class{_CHOICE}"
    ),
    "max_ops_per_group": Variable(
        "PIPECOMM_NCCL_MAX_OPS_PER_GROUP", Number(2, 1024), "sends and receives in one NCCL group", 64
    ),
    "num_sms": Variable(
        "PIPECOMM_PACK_SMS",
        Number(1, 1024),
        "multiprocessors that pack and unpack kernels may occupy; else all",
        on_wire=False,
    ),
}


def options(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of _C.Communicator over NCCL that follow from `environment.read()`."""
    least, most = settings["PIPECOMM_NCCL_MIN_CTAS"], settings["PIPECOMM_NCCL_MAX_CTAS"]
    if least is not None and most is not None and least > most:
        raise ValueError(
            f"PIPECOMM_NCCL_MIN_CTAS ({least}) must not be more than PIPECOMM_NCCL_MAX_CTAS ({most})"
        )
    chosen = {argument: settings[variable.name] for argument, variable in _OPTIONS.items()}
    return {argument: value for argument, value in chosen.items() if value is not None}


def capture_problem(environ: Mapping[str, str]) -> str:
    """Returns why these variables rule out CUDA graphs, or ""."""
    settings = environ.get("PYTORCH_ALLOC_CONF") or environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    has_segments = "expandable_segments:true" in settings.lower().replace(" ", "")
    if not has_segments or environ.get("NCCL_GRAPH_REGISTER") == "0":
        return ""
    return (
        "NCCL registers the memory of messages in a graph, and of torch's expandable segments only parts, "
        "not the same ones on both ends; set NCCL_GRAPH_REGISTER=0 on all ranks, or do without "
        "expandable_segments"
    )


def environment_warnings(environ: Mapping[str, str]) -> list[str]:
    """Warnings of variables that make NCCL, or the streams of its communicators, behave unexpectedly."""
    found = []
    connections = environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "")
    if connections.isdigit() and int(connections) < _NUM_QUEUES:
        found.append(
            f"CUDA_DEVICE_MAX_CONNECTIONS={connections}: streams share {connections} hardware queues, so "
            "messages of separate calls can wait for each other; put messages that depend on each other in "
            "one batch"
        )
    if environ.get("NCCL_LAUNCH_ORDER_IMPLICIT") == "1":
        found.append(
            "NCCL_LAUNCH_ORDER_IMPLICIT=1: NCCL takes threads that launch at the same time, as those that "
            "connect ranks, for an error; unset it"
        )
    return found


def problem_here(cuda: Mapping[str, Any], nccl: Mapping[str, Any]) -> str:
    """Why a process with these facts (see core.accelerators) cannot use NCCL, or ""."""
    if not cuda["built"]:
        return cuda["reason"]
    if nccl["loaded_version"] is None:
        return "this torch has loaded no libnccl.so.2 (a torch that NCCL is linked into does not do)"
    return "" if cuda["devices"] else "this process sees no CUDA device"


def problem_among(meeting: Rendezvous, facts: Mapping[str, str]) -> str:
    """Why a rank with these `Nccl.local_facts` cannot use NCCL with the ranks that came before, or ""."""
    if facts["problem"]:
        return f"rank {meeting.rank}: {facts['problem']}"
    first = meeting.taken_by(facts["gpu"])
    if first == meeting.rank:
        return ""
    ranks = " and ".join(map(str, sorted((first, meeting.rank))))
    return (
        f"ranks {ranks} have the same GPU (call torch.cuda.set_device() on each rank with a device of its "
        "own, before the communicator is made)"
    )


class Nccl(Transport):
    name = "nccl"
    devices = ("cuda",)
    costs = Costs(20e-6, 48e9, 370e9)  # a guess: a NIC for each GPU between stages, NVLink within
    waits_on_device = True
    variables = tuple(_OPTIONS.values())

    def status(self) -> tuple[bool, str]:
        nccl = nccl_facts()
        problem = problem_here(cuda_facts(), nccl) or engine_problem()
        return not problem, problem or f"NCCL {nccl['loaded_version']} and a CUDA device"

    def local_facts(self, device: torch.device) -> dict[str, str]:
        """Why this rank cannot use NCCL ("" if it can), and which GPU it has."""
        is_usable, reason = self.status()
        problem = "" if is_usable else reason
        if is_usable and (cause := kernel_problem(device.index)):
            problem = (
                f"{device} cannot run the kernels of this build, which are for {build_info.cuda_archs}: "
                f"{cause} (install pipecomm_ext again with TORCH_CUDA_ARCH_LIST naming that GPU)"
            )
        if problem:
            return {"problem": problem, "gpu": ""}
        host = host_name()
        # From 2.30 on, NCCL lets ranks share a GPU if this variable is set.
        if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1":
            host += f"/{os.getpid()}"
        return {"problem": "", "gpu": f"{host}/{torch.cuda.get_device_properties(device).uuid}"}


def host_name() -> str:
    """Returns the host as NCCL sees it: ranks with different NCCL_HOSTID count as on different hosts."""
    return os.environ.get("NCCL_HOSTID", platform.node())


def engine(
    meeting: Rendezvous,
    connections: _C.Connections,
    device: torch.device,
    arguments: Mapping[str, Any],
    settings: Mapping[str, Any],
) -> _C.Communicator:
    """Makes the communicator over NCCL, with its control plane over `connections`. Waits for no other rank:
    NCCL connects ranks when they first need each other.
    """
    for text in environment_warnings(os.environ):
        warnings.warn(text, RuntimeWarning, stacklevel=4)
    return _C.Communicator(
        connections,
        rank=meeting.rank,
        size=meeting.size,
        channels=arguments["channels"],
        timeout=math.inf if arguments["timeout"] is None else arguments["timeout"],
        check=arguments["check"],
        device_idx=device.index,
        host=host_name(),
        capture_problem=capture_problem(os.environ),
        **options(settings),
    )


def usage_text(num_comms: int, num_bytes: int, device: torch.device) -> str:
    """States how much device memory NCCL has taken for a communicator so far. That includes what other
    processes took while it was connecting.
    """
    if num_comms == 0:
        return "nothing is connected yet"
    return f"connecting took {num_bytes >> 20} MiB of {device} for {num_comms} NCCL communicators"
