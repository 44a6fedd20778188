"""Messages to and from ranks that the caller names: one or several of them, over a group each.

Semantics of MindSpeed-MM's layerwise-disaggregated p2p: `group`, `next_rank` and `prev_rank` are single
values or lists that are read in parallel; the same tensor goes to all, and what comes from several is
averaged. Messages within the topology use its connections, whatever group of its ranks is named; for any
other group connections are made at its first use, by all its ranks, which must be first in their stages.

With `vtp_*` a message to or from the first rank of a neighbouring stage is an exchange in the order of the
relays between the two stages. So if the other end names no ranks, it meets that end's relay and both raise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ..communicator import Communicator, Work, kept_communicator
from ..core.checked import require_attributes
from ..core.extension import _C
from ..core.tensor_specs import spec_of
from ..parallel_state import PipelineTopology
from ..parallel_state.pipeline import NUM_CHANNELS, NUM_RELAY_CHANNELS

# Numbers within the two channels for messages between single ranks.
ACTIVATIONS, GRADIENTS = 0, 1


@dataclass(frozen=True)
class Peer:
    """A rank on the other end, and the order of messages to and from it."""

    comm: Communicator
    rank: int
    channel: int
    is_linked: bool = False  # the channel is that of a link between stages

    def send(self, tensor: torch.Tensor) -> Work:
        if self.is_linked:
            return exchanged(self.comm, tensor, self.comm.rank, [self.rank], self.channel, async_op=True)
        return self.comm.isend(tensor, self.rank, self.channel)

    def recv(self, tensor: torch.Tensor) -> Work:
        if self.is_linked:
            return exchanged(self.comm, tensor, self.rank, [self.comm.rank], self.channel, async_op=True)
        return self.comm.irecv(tensor, self.rank, self.channel)


def exchanged(
    comm: Communicator,
    tensor: torch.Tensor,
    source: int,
    destinations: Sequence[int],
    channel: int | None,
    async_op: bool = False,
) -> Work:
    """Copies `tensor` of rank `source` into that of the destinations, which is contiguous. The
    Work is done unless `async_op`."""
    flat = tensor.reshape(-1)
    plan = _C.plan_reshard(
        comm.rank,
        comm.size,
        ((flat.numel(),), flat.dtype),
        ([source], 0, None, True),
        (destinations, 0, None, True),
        tag="vtp",
        shown=(tuple(tensor.shape), tensor.dtype),
    )
    inputs, outputs = ([flat], []) if comm.rank == source else ([], [flat])
    members = sorted([source, *destinations])
    return comm.exchange(
        plan, inputs, outputs, async_op=async_op, members=members, channel=channel, returns_work=True
    )


def peers_of(topology: PipelineTopology, groups: Any, ranks: Any, default_rank: int, kind: int) -> list[Peer]:
    """Peers from groups and global ranks: lists, single values, or None for those of the topology."""
    groups = groups if isinstance(groups, list) else [groups]
    ranks = ranks if isinstance(ranks, list) else [ranks]
    peers = []
    known_ranks = set(dist.get_process_group_ranks(topology.group))
    for group, rank in zip(groups, ranks, strict=False):  # the shortest list counts, as there
        rank = default_rank if rank is None else rank
        if group is None or known_ranks.issuperset(dist.get_process_group_ranks(group)):
            comm, first_channel, group = topology.communicator, NUM_RELAY_CHANNELS, topology.group
        else:
            counts: dict[str, int] = dict.fromkeys(("cpu", "cuda"), NUM_CHANNELS - NUM_RELAY_CHANNELS)
            comm, first_channel = kept_communicator(group, None, "peers", counts), 0
        peers.append(Peer(comm, dist.get_group_rank(group, rank), first_channel + kind))
    return peers


def send_to(peers: Sequence[Peer], tensor: torch.Tensor) -> list[Work]:
    """Sends the same tensor to each of the peers."""
    spec_of(tensor, "tensor")
    return [peer.send(tensor.detach()) for peer in peers]


class Received:
    """A tensor in flight from one rank, or the mean of tensors from several ranks.

    Like a Work, but with several sources only one thread at a time may call `wait`. The mean is taken on the
    current stream if the tensor is on a device.
    """

    def __init__(self, peers: Sequence[Peer], shape: Sequence[int], dtype: torch.dtype):
        self._buffers = [peer.comm.empty(shape, dtype) for peer in peers]
        self._works = [peer.recv(buffer) for peer, buffer in zip(peers, self._buffers, strict=True)]
        self.tensor = self._buffers[0]

    def wait(self, timeout: float | None = None) -> None:
        for work in self._works:
            work.wait(timeout)
        if len(self._buffers) > 1:
            _take_mean(self.tensor.detach(), self._buffers)
            for buffer in self._buffers:
                if buffer.is_cuda:  # else the stream that it was made on could reuse its memory
                    buffer.record_stream(torch.cuda.current_stream(buffer.device))
            self._buffers = self._buffers[:1]

    def is_completed(self) -> bool:
        """Whether everything has arrived; `wait` computes the mean."""
        return all(work.is_completed() for work in self._works)


def _take_mean(output: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Writes the mean: by one kernel, in fp32 if the dtype is smaller; of dtypes without a kernel (integers,
    bool, float8) in fp64, then cast back to the dtype.
    """
    if output.is_complex():
        output, tensors = torch.view_as_real(output), list(map(torch.view_as_real, tensors))
    if _C.reduces("AVG", output.dtype):
        _C.reduce(output, tensors, "AVG")
    else:
        output.copy_(torch.stack([tensor.to(torch.float64) for tensor in tensors]).mean(0))


def required(tensor_shape: Any, config: Any) -> tuple[Sequence[int], torch.dtype]:
    """Shape and dtype of a tensor to be received.

    Raises:
        RuntimeError: either is None, as in MindSpeed-MM.
        TypeError: the config is a dict.
    """
    require_attributes(config)
    dtype = getattr(config, "pipeline_dtype", None)
    if dtype is None:
        raise RuntimeError("config.pipeline_dtype must be set, to receive a tensor of that dtype")
    if tensor_shape is None:
        raise RuntimeError("tensor_shape must be given, to receive a tensor of that shape")
    return tensor_shape, dtype


def leaf(tensor: torch.Tensor) -> torch.Tensor:
    """Makes the tensor require grad if its dtype can; returns it."""
    return tensor.requires_grad_(tensor.is_floating_point() or tensor.is_complex())
