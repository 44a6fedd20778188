"""Relays between stages and whole schedules, for the table of operations.py."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from operations import Call, Draw, check_tensors, operation
from patterns import assert_same, pattern
from ranks import keep_groups

from pipecomm_ext import Communicator, StageRelay, schedules, vtp_recv_forward, vtp_send_forward
from pipecomm_ext.parallel_state import PipelineTopology
from pipecomm_ext.pipeline_parallel import (
    P2PCommunicator,
    PipelineConfig,
    forward_backward_pipelining_without_interleaving,
)

ALGORITHMS = ("auto", "sharded", "direct")

_topologies: weakref.WeakKeyDictionary[Any, PipelineTopology] = weakref.WeakKeyDictionary()


def topology_of(comm: Communicator) -> PipelineTopology:
    """One rank, and all others; made once for a group, collectively."""
    if comm.group not in _topologies:
        _topologies[comm.group] = PipelineTopology([1, comm.size - 1], group=comm.group, timeout=comm.timeout)
        make_equally_many_groups(comm.group)
        keep_groups()
    return _topologies[comm.group]


def make_equally_many_groups(group: Any) -> None:
    """torch < 2.14 names a group that only its members make by how many groups each of them has had: ranks
    that are in more groups than others could not make a group with the remaining ones. Later releases count
    calls of new_group, of which all ranks here have made the same number."""
    if torch.__version__ >= "2.14":
        return
    names = dist.distributed_c10d._world.pg_names
    most = torch.tensor([len(names)])
    dist.all_reduce(most, dist.ReduceOp.MAX, group)
    while len(names) < most.item():
        dist.new_group([dist.get_rank()], use_local_synchronization=True)


class Boundary:
    """A tensor from each stage for the other."""

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
    """Waits at once: relays post on the first channels in their turn, and no other call may use these."""
    for work in works:
        work.wait()
    return []


def relay_over(comm: Communicator, draw: Draw, boundary: Boundary) -> StageRelay:
    algorithm = ALGORITHMS[draw.variant % len(ALGORITHMS)]
    return StageRelay(boundary.topology, algorithm=algorithm, communicator=comm)


@operation("StageRelay.send_forward, recv_forward", "ring", "shape dtype")
def relay_forward(comm: Communicator, draw: Draw) -> Call:
    relay = relay_over(comm, draw, boundary := Boundary(comm, draw))

    def start() -> list[Any]:
        boundary.received, work = relay.recv_forward(boundary.shape, boundary.dtype, async_op=True)
        return finished(work, relay.send_forward(boundary.sent, async_op=True))

    return Call(start, boundary.check)


@operation("StageRelay.send_backward, recv_backward", "ring", "shape dtype")
def relay_backward(comm: Communicator, draw: Draw) -> Call:
    relay = relay_over(comm, draw, boundary := Boundary(comm, draw))

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


class Training:
    """A step of a pipeline with one stage per rank; the loss is the first element of the output."""

    def __init__(self, comm: Communicator, draw: Draw):
        self.num_micros = comm.size + draw.variant % 2
        factors = [float(1 + rank % 2) for rank in range(comm.size)]
        self.shape = (draw.length, 2, 1)
        self.inputs = [torch.full(self.shape, float(1 + micro % 3)) for micro in range(self.num_micros)]
        self.is_first, self.is_last = comm.rank == 0, comm.rank == comm.size - 1
        self.factor, self.product = factors[comm.rank], torch.tensor(factors).prod()
        self.losses: list[torch.Tensor] = []
        self.gradient: torch.Tensor | None = None

    def check(self) -> None:
        if self.is_last:
            wanted = [tensor[0, 0, 0] * self.product for tensor in self.inputs]
            check_tensors(self.losses, wanted, "losses")
        total = sum(tensor[0, 0, 0] for tensor in self.inputs)
        assert_same(self.gradient, total * self.product / self.factor, "gradient")


@operation("schedules.Executor.step", "collective", "")
def executor_step(comm: Communicator, draw: Draw) -> Call:
    training = Training(comm, draw)
    plan = schedules.one_f_one_b(comm.size, training.num_micros)

    def start() -> list[Any]:
        stage = Scale(training.factor)
        executor = schedules.Executor(
            plan,
            {comm.rank: stage},
            communicator=comm,
            loss_fn=lambda output, target: output[0, 0, 0] - target,
        )
        training.losses, _ = executor.step(
            training.inputs if training.is_first else None,
            [torch.zeros(())] * plan.M if training.is_last else None,
        )
        training.gradient = stage.factor.grad
        return []

    return Call(start, training.check)


class ScaleOfInput(Scale):
    """The same, with what Megatron's schedules need of a model."""

    def __init__(self, factor: float, config: PipelineConfig):
        super().__init__(factor)
        self.config = config

    def set_input_tensor(self, tensors: list[torch.Tensor | None]) -> None:
        [self.received] = tensors

    def forward(self, tensor: torch.Tensor | None) -> torch.Tensor:
        return super().forward(tensor if self.received is None else self.received)


@operation("pipeline_parallel.forward_backward_pipelining_without_interleaving", "chain", "")
def megatron_1f1b(comm: Communicator, draw: Draw) -> Call:
    """With losses per token, so that nothing is divided and all results are exact."""
    training = Training(comm, draw)

    def start() -> list[Any]:
        config = PipelineConfig(
            pipeline_dtype=torch.float32,
            hidden_size=1,
            variable_seq_lengths=draw.variant % 4 >= 2,
            calculate_per_token_loss=True,
        )
        stage = ScaleOfInput(training.factor, config)

        def loss_of(output: torch.Tensor):
            loss = output[0, 0, 0]
            return loss, torch.tensor(1), {"loss": loss.detach().clone()}

        results = forward_backward_pipelining_without_interleaving(
            forward_step_func=lambda data, model: (model(next(data)), loss_of),
            data_iterator=iter(training.inputs),
            model=stage,
            num_microbatches=training.num_micros,
            seq_length=draw.length,
            micro_batch_size=2,
            p2p_communicator=P2PCommunicator(comm, config),
            pg_collection=SimpleNamespace(tp=None, cp=None),
        )
        training.losses = [result["loss"] for result in results]
        training.gradient = stage.factor.grad
        return []

    return Call(start, training.check)
