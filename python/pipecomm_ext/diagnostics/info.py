"""Facts about the build and this machine, and which transports can therefore be used."""

from __future__ import annotations

import os
import platform
from typing import Any

import torch
import torch.distributed as dist

from ..communicator.communicator import Communicator, open_communicators
from ..core import environment
from ..core.accelerators import cuda_facts, nccl_facts
from ..core.build_check import NEWEST_TESTED_TORCH, OLDEST_TORCH, minor_version
from ..core.extension import build_info
from ..transports import TRANSPORTS
from ..transports.nccl import environment_warnings as nccl_warnings


def info() -> dict[str, Any]:
    """Build and run-time facts as plain data (`json.dumps` accepts it). The keys:

    * version, python, torch: versions, and the backends of torch.
    * build: git revision, compiler, fault hooks.
    * cuda: whether it was built and why (not), toolkit, archs, devices of this process.
    * nccl: version and path of the library that torch loaded.
    * transports: for each one `available` and `reason`.
    * choice: what `auto` takes for "cpu" and "cuda" tensors and why, as far as one process can know (`shm`
      also needs all ranks on one host).
    * environment: every PIPECOMM_* variable that is set, without the values of secrets and of unknown names.
    * settings: the value in effect of every known PIPECOMM_* variable; None: see its meaning.
    * communicators: for each one that is open here its rank, size, device and transport, the number of NCCL
      communicators that it has made (`nccl_communicators`), and the memory of the device that was taken
      meanwhile (`nccl_bytes`).
    * warnings: list of texts, empty if all is well.

    Starts no process group. Asking for CUDA devices does not create a CUDA context.

    Example:
        ```python
        facts = info()
        print(facts["choice"]["cpu"]["transport"], facts["choice"]["cpu"]["reason"])
        ```
    """
    nccl = nccl_facts()
    backends = [name for name in ("gloo", "nccl", "mpi", "ucc") if dist.is_backend_available(name)]
    settings, environment_warnings = _environment_facts()
    # An unknown name may be the misspelt name of a secret.
    hidden = {*environment.unknown(), *(key for key in settings if settings[key] == environment.HIDDEN)}
    transports = transport_status()
    return {
        "version": build_info.version,
        "build": {
            "git_revision": build_info.git_revision,
            "compiler": build_info.compiler,
            "type": build_info.build_type,
            "faults": build_info.with_faults,
        },
        "python": platform.python_version(),
        "torch": {
            "version": torch.__version__,
            "cuda": torch.version.cuda,
            "backends": backends,
            "tested": [OLDEST_TORCH, NEWEST_TESTED_TORCH],
        },
        "cuda": cuda_facts(),
        "nccl": nccl,
        "transports": transports,
        "choice": {device: choose_transport(device, transports) for device in ("cpu", "cuda")},
        "environment": {
            key: environment.HIDDEN if key in hidden else os.environ[key]
            for key in sorted(os.environ)
            if key.startswith("PIPECOMM_")
        },
        "settings": settings,
        "communicators": [_communicator_facts(each) for each in open_communicators if not each.closed],
        "warnings": [
            *warnings_of(nccl, torch.__version__),
            *(nccl_warnings(os.environ) if cuda_facts()["devices"] else ()),
            *environment_warnings,
        ],
    }


def _communicator_facts(communicator: Communicator) -> dict[str, Any]:
    num_comms, num_bytes = communicator.nccl_usage
    return {
        "rank": communicator.rank,
        "size": communicator.size,
        "device": str(communicator.device),
        "transport": communicator.known_transport,
        "nccl_communicators": num_comms,
        "nccl_bytes": num_bytes,
    }


def transport_status() -> dict[str, dict[str, Any]]:
    """For each transport whether this process can use it (`available`), and why (not) (`reason`)."""
    status = {name: TRANSPORTS[name].status() for name in sorted(TRANSPORTS)}
    return {name: {"available": is_usable, "reason": why} for name, (is_usable, why) in status.items()}


def choose_transport(device: str, transports: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What `transport="auto"` takes for tensors on `device` ("cpu" or "cuda"): the first transport of the
    table that serves this device and is available.
    """
    obstacles: list[str] = []
    for row in TRANSPORTS.values():
        if device not in row.devices:
            continue
        status = transports[row.name]
        if status["available"]:
            return {"transport": row.name, "reason": "; ".join(obstacles) or status["reason"]}
        obstacles.append(f"no {row.name}: {status['reason']}")
    return {"transport": None, "reason": "; ".join(obstacles)}


def format_info(facts: dict[str, Any], has_defaults: bool = True) -> str:
    """The text that `python -m pipecomm_ext info` prints. Variables that are not set are left out unless
    `has_defaults`.
    """
    build, cuda, nccl = facts["build"], facts["cuda"], facts["nccl"]
    devices = ", ".join(cuda["devices"]) or "none"
    lines = [
        f"pipecomm_ext {facts['version']} (git {build['git_revision'] or 'unknown'}, {build['type']}, "
        f"{build['compiler']}{', with fault hooks' if build['faults'] else ''})",
        f"  python      {facts['python']}",
        f"  torch       {facts['torch']['version']} (tested: {' to '.join(facts['torch']['tested'])}), "
        f"backends: {', '.join(facts['torch']['backends']) or 'none'}",
        f"  CUDA        {'built' if cuda['built'] else 'not built'} ({cuda['reason']})",
        f"  archs       {cuda['archs'] or '-'}",
        f"  devices     {devices}",
        f"  NCCL        {nccl['loaded_version'] or 'not loaded'}",
    ]
    lines += [f"              {path}" for path in nccl["libraries"]]
    for name, status in facts["transports"].items():
        lines.append(f"  {name:<11} {'usable' if status['available'] else 'not usable'} ({status['reason']})")
    for device, choice in facts["choice"].items():
        lines.append(f"  auto        {device} tensors: {choice['transport']} ({choice['reason']})")
    lines += [f"  set         {key}={value}" for key, value in facts["environment"].items()]
    if has_defaults:
        unset = {key: value for key, value in facts["settings"].items() if key not in facts["environment"]}
        lines += [f"  default     {key}={'' if value is None else value}" for key, value in unset.items()]
    lines += [f"warning: {text}" for text in facts["warnings"]]
    return "\n".join(lines)


def _environment_facts() -> tuple[dict[str, Any], list[str]]:
    """The value of each variable by `environment.read`, and what is wrong with those that are set."""
    settings, problems = {}, []
    for variable in environment.VARIABLES:
        try:
            settings[variable.name] = environment.value_of(variable, os.environ.get(variable.name))
        except ValueError as error:
            settings[variable.name] = None
            problems.append(str(error))
    for name, similar in environment.unknown().items():
        problems.append(f"{name} means nothing{f'; did you mean {similar}?' if similar else ''}")
    return settings, problems


def warnings_of(nccl: dict[str, Any], torch_version: str) -> list[str]:
    """What may go wrong with the libraries of this process, and what to do; empty if all is well."""
    warnings = []
    if len(nccl["libraries"]) > 1:
        warnings.append(
            f"{len(nccl['libraries'])} copies of NCCL are loaded ({', '.join(nccl['libraries'])}); "
            "remove LD_PRELOAD or the package that brings the second one"
        )
    if minor_version(torch_version) > minor_version(NEWEST_TESTED_TORCH):
        warnings.append(
            f"torch {torch_version} is newer than {NEWEST_TESTED_TORCH}, the newest that this version of "
            "pipecomm_ext was tested with"
        )
    return warnings
