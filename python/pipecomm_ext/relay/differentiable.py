"""The relay as autograd sees it: one stage sends a tensor to another, and receives its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.tensor_specs import can_have_gradient
from ..sequence_parallel.differentiable import told_of_backwards
from .link import Link


class SentToken(Tensor):
    """Represents a tensor that the source has sent: it has no elements, but a place in the graph."""

    # As torch does; its stub declares the function as a method.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def backward(self, gradient: Tensor | None = None, *args: Any, **kwargs: Any) -> None:
        """Receives the gradient and continues backward; needs no argument, as there are no elements."""
        super().backward(torch.empty_like(self) if gradient is None else gradient, *args, **kwargs)


def give(relay: Any, link: Link, tensor: Tensor, shape: Sequence[int]) -> SentToken:
    """Sends what this rank of the source holds, by a StageRelay; the backward receives its gradient."""
    return _Give.apply(relay, link, shape, tensor, _anchor(tensor.dtype, tensor.device)).as_subclass(
        SentToken
    )


def take(relay: Any, link: Link, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Receives what this rank of the destination is to hold; the backward sends its gradient."""
    return _Take.apply(relay, link, shape, dtype, _anchor(dtype, device))


def _anchor(dtype: Any, device: torch.device) -> Tensor:
    """An input that makes autograd record the relay on both stages if `dtype` can have a gradient.

    Each stage relies on the other's backward, whether or not anything before the relay requires grad.
    """
    requires_grad = isinstance(dtype, torch.dtype) and can_have_gradient(dtype)
    return torch.empty(0, device=device, requires_grad=requires_grad)


class _Give(torch.autograd.Function):
    @staticmethod
    def forward(ctx, relay, link, shape, tensor, anchor):
        relay.send_on(link, tensor, False, shape)
        ctx.relay, ctx.link, ctx.shape, ctx.dtype = relay, link.reversed(), shape, tensor.dtype
        return tensor.new_empty(0)

    @staticmethod
    def backward(ctx, *_):
        with told_of_backwards():
            gradient, _ = ctx.relay.recv_on(ctx.link, ctx.shape, ctx.dtype, False)
        return None, None, None, gradient, None  # relay, link, shape, tensor's, anchor


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx, relay, link, shape, dtype, anchor):
        ctx.relay, ctx.link, ctx.shape = relay, link.reversed(), shape
        return relay.recv_on(link, shape, dtype, False)[0]

    @staticmethod
    def backward(ctx, *gradients):
        [gradient] = gradients
        with told_of_backwards():
            ctx.relay.send_on(ctx.link, gradient, False, ctx.shape)
        return None, None, None, None, None  # relay, link, shape, dtype, anchor
