"""MindSpeed-MM's `vtp_*` functions: the stage relay between stages of different tensor-parallel size.

Same names, arguments and results. Different on purpose: the part within the stage starts when the data arrive
and not in `wait()`; `wait()` may be called twice; a tensor that is not contiguous is copied; shapes and
dtypes that do not fit raise on all ranks; tensors of several sources are averaged; sequence parallelism, in
which ranks would hold pieces, is refused (use a `StageRelay` with a sharded layout).

Without `group`, `next_rank`, `prev_rank` a call is a `StageRelay` of replicated tensors over the topology,
and every rank of both stages takes part. With any of them the first rank of the stage exchanges with the
named ranks, over the named groups, and passes tensors on to its stage. All ranks of both stages must use the
same form: a waiting rank that finds otherwise aborts the topology's communicator with this reason.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..communicator import Work
from ..errors import PipeCommMismatch, PipeCommTimeout
from ..parallel_state import PipelineTopology, get_pipeline_topology
from ..relay import StageRelay
from ..relay.link import BACKWARD, FORWARD, Link
from .named_peers import (
    ACTIVATIONS,
    GRADIENTS,
    Peer,
    Received,
    exchanged,
    leaf,
    peers_of,
    required,
    send_to,
)


def vtp_recv_forward(
    tensor_shape: Sequence[int], config: Any, async_op: bool = False, **kwargs: Any
) -> torch.Tensor | tuple[torch.Tensor, dict[str, Any]]:
    """Receives an activation from the previous stage (the first stage: from the last).

    Args:
        tensor_shape: shape of the whole tensor.
        config: its `pipeline_dtype` is the dtype.
        async_op: return (tensor, {"recv_prev": work}) before it has arrived.
        group, prev_rank: torch group(s) and global rank(s) to receive from; with lists of both, the result is
            the fp32 mean of what comes from each. The part in the stage then starts in `wait()`, which all
            its ranks call.
        topology: default that of `parallel_state`.

    Returns:
        the tensor, on all ranks of the stage: a leaf that requires grad if its dtype can.

    Raises:
        RuntimeError: `config.pipeline_dtype` or `tensor_shape` is None.
        ValueError: `config.sequence_parallel` is set.
    """
    return _receive(FORWARD, "prev", tensor_shape, config, async_op, kwargs)


def vtp_recv_backward(
    tensor_shape: Sequence[int], config: Any, async_op: bool = False, **kwargs: Any
) -> torch.Tensor | tuple[torch.Tensor, dict[str, Any]]:
    """Receives a gradient from the next stage (the last stage: from the first).

    See `vtp_recv_forward`, with `next_rank` and {"recv_next": work}.
    """
    return _receive(BACKWARD, "next", tensor_shape, config, async_op, kwargs)


def vtp_send_forward(tensor: torch.Tensor, **kwargs: Any) -> list[Work] | None:
    """Sends an activation, which all ranks of the stage hold, to the next stage (the last: to the first).

    `group`, `next_rank`, `topology`: see `vtp_recv_forward`; the same tensor goes to each rank of a list.

    Returns:
        on the first rank of the stage a list of handles (may be dropped), on the others None.
    """
    return _send(FORWARD, "next", tensor, kwargs)


def vtp_send_backward(tensor: torch.Tensor, **kwargs: Any) -> list[Work] | None:
    """Sends a gradient to the previous stage; see `vtp_send_forward`, with `prev_rank`.

    It is the gradient of the first rank of this stage: the ranks' gradients are not summed.
    """
    return _send(BACKWARD, "prev", tensor, kwargs)


_RULE = "with vtp_* all ranks of both stages give group, next_rank or prev_rank, or none does"


def _receive(kind: str, side: str, tensor_shape: Any, config: Any, async_op: bool, kwargs: dict) -> Any:
    topology = kwargs.get("topology") or get_pipeline_topology()
    relay = StageRelay(topology)
    link = relay.link(kind, receives=True) if topology.num_stages > 1 else None
    peers = _named_peers(topology, kind, side, link, kwargs)
    try:
        shape, dtype = required(tensor_shape, config)
        if getattr(config, "sequence_parallel", False):
            raise ValueError(
                "with sequence_parallel the ranks of a stage hold pieces, which vtp_* cannot know; use "
                'StageRelay(layout=("sharded", dim)), whose shapes are those of the whole tensor'
            )
    except (RuntimeError, TypeError, ValueError) as error:
        if peers is None:
            relay.refuse(kind, True, error)
        raise
    work: Work | _PassedOn
    if peers is None:
        receive = relay.recv_forward if kind == FORWARD else relay.recv_backward
        tensor, work = receive(shape, dtype, async_op=True)
    else:
        work = _PassedOn(topology, peers, shape, dtype, None if link is None else link.channel)
        tensor = work.tensor
    if async_op:
        return leaf(tensor), {f"recv_{side}": work}
    with contextlib.nullcontext() if peers is not None else _naming_alike(topology):
        work.wait()
    return leaf(tensor)


def _send(kind: str, side: str, tensor: torch.Tensor, kwargs: dict) -> list[Work] | None:
    topology = kwargs.get("topology") or get_pipeline_topology()
    relay = StageRelay(topology)
    link = relay.link(kind, receives=False) if topology.num_stages > 1 else None
    peers = _named_peers(topology, kind, side, link, kwargs)
    if peers is not None:
        return send_to(peers, tensor) if topology.is_vtp_stage_rank0() else None
    work = (relay.send_forward if kind == FORWARD else relay.send_backward)(tensor, async_op=True)
    return [work] if topology.is_vtp_stage_rank0() else None


def _named_peers(
    topology: PipelineTopology, kind: str, side: str, link: Link | None, kwargs: dict
) -> list[Peer] | None:
    """The ranks that the caller names, which only the first rank of a stage uses; None if none are named."""
    groups, ranks = kwargs.get("group"), kwargs.get(f"{side}_rank")
    if groups is None and ranks is None:
        return None
    if not topology.is_vtp_stage_rank0():
        return []
    stages, mine = topology.get_vtp_stage_ranks(), topology.get_vtp_my_stage_idx()
    idx = (mine + 1) % len(stages) if side == "next" else mine - 1
    peers = peers_of(topology, groups, ranks, stages[idx][0], ACTIVATIONS if kind == FORWARD else GRADIENTS)
    if link is None:
        return peers
    neighbour, channel = (topology.communicator, topology.stages[idx][0]), link.channel
    assert channel is not None
    return [
        replace(peer, channel=channel, is_linked=True) if (peer.comm, peer.rank) == neighbour else peer
        for peer in peers
    ]


@contextlib.contextmanager
def _naming_alike(topology: PipelineTopology) -> Iterator[None]:
    """Wraps a wait. If only one of two ends names ranks, other ranks of both stages would wait until the
    deadline, so the communicator is aborted with the reason.
    """
    try:
        yield
    except (PipeCommMismatch, PipeCommTimeout) as error:
        disagrees = isinstance(error, PipeCommMismatch) and _ops_of(error) == {"relay", "exchange"}
        if disagrees or isinstance(error, PipeCommTimeout):
            error.args = (f"{error}; {_RULE}",)
        if disagrees:
            topology.communicator.abort(str(error))
        raise


def _ops_of(error: PipeCommMismatch) -> set[str]:
    return {side.op for side in (error.ours, error.theirs) if side}


class _PassedOn:
    """A tensor that the first rank of a stage receives, and passes on to the others in `wait`.

    If what should arrive cannot be passed on, all ranks of the stage raise.
    """

    def __init__(
        self,
        topology: PipelineTopology,
        peers: Sequence[Peer],
        shape: Sequence[int],
        dtype: torch.dtype,
        channel: int | None,
    ):
        self._topology, self._channel = topology, channel
        self._received = Received(peers, shape, dtype) if topology.is_vtp_stage_rank0() else None
        self._is_done = False
        self._failure: Exception | None = None
        self.tensor = self._received.tensor if self._received else topology.communicator.empty(shape, dtype)

    def wait(self, timeout: float | None = None) -> None:
        if self._failure is not None:
            raise self._failure
        if not self._is_done:
            try:
                self._receive_and_pass_on(timeout)
                self._is_done = True
            except PipeCommTimeout:
                raise  # `wait` may be called again
            except Exception as error:
                self._failure = error
                raise

    def is_completed(self) -> bool:
        """Whether `wait` has passed it on, or has failed."""
        return self._is_done or self._failure is not None

    def _receive_and_pass_on(self, timeout: float | None) -> None:
        comm, (leader, *others) = self._topology.communicator, self._topology.stage_ranks
        if self._received is not None:
            try:
                with _naming_alike(self._topology):
                    self._received.wait(timeout)
            except PipeCommTimeout:
                raise
            except Exception as error:
                if others and comm.failure is None:  # else it has been aborted, with the reason
                    comm.refuse("exchange", error, sorted(self._topology.stage_ranks), self._channel)
                raise
        if others:
            with _naming_alike(self._topology):
                exchanged(comm, self.tensor.detach(), leader, others, self._channel)
