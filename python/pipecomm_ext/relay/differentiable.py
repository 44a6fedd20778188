"""The relay as autograd sees it: the source gives a tensor away, the destination gets it, and the other way
round with the gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .stage_relay import Link, StageRelay


class SentToken(torch.Tensor):
    """What the source keeps of a tensor that it gave away: no elements, and a place in the graph."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    def backward(self, gradient: torch.Tensor | None = None, *args: Any, **kwargs: Any) -> None:
        """Receives the gradient and goes on from there; needs no argument, as there are no elements."""
        super().backward(torch.empty_like(self) if gradient is None else gradient, *args, **kwargs)


def relay(
    stage_relay: StageRelay,
    tensor: torch.Tensor | None,
    shape: Sequence[int],
    dtype: torch.dtype,
    link: Link,
) -> torch.Tensor:
    """See `StageRelay.relay`; this rank is in one of the stages of `link`."""
    comm = stage_relay.communicator
    is_source = stage_relay.topology.get_vtp_my_stage_idx() == link.source_idx
    with comm.collective("relay", link.members, link.channel):
        if not is_source and tensor is not None:
            raise ValueError("tensor must be None on the ranks of dst_stage, which receive it")
        if is_source and not isinstance(tensor, torch.Tensor):
            raise TypeError(f"tensor must be a torch.Tensor in src_stage, not {type(tensor).__name__}")
        if is_source and tensor.dtype != dtype:
            raise ValueError(f"tensor is {tensor.dtype}, but dtype says {dtype}")
    can_have_grad = isinstance(dtype, torch.dtype) and (dtype.is_floating_point or dtype.is_complex)
    # Both stages record the relay, whatever requires grad before it: each relies on the other's backward.
    anchor = torch.empty(0, device=comm.device, requires_grad=can_have_grad)
    if is_source:
        return _Give.apply(stage_relay, link, shape, tensor, anchor).as_subclass(SentToken)
    return _Take.apply(stage_relay, link, shape, dtype, anchor)


class _Give(torch.autograd.Function):
    @staticmethod
    def forward(ctx, stage_relay, link, shape, tensor, anchor):
        stage_relay.send_on(link, tensor, False, shape)
        ctx.stage_relay, ctx.link, ctx.spec = stage_relay, link.reversed(), (shape, tensor.dtype)
        return tensor.new_empty(0)

    @staticmethod
    def backward(ctx, _):
        gradient, _ = ctx.stage_relay.recv_on(ctx.link, *ctx.spec, False)
        return None, None, None, gradient, None


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx, stage_relay, link, shape, dtype, anchor):
        result, _ = stage_relay.recv_on(link, shape, dtype, False)
        ctx.stage_relay, ctx.link, ctx.shape = stage_relay, link.reversed(), shape
        return result

    @staticmethod
    def backward(ctx, gradient):
        ctx.stage_relay.send_on(ctx.link, gradient, False, ctx.shape)
        return None, None, None, None, None
