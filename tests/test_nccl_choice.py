"""What decides about NCCL on a machine without a GPU: options, reasons, and refusals that say why."""

from __future__ import annotations

import warnings
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from pipecomm_ext import _C, PipeCommMismatch, PipeCommTimeout, _build_info
from pipecomm_ext.communicator import construction
from pipecomm_ext.core import environment, rendezvous
from pipecomm_ext.core.rendezvous import Rendezvous
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


class Meeting(Rendezvous):
    """One construction of a group that is nothing but a store."""

    def __init__(self, store, rank, size, timeout=None):
        self.store, self.rank, self.size = store, rank, size
        self._group, self._what, self._name, self._number = self, "Communicator", "Communicator/", 0
        self._timeout, self._own_keys = timeout, []
        rendezvous._num_made[self] = {}
        self._restart()

    def choice(self, gpu, problem=""):
        return self.first_problem(nccl.problem_among(self, {"problem": problem, "gpu": gpu}))


def choices(gpus, problems=None):
    """What each rank of a group takes to be the problem with NCCL, all at the same time over one store."""
    store, size = dist.HashStore(), len(gpus)
    with ThreadPoolExecutor(size) as pool:
        meetings = [Meeting(store, rank, size) for rank in range(size)]
        return list(pool.map(Meeting.choice, meetings, gpus, problems or [""] * size))


def test_nccl_needs_all_ranks_and_a_gpu_for_each():
    assert choices([f"host/{idx}" for idx in range(6)]) == [""] * 6
    assert choices(["a", "b", ""], ["", "", "no driver"]) == ["rank 2: no driver"] * 3
    for _ in range(5):
        (problem,) = set(choices(["a", "b", "c", "b"]))
        assert problem.startswith("ranks 1 and 3 have the same GPU") and "set_device" in problem


def test_the_choice_waits_for_all_ranks_and_can_be_made_again():
    store = dist.HashStore()
    with pytest.raises(PipeCommTimeout, match=r"ranks \[1\] of 2 have not joined after 0.2 s"):
        Meeting(store, 0, 2, timeout=0.2).choice("a")
    with ThreadPoolExecutor(2) as pool:
        again = [pool.submit(Meeting(store, rank, 2, timeout=20).choice, "ab"[rank]) for rank in range(2)]
        assert [each.result() for each in again] == ["", ""]


def test_a_rank_that_refuses_ends_the_choice():
    store = dist.HashStore()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(Meeting(store, 0, 2, timeout=20).choice, "a")
        Meeting(store, 1, 2).publish({"error": "ValueError: no such transport"})
        with pytest.raises(PipeCommMismatch, match="refused by rank 1: ValueError: no such transport"):
            waiting.result()


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
    """Rank 1 of two, with engines that do nothing."""
    meeting = SimpleNamespace(
        rank=1,
        size=2,
        first_problem=lambda problem: problem,
        taken_by=lambda gpu: gpus.index(gpu),
        publish=lambda record: None,
    )
    made = []

    def engine(connections, **arguments):
        made.append("nccl" if "device_idx" in arguments else "c10d")

    monkeypatch.setattr(_C, "Communicator", engine)
    requested = "nccl" if is_asked_for else "auto"
    arguments = {"transport": requested, "channels": 2, "timeout": 1.0, "check": "auto"}
    routes = SimpleNamespace(connections=None)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        _, chosen, why = construction._engine(
            meeting,
            routes,
            {"nccl": {"problem": "", "gpu": gpus[1]}},
            torch.device("cuda", 0),
            arguments,
            environment.read(),
        )
    assert [chosen] == made == [transport] and reason in why
    if transport == "c10d":
        assert why.startswith("staged through host memory over TCP")
        (warning,) = warned
        assert warning.category is RuntimeWarning
        assert "stages CUDA tensors" in str(warning.message) and "set_device" in str(warning.message)
    else:
        assert not warned


def test_what_nccl_has_taken():
    device = torch.device("cuda", 1)
    assert nccl.usage_text(0, 0, device) == "nothing is connected yet"
    assert nccl.usage_text(4, 130 << 20, device) == (
        "connecting took 130 MiB of cuda:1 for 4 NCCL communicators"
    )


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
            _C.Connections(0, 1, 1, bytes(16), lambda rank: None, lambda farewell: None),
            rank=0,
            size=1,
            channels=2,
            timeout=5,
            check="auto",
            device_idx=0,
        )


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"check": "sometimes"}, "check must be"),
        ({"timeout": 0}, "timeout must be more than 0"),
    ],
)
def test_wrong_arguments_of_a_device_communicator(wrong, text):
    arguments = {
        "connections": _C.Connections(0, 1, 1, bytes(16), lambda rank: None, lambda farewell: None),
        "rank": 0,
        "size": 1,
        "channels": 2,
        "timeout": 5,
        "check": "auto",
        "device_idx": 0,
    }
    with pytest.raises(ValueError, match=text):
        _C.Communicator(**{**arguments, **wrong})
