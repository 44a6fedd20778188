"""Ranks on GPUs: one each where there are enough, else all on one, as if on different hosts.

NCCL refuses two ranks on one GPU of one host. A host id of its own per process makes them ranks of different
hosts, which talk over sockets on the loopback device: slow (the GPU is time-sliced between processes), and so
right for correctness, not for timing.
"""

from __future__ import annotations

import os

import torch

from pipecomm_ext import Communicator

DEADLINE_S = 120.0  # CUDA contexts and NCCL take their time to start

_ONE_GPU = {
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_NET_PLUGIN": "none",
    "NCCL_MAX_CTAS": "4",
    "NCCL_RAS_ENABLE": "0",
}


def nccl_comm(world, **kwargs) -> Communicator:
    """A Communicator over NCCL for this test; must be the first use of CUDA in its process."""
    if torch.cuda.device_count() < world.size:
        os.environ.update(_ONE_GPU, NCCL_HOSTID=f"pipecomm-test-{world.rank}")
    torch.cuda.set_device(world.rank % torch.cuda.device_count())
    kwargs = {"device": "cuda", "transport": "nccl", "timeout": 60} | kwargs
    return world.fresh_comm(**kwargs)
