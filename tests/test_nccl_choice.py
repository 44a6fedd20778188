"""What decides about NCCL on a machine without a GPU: options, reasons, and refusals that say why."""

from __future__ import annotations

import pytest
import torch

from pipecomm_ext import _C, _build_info, environment, nccl
from pipecomm_ext.communicator import _choose_for_cuda

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


def test_options_come_from_the_environment(monkeypatch):
    assert nccl.options(environment.read()) == {"max_ops_per_group": 64}
    monkeypatch.setenv("PIPECOMM_NCCL_MAX_CTAS", "16")
    monkeypatch.setenv("PIPECOMM_NCCL_TRAFFIC_CLASS", "0")
    assert nccl.options(environment.read()) == {
        "max_ops_per_group": 64,
        "max_ctas": 16,
        "traffic_class": 0,
    }


@pytest.mark.parametrize("text", ["", "abc", "12junk", "-1", "1", "4096", "1.5", "\u0663\u0663"])
def test_wrong_options_are_refused(monkeypatch, text):
    monkeypatch.setenv("PIPECOMM_NCCL_MAX_OPS_PER_GROUP", text)
    with pytest.raises(ValueError, match="PIPECOMM_NCCL_MAX_OPS_PER_GROUP must be a number from 2 to 1024"):
        nccl.options(environment.read())


def test_nccl_needs_all_ranks_and_a_gpu_for_each():
    good = [{"problem": "", "gpu": f"host/{idx}"} for idx in range(3)]
    assert nccl.problem_of(good) == ""
    assert nccl.problem_of([*good, {"problem": "no driver", "gpu": ""}]) == "rank 3: no driver"
    assert nccl.problem_of([*good, good[1]]) == "ranks 1 and 3 have the same GPU"


def test_the_choice_for_cuda_tensors():
    facts = {"device": "cuda", "transport": "auto", "local": {"problem": "", "gpu": "host/0"}}
    other = {**facts, "local": {"problem": "", "gpu": "host/1"}}
    assert _choose_for_cuda(facts, [facts, other])[0] == "nccl"
    transport, reason = _choose_for_cuda(facts, [facts, facts])
    assert transport == "c10d" and "ranks 0 and 1 have the same GPU" in reason
    asked = {**facts, "transport": "nccl"}
    assert _choose_for_cuda(asked, [asked, asked]) == ("nccl", "asked for")


@without_gpu
def test_this_machine_says_why_not():
    assert nccl.local_facts()["problem"]
    if _build_info.with_nccl:
        assert _C.nccl_problem() == ""  # torch has loaded a libnccl that is new enough
    else:
        assert "no CUDA and NCCL support" in _C.nccl_problem()


@without_gpu
def test_a_device_communicator_without_a_device():
    with pytest.raises(RuntimeError, match="no CUDA and NCCL support|CUDA: looking for devices"):
        _C.DeviceCommunicator(
            backend=None,
            rank=0,
            size=1,
            epoch=1,
            channels=2,
            timeout=5,
            check="auto",
            device_idx=0,
            nccl_ids=[],
        )


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"check": "sometimes"}, "check must be"),
        ({"size": 2}, "nccl_ids must have 3 elements"),
        ({"size": 2, "nccl_ids": [b"short"] * 3}, "must have 128 bytes, not 5"),
        ({"timeout": 0}, "timeout must be more than 0"),
    ],
)
def test_wrong_arguments_of_a_device_communicator(wrong, text):
    arguments = {
        "backend": None,
        "rank": 0,
        "size": 1,
        "epoch": 1,
        "channels": 2,
        "timeout": 5,
        "check": "auto",
        "device_idx": 0,
        "nccl_ids": [],
    }
    with pytest.raises(ValueError, match=text):
        _C.DeviceCommunicator(**{**arguments, **wrong})
