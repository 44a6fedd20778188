"""This rank's stages of any schedule, run by pipecomm_ext's Executor."""

from __future__ import annotations

import functools
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from pipecomm_ext import Communicator, Recv, Send
from pipecomm_ext.schedules import SEND, Executor, Group, Plan, draw, get_plan, simulate

from .sequence import SequencePiece
from .text_model import loss_of


def plan_of(schedule: str, num_ranks: int, num_micro: int) -> Plan:
    """The plan of that name; interleaved ones have two stages a rank."""
    plan_sizes = {"V": 2} if schedule.startswith("interleaved") else {}
    return get_plan(schedule, P=num_ranks, M=num_micro, **plan_sizes)


class PlannedStages:
    """The stages of `plan` that this rank of `comm` owns, and their optimizer.

    `layers` are those of the unsplit model, `owned[depth]` the indices of those of a stage. If the plan has
    two chains, each gets half of the micro-batches, and the copies of a stage have the same gradients.
    """

    def __init__(
        self,
        plan: Plan,
        layers: list[nn.Module],
        owned: list[range],
        comm: Communicator,
        piece: SequencePiece,
        micro_shape: tuple[int, int, int],
        lr: float,
    ):
        self.plan, self.comm, self.piece, self.micro_shape = plan, comm, piece, micro_shape
        self.depth_of = {stage: depth for chain in plan.chains for depth, stage in enumerate(chain)}
        self.stages = nn.ModuleDict()
        for stage in plan.stages_of(comm.rank):
            mine = [layers[idx] for idx in owned[self.depth_of[stage]]]
            self.stages[str(stage)] = nn.Sequential(*mine).to(comm.device)
        self.optimizer = torch.optim.AdamW(self.stages.parameters(), lr=lr)
        self.executor = Executor(
            plan,
            list(self.stages.values()),
            communicator=comm,
            loss_fn=functools.partial(loss_of, seq_len=piece.seq_len),
            loss_scale="mean",
            return_outputs=False,
            record_timeline=True,
        )
        groups = [item for item in plan.program[comm.rank] if type(item) is Group]
        num_sends = sum(op.kind == SEND for group in groups for op in group.ops)
        self.num_bytes_per_step = num_sends * torch.empty(micro_shape).nbytes
        self.num_bytes_sent = 0

    def step(self, inputs: tuple[torch.Tensor, ...], targets: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
        """One optimizer step; returns the mean loss of my tokens on the last rank, and [] elsewhere."""
        self.optimizer.zero_grad()
        losses = self.executor.step(self._by_stage(0, inputs), self._by_stage(-1, targets)).losses
        self.num_bytes_sent += self.num_bytes_per_step
        self.executor.sum_replica_gradients()
        parameters = list(self.stages.parameters())
        gradients = self.piece.sum_over_pieces([parameter.grad for parameter in parameters])
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        self.optimizer.step()
        # The rank with the loss depends on the schedule, and there may be two.
        total = torch.stack(losses).sum() if losses else torch.zeros((), device=self.comm.device)
        dist.all_reduce(total, group=self.comm.group)
        return [total / self.plan.M] if self.comm.rank == self.comm.size - 1 else []

    def _by_stage(self, end: int, micro_batches: tuple[torch.Tensor, ...]) -> dict[int, list[torch.Tensor]]:
        """The micro-batches of the chains whose first (0) or last (-1) stage is mine."""
        num_micro = self.plan.micros_per_chain
        return {
            chain[end]: list(micro_batches[idx * num_micro : (idx + 1) * num_micro])
            for idx, chain in enumerate(self.plan.chains)
            if self.plan.owner[chain[end]] == self.comm.rank
        }

    def gather_gradients(self, shapes: list[list[torch.Size]]) -> list[torch.Tensor] | None:
        """The gradients of all stages in layer order, on the last rank; `shapes[depth]` are their shapes."""
        last = self.comm.size - 1
        gathered: list[torch.Tensor] = []
        ops: list[Send | Recv] = []
        for depth, stage in enumerate(self.plan.chains[0]):
            owner = self.plan.owner[stage]
            if owner == self.comm.rank:
                mine = [parameter.grad for parameter in self.stages[str(stage)].parameters()]
                gathered += mine
                ops += [Send(gradient, last) for gradient in mine if owner != last]
            elif self.comm.rank == last:
                theirs = [torch.empty(shape, device=self.comm.device) for shape in shapes[depth]]
                gathered += theirs
                ops += [Recv(gradient, owner) for gradient in theirs]
        self.comm.batch_p2p(ops)
        return gathered if self.comm.rank == last else None

    def draw_timelines(self, path: Path) -> str | None:
        """Draws the last step as measured, and as simulated with its median times; both as text, too, on the
        last rank. Called by all ranks of `comm`."""
        measured = self.executor.timeline()
        if self.comm.rank != self.comm.size - 1:
            return None
        simulated = simulate(self.plan, measured.costs())
        draw([simulated, measured], path, titles=["simulated, in seconds", "measured, in seconds"])
        parts = [
            f"{name}: {1e3 * timeline.makespan:.1f} ms a step, bubble {timeline.bubble_ratio:.0%}\n"
            f"{timeline.text_picture()}"
            for name, timeline in (("simulated", simulated), ("measured", measured))
        ]
        return "\n".join(parts)
