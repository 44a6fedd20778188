"""What was built, what this machine offers, and which transport follows from the two."""

from __future__ import annotations

import ctypes
import os
import platform
import re
from typing import Any

import torch
import torch.distributed

from . import _build_info, environment, shared_memory


def info() -> dict[str, Any]:
    """Returns build and run-time facts as plain data (`json.dumps` accepts it).

    Keys: `version`; `build` (git revision, compiler, the torch built for, faults); `python`; `torch`;
    `cuda` (built or why not, toolkit, archs, devices of this process); `nccl` (version of the header
    built against and of the library that torch loaded, its paths in this process); `transports` (name ->
    available, reason); `choice` (what `auto` takes for "cpu" and "cuda" tensors and why, as far as one
    process can know: `shm` also needs all ranks on one host); `environment` (every PIPECOMM_* variable
    set); `settings` (every PIPECOMM_* variable that there is, with the value in effect, None: see its
    meaning); `warnings` (list of texts, empty if all is well).

    Starts no process group. Asking for CUDA devices does not create a CUDA context.
    """
    nccl = _nccl_facts()
    cuda = _cuda_facts()
    settings, environment_warnings = _environment_facts()
    transports = transport_status(cuda, nccl)
    return {
        "version": _build_info.version,
        "build": {
            "git_revision": _build_info.git_revision,
            "compiler": _build_info.compiler,
            "type": _build_info.build_type,
            "torch": _build_info.torch_version,
            "faults": _build_info.with_faults,
        },
        "python": platform.python_version(),
        "torch": {
            "version": torch.__version__,
            "cuda": torch.version.cuda,
            "backends": [name for name in ("gloo", "nccl", "mpi", "ucc") if _has_backend(name)],
        },
        "cuda": cuda,
        "nccl": nccl,
        "transports": transports,
        "choice": {device: choose_transport(device, transports) for device in ("cpu", "cuda")},
        "environment": {
            key: value for key, value in sorted(os.environ.items()) if key.startswith("PIPECOMM_")
        },
        "settings": settings,
        "warnings": [*warnings_of(nccl), *environment_warnings],
    }


