"""Ranks that MPI has started (`bench/run.py --mpi`): the same transfers by mpi4py, in the same processes."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from tools import find_tool

NAME = "mpi"
_RANK_NAMES = ("PMI_RANK", "OMPI_COMM_WORLD_RANK")  # MPICH and Intel MPI, Open MPI


def has_started() -> bool:
    """Whether this process is one of MPI's ranks."""
    return any(name in os.environ for name in _RANK_NAMES)


def start(num_ranks: int) -> int:
    """Runs this command on ranks that MPI starts; returns the exit code."""
    own = Path(sys.executable).parent / "mpiexec"
    mpiexec = str(own) if own.exists() else find_tool("mpiexec")
    if mpiexec is None or importlib.util.find_spec("mpi4py") is None:
        print("--mpi needs an MPI and mpi4py: pip install 'pipecomm_ext[bench]'", file=sys.stderr)
        return 2
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [mpiexec, "-n", str(num_ranks), sys.executable, *sys.argv]
    return subprocess.run(command, env=environment, check=False).returncode


def join() -> Any:
    """The communicator of all ranks, which torch's default group will have, too."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    place = {"RANK": world.rank, "LOCAL_RANK": world.rank, "WORLD_SIZE": world.size}
    os.environ.update({name: str(value) for name, value in place.items()})
    return world


def buffer_of(tensor: torch.Tensor) -> Any:
    """The memory of a contiguous tensor, as mpi4py takes it: numbers if NumPy has their type, else bytes."""
    from mpi4py import MPI

    flat = tensor.view(-1)
    return [flat.view(torch.uint8).numpy(), MPI.BYTE] if tensor.dtype == torch.bfloat16 else flat.numpy()


def in_place() -> Any:
    from mpi4py import MPI

    return MPI.IN_PLACE
