"""Which device and transport a communicator chooses, without a GPU: the group's device, indices, options and
reasons of NCCL, refusals."""

from __future__ import annotations

import warnings
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks

import pipecomm_ext
from pipecomm_ext import _C, PipeCommMismatch, PipeCommTimeout
from pipecomm_ext.communicator import construction
from pipecomm_ext.core import environment, process_groups, rendezvous
from pipecomm_ext.core.limited_store import LimitedStore
from pipecomm_ext.core.process_groups import device_of
from pipecomm_ext.core.rendezvous import Rendezvous
from pipecomm_ext.parallel_state import PipelineTopology
from pipecomm_ext.transports import TRANSPORTS, Transport, nccl

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
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
    """Without a device argument the CPU is used: the quickstart, the topology, kept communicators."""
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


def test_the_natural_device_of_a_group_and_indices(two_gpus):
    for config, device in {
        GLOO: "cpu",
        "cpu:gloo": "cpu",
        "cpu:gloo,cuda:nccl": "cuda:1",
        "cuda:nccl": "cuda:1",
        "cpu:mpi": "cpu",
    }.items():
        with two_gpus.context() as changed:
            changed.setattr(dist, "get_backend_config", lambda group, config=config: config)
            assert device_of(None, None) == torch.device(device)
            changed.setattr(torch.cuda, "is_available", lambda: False)
            assert device_of(None, None) == torch.device("cpu")
    assert device_of(None, "cuda") == torch.device("cuda", 1)  # the current one
    assert device_of(None, "cuda:0") == torch.device("cuda", 0)
    assert device_of(None, torch.device("cuda", 0)) == torch.device("cuda", 0)
    assert device_of(None, "cpu:0") == torch.device("cpu")


def test_wrong_devices(two_gpus):
    for device in ("cuda:x", "cuda:-1", "meta", 1):
        with pytest.raises(ValueError, match='device must be "cpu" or "cuda"'):
            device_of(None, device)
    with pytest.raises(ValueError, match="this process sees 2 CUDA"):
        device_of(None, "cuda:2")
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


# ---- NCCL -------------------------------------------------------------------------------------------------


def test_options_come_from_the_environment(monkeypatch):
    assert nccl.options(environment.read()) == {"max_ops_per_group": 64}
    monkeypatch.setenv("PIPECOMM_NCCL_MAX_CTAS", "16")
    monkeypatch.setenv("PIPECOMM_NCCL_TRAFFIC_CLASS", "0")
    assert nccl.options(environment.read()) == {
        "max_ops_per_group": 64,
        "max_ctas": 16,
        "traffic_class": 0,
    }
    monkeypatch.setenv("PIPECOMM_NCCL_MIN_CTAS", "8")
    assert nccl.options(environment.read())["min_ctas"] == 8
    monkeypatch.setenv("PIPECOMM_NCCL_MAX_CTAS", "4")
    told = r"MIN_CTAS \(8\) must not be more than PIPECOMM_NCCL_MAX_CTAS \(4\)"
    with pytest.raises(ValueError, match=told):
        nccl.options(environment.read())


class Meeting(Rendezvous):
    """One construction of a group that is only a store."""

    def __init__(self, store, rank, size, timeout=None):
        self.store, self.rank, self.size = store, rank, size
        self._stores = (LimitedStore(store, rank),) * 2
        self._group, self._what, self._name, self._number = self, "Communicator", "Communicator/", 0
        self._prefix, self._timeout, self._own_keys = "pipecomm", timeout, []
        rendezvous._num_made[self] = {}
        self._restart()

    def choice(self, gpu, problem=""):
        return self.first_problem(nccl.problem_among(self, {"problem": problem, "gpu": gpu}))


def choices(gpus, problems=None):
    """The problem with NCCL that each rank of a group finds, all at the same time over one store."""
    store, size = dist.HashStore(), len(gpus)
    with ThreadPoolExecutor(size) as pool:
        meetings = [Meeting(store, rank, size) for rank in range(size)]
        return list(pool.map(Meeting.choice, meetings, gpus, problems or [""] * size))


def test_a_farewell_leaves_a_refusal_as_it_is():
    """A rank that finds that it cannot take part after it has published."""
    store = dist.HashStore()
    meeting, other = Meeting(store, 0, 2), Meeting(store, 1, 2)
    meeting.publish({"port": 1})
    meeting.refuse("no such device")
    meeting.say_farewell(b"closed")
    assert other.look_up(0) == {"rank": 0, "error": "no such device"}


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
        Meeting(store, 1, 2).refuse("ValueError: no such transport")
        with pytest.raises(PipeCommMismatch, match="refused by rank 1: ValueError: no such transport"):
            waiting.result()


