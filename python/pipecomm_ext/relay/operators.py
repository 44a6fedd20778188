"""In a compiled graph: the relay as two custom operators, each of which is the other's gradient.

Both take part in autograd by `anchor`, a tensor without elements that requires grad: each stage relies on the
other's backward, whether or not anything before the relay requires grad. Both return their `number` as well,
which their gradient gets, see `Link.numbered`. It is on the device of the tensors, and is read on CPUs only,
whose exchanges compare it.
"""

from __future__ import annotations

import dataclasses
import secrets
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.operators import communicates
from ..core.tensor_specs import can_have_gradient
from .differentiable import SentToken
from .link import BACKWARD, FORWARD, Link

_relays: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()


def named_in_graphs(relay: Any) -> tuple[str, Tensor]:
    """Makes a StageRelay known to the operators. Returns its name, which no later one gets, and its anchor: a
    graph can compute gradients only of tensors that it is given. It keeps both.
    """
    name = secrets.token_hex(8)
    _relays[name] = relay
    with torch.inference_mode(False):
        return name, torch.empty(0, device=relay.communicator.device, requires_grad=True)


def traced_relay(
    relay: Any, tensor: Tensor | None, shape: Sequence[int], dtype: torch.dtype, source: int, destination: int
) -> Tensor:
    """`StageRelay.relay`, whose arguments are checked."""
    anchor = relay.anchor if can_have_gradient(dtype) else relay.anchor.detach()
    link = relay.name_in_graphs, FORWARD, source, destination
    if tensor is None:
        return receive(anchor, *link, list(shape), dtype)[0]
    return send(tensor, anchor, *link, list(shape))[0].as_subclass(SentToken)


def _relay_of(name: str) -> Any:
    relay = _relays.get(name)
    if relay is None:
        raise ValueError("the StageRelay that a compiled function was traced with is gone")
    return relay


def _link_of(relay: Any, kind: str, source: int, destination: int, number: Tensor | None) -> Link:
    link = relay.link_between(kind, source, destination, None)
    if number is None:
        return link.numbered(relay.communicator)
    return dataclasses.replace(link, number=0 if number.is_cuda else int(number))


def _number_of(relay: Any, link: Link) -> Tensor:
    return torch.full((), link.number, device=relay.communicator.device)


# `shape` is that of the whole tensor. The result has no elements.
@torch.library.custom_op(
    "pipecomm_ext::relay_send",
    mutates_args=(),
    schema="(Tensor tensor, Tensor anchor, str relay, str kind, int source, int destination, SymInt[] shape, "
    "Tensor? number=None) -> (Tensor, Tensor)",
)
def send(tensor, anchor, relay, kind, source, destination, shape, number=None):
    stage_relay = _relay_of(relay)
    link = _link_of(stage_relay, kind, source, destination, number)
    stage_relay.send_on(link, tensor, False, shape)
    return tensor.new_empty(0), _number_of(stage_relay, link)


@communicates(send)
def _(tensor, anchor, relay, kind, source, destination, shape, number=None) -> tuple[Tensor, Tensor]:
    return tensor.new_empty(0), tensor.new_empty((), dtype=torch.int64)


@torch.library.custom_op(
    "pipecomm_ext::relay_receive",
    mutates_args=(),
    schema="(Tensor anchor, str relay, str kind, int source, int destination, SymInt[] shape, "
    "ScalarType dtype, Tensor? number=None) -> (Tensor, Tensor)",
)
def receive(anchor, relay, kind, source, destination, shape, dtype, number=None):
    stage_relay = _relay_of(relay)
    link = _link_of(stage_relay, kind, source, destination, number)
    return stage_relay.recv_on(link, shape, dtype, False)[0], _number_of(stage_relay, link)


@communicates(receive)
def _(anchor, relay, kind, source, destination, shape, dtype, number=None) -> tuple[Tensor, Tensor]:
    stage_relay = _relay_of(relay)
    holding = stage_relay.holding(destination, shape)
    mine = holding.shape_on(stage_relay.communicator.rank, tuple(shape))
    result = torch.empty(mine, dtype=dtype, device=stage_relay.communicator.device)
    return result, result.new_empty((), dtype=torch.int64)


# ---- gradients --------------------------------------------------------------------------------------------


def _reversed(kind: str, source: int, destination: int) -> tuple[str, int, int]:
    return BACKWARD if kind == FORWARD else FORWARD, destination, source


def _save_of_send(ctx, inputs, output) -> None:
    tensor, _, ctx.relay, *link, ctx.shape, _ = inputs
    ctx.link, ctx.dtype = _reversed(*link), tensor.dtype
    ctx.save_for_backward(output[1])


def _backward_of_send(ctx, grad, _):
    gradient, _ = receive(grad, ctx.relay, *ctx.link, ctx.shape, ctx.dtype, *ctx.saved_tensors)
    return gradient, None, *[None] * 6  # tensor, anchor, relay, kind, source, destination, shape, number


def _save_of_receive(ctx, inputs, output) -> None:
    _, ctx.relay, *link, ctx.shape, _, _ = inputs
    ctx.link = _reversed(*link)
    ctx.save_for_backward(output[1])


def _backward_of_receive(ctx, grad, _):
    token, _ = send(grad, grad.new_empty(0), ctx.relay, *ctx.link, ctx.shape, *ctx.saved_tensors)
    return token, *[None] * 7  # anchor, relay, kind, source, destination, shape, dtype, number


send.register_autograd(_backward_of_send, setup_context=_save_of_send)
receive.register_autograd(_backward_of_receive, setup_context=_save_of_receive)
