"""Relays between stages and whole schedules, for the table of operations.py."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from operations import Call, Draw, operation
from patterns import assert_same, pattern

from pipecomm_ext import Communicator, StageRelay, schedules, vtp_recv_forward, vtp_send_forward
from pipecomm_ext.parallel_state import PipelineTopology

ALGORITHMS = ("auto", "leader", "pipelined", "sharded", "direct")

_topologies: weakref.WeakKeyDictionary[Any, PipelineTopology] = weakref.WeakKeyDictionary()


def topology_of(comm: Communicator) -> PipelineTopology:
    """One rank, and all others; made once for a group, collectively."""
    if comm.group not in _topologies:
        _topologies[comm.group] = PipelineTopology([1, comm.size - 1], group=comm.group)
        make_equally_many_groups(comm.group)
    return _topologies[comm.group]


def make_equally_many_groups(group: Any) -> None:
    """torch names a group that only its members make by how many groups each of them has had: ranks that are
    in more groups than others could make no group of those that are left with them."""
    names = dist.distributed_c10d._world.pg_names
    most = torch.tensor([len(names)])
    dist.all_reduce(most, dist.ReduceOp.MAX, group)
    while len(names) < most.item():
        dist.new_group([dist.get_rank()], use_local_synchronization=True)


class Boundary:
    """A tensor from either stage for the other."""

    def __init__(self, comm: Communicator, draw: Draw):
        self.topology = topology_of(comm)
        mine = self.topology.get_vtp_my_stage_idx()
        self.shape, self.dtype = (draw.length, 3), draw.dtype
        self.sent, self.expected = (
            pattern(self.shape, self.dtype, draw.key, stage_idx) for stage_idx in (mine, 1 - mine)
        )
        self.received: torch.Tensor | None = None

    def check(self) -> None:
        assert_same(self.received.detach(), self.expected, "from the other stage")


def finished(*works: Any) -> list[Any]:
    """Relays post on the first channels when it is their turn: nobody else may use these meanwhile."""
    for work in works:
        work.wait()
    return []


@operation("StageRelay.send_forward, recv_forward", "ring", "shape dtype")
def relay_forward(comm: Communicator, draw: Draw) -> Call:
    boundary = Boundary(comm, draw)
    relay = StageRelay(boundary.topology, algorithm=ALGORITHMS[draw.variant % 5], communicator=comm)

    def start() -> list[Any]:
        boundary.received, work = relay.recv_forward(boundary.shape, boundary.dtype, async_op=True)
        return finished(work, relay.send_forward(boundary.sent, async_op=True))

    return Call(start, boundary.check)


@operation("StageRelay.send_backward, recv_backward", "ring", "shape dtype")
def relay_backward(comm: Communicator, draw: Draw) -> Call:
    boundary = Boundary(comm, draw)
    relay = StageRelay(boundary.topology, algorithm=ALGORITHMS[draw.variant % 5], communicator=comm)

    def start() -> list[Any]:
        work = relay.send_backward(boundary.sent, async_op=True)
        boundary.received = relay.recv_backward(boundary.shape, boundary.dtype)
        return finished(work)

    return Call(start, boundary.check)


@operation("vtp_send_forward, vtp_recv_forward", "apart", "")
def vtp_forward(comm: Communicator, draw: Draw) -> Call:
    """Over the topology's own connections."""
    boundary = Boundary(comm, draw)
    config = SimpleNamespace(pipeline_dtype=boundary.dtype)

    def start() -> list[Any]:
        sends = vtp_send_forward(boundary.sent, topology=boundary.topology) or []
        boundary.received = vtp_recv_forward(boundary.shape, config, topology=boundary.topology)
        return list(sends)

    return Call(start, boundary.check)


class Scale(torch.nn.Module):
    """A stage whose results are exact: times a small whole number."""

    def __init__(self, factor: float):
        super().__init__()
        self.factor = torch.nn.Parameter(torch.tensor(factor))

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor * self.factor


@operation("schedules.Executor.step", "collective", "")
def executor_step(comm: Communicator, draw: Draw) -> Call:
    """1F1B over all ranks; losses and gradients are those of one process."""
    plan = schedules.one_f_one_b(comm.size, comm.size + draw.variant % 2)
    factors = [float(1 + rank % 2) for rank in range(comm.size)]
    inputs = [torch.full((draw.length, 2), float(1 + micro % 3)) for micro in range(plan.M)]
    is_first, is_last = comm.rank == 0, comm.rank == comm.size - 1
    done: list[Any] = []

    def start() -> list[Any]:
        stage = Scale(factors[comm.rank])
        executor = schedules.Executor(
            plan, {comm.rank: stage}, communicator=comm, loss_fn=lambda output, target: output[0, 0] - target
        )
        losses, _ = executor.step(
            inputs if is_first else None, [torch.zeros(())] * plan.M if is_last else None
        )
        done[:] = [losses, stage.factor.grad]
        return []

    def check() -> None:
        product = torch.tensor(factors).prod()
        if is_last:
            for micro, loss in enumerate(done[0]):
                assert_same(loss, inputs[micro][0, 0] * product, f"loss {micro}")
        total = sum(tensor[0, 0] for tensor in inputs)
        assert_same(done[1], total * product / factors[comm.rank], "gradient")

    return Call(start, check)