def transport_status(cuda: dict[str, Any], nccl: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """For each transport whether this process can use it, and why (not)."""
    if not nccl["built"]:
        nccl_reason = cuda["reason"] if not cuda["built"] else "nccl.h was not found when this was built"
    elif nccl["loaded_version"] is None:
        nccl_reason = "this torch has loaded no libnccl.so.2"
    elif not cuda["devices"]:
        nccl_reason = "this process sees no CUDA device"
    else:
        nccl_reason = ""
    has_c10d = torch.distributed.is_available()
    return {
        "c10d": {
            "available": has_c10d,
            "reason": "any torch.distributed group"
            if has_c10d
            else "torch was built without torch.distributed",
        },
        "nccl": {
            "available": not nccl_reason,
            "reason": nccl_reason or f"NCCL {nccl['loaded_version']} and a CUDA device",
        },
        "shm": dict(zip(("available", "reason"), shared_memory.status(), strict=True)),
    }


def choose_transport(device: str, transports: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What `transport="auto"` takes for tensors on `device` ("cpu" or "cuda"): the fast transport of that
    device if it is available, else the c10d group."""
    fast = {"cpu": "shm", "cuda": "nccl"}[device]
    if transports[fast]["available"]:
        return {"transport": fast, "reason": transports[fast]["reason"]}
    if transports["c10d"]["available"]:
        return {"transport": "c10d", "reason": f"no {fast}: {transports[fast]['reason']}"}
    return {"transport": None, "reason": transports["c10d"]["reason"]}


def format_info(facts: dict[str, Any]) -> str:
    """The text that `python -m pipecomm_ext info` prints."""
    build, cuda, nccl = facts["build"], facts["cuda"], facts["nccl"]
    devices = ", ".join(cuda["devices"]) or "none"
    lines = [
        f"pipecomm_ext {facts['version']} (git {build['git_revision'] or 'unknown'}, {build['type']}, "
        f"{build['compiler']}{', with fault hooks' if build['faults'] else ''})",
        f"  python      {facts['python']}",
        f"  torch       {facts['torch']['version']}, built for {build['torch']}, "
        f"backends: {', '.join(facts['torch']['backends']) or 'none'}",
        f"  CUDA        {'built' if cuda['built'] else 'not built'} ({cuda['reason']})",
        f"  archs       {cuda['archs'] or '-'}",
        f"  devices     {devices}",
        f"  NCCL        header {nccl['header_version'] or '-'}, loaded {nccl['loaded_version'] or '-'}",
    ]
    lines += [f"              {path}" for path in nccl["libraries"]]
    for name, status in facts["transports"].items():
        lines.append(f"  {name:<11} {'usable' if status['available'] else 'not usable'} ({status['reason']})")
    for device, choice in facts["choice"].items():
        lines.append(f"  auto        {device} tensors: {choice['transport']} ({choice['reason']})")
    lines += [f"  set         {key}={value}" for key, value in facts["environment"].items()]
    lines += [
        f"  default     {key}={'' if value is None else value}"
        for key, value in facts["settings"].items()
        if key not in facts["environment"]
    ]
    lines += [f"warning: {text}" for text in facts["warnings"]]
    return "\n".join(lines)


def _environment_facts() -> tuple[dict[str, Any], list[str]]:
    """The value of each variable as `environment.read` has it, and what is wrong with those that are set."""
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


def _cuda_facts() -> dict[str, Any]:
    count = torch.cuda.device_count() if torch.version.cuda else 0
    return {
        "built": _build_info.with_cuda,
        "reason": _build_info.cuda_reason,
        "toolkit_version": _build_info.cuda_version,
        "archs": _build_info.cuda_archs,
        "devices": [torch.cuda.get_device_name(index) for index in range(count)],
    }


def _nccl_facts() -> dict[str, Any]:
    return {
        "built": _build_info.with_nccl,
        "header_version": _build_info.nccl_header_version,
        "loaded_version": _loaded_nccl_version(),
        "libraries": _mapped_libraries("libnccl"),
    }


def _loaded_nccl_version() -> str | None:
    """Version of the NCCL that this process has loaded, asked by soname: a path could load a second copy."""
    try:
        library = ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return None
    code = ctypes.c_int()
    if library.ncclGetVersion(ctypes.byref(code)) != 0:
        return None
    return f"{code.value // 10000}.{code.value // 100 % 100}.{code.value % 100}"


def _mapped_libraries(stem: str) -> list[str]:
    """Distinct files named `stem`.so* that are mapped into this process."""
    pattern = re.compile(rf"(/.*/{re.escape(stem)}\.so\S*)$", re.MULTILINE)
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        return sorted(set(pattern.findall(maps.read())))


def _has_backend(name: str) -> bool:
    return torch.distributed.is_available() and torch.distributed.is_backend_available(name)


def warnings_of(nccl: dict[str, Any]) -> list[str]:
    """What is wrong with the NCCL of this process, and what to do; empty if all is well."""
    warnings = []
    if len(nccl["libraries"]) > 1:
        warnings.append(
            f"{len(nccl['libraries'])} copies of NCCL are loaded ({', '.join(nccl['libraries'])}); "
            "remove LD_PRELOAD or the package that brings the second one"
        )
    if nccl["built"] and nccl["loaded_version"] and nccl["header_version"]:
        built, loaded = (
            tuple(map(int, nccl[key].split("."))) for key in ("header_version", "loaded_version")
        )
        if loaded[:2] < built[:2]:
            warnings.append(
                f"NCCL {nccl['loaded_version']} is loaded, older than the header of "
                f"{nccl['header_version']} that the extension was built with; rebuild it here"
            )
    return warnings
