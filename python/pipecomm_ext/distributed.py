"""torch.distributed's communication calls, by the same names and with the same arguments.

    from pipecomm_ext import distributed as dist

As in torch, peers are global ranks, `group` None is the default group, and a rank outside the group does
nothing. Groups are those of torch; a pipecomm_ext.Communicator may stand in their place. Different where
torch has limits:

* uneven sizes work on every backend, also zero; tensors may have any strides and any dtype;
* shapes, dtypes and arguments that do not fit raise on both ends (a recv must have the shape that was sent);
* an empty batch is legal, a dropped handle's data are delivered, a handle may be waited for twice;
* `tag` is a channel: 0 to 14 for CPU tensors, 0 or 1 for CUDA tensors;
* a receive must name its source.

A group's communicator is made at its first call here, which all its ranks must therefore make; to have it
made at a point of your choice, call `pipecomm_ext.get_communicator(group)`.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

from . import _C
from .communicator import Communicator, Recv, Send, Work
from .sequence_parallel.group import communicator_of
from .specs import Spec, spec_of, specs_of

__all__ = [
    "P2POp",
    "all_gather",
    "all_gather_into_tensor",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "irecv",
    "isend",
    "recv",
    "send",
]

# ---- point to point ---------------------------------------------------------------------------------------


def isend(
    tensor: torch.Tensor,
    dst: int | None = None,
    group: Any = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> Work | None:
    """Starts sending `tensor` to global rank `dst` (or `group_dst`, a rank of the group) on channel `tag`."""
    if _is_outside(group):
        return None
    comm = communicator_of(group, tensor)
    return comm.isend(tensor, _peer(comm, dst, group_dst, "dst"), tag)


def irecv(
    tensor: torch.Tensor,
    src: int | None = None,
    group: Any = None,
    tag: int = 0,
    group_src: int | None = None,
) -> Work | None:
    """Starts receiving into `tensor` from global rank `src` (or `group_src`, a rank of the group)."""
    if _is_outside(group):
        return None
    comm = communicator_of(group, tensor)
    peer = _peer(comm, src, group_src, "src")
    with torch.no_grad():  # buffers that require grad are legal here, as in torch
        return comm.irecv(tensor, peer, tag)


def send(
    tensor: torch.Tensor,
    dst: int | None = None,
    group: Any = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> None:
    """`isend`, and waits until the receiver has the data."""
    work = isend(tensor, dst, group, tag, group_dst)
    if work is not None:
        work.wait()


def recv(
    tensor: torch.Tensor,
    src: int | None = None,
    group: Any = None,
    tag: int = 0,
    group_src: int | None = None,
) -> int:
    """`irecv`, and waits; the global rank of the sender, or -1 outside the group."""
    work = irecv(tensor, src, group, tag, group_src)
    if work is None:
        return -1
    work.wait()
    return src if src is not None else dist.get_global_rank(_torch_group(group), group_src)


class P2POp:
    """One element of `batch_isend_irecv`: `op` is isend or irecv, of this module or of torch.distributed."""

    def __init__(
        self,
        op: Any,
        tensor: torch.Tensor,
        peer: int | None = None,
        group: Any = None,
        tag: int = 0,
        group_peer: int | None = None,
    ):
        if op not in _DIRECTIONS:
            raise ValueError(f"op must be isend or irecv, not {getattr(op, '__name__', op)}")
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"tensor must be a torch.Tensor, not {type(tensor).__name__}")
        self.op = op
        self.tensor = tensor
        self.peer = peer
        self.group = group
        self.tag = tag
        self.group_peer = group_peer

    def __repr__(self) -> str:
        peer = f"peer={self.peer}" if self.peer is not None else f"group_peer={self.group_peer}"
        what = f"{self.tensor.dtype}{list(self.tensor.shape)}"
        return f"P2POp({self.op.__name__}, {what}, {peer}, tag={self.tag})"


_DIRECTIONS = {isend: Send, irecv: Recv, dist.isend: Send, dist.irecv: Recv}


def batch_isend_irecv(p2p_op_list: Sequence[P2POp]) -> list[Work]:
    """Starts all sends and receives of the list as one batch; a list of one handle, or of none if it is
    empty.

    The elements are `P2POp` of this module or of torch.distributed, all of the same group. A message to
    oneself needs its receive in the same batch.
    """
    if not isinstance(p2p_op_list, (list, tuple)):
        raise TypeError(f"p2p_op_list must be a list, not {type(p2p_op_list).__name__}")
    for idx, op in enumerate(p2p_op_list):
        if not isinstance(op, (P2POp, dist.P2POp)):
            raise TypeError(f"p2p_op_list[{idx}] must be a P2POp, not {type(op).__name__}")
    if not p2p_op_list:
        return []
    group = p2p_op_list[0].group
    for idx, op in enumerate(p2p_op_list):
        if _torch_group(op.group) is not _torch_group(group):
            raise ValueError(f"all elements must have the same group, p2p_op_list[{idx}] has another one")
    if _is_outside(group):
        return []
    comm = communicator_of(group, p2p_op_list[0].tensor)
    batch = [
        _DIRECTIONS[op.op](
            op.tensor,
            op.group_peer if isinstance(op, dist.P2POp) else _peer(comm, op.peer, op.group_peer, "peer"),
            op.tag,
        )
        for op in p2p_op_list
    ]
    with torch.no_grad():
        return [comm.batch_p2p(batch, async_op=True)]


# ---- collectives ------------------------------------------------------------------------------------------


def broadcast(
    tensor: torch.Tensor,
    src: int | None = None,
    group: Any = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Work | None:
    """Copies `tensor` of global rank `src` (or `group_src`) into `tensor` of all other ranks of the group."""
    if _is_outside(group):
        return None
    comm = communicator_of(group, tensor)
    with torch.no_grad():
        with comm.collective("broadcast"):
            source = _peer(comm, src, group_src, "src")
        return comm.broadcast(tensor, source, async_op=async_op)


def barrier(
    group: Any = None,
    async_op: bool = False,
    device_ids: Any = None,
    timeout: datetime.timedelta | None = None,
) -> Work | None:
    """Returns, or the handle is done, when all ranks of the group have called it.

    Args:
        device_ids: not used.
        timeout: how long this rank waits before it raises PipeCommTimeout; None: as long as the
            communicator's own timeout allows. With async_op, give it to the handle's wait() instead.
    """
    if _is_outside(group):
        return None
    if async_op and timeout is not None:
        raise ValueError("barrier: timeout has no effect with async_op=True; pass it to the handle's wait()")
    work = communicator_of(group, None)._c.barrier(async_op)
    if async_op:
        return work
    work.wait(timeout)
    return None


def all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Any = None,
    async_op: bool = False,
) -> Work | None:
    """Sends piece r of `input` to rank r, receives piece r of `output` from it; pieces are cut along dim 0.

    Args:
        output, input: same dtype, and same shape but for dim 0; any strides.
        output_split_sizes, input_split_sizes: lengths along dim 0, one per rank, zeros allowed; None: equal
            ones.
    """
    if _is_outside(group):
        return None
    comm = communicator_of(group, input)
    with comm.collective("all_to_all"):
        plan = _all_to_all_single_plan(
            comm.rank,
            comm.size,
            spec_of(input, "input"),
            spec_of(output, "output"),
            _splits(input_split_sizes, "input_split_sizes"),
            _splits(output_split_sizes, "output_split_sizes"),
        )
    return _exchange(comm, "all_to_all", plan, [input], [output], async_op)


def all_to_all(
    output_tensor_list: Sequence[torch.Tensor],
    input_tensor_list: Sequence[torch.Tensor],
    group: Any = None,
    async_op: bool = False,
) -> Work | None:
    """Sends input_tensor_list[r] to rank r, receives output_tensor_list[r] from it: any shapes and dtypes."""
    if _is_outside(group):
        return None
    comm = communicator_of(group, _first(input_tensor_list))
    with comm.collective("all_to_all"):
        specs_of(input_tensor_list, "input_tensor_list")
        specs_of(output_tensor_list, "output_tensor_list")
    with torch.no_grad():
        return comm.all_to_all(input_tensor_list, output_tensor_list, async_op=async_op)


def all_gather(
    tensor_list: Sequence[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False
) -> Work | None:
    """Receives rank r's `tensor` into tensor_list[r]; the shapes of the ranks' tensors may differ in any
    way.
    """
    if _is_outside(group):
        return None
    comm = communicator_of(group, tensor)
    with comm.collective("all_gather"):
        plan = _all_gather_plan(
            comm.rank, comm.size, spec_of(tensor, "tensor"), specs_of(tensor_list, "tensor_list")
        )
    return _exchange(comm, "all_gather", plan, [tensor], tensor_list, async_op)


def all_gather_into_tensor(
    output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any = None, async_op: bool = False
) -> Work | None:
    """Gathers the ranks' `input_tensor` into one tensor.

    Args:
        output_tensor: the inputs concatenated along dim 0, or stacked along a new dim 0 (then all are equal).
        input_tensor: of the same dtype. Concatenated ones may differ by one in length along dim 0: rank r
            holds entry r of pipecomm_ext.cal_split_sizes(len(output_tensor), P).
    """
    if _is_outside(group):
        return None
    comm = communicator_of(group, input_tensor)
    with comm.collective("all_gather"):
        spec, output_spec = spec_of(input_tensor, "input_tensor"), spec_of(output_tensor, "output_tensor")
        if output_spec == ((comm.size, *spec[0]), spec[1]):
            outputs = list(output_tensor.unbind(0))
            plan = _all_gather_plan(comm.rank, comm.size, spec, (spec,) * comm.size)
        else:
            outputs = [output_tensor]
            plan = _all_gather_into_plan(comm.rank, comm.size, spec, output_spec)
    return _exchange(comm, "all_gather", plan, [input_tensor], outputs, async_op)


# ---- plans ------------------------------------------------------------------------------------------------


def _splits(sizes: Any, name: str) -> tuple[int, ...] | None:
    """None or empty, as torch has it: equal pieces."""
    if sizes is None:
        return None
    if not isinstance(sizes, (list, tuple)):
        raise TypeError(f"{name} must be a list of ints, not {type(sizes).__name__}")
    if not all(isinstance(size, int) for size in sizes):
        raise TypeError(f"{name} must be a list of ints, not {sizes!r}")
    return tuple(sizes) or None


def _equal_splits(spec: Spec, size: int, name: str) -> tuple[int, ...]:
    shape, _ = spec
    if not shape or shape[0] % size:
        raise ValueError(
            f"dim 0 of {name} of shape {list(shape)} must divide by the {size} ranks; or give sizes"
        )
    return (shape[0] // size,) * size


@lru_cache(maxsize=256)
def _all_to_all_single_plan(rank, size, input_spec, output_spec, input_splits, output_splits) -> _C.Plan:
    if input_splits is None:
        input_splits = _equal_splits(input_spec, size, "input")
    if output_splits is None:
        output_splits = _equal_splits(output_spec, size, "output")
    return _C.plan_all_to_all_single(rank, size, input_spec, output_spec, input_splits, output_splits)


@lru_cache(maxsize=256)
def _all_gather_plan(rank, size, spec, outputs) -> _C.Plan:
    return _C.plan_all_gather_list(rank, size, spec, outputs)


@lru_cache(maxsize=256)
def _all_gather_into_plan(rank, size, spec, output_spec) -> _C.Plan:
    (shape, dtype), (output_shape, output_dtype) = spec, output_spec
    sizes = _C.remainder_first(output_shape[0], size) if output_shape else []
    if (
        not shape
        or dtype != output_dtype
        or output_shape != (sum(sizes), *shape[1:])
        or shape[0] != sizes[rank]
    ):
        raise ValueError(
            f"output_tensor of shape {list(output_shape)}, {output_dtype}, holds the tensors of {size} ranks "
            f"neither concatenated nor stacked: input_tensor has shape {list(shape)}, {dtype}"
        )
    return _C.plan_gather(rank, size, spec, 0, sizes)


def _exchange(comm: Communicator, op: str, plan: _C.Plan, inputs, outputs, async_op: bool) -> Work | None:
    with torch.no_grad():
        return comm.exchange(plan, inputs, outputs, async_op=async_op, op=op)


# ---- groups and ranks -------------------------------------------------------------------------------------


def _torch_group(group: Any) -> Any:
    if isinstance(group, Communicator):
        return group.group
    return dist.group.WORLD if group is None else group


def _is_outside(group: Any) -> bool:
    return group is dist.GroupMember.NON_GROUP_MEMBER


def _first(tensors: Any) -> Any:
    return tensors[0] if isinstance(tensors, (list, tuple)) and tensors else None


def _peer(comm: Communicator, global_rank: int | None, group_rank: int | None, name: str) -> int:
    """The peer's rank in the group, from one of two ways to say it."""
    if (global_rank is None) == (group_rank is None):
        if global_rank is not None:
            raise ValueError(f"give {name} (a global rank) or group_{name} (a rank of the group), not both")
        hint = "; receiving from any source is not supported" if name == "src" else ""
        raise ValueError(f"{name} must name a rank{hint}")
    if group_rank is not None:
        return group_rank
    if isinstance(global_rank, bool) or not isinstance(global_rank, int):
        raise TypeError(f"{name} must be an int, not {type(global_rank).__name__}")
    if comm.group is dist.group.WORLD:
        return global_rank
    try:
        return dist.get_group_rank(comm.group, global_rank)
    except ValueError:
        ranks = dist.get_process_group_ranks(comm.group)
        raise ValueError(f"{name} {global_rank} (global) is not one of the group's ranks {ranks}") from None
