"""MindSpeed-MM's `vtp_*` functions: the stage relay between stages of different tensor-parallel size.

Same names, arguments and results. Different on purpose: the part within the stage starts when the data arrive
and not in `wait()`; `wait()` may be called twice; a tensor that is not contiguous is copied; shapes and
dtypes that do not fit raise on all ranks; several sources give their mean; sequence parallelism, where ranks
would hold pieces, is refused (use a `StageRelay` with a sharded layout).

Without `group`, `next_rank`, `prev_rank` a call is a `StageRelay` of replicated tensors over the topology,
and every rank of both stages takes part. With any of them the first rank of the stage exchanges with the
ranks named, over the groups named, and passes on to its stage; then both ends name each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .. import _C
from ..communicator import Work
from ..errors import PipeCommMismatch
from ..parallel_state import PipelineTopology, get_pipeline_topology
from .peers import ACTIVATIONS, GRADIENTS, Peer, Received, leaf, peers_of, required, send_to
from .stage_relay import BACKWARD, FORWARD, StageRelay


def vtp_recv_forward(
    tensor_shape: Sequence[int], config: Any, async_op: bool = False, **kwargs: Any
) -> torch.Tensor | tuple[torch.Tensor, dict[str, Any]]:
    """Receives an activation from the previous stage, from the last one in the first.

    Args:
        tensor_shape: of the whole tensor.
        config: its `pipeline_dtype` is the dtype.
        async_op: return (tensor, {"recv_prev": work}) before it has arrived.
        group, prev_rank: torch group(s) and global rank(s) to receive from; a list of both gives the fp32
            mean of what comes from each. The part in the stage then starts in `wait()`, which all its ranks
            call.
        topology: default that of `parallel_state`.

    Returns:
        the tensor, on all ranks of the stage: a leaf that requires grad if its dtype can.

    Raises:
        RuntimeError: `config.pipeline_dtype` or `tensor_shape` is None.
        ValueError: `config.sequence_parallel` is set.
    """
    return _receive(FORWARD, "recv_prev", "prev_rank", tensor_shape, config, async_op, kwargs)


def vtp_recv_backward(
    tensor_shape: Sequence[int], config: Any, async_op: bool = False, **kwargs: Any
) -> torch.Tensor | tuple[torch.Tensor, dict[str, Any]]:
    """Receives a gradient from the next stage, from the first one in the last; see `vtp_recv_forward`, with
    `next_rank` and {"recv_next": work}.
    """
    return _receive(BACKWARD, "recv_next", "next_rank", tensor_shape, config, async_op, kwargs)


def vtp_send_forward(tensor: torch.Tensor, **kwargs: Any) -> list[Work] | None:
    """Sends an activation, which all ranks of the stage hold, to the next stage, from the last to the first.

    `group`, `next_rank`, `topology`: see `vtp_recv_forward`; the same tensor goes to each rank of a list.

    Returns:
        on the first rank of the stage a list of handles (may be dropped), on the others None.
    """
    return _send(FORWARD, "next_rank", tensor, kwargs)


def vtp_send_backward(tensor: torch.Tensor, **kwargs: Any) -> list[Work] | None:
    """Sends a gradient to the previous stage: that of the first rank of this stage, nothing is added up; see
    `vtp_send_forward`, with `prev_rank`.
    """
    return _send(BACKWARD, "prev_rank", tensor, kwargs)


def _receive(
    kind: str, handle: str, rank_name: str, tensor_shape: Any, config: Any, async_op: bool, kwargs: dict
) -> Any:
    topology = kwargs.get("topology") or get_pipeline_topology()
    relay = StageRelay(topology)
    peers = _named_peers(topology, kind, rank_name, kwargs)
    try:
        shape, dtype = required(tensor_shape, config)
        if getattr(config, "sequence_parallel", False):
            raise ValueError(
                "with sequence_parallel the ranks of a stage hold pieces, which vtp_* cannot know; use "
                'StageRelay(layout=("sharded", dim)), whose shapes are those of the whole tensor'
            )
    except (RuntimeError, ValueError) as error:
        if peers is None:
            relay.refuse(kind, True, error)
        raise
    if peers is None:
        receive = relay.recv_forward if kind == FORWARD else relay.recv_backward
        tensor, work = receive(shape, dtype, async_op=True)
    else:
        work = _PassedOn(topology, peers, shape, dtype)
        tensor = work.tensor
    if async_op:
        return leaf(tensor), {handle: work}
    work.wait()
    return leaf(tensor)


def _send(kind: str, rank_name: str, tensor: torch.Tensor, kwargs: dict) -> list[Work] | None:
    topology = kwargs.get("topology") or get_pipeline_topology()
    peers = _named_peers(topology, kind, rank_name, kwargs)
    if peers is not None:
        return send_to(peers, tensor) if topology.is_vtp_stage_rank0() else None
    relay = StageRelay(topology)
    work = (relay.send_forward if kind == FORWARD else relay.send_backward)(tensor, async_op=True)
    return [work] if topology.is_vtp_stage_rank0() else None


def _named_peers(
    topology: PipelineTopology, kind: str, rank_name: str, kwargs: dict[str, Any]
) -> list[Peer] | None:
    """The ranks that the caller names; None if he does not. What is named matters on a stage's first rank."""
    groups, ranks = kwargs.get("group"), kwargs.get(rank_name)
    if groups is None and ranks is None:
        return None
    if not topology.is_vtp_stage_rank0():
        return []
    stages, mine = topology.get_vtp_stage_ranks(), topology.get_vtp_my_stage_idx()
    neighbour = stages[(mine + 1) % len(stages) if rank_name == "next_rank" else mine - 1]
    return peers_of(topology, groups, ranks, neighbour[0], ACTIVATIONS if kind == FORWARD else GRADIENTS)


