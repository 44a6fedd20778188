"""The names of megatron.core.pipeline_parallel.p2p_communication, for code that imports that module.

`_batched_p2p_ops` and `_p2p_ops` are private there, and used by code that patches it. Here activations, which
go to the next stage, have tag 0 and gradients tag 1, so that two stages cannot swap them.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import distributed as dist
from ..communicator import Work
from .p2p_communicator import ACTIVATIONS, GRADIENTS, P2PCommunicator
from .shapes import is_single_shape

__all__ = ["P2PCommunicator", "Shape", "is_single_shape"]

Shape = list[int] | torch.Size


def _batched_p2p_ops(
    *, group: Any, prev_pipeline_rank: int, next_pipeline_rank: int, **tensors: Any
) -> list[Work]:
    """Posts what `_p2p_ops` posts as one batch; returns a list of its handle, or an empty one."""
    ops = _ops(prev_pipeline_rank, next_pipeline_rank, **tensors)
    return dist.batch_isend_irecv(
        [dist.P2POp(op, tensor, peer, group, tag) for op, tensor, peer, tag in ops.values()]
    )


def _p2p_ops(
    *, group: Any, prev_pipeline_rank: int, next_pipeline_rank: int, **tensors: Any
) -> dict[str, Work]:
    """Posts each of tensor_send_prev, tensor_recv_prev, tensor_send_next, tensor_recv_next that is not None,
    to and from these global ranks; returns handles by "send_prev", "recv_prev", "send_next", "recv_next".
    """
    ops = _ops(prev_pipeline_rank, next_pipeline_rank, **tensors)
    return {name: op(tensor, peer, group, tag) for name, (op, tensor, peer, tag) in ops.items()}


def _ops(
    prev_rank: int,
    next_rank: int,
    *,
    tensor_send_prev: torch.Tensor | None,
    tensor_recv_prev: torch.Tensor | None,
    tensor_send_next: torch.Tensor | None,
    tensor_recv_next: torch.Tensor | None,
) -> dict[str, tuple[Any, torch.Tensor, int, int]]:
    """Function, tensor, peer and tag of each message."""
    every = {
        "send_prev": (dist.isend, tensor_send_prev, prev_rank, GRADIENTS),
        "recv_prev": (dist.irecv, tensor_recv_prev, prev_rank, ACTIVATIONS),
        "send_next": (dist.isend, tensor_send_next, next_rank, ACTIVATIONS),
        "recv_next": (dist.irecv, tensor_recv_next, next_rank, GRADIENTS),
    }
    return {
        name: (op, tensor, peer, tag) for name, (op, tensor, peer, tag) in every.items() if tensor is not None
    }
