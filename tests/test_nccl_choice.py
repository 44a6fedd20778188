"""What decides about NCCL on a machine without a GPU: options, reasons, and refusals that say why."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest
import torch

from pipecomm_ext import _C, _build_info
from pipecomm_ext.communicator import construction
from pipecomm_ext.core import environment
from pipecomm_ext.transports import TRANSPORTS, nccl

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
    problem = nccl.problem_of([*good, good[1]])
    assert problem.startswith("ranks 1 and 3 have the same GPU") and "set_device" in problem


def test_more_thread_blocks_at_least_than_at_most(monkeypatch):
    monkeypatch.setenv("PIPECOMM_NCCL_MIN_CTAS", "8")
    assert nccl.options(environment.read())["min_ctas"] == 8
    monkeypatch.setenv("PIPECOMM_NCCL_MAX_CTAS", "4")
    with pytest.raises(
        ValueError, match=r"MIN_CTAS \(8\) must not be more than PIPECOMM_NCCL_MAX_CTAS \(4\)"
    ):
        nccl.options(environment.read())


@pytest.mark.parametrize(
    ("gpus", "is_asked_for", "transport", "reason"),
    [
        (("host/0", "host/1"), False, "nccl", "every rank has NCCL and a GPU of its own"),
        (("host/0", "host/0"), False, "c10d", "NCCL cannot be used: ranks 0 and 1 have the same GPU"),
        (("host/0", "host/0"), True, "nccl", "asked for"),
    ],
)
def test_the_choice_for_cuda_tensors(monkeypatch, gpus, is_asked_for, transport, reason):
    """Rank 0 of two, with engines that connect nothing."""
    meeting = SimpleNamespace(
        rank=0,
        size=2,
        gather_published=lambda: [{"nccl": {"problem": "", "gpu": gpu}} for gpu in gpus],
        gather=lambda stage, record: [{"ids": []}] * 2,
        publish=lambda record: None,
    )
    made = []

    def engine(connections, **arguments):
        made.append("nccl" if "nccl_ids" in arguments else "c10d")

    monkeypatch.setattr(_C, "Communicator", engine)
    monkeypatch.setattr(_C, "nccl_num_ids", lambda channels: 0)
    monkeypatch.setattr(_C, "nccl_unique_ids", lambda number: [])
    free = iter([7 << 30, (7 << 30) - (160 << 20)])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (next(free), 8 << 30))
    requested = "nccl" if is_asked_for else "auto"
    arguments = {"transport": requested, "channels": 2, "timeout": 1.0, "check": "auto"}
    routes = SimpleNamespace(connections=None)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        _, chosen, why = construction._engine(
            meeting, routes, {}, torch.device("cuda", 0), arguments, environment.read()
        )
    assert [chosen] == made == [transport] and reason in why
    if transport == "c10d":
        assert why.startswith("staged through host memory over TCP")
        (warning,) = warned
        assert warning.category is RuntimeWarning
        assert "stages CUDA tensors" in str(warning.message) and "set_device" in str(warning.message)
    else:
        assert not warned and why.endswith("; connecting took 160 MiB of cuda:0")


@without_gpu
def test_this_machine_says_why_not():
    assert TRANSPORTS["nccl"].local_facts(torch.device("cuda", 0))["problem"]
    if _build_info.with_nccl:
        assert _C.nccl_problem() == ""  # torch has loaded a libnccl that is new enough
    else:
        assert "no CUDA and NCCL support" in _C.nccl_problem()


@without_gpu
def test_a_device_communicator_without_a_device():
    with pytest.raises(RuntimeError, match="has no CUDA support|CUDA: looking for devices"):
        _C.Communicator(
            _C.Connections(0, 1, 1, bytes(16), lambda rank: None),
            rank=0,
            size=1,
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
        ({"size": 2}, "nccl_ids must have 5 elements"),
        ({"size": 2, "nccl_ids": [b"short"] * 5}, "must have 128 bytes, not 5"),
        ({"timeout": 0}, "timeout must be more than 0"),
    ],
)
def test_wrong_arguments_of_a_device_communicator(wrong, text):
    arguments = {
        "connections": _C.Connections(0, 1, 1, bytes(16), lambda rank: None),
        "rank": 0,
        "size": 1,
        "channels": 2,
        "timeout": 5,
        "check": "auto",
        "device_idx": 0,
        "nccl_ids": [],
    }
    with pytest.raises(ValueError, match=text):
        _C.Communicator(**{**arguments, **wrong})
