"""Messages of pipeline-parallel inference: a tensor to the next stage, results of the last one to all.

Names, arguments and results: megatron.core.inference.communication_utils (Core 0.20), and
`broadcast_from_last_to_first_pipeline_stage` of older versions. Different on purpose: tensors may be on the
CPU and have any strides; shapes and dtypes that differ raise on all ranks that take part, instead of
assertions and lost data; no device is synchronised.

`pp_group` is a torch ProcessGroup or a Communicator, whose ranks are the stages; None is the group of the
default pipeline. A group without a communicator gets one at the first call here, which all its ranks make.
The broadcasts return tensors on the device of that communicator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..communicator import Communicator
from ..communicator.registry import communicator_of
from ..core.extension import _C
from ..core.tensor_specs import spec_of
from .default_pipeline import default_groups, default_replica
from .p2p_communicator import ACTIVATIONS

__all__ = [
    "broadcast_float_list",
    "broadcast_from_last_pipeline_stage",
    "broadcast_from_last_to_first_pipeline_stage",
    "broadcast_int_list",
    "broadcast_list",
    "broadcast_tensor",
    "recv_from_prev_pipeline_rank_",
    "send_to_next_pipeline_rank",
]


def recv_from_prev_pipeline_rank_(recv_buffer: torch.Tensor, pp_group: Any = None) -> None:
    """Receives what the previous stage sends into `recv_buffer`; the first stage receives from the last."""
    comm = _communicator(pp_group, recv_buffer)
    comm.recv(recv_buffer, (comm.rank - 1) % comm.size, ACTIVATIONS)


def send_to_next_pipeline_rank(tensor: torch.Tensor, pp_group: Any = None) -> None:
    """Sends `tensor` to the next stage (the last stage: to the first); returns when it has been accepted."""
    comm = _communicator(pp_group, tensor)
    comm.send(tensor.detach(), (comm.rank + 1) % comm.size, ACTIVATIONS)


def broadcast_from_last_pipeline_stage(
    size: Sequence[int], dtype: torch.dtype, tensor: torch.Tensor | None = None, pp_group: Any = None
) -> torch.Tensor:
    """Returns on all stages the `tensor` of the last one, which has this size and dtype."""
    comm = _communicator(pp_group)
    return _broadcast(comm, size, dtype, tensor, comm.size - 1)


def broadcast_from_last_to_first_pipeline_stage(
    size: Sequence[int], dtype: torch.dtype, tensor: torch.Tensor | None = None, pp_group: Any = None
) -> torch.Tensor | None:
    """Returns the `tensor` of the last stage, which has this size and dtype, on the first and the last one;
    those between get None.
    """
    comm = _communicator(pp_group)
    first, last = 0, comm.size - 1
    if comm.rank not in (first, last):
        return None
    both = sorted({first, last})
    with comm.collective("broadcast", both):
        values = _checked_values(comm, size, dtype, tensor, last).detach()
        if first == last:
            return tensor
        whole, end = spec_of(values, "tensor"), (0, None, True)
        plan = _C.plan_reshard(comm.rank, comm.size, whole, ([last], *end), ([first], *end), tag="to first")
    sent, received = ([values], []) if comm.rank == last else ([], [values])
    comm.exchange(plan, sent, received, op="broadcast", members=both)
    return tensor if comm.rank == last else values


def broadcast_tensor(
    size: int | Sequence[int],
    dtype: torch.dtype,
    tensor: torch.Tensor | None = None,
    rank: int = 0,
    data_parallel: bool = False,
) -> torch.Tensor:
    """Returns on all ranks of the world the `tensor` of global rank `rank`. With `data_parallel`, the ranks
    of this rank's replica of the model get that of its first rank, and `rank` is not used.
    """
    return _broadcast_from(rank, size, dtype, tensor, data_parallel)


def broadcast_list(
    size: int,
    dtype: torch.dtype,
    list_values: Sequence[Any] | None = None,
    rank: int = 0,
    data_parallel: bool = False,
) -> torch.Tensor:
    """Returns on all ranks the `size` values of a list as a tensor; see `broadcast_tensor`."""
    return _broadcast_from(rank, size, dtype, list_values, data_parallel)


def broadcast_int_list(
    size: int, int_list: Sequence[int] | None = None, rank: int = 0, data_parallel: bool = False
) -> torch.Tensor:
    """Returns on all ranks the `size` integers of a list, as a tensor of int64; see `broadcast_tensor`."""
    return broadcast_list(size, torch.int64, int_list, rank, data_parallel)


def broadcast_float_list(
    size: int, float_list: Sequence[float] | None = None, rank: int = 0, data_parallel: bool = False
) -> torch.Tensor:
    """Returns on all ranks the `size` numbers of a list, as a tensor of float32; see `broadcast_tensor`."""
    return broadcast_list(size, torch.float32, float_list, rank, data_parallel)


def _communicator(pp_group: Any, tensor: torch.Tensor | None = None) -> Communicator:
    return communicator_of(default_groups().pp if pp_group is None else pp_group, tensor)


def _broadcast_from(
    rank: int, size: Any, dtype: torch.dtype, values: Any, data_parallel: bool
) -> torch.Tensor:
    group, source = default_replica() if data_parallel else (None, rank)
    comm = communicator_of(group, None)
    return _broadcast(comm, size, dtype, values, dist.get_group_rank(comm.group, source))


def _broadcast(comm: Communicator, size: Any, dtype: torch.dtype, values: Any, source: int) -> torch.Tensor:
    """Returns the `values` of rank `source`, a tensor or a list there, as a tensor on all ranks."""
    with comm.collective("broadcast"):
        values = _checked_values(comm, size, dtype, values, source)
    comm.broadcast(values.detach(), source)
    return values


def _checked_values(
    comm: Communicator, size: Any, dtype: torch.dtype, values: Any, source: int
) -> torch.Tensor:
    """The `values` of rank `source` as a tensor of this size and dtype; elsewhere an empty one to receive."""
    shape = (size,) if isinstance(size, int) else tuple(size)
    if comm.rank != source:
        return comm.empty(shape, dtype)
    if isinstance(values, (list, tuple)):
        values = torch.tensor(values, dtype=dtype, device=comm.device)
    if (given := spec_of(values, "tensor")) != (shape, dtype):
        raise ValueError(f"tensor must be {dtype}{list(shape)}, not {given[1]}{list(given[0])}")
    return values