class _PassedOn:
    """A tensor that the first rank of a stage receives, and passes on to the others in `wait`. If what it is
    sent does not fit, all of them raise.
    """

    def __init__(
        self, topology: PipelineTopology, peers: Sequence[Peer], shape: Sequence[int], dtype: torch.dtype
    ):
        self._topology, self._spec = topology, (tuple(shape), dtype)
        self._received = Received(peers, shape, dtype) if topology.is_vtp_stage_rank0() else None
        self._is_done = False
        self._mismatch: PipeCommMismatch | None = None
        if self._received is not None:
            self.tensor = self._received.tensor
        else:
            self.tensor = topology.communicator.empty(shape, dtype)

    def wait(self, timeout: float | None = None) -> None:
        if self._mismatch is not None:
            raise self._mismatch
        if self._is_done:
            return
        try:
            self._receive_and_pass_on(timeout)
        except PipeCommMismatch as error:
            self._mismatch = error
            raise
        self._is_done = True

    def is_completed(self) -> bool:
        """Whether `wait` has passed it on, or has failed to."""
        return self._is_done or self._mismatch is not None

    def _receive_and_pass_on(self, timeout: float | None) -> None:
        comm, (leader, *others) = self._topology.communicator, self._topology.stage_ranks
        members = sorted(self._topology.stage_ranks)
        if self._received is not None:
            try:
                self._received.wait(timeout)
            except PipeCommMismatch as error:
                if others:
                    comm.refuse("relay", error, members)
                raise
        if not others:
            return
        shape, dtype = self._spec
        flat = self.tensor.detach().view(-1)
        plan = _C.plan_reshard(
            comm.rank,
            comm.size,
            ((flat.numel(),), dtype),
            ([leader], 0, None, True),
            (others, 0, None, True),
            tag="vtp",
            shown=self._spec,
        )
        inputs, outputs = ([flat], []) if comm.rank == leader else ([], [flat])
        comm.exchange(plan, inputs, outputs, op="relay", members=members)
