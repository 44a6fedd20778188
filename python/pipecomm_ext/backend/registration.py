"""Registers the backend with torch.distributed."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from .names import DEVICES, MIN_TORCH, NAME


def register() -> None:
    """Registers the backend, unless it is registered already. On a torch that is too old, making a group of
    it raises a RuntimeError that says so.
    """
    if hasattr(dist.Backend, NAME.upper()):
        return
    create = _create if is_new_enough() else refuse
    dist.Backend.register_backend(NAME, create, extended_api=True, devices=DEVICES)


def is_new_enough() -> bool:
    major, minor = torch.__version__.split(".")[:2]
    return (int(major), int(minor)) >= MIN_TORCH


def _create(options: Any, backend_options: Any = None) -> Any:
    from .group import create  # its classes need a torch that is new enough

    return create(options, backend_options)


def refuse(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError(
        f'the backend "{NAME}" needs torch {".".join(map(str, MIN_TORCH))} or later, this is torch '
        f'{torch.__version__}; use backend="gloo" with `from pipecomm_ext import distributed as dist`'
    )
