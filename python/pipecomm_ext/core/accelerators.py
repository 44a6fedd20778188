"""Facts about CUDA and NCCL: what the extension was built for, and what this process has."""

from __future__ import annotations

import re
from typing import Any

import torch
import torch.cuda.nccl

from .extension import build_info


def cuda_facts() -> dict[str, Any]:
    """Keys: `built`, `reason` (why, or why not), `toolkit_version`, `archs`, `devices` (names)."""
    count = torch.cuda.device_count() if torch.version.cuda else 0
    return {
        "built": build_info.with_cuda,
        "reason": build_info.cuda_reason,
        "toolkit_version": build_info.cuda_version,
        "archs": build_info.cuda_archs,
        "devices": [torch.cuda.get_device_name(index) for index in range(count)],
    }


def nccl_facts() -> dict[str, Any]:
    """Keys: `loaded_version` (of the library that torch loaded), `libraries` (files)."""
    libraries = _mapped_libraries("libnccl")
    is_loaded = torch.version.cuda is not None and libraries
    return {
        "loaded_version": ".".join(map(str, torch.cuda.nccl.version()[:3])) if is_loaded else None,
        "libraries": libraries,
    }


def _mapped_libraries(stem: str) -> list[str]:
    """Distinct files named `stem`.so* that are mapped into this process."""
    pattern = re.compile(rf"(/.*/{re.escape(stem)}\.so\S*)$", re.MULTILINE)
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        return sorted(set(pattern.findall(maps.read())))
