"""Point-to-point calls and broadcasts in a graph of torch.compile, by the operators of `operators.py`.

Those are pure functions, as graphs need them, so received data is copied into the buffers here. Each call is
done when it returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from ..core.copyable import copyable
from ..core.extension import _C

Work = _C.Work


class Message(NamedTuple):
    """A send or a receive; `peer` is a rank of the group."""

    is_send: bool
    tensor: Tensor
    peer: int
    channel: int


class DoneWork:
    """The handle of an operation that is done, with the methods of a `Work`, which graphs cannot make."""

    number = 0
    is_captured = False

    def wait(self, timeout: object = None) -> None:
        """Returns at once."""

    def synchronize(self) -> None:
        """Returns at once."""

    def is_completed(self) -> bool:
        """True."""
        return True


def done_work() -> Work:
    return cast(Work, DoneWork())


def batch_p2p(group: str, messages: Sequence[Message]) -> None:
    """Sends and receives one batch in the group of that name."""
    sends = [message for message in messages if message.is_send]
    recvs = [message for message in messages if not message.is_send]
    if not messages:
        return
    for message in recvs:
        _check_buffer(message.tensor)
    with torch.no_grad():
        results = torch.ops.pipecomm_ext.batch_p2p(
            [message.tensor for message in sends],
            [message.peer for message in sends],
            [message.channel for message in sends],
            [message.tensor for message in recvs],
            [message.peer for message in recvs],
            [message.channel for message in recvs],
            group,
        )
        for message, result in zip(recvs, results, strict=True):
            copyable(message.tensor).copy_(copyable(result))


def broadcast(group: str, tensor: Tensor, src: int, is_source: bool) -> None:
    """Copies `tensor` of rank `src` of the group of that name into `tensor` of all others."""
    if not is_source:
        _check_buffer(tensor)
    with torch.no_grad():
        result = torch.ops.pipecomm_ext.broadcast(tensor, group, src)
        if not is_source:
            copyable(tensor).copy_(copyable(result))


def _check_buffer(tensor: Tensor) -> None:
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "tensor requires grad; receive into a tensor that does not, and call requires_grad_() after, or "
            "receive under torch.no_grad()"
        )
