"""In a compiled graph: the relay as two custom operators, each of which is the other's gradient.

Both take part in autograd by `anchor`, a tensor without elements that requires grad: each stage relies on the
other's backward, whether or not anything before the relay requires grad.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.operators import communicates
from .differentiable import SentToken
from .link import BACKWARD, FORWARD

_relays: weakref.WeakSet[Any] = weakref.WeakSet()


def anchor_of(relay: Any) -> Tensor:
    """Makes a StageRelay known to the operators, by its id. Returns its anchor, which it keeps: a graph can
    compute gradients only of tensors that it is given.
    """
    _relays.add(relay)
    with torch.inference_mode(False):
        return torch.empty(0, device=relay.communicator.device, requires_grad=True)


def traced_relay(
    relay: Any, tensor: Tensor | None, shape: Sequence[int], dtype: torch.dtype, source: int, destination: int
) -> Tensor:
    """`StageRelay.relay`, whose arguments are checked."""
    can_have_grad = dtype.is_floating_point or dtype.is_complex
    anchor = relay.anchor if can_have_grad else relay.anchor.detach()
    link = id(relay), FORWARD, source, destination
    if tensor is None:
        return receive(anchor, *link, list(shape), dtype)
    return send(tensor, anchor, *link, list(shape)).as_subclass(SentToken)


def _relay_of(number: int) -> Any:
    for relay in _relays:
        if id(relay) == number:
            return relay
    raise ValueError("the StageRelay that a compiled function was traced with is gone")


# `shape` is that of the whole tensor. The result has no elements.
@torch.library.custom_op(
    "pipecomm_ext::relay_send",
    mutates_args=(),
    schema="(Tensor tensor, Tensor anchor, int relay, str kind, int source, int destination, SymInt[] shape)"
    " -> Tensor",
)
def send(tensor, anchor, relay, kind, source, destination, shape):
    stage_relay = _relay_of(relay)
    stage_relay.send_on(stage_relay.link_between(kind, source, destination, None), tensor, False, shape)
    return tensor.new_empty(0)


@communicates(send)
def _(tensor, anchor, relay, kind, source, destination, shape) -> Tensor:
    return tensor.new_empty(0)


@torch.library.custom_op(
    "pipecomm_ext::relay_receive",
    mutates_args=(),
    schema="(Tensor anchor, int relay, str kind, int source, int destination, SymInt[] shape, "
    "ScalarType dtype) -> Tensor",
)
def receive(anchor, relay, kind, source, destination, shape, dtype):
    stage_relay = _relay_of(relay)
    link = stage_relay.link_between(kind, source, destination, None)
    return stage_relay.recv_on(link, shape, dtype, False)[0]


@communicates(receive)
def _(anchor, relay, kind, source, destination, shape, dtype) -> Tensor:
    stage_relay = _relay_of(relay)
    holding = stage_relay.holding(destination, shape)
    mine = holding.shape_on(stage_relay.communicator.rank, tuple(shape))
    return torch.empty(mine, dtype=dtype, device=stage_relay.communicator.device)


# ---- gradients --------------------------------------------------------------------------------------------


def _reversed(kind: str, source: int, destination: int) -> tuple[str, int, int]:
    return BACKWARD if kind == FORWARD else FORWARD, destination, source


def _save_of_send(ctx, inputs, output) -> None:
    tensor, _, ctx.relay, *link, ctx.shape = inputs
    ctx.link, ctx.dtype = _reversed(*link), tensor.dtype


def _backward_of_send(ctx, grad):
    gradient = receive(grad, ctx.relay, *ctx.link, ctx.shape, ctx.dtype)
    return gradient, None, *[None] * 5  # tensor, anchor, relay, kind, source, destination, shape


def _save_of_receive(ctx, inputs, output) -> None:
    _, ctx.relay, *link, ctx.shape, _ = inputs
    ctx.link = _reversed(*link)


def _backward_of_receive(ctx, grad):
    token = send(grad, grad.new_empty(0), ctx.relay, *ctx.link, ctx.shape)
    return token, *[None] * 6  # anchor, relay, kind, source, destination, shape, dtype


send.register_autograd(_backward_of_send, setup_context=_save_of_send)
receive.register_autograd(_backward_of_receive, setup_context=_save_of_receive)
