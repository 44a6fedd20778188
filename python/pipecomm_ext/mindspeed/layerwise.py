"""MindSpeed-MM's layerwise-disaggregated point-to-point functions, for pipelines in U shape.

With `config.layerwise_disaggregated_training` the first stage runs the first and the last layers: what the
last stage computes goes back to the first, and `is_end_stage` selects the end of the U that a call of the
first stage is for. The topology determines the first and last stage; virtual stages are ignored.

Same names, arguments and results. Different on purpose: dropping a handle loses no message, and with several
groups no handle is lost; the mean of several tensors waits only for them; the shape and dtype of every
message are checked; a tensor that is not contiguous is copied; `use_ring_exchange_p2p` and `batch_p2p_sync`
change only what is returned.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..core.timers import timed
from ..parallel_state import PipelineTopology, get_pipeline_topology
from .named_peers import ACTIVATIONS, GRADIENTS, Peer, Received, leaf, peers_of, required, send_to


def recv_forward_with_reqs(
    tensor_shape: Sequence[int], config: Any, is_end_stage: bool = False, **kwargs: Any
) -> tuple[torch.Tensor | None, Any]:
    """Receives an activation from the previous stage; nothing in the first stage unless `is_end_stage`.

    Args:
        tensor_shape: its shape; its dtype is `config.pipeline_dtype`.
        group, prev_rank, next_rank: torch group(s) and global rank(s) on the other end; with lists of both,
            the result is the fp32 mean of what comes from each. Default: this rank's chain of the topology.
        wait_on_reqs: False returns before it has arrived.
        topology: default that of `parallel_state`.

    Returns:
        (None, None) if there is nothing to receive, else (tensor, requests): a leaf that requires grad if its
        dtype can, and {"recv_prev": handle} with `wait_on_reqs=False`, else None (an empty list with
        `config.use_ring_exchange_p2p`).

    Raises:
        RuntimeError: `config.pipeline_dtype` or `tensor_shape` is None.
        ValueError: `config.batch_p2p_comm` with `wait_on_reqs=False`, where there are no requests.
    """
    topology = kwargs.get("topology") or get_pipeline_topology()
    if topology.is_pipeline_first_stage() and not is_end_stage:
        return None, None
    return _receive("forward-recv", topology, "prev", ACTIVATIONS, tensor_shape, config, kwargs)


def recv_backward_with_reqs(
    tensor_shape: Sequence[int], config: Any, is_end_stage: bool = False, **kwargs: Any
) -> tuple[torch.Tensor | None, Any]:
    """Receives a gradient from the next stage; see `recv_forward_with_reqs`, with {"recv_next": handle}.

    Nothing in the last stage, or, layerwise-disaggregated, in the first stage if `is_end_stage`.
    """
    topology = kwargs.get("topology") or get_pipeline_topology()
    if _is_end(topology, config, is_end_stage):
        return None, None
    return _receive("backward-recv", topology, "next", GRADIENTS, tensor_shape, config, kwargs)


def send_forward(
    output_tensor: torch.Tensor | None, config: Any, is_end_stage: bool = False, **kwargs: Any
) -> None:
    """Sends an activation to the next stage (to each rank of a list); see `recv_forward_with_reqs`.

    Nothing if the tensor is None, in the last stage, or, layerwise-disaggregated, in the first stage if
    `is_end_stage`. With `wait_on_reqs=False` the message is delivered all the same; the tensor must not
    change before.
    """
    topology = kwargs.get("topology") or get_pipeline_topology()
    if output_tensor is not None and not _is_end(topology, config, is_end_stage):
        _send("forward-send", topology, "next", ACTIVATIONS, output_tensor, config, kwargs)


def send_backward(
    input_tensor_grad: torch.Tensor | None, config: Any, is_end_stage: bool = False, **kwargs: Any
) -> None:
    """Sends a gradient to the previous stage; see `send_forward`.

    Nothing if the gradient is None, or in the first stage unless `is_end_stage`.
    """
    topology = kwargs.get("topology") or get_pipeline_topology()
    if input_tensor_grad is not None and (is_end_stage or not topology.is_pipeline_first_stage()):
        _send("backward-send", topology, "prev", GRADIENTS, input_tensor_grad, config, kwargs)


def _is_end(topology: PipelineTopology, config: Any, is_end_stage: bool) -> bool:
    """Whether no stage follows: the last stage, or the far end of the U."""
    if getattr(config, "layerwise_disaggregated_training", False):
        return topology.is_pipeline_first_stage() and is_end_stage
    return topology.is_pipeline_last_stage()


def _receive(
    timer: str, topology: PipelineTopology, side: str, kind: int, tensor_shape: Any, config: Any, kwargs: dict
) -> tuple[torch.Tensor, Any]:
    with timed(getattr(config, "timers", None), timer):
        shape, dtype = required(tensor_shape, config)
        waits = _waits(config, kwargs)
        received = Received(_peers(topology, side, kind, kwargs), shape, dtype)
        if not waits:
            return leaf(received.tensor), {f"recv_{side}": received}
        received.wait()
        return leaf(received.tensor), [] if getattr(config, "use_ring_exchange_p2p", False) else None


def _send(
    timer: str, topology: PipelineTopology, side: str, kind: int, tensor: Any, config: Any, kwargs: dict
) -> None:
    with timed(getattr(config, "timers", None), timer):
        waits = _waits(config, kwargs)
        works = send_to(_peers(topology, side, kind, kwargs), tensor)
        if waits:
            for work in works:
                work.wait()


def _waits(config: Any, kwargs: dict[str, Any]) -> bool:
    """Whether the call waits for its messages."""
    if getattr(config, "use_ring_exchange_p2p", False) or kwargs.get("wait_on_reqs", True):
        return True
    if getattr(config, "batch_p2p_comm", False):
        raise ValueError(
            "wait_on_reqs=False needs config.batch_p2p_comm=False: a batch is waited for as a whole"
        )
    return False


def _peers(topology: PipelineTopology, side: str, kind: int, kwargs: dict[str, Any]) -> list[Peer]:
    default_rank = getattr(topology, f"get_pipeline_model_parallel_{side}_rank")()
    peers = peers_of(topology, kwargs.get("group"), kwargs.get(f"{side}_rank"), default_rank, kind)
    others = kwargs.get("prev_rank" if side == "next" else "next_rank")
    return peers[: len(others)] if isinstance(others, list) else peers  # the shortest list counts, as there
