"""Which device a communicator is for, without a GPU: what the group is for, indices, refusals."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks

import pipecomm_ext
from pipecomm_ext import _C
from pipecomm_ext.core import process_groups
from pipecomm_ext.core.process_groups import device_of
from pipecomm_ext.parallel_state import PipelineTopology
from pipecomm_ext.transports import nccl

GLOO = "cpu:gloo,cuda:gloo"


@pytest.fixture
def two_gpus(monkeypatch):
    """Device 1 is current; no CUDA call is made."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(process_groups.build_info, "with_cuda", True)
    return monkeypatch


@on_ranks(2)
def test_a_gloo_group_is_for_cpu_tensors_beside_a_gpu(world):
    """Whoever leaves the device out gets the CPU: the quickstart, the topology, kept communicators."""
    assert dist.get_backend_config() in (GLOO, "cpu:gloo")
    is_available, torch.cuda.is_available = torch.cuda.is_available, lambda: True
    try:
        with world.fresh_comm() as comm:
            assert comm.device == torch.device("cpu")
        topology = PipelineTopology([1, 1])
        assert topology.communicator.device == torch.device("cpu")
        topology.close()
        assert pipecomm_ext.get_communicator().device.type == "cpu"
        pipecomm_ext.distributed.barrier()
    finally:
        torch.cuda.is_available = is_available


@pytest.mark.parametrize(
    ("config", "device"),
    [
        (GLOO, "cpu"),
        ("cpu:gloo", "cpu"),
        ("cpu:gloo,cuda:nccl", "cuda:1"),
        ("cuda:nccl", "cuda:1"),
        ("cpu:mpi", "cpu"),
    ],
)
def test_the_natural_device_of_a_group(two_gpus, config, device):
    two_gpus.setattr(dist, "get_backend_config", lambda group: config)
    assert device_of(None, None) == torch.device(device)
    two_gpus.setattr(torch.cuda, "is_available", lambda: False)
    assert device_of(None, None) == torch.device("cpu")


def test_indices_are_kept(two_gpus):
    assert device_of(None, "cuda") == torch.device("cuda", 1)  # the current one
    assert device_of(None, "cuda:0") == torch.device("cuda", 0)
    assert device_of(None, torch.device("cuda", 0)) == torch.device("cuda", 0)
    assert device_of(None, "cpu:0") == torch.device("cpu")


@pytest.mark.parametrize(
    ("device", "text"),
    [
        ("cuda:2", "this process sees 2 CUDA"),
        ("cuda:x", 'device must be "cpu" or "cuda"'),
        ("cuda:-1", 'device must be "cpu" or "cuda"'),
        ("meta", 'device must be "cpu" or "cuda"'),
        (1, 'device must be "cpu" or "cuda"'),
    ],
)
def test_wrong_devices(two_gpus, device, text):
    with pytest.raises(ValueError, match=text):
        device_of(None, device)


def test_a_build_without_cuda_says_so(two_gpus):
    two_gpus.setattr(process_groups.build_info, "with_cuda", False)
    with pytest.raises(ValueError, match="needs a build of pipecomm_ext with CUDA, but"):
        device_of(None, "cuda")


def test_a_gpu_without_kernels_is_told_of(monkeypatch):
    """`auto` then stages, for this reason."""
    row = nccl.Nccl()
    monkeypatch.setattr(row, "status", lambda: (True, ""))
    asked = []
    monkeypatch.setattr(nccl, "kernel_problem", lambda index: asked.append(index) or "no kernel image")
    facts = row.local_facts(torch.device("cuda", 1))
    assert asked == [1] and facts["gpu"] == ""
    assert facts["problem"].startswith("cuda:1 cannot run the kernels of this build")
    assert "no kernel image" in facts["problem"] and "TORCH_CUDA_ARCH_LIST" in facts["problem"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_communicator_for_a_device_that_is_not_there():
    with pytest.raises(RuntimeError, match="CUDA"):
        _C.Communicator(
            _C.Connections(0, 1, 1, bytes(16), lambda rank: None, lambda farewell: None),
            rank=0,
            size=1,
            channels=2,
            timeout=5,
            num_threads=1,
            device="cuda:0",
        )
