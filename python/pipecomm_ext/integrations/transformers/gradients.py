"""The gradients of the whole sequence from those of its pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ...communicator import Communicator
from ...communicator.registry import communicator_of
from .pieces import state_of

BUCKET_BYTES = 32 << 20  # of gradients that are summed at once


def sum_gradients(model: torch.nn.Module, process_group: Any = None) -> None:
    """Sums the gradient of each parameter over the ranks that share a sequence. Collective.

    Call it after `backward`, before clipping and the optimizer: each rank has the gradients of its piece, and
    their sum is the gradient of the whole batch. All ranks get the same bits. A parameter that has a gradient
    on some ranks only, such as an expert that no token of a piece has reached, gets the sum of those.

    Not for models in DDP or FSDP, which average gradients themselves: multiply the loss by the number of
    ranks instead.

    Args:
        model: the same parameters on all ranks, in the same order.
        process_group: the group that was passed to `register`.

    Raises:
        TypeError: a gradient is sparse, or a DTensor, as with FSDP.

    Example:
        ```python
        loss = model(**split_batch({"input_ids": tokens, "labels": tokens})).loss
        loss.backward()
        sum_gradients(model)  # those of the whole batch, on every rank
        ```
    """
    state = state_of(process_group)
    groups = [state.get_ulysses_group()] if state.is_ulysses_enable() else []
    groups += [state.get_ring_group()] if state.is_ring_enable() else []
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for group in groups:
        if parameters:
            _sum_over(group, parameters)


def _sum_over(group: Any, parameters: Sequence[Tensor]) -> None:
    comm = communicator_of(group, parameters[0])
    with comm.collective("all_reduce"):
        for parameter in parameters:
            _check(parameter.grad)
    has_gradient = torch.tensor([p.grad is not None for p in parameters], device=comm.device)
    comm.all_reduce(has_gradient)
    gradients = []
    for parameter, is_wanted in zip(parameters, has_gradient.tolist(), strict=True):
        if is_wanted:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
    for bucket in _buckets(gradients):
        _sum_together(comm, bucket)


def _check(gradient: Tensor | None) -> None:
    if isinstance(gradient, DTensor) or (gradient is not None and gradient.layout != torch.strided):
        kind = "a DTensor" if isinstance(gradient, DTensor) else "sparse"
        raise TypeError(
            f"sum_gradients() got a gradient that is {kind}; it sums dense gradients of plain tensors. DDP "
            "and FSDP average gradients themselves: multiply the loss by the number of ranks instead"
        )


def _buckets(gradients: list[Tensor]) -> list[list[Tensor]]:
    """Gradients of one dtype, in order, up to BUCKET_BYTES together; larger ones alone."""
    buckets: list[list[Tensor]] = []
    open_ones: dict[torch.dtype, tuple[list[Tensor], int]] = {}
    for gradient in gradients:
        bucket, num_bytes = open_ones.get(gradient.dtype, ([], 0))
        if not bucket or num_bytes + gradient.nbytes > BUCKET_BYTES:
            bucket, num_bytes = [], 0
            buckets.append(bucket)
        bucket.append(gradient)
        open_ones[gradient.dtype] = bucket, num_bytes + gradient.nbytes
    return buckets


def _sum_together(comm: Communicator, bucket: list[Tensor]) -> None:
    if len(bucket) == 1:
        comm.all_reduce(bucket[0], dist.ReduceOp.SUM)
        return
    flat = torch.cat([gradient.flatten() for gradient in bucket])
    comm.all_reduce(flat, dist.ReduceOp.SUM)
    pieces = flat.split([gradient.numel() for gradient in bucket])
    for gradient, piece in zip(bucket, pieces, strict=True):
        gradient.copy_(piece.view_as(gradient))
