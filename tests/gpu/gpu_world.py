"""Communicators over GPUs for tests: each rank has its own where there are enough, else all share one."""

from __future__ import annotations

import sys

import pytest
import torch
from scripts import REPOSITORY

from pipecomm_ext import Communicator

sys.path.append(str(REPOSITORY / "examples"))
from lib import launch  # noqa: E402

DEADLINE_S = 120.0  # CUDA contexts and NCCL take their time to start
on_devices = pytest.mark.parametrize("device", ["cpu", "cuda"])
over_transports = pytest.mark.parametrize("over", ["own transport", "tcp"])


def take_device(world, device: str) -> None:
    """Makes a GPU the current one, if that is the device; must come before NCCL is used in the process."""
    if device == "cuda":
        launch.take_gpu(world.rank, world.size)


def nccl_comm(world, **kwargs) -> Communicator:
    """A Communicator over NCCL for this test."""
    take_device(world, "cuda")
    comm = world.fresh_comm(**{"device": "cuda", "transport": "nccl", "timeout": 60} | kwargs)
    assert comm.transport == "nccl", comm.transport_reason
    return comm


def comm_on(world, device: str, **kwargs) -> Communicator:
    """The same over what the host has, if that is the device."""
    if device == "cuda":
        return nccl_comm(world, **kwargs)
    return world.fresh_comm(**{"device": "cpu", "timeout": 60} | kwargs)


def comm_over(world, device: str, over: str, **kwargs) -> Communicator:
    """The same, or one over sockets of the host, which stages CUDA tensors."""
    if over == "own transport":
        return comm_on(world, device, **kwargs)
    if device == "cuda":
        torch.cuda.set_device(world.rank % torch.cuda.device_count())
    comm = world.fresh_comm(**{"device": device, "transport": "tcp", "timeout": 60} | kwargs)
    assert comm.transport == "tcp" and comm.device.type == device
    return comm


def finish(device: str) -> None:
    """Waits for everything on the device."""
    if device == "cuda":
        torch.cuda.synchronize()
