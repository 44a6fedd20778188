"""How a stage reaches the stages before and after it: rank to rank, or by a relay between sets of ranks."""

from __future__ import annotations

import torch

from pipecomm_ext import Communicator, Recv, Send, StageRelay, get_communicator
from pipecomm_ext.parallel_state import PipelineTopology

ACTIVATIONS, GRADIENTS = 0, 1  # go to the next stage, come back to the previous one


class RankLink:
    """Stages of one rank each: the ranks of `comm`. If the sequence is split, there is one per piece."""

    def __init__(self, comm: Communicator):
        self.comm, self.device = comm, comm.device
        self.stage_idx, self.num_stages = comm.rank, comm.size
        self.is_leader = True

    def exchange(
        self, sends: list[tuple[torch.Tensor, int]], recvs: list[int], shape: tuple[int, ...]
    ) -> list[torch.Tensor]:
        """Sends (tensor, kind) and receives kinds as one batch; the channel is the kind."""
        buffers = [torch.empty(shape, device=self.device) for _ in recvs]
        step = {ACTIVATIONS: 1, GRADIENTS: -1}
        messages = [Send(tensor, self.comm.rank + step[kind], kind) for tensor, kind in sends]
        messages += [
            Recv(buffer, self.comm.rank - step[kind], kind)
            for buffer, kind in zip(buffers, recvs, strict=True)
        ]
        self.comm.batch_p2p(messages)
        return buffers

    def collect(self, mine: list[torch.Tensor], shapes: list[list[torch.Size]]) -> list[torch.Tensor] | None:
        """All stages' tensors, in order, on the last stage; `shapes[stage]` are those of the others."""
        return _collect(self.comm, list(range(self.num_stages)), mine, shapes)


class RelayLink:
    """Stages of several ranks that hold the same activations."""

    def __init__(self, topology: PipelineTopology):
        self.topology, self.relay = topology, StageRelay(topology)
        self.comm = topology.communicator
        self.device = self.comm.device
        self.messages = get_communicator(topology.group, self.device)  # made by all, used by leaders
        self.stage_idx = topology.get_vtp_my_stage_idx()
        self.num_stages = topology.num_stages
        self.is_leader = topology.is_vtp_stage_rank0()

    def exchange(
        self, sends: list[tuple[torch.Tensor, int]], recvs: list[int], shape: tuple[int, ...]
    ) -> list[torch.Tensor]:
        """Sends (tensor, kind) and receives kinds, all in flight together."""
        relay = self.relay
        receive = {ACTIVATIONS: relay.recv_forward, GRADIENTS: relay.recv_backward}
        send = {ACTIVATIONS: relay.send_forward, GRADIENTS: relay.send_backward}
        received = [receive[kind](shape, torch.float32, async_op=True) for kind in recvs]
        works = [send[kind](tensor, async_op=True) for tensor, kind in sends]
        for work in [*works, *(work for _, work in received)]:
            work.wait()
        return [tensor for tensor, _ in received]

    def collect(self, mine: list[torch.Tensor], shapes: list[list[torch.Size]]) -> list[torch.Tensor] | None:
        """All stages' tensors, in order, on the leader of the last stage; called by all leaders."""
        leaders = [ranks[0] for ranks in self.topology.stages]
        return _collect(self.messages, leaders, mine, shapes)


def _collect(
    comm: Communicator, leaders: list[int], mine: list[torch.Tensor], shapes: list[list[torch.Size]]
) -> list[torch.Tensor] | None:
    *others, last = leaders
    if comm.rank != last:
        comm.batch_p2p([Send(tensor, last) for tensor in mine])
        return None
    theirs = [
        Recv(torch.empty(shape, device=comm.device), rank)
        for rank, stage_shapes in zip(others, shapes, strict=False)
        for shape in stage_shapes
    ]
    comm.batch_p2p(theirs)
    return [recv.tensor for recv in theirs] + mine