@pytest.mark.parametrize(
    ("gpus", "is_asked_for", "transport", "reason"),
    [
        (("host/0", "host/1"), False, "nccl", "every rank has NCCL and a GPU of its own"),
        (("host/0", "host/0"), False, "tcp", "NCCL cannot be used: ranks 0 and 1 have the same GPU"),
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
        made.append("nccl" if "device_idx" in arguments else "tcp")

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
    if transport == "tcp":
        assert why.startswith("staged through host memory over TCP")
        (warning,) = warned
        assert warning.category is RuntimeWarning
        assert "stages CUDA tensors" in str(warning.message) and "set_device" in str(warning.message)
    else:
        assert not warned


@pytest.mark.parametrize(
    ("variables", "is_problem"),
    [
        ({}, False),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, False),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64, expandable_segments: True"}, True),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, True),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:False"}, False),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:True", "NCCL_GRAPH_REGISTER": "1"}, True),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:True", "NCCL_GRAPH_REGISTER": "0"}, False),
    ],
)
def test_graphs_of_memory_that_nccl_registers_in_part(variables, is_problem):
    problem = nccl.capture_problem(variables)
    assert ("set NCCL_GRAPH_REGISTER=0" in problem) == is_problem == bool(problem)


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({}, []),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "8", "NCCL_LAUNCH_ORDER_IMPLICIT": "0"}, []),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, ["share 1 hardware queues"]),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "many"}, []),
        ({"NCCL_LAUNCH_ORDER_IMPLICIT": "1"}, ["NCCL_LAUNCH_ORDER_IMPLICIT=1"]),
    ],
)
def test_variables_that_change_what_nccl_does(variables, named):
    warned = nccl.environment_warnings(variables)
    assert len(warned) == len(named)
    assert all(part in text for part, text in zip(named, warned, strict=True))


def test_what_nccl_has_taken():
    device = torch.device("cuda", 1)
    assert nccl.usage_text(0, 0, device) == "nothing is connected yet"
    assert nccl.usage_text(4, 130 << 20, device) == (
        "connecting took 130 MiB of cuda:1 for 4 NCCL communicators"
    )


@without_gpu
def test_this_machine_says_why_not():
    assert TRANSPORTS["nccl"].local_facts(torch.device("cuda", 0))["problem"]
    if not _C.build_info["with_cuda"]:
        assert "no CUDA and NCCL support" in _C.nccl_problem()
    elif torch.version.cuda is None:
        assert "this torch has loaded no libnccl.so.2" in _C.nccl_problem()
    else:
        assert _C.nccl_problem() == ""  # torch has loaded a libnccl that is new enough


def engine_of(**arguments: object) -> _C.Communicator:
    connections = _C.Connections(0, 1, 1, bytes(32), lambda rank: None, lambda farewell: None)
    return _C.Communicator(connections, **{"rank": 0, "size": 1, "channels": 2, "timeout": 5, **arguments})


@without_gpu
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"check": "auto", "device_idx": 0}, "has no CUDA support|CUDA: looking for devices"),
        ({"num_threads": 1, "device": "cuda:0"}, "CUDA"),
    ],
)
def test_a_communicator_for_a_device_that_is_not_there(arguments, told):
    with pytest.raises(RuntimeError, match=told):
        engine_of(**arguments)


def test_wrong_arguments_of_a_device_communicator():
    for arguments, text in (
        ({"check": "sometimes"}, "check must"),
        ({"timeout": 0}, "timeout must be more than 0"),
    ):
        with pytest.raises(ValueError, match=text):
            engine_of(**{"check": "auto", "device_idx": 0, **arguments})


@on_ranks(2)
def test_a_transport_without_a_way_between_two_ranks_is_refused(world):
    """As one of which only the row in Python exists; other transports do not stand in for it."""

    class Loopback(Transport):
        name = "loopback"
        devices = ("cpu",)

        def status(self):
            return True, "a group of one rank"

    with (
        mock.patch.dict(TRANSPORTS, loopback=Loopback()),
        pytest.raises(ValueError, match="there is no way to other ranks"),
    ):
        pipecomm_ext.Communicator(world.group, transport="loopback")
    world.meet()
