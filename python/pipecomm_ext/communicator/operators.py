"""A communicator's own operations in a compiled graph, as custom operators that name it.

They write no argument: a graph keeps the order of communicating operators (see `communicates`) only if they
are pure functions. So the callers copy received data into the buffers that were given.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.copyable import cloned
from ..core.operators import communicates
from .communicator import Recv, Send
from .registry import communicator_of, named_group


@torch.library.custom_op(
    "pipecomm_ext::empty", mutates_args=(), schema="(SymInt[] shape, ScalarType dtype, str comm) -> Tensor"
)
def empty(shape, dtype, comm):
    return named_group(comm).empty(shape, dtype)


@empty.register_fake
def _(shape, dtype, comm) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=named_group(comm).device)


@torch.library.custom_op(
    "pipecomm_ext::broadcast", mutates_args=(), schema="(Tensor tensor, str group, int src) -> Tensor"
)
def broadcast(tensor, group, src):
    comm = communicator_of(named_group(group), tensor)
    is_source = src == comm.rank
    result = cloned(tensor) if is_source else torch.empty_like(tensor)
    with torch.no_grad():
        comm.broadcast(result, src)
    return result


@communicates(broadcast)
def _(tensor, group, src) -> Tensor:
    return torch.empty_like(tensor)


# One batch: tensors to send, their receivers and channels; and buffers of the shapes and dtypes to receive,
# with their senders and channels. Done when it returns.
@torch.library.custom_op(
    "pipecomm_ext::batch_p2p",
    mutates_args=(),
    schema="(Tensor[] tensors, int[] receivers, int[] send_channels, Tensor[] buffers, int[] senders, "
    "int[] recv_channels, str group) -> Tensor[]",
)
def batch_p2p(tensors, receivers, send_channels, buffers, senders, recv_channels, group):
    results = [torch.empty_like(buffer) for buffer in buffers]
    sends = [Send(*send) for send in zip(tensors, receivers, send_channels, strict=True)]
    recvs = [Recv(*recv) for recv in zip(results, senders, recv_channels, strict=True)]
    comm = communicator_of(named_group(group), (tensors or buffers)[0])
    with torch.no_grad():
        comm.batch_p2p([*sends, *recvs])
    return results


@communicates(batch_p2p)
def _(tensors, receivers, send_channels, buffers, senders, recv_channels, group) -> list[Tensor]:
    return [torch.empty_like(buffer) for buffer in buffers]
