"""torch.distributed's communication calls, by the same names and with the same arguments.

    from pipecomm_ext import distributed as dist

Every other name (`get_rank`, `new_group`, `ReduceOp`, `group`, ...) is torch.distributed's own object. Its
submodules are imported from torch, and `import *` takes the calls below only.

As in torch, peers are global ranks, `group` None is the default group, and a rank outside the group does
nothing. A pipecomm_ext.Communicator may be passed as the group. The calls differ where torch has limits:

* uneven sizes, zero among them, work on every backend; tensors may have any strides and any dtype;
* shapes, dtypes and arguments that do not fit raise on both ends (a recv must have the shape that was sent);
* an empty batch is legal, the data of a dropped handle arrive, a handle may be waited for twice;
* `tag` is a channel: 0 to 14 for CPU tensors, 0 or 1 for CUDA tensors;
* a receive must name its source.

Each rank makes the group's communicator at its first call here, and two ranks connect when they first need
each other: as in torch, ranks that have nothing to send or receive take no part. (Where NCCL may be used, all
ranks connect at the first call, which all must therefore make.) To make it at a point of your choice, call
`pipecomm_ext.get_communicator(group)`.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from .communicator import Communicator, Recv, Send, traced
from .communicator import Work as _Handle  # `Work` is torch's here
from .communicator.plans import all_gather_list_plan, all_to_all_single_plan, concatenation_plan, list_plan
from .communicator.registry import communicator_of, group_name, rank_and_size
from .core.checked import whole_number
from .core.copyable import cloned
from .core.extension import _C
from .core.tensor_specs import plain, spec_of, specs_of

__all__ = [
    "P2POp",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_single",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "irecv",
    "isend",
    "recv",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "send",
]


def __getattr__(name: str) -> Any:
    """Returns other names of torch.distributed, except `__path__`, which would make this module a package."""
    if name.startswith("__") or not hasattr(dist, name):
        raise AttributeError(f"neither {__name__} nor torch.distributed has an attribute {name!r}")
    return getattr(dist, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *dir(dist)})


# ---- point to point ---------------------------------------------------------------------------------------


def isend(
    tensor: Tensor, dst: int | None = None, group: Any = None, tag: int = 0, group_dst: int | None = None
) -> _Handle | None:
    """Starts sending `tensor` to global rank `dst` (or `group_dst`, a rank of the group) on channel `tag`."""
    if _is_outside(group):
        return None
    comm = communicator_of(group, tensor)
    return comm.isend(plain(tensor), _peer(group, dst, group_dst, "dst"), tag)


def irecv(
    tensor: Tensor, src: int | None = None, group: Any = None, tag: int = 0, group_src: int | None = None
) -> _Handle | None:
    """Starts receiving into `tensor` from global rank `src` (or `group_src`, a rank of the group)."""
    if _is_outside(group):
        return None
    comm = communicator_of(group, tensor)
    peer = _peer(group, src, group_src, "src")
    with torch.no_grad():  # buffers that require grad are legal here, as in torch
        return comm.irecv(plain(tensor), peer, tag)


def send(
    tensor: Tensor, dst: int | None = None, group: Any = None, tag: int = 0, group_dst: int | None = None
) -> None:
    """Sends `tensor` to global rank `dst`, or to `group_dst` of the group; returns when the receiver has it.

    `tag` is a channel. The arguments are those of `isend`.
    """
    if torch.compiler.is_compiling():
        _traced_message(True, tensor, dst, group, tag, group_dst)
        return
    work = isend(tensor, dst, group, tag, group_dst)
    if work is not None:
        work.wait()


def recv(
    tensor: Tensor, src: int | None = None, group: Any = None, tag: int = 0, group_src: int | None = None
) -> int:
    """`irecv` that waits. Returns the global rank of the sender, or -1 outside the group."""
    if _is_outside(group):
        return -1
    if torch.compiler.is_compiling():
        _traced_message(False, tensor, src, group, tag, group_src)
    else:
        work = irecv(tensor, src, group, tag, group_src)
        assert work is not None
        work.wait()
    if src is not None:
        return src
    return dist.get_global_rank(_torch_group(group), _peer(group, src, group_src, "src"))


def _traced_message(
    is_send: bool, tensor: Tensor, peer: int | None, group: Any, tag: int, group_peer: int | None
) -> None:
    """One send or receive in a graph of torch.compile."""
    if not _is_outside(group):
        peer = _peer(group, peer, group_peer, "dst" if is_send else "src")
        with torch.no_grad():
            traced.batch_p2p(group_name(group), [traced.Message(is_send, tensor, peer, tag)])


@dataclass(eq=False, repr=False)
class P2POp:
    """One element of `batch_isend_irecv`: `op` is isend or irecv, of this module or of torch.distributed.
    As in torch, `peer`, `group_peer` and `group` are set whichever was given.
    """

    op: Any
    tensor: Tensor
    peer: int | None = None
    group: Any = None
    tag: int = 0
    group_peer: int | None = None

    def __post_init__(self) -> None:
        if self.op not in _DIRECTIONS:
            raise ValueError(f"op must be isend or irecv, not {getattr(self.op, '__name__', self.op)}")
        if not isinstance(self.tensor, Tensor):
            raise TypeError(f"tensor must be a torch.Tensor, not {type(self.tensor).__name__}")
        if _is_outside(self.group):
            return
        self.group_peer = _peer(self.group, self.peer, self.group_peer, "peer")
        group = _torch_group(self.group)
        if self.peer is None and isinstance(group, dist.ProcessGroup):
            self.peer = dist.get_global_rank(group, self.group_peer)
        if self.group is None:
            self.group = group

    @property
    def message_type(self) -> type[Send] | type[Recv]:
        """The form in which a `Communicator` takes it."""
        return _DIRECTIONS[self.op]

    def __repr__(self) -> str:
        peer = f"peer={self.peer}" if self.peer is not None else f"group_peer={self.group_peer}"
        what = f"{self.tensor.dtype}{list(self.tensor.shape)}"
        return f"P2POp({self.op.__name__}, {what}, {peer}, tag={self.tag})"


_DIRECTIONS: dict[Any, type[Send] | type[Recv]] = {
    isend: Send,
    irecv: Recv,
    dist.isend: Send,
    dist.irecv: Recv,
}


def batch_isend_irecv(p2p_op_list: Sequence[P2POp | dist.P2POp]) -> list[_Handle]:
    """Starts all sends and receives of the list as one batch. Returns a list of one handle; an empty one for
    an empty batch.

    The elements are `P2POp` of this module or of torch.distributed, all of the same group. A message to
    oneself needs its receive in the same batch. In a graph of torch.compile the batch is done when this
    returns.

    Example:
        ```python
        sent, received, other = torch.ones(4), torch.empty(4), 1 - dist.get_rank()
        ops = [dist.P2POp(dist.isend, sent, other), dist.P2POp(dist.irecv, received, other)]
        for work in distributed.batch_isend_irecv(ops):
            work.wait()
        ```
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
    if torch.compiler.is_compiling():
        messages = [
            traced.Message(_DIRECTIONS[op.op] is Send, op.tensor, cast(int, op.group_peer), op.tag)
            for op in p2p_op_list
        ]
        with torch.no_grad():
            traced.batch_p2p(group_name(group), messages)
        return [traced.done_work()]
    comm = communicator_of(group, p2p_op_list[0].tensor)
    batch = [_DIRECTIONS[op.op](plain(op.tensor), cast(int, op.group_peer), op.tag) for op in p2p_op_list]
    with torch.no_grad():
        return [comm.batch_p2p(batch, async_op=True)]


# ---- collectives ------------------------------------------------------------------------------------------


def broadcast(
    tensor: Tensor,
    src: int | None = None,
    group: Any = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> _Handle | None:
    """Copies `tensor` of global rank `src` (or `group_src`) into `tensor` of all other ranks of the group."""
    if _is_outside(group):
        return None
    if torch.compiler.is_compiling() and not async_op:
        source, (rank, _) = _peer(group, src, group_src, "src"), rank_and_size(group)
        with torch.no_grad():
            traced.broadcast(group_name(group), tensor, source, is_source=source == rank)
        return None
    comm = communicator_of(group, tensor)
    with torch.no_grad():
        with comm.collective("broadcast"):
            source = _peer(group, src, group_src, "src")
        return comm.broadcast(plain(tensor), source, async_op=async_op)


def barrier(
    group: Any = None,
    async_op: bool = False,
    device_ids: Any = None,
    timeout: datetime.timedelta | None = None,
) -> _Handle | None:
    """Returns when all ranks of the group have called it, or returns a handle that is done by then.

    Args:
        device_ids: not used.
        timeout: how long this rank waits before it raises PipeCommTimeout; None is the communicator's own
            timeout. With async_op, pass it to the handle's wait() instead.
    """
    if _is_outside(group):
        return None
    return communicator_of(group, None).barrier(timeout=timeout, async_op=async_op)


def all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Any = None,
    async_op: bool = False,
) -> _Handle | None:
    """Sends piece r of `input` to rank r and receives piece r of `output` from it. Pieces are cut along dim
    0.

    Args:
        output, input: tensors of one dtype, or the same tensor twice. The inputs of the ranks differ in dim 0
            only. Strides are arbitrary if input and output, too, differ in dim 0 only.
        output_split_sizes, input_split_sizes: lengths along dim 0, one per rank, zeros allowed; None divides
            the dim equally.
    """
    output, input = plain(output), plain(input)

    inputs = [input]

    def plan(comm: Communicator) -> _C.PreparedExchange:
        plan = all_to_all_single_plan(
            comm.rank,
            comm.size,
            spec_of(input, "input"),
            spec_of(output, "output"),
            _splits(input_split_sizes, "input_split_sizes"),
            _splits(output_split_sizes, "output_split_sizes"),
        )
        if input is output:
            inputs[0] = cloned(input)
        return plan

    return _exchange("all_to_all", plan, inputs, [output], group, async_op)


def all_to_all(
    output_tensor_list: Sequence[Tensor],
    input_tensor_list: Sequence[Tensor],
    group: Any = None,
    async_op: bool = False,
) -> _Handle | None:
    """Sends input_tensor_list[r] to rank r, receives output_tensor_list[r] from it: any shapes and dtypes."""
    inputs, outputs = _all_plain(input_tensor_list), _all_plain(output_tensor_list)

    def plan(comm: Communicator) -> _C.PreparedExchange:
        specs = specs_of(inputs, "input_tensor_list"), specs_of(outputs, "output_tensor_list")
        return list_plan(comm.rank, comm.size, *specs)

    return _exchange("all_to_all", plan, inputs, outputs, group, async_op)


def all_gather(
    tensor_list: Sequence[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False
) -> _Handle | None:
    """Receives rank r's `tensor` into tensor_list[r]. The tensors of the ranks may have different shapes."""
    input, outputs = plain(tensor), _all_plain(tensor_list)

    def plan(comm: Communicator) -> _C.PreparedExchange:
        specs = spec_of(input, "tensor"), specs_of(outputs, "tensor_list")
        return all_gather_list_plan(comm.rank, comm.size, *specs)

    return _exchange("all_gather", plan, [input], outputs, group, async_op)


def all_gather_into_tensor(
    output_tensor: Tensor, input_tensor: Tensor, group: Any = None, async_op: bool = False
) -> _Handle | None:
    """Gathers the ranks' `input_tensor` into one tensor.

    Args:
        output_tensor: the inputs concatenated along dim 0, or stacked along a new dim 0 (then all are equal).
        input_tensor: a tensor of the same dtype. If they are concatenated, their lengths along dim 0 may
            differ by one: rank r has entry r of pipecomm_ext.cal_split_sizes(len(output_tensor), P).
    """
    output_tensor, input_tensor = plain(output_tensor), plain(input_tensor)
    outputs: list[Tensor] = []

    def plan(comm: Communicator) -> _C.PreparedExchange:
        spec, output_spec = spec_of(input_tensor, "input_tensor"), spec_of(output_tensor, "output_tensor")
        if output_spec == ((comm.size, *spec[0]), spec[1]):
            outputs.extend(output_tensor.unbind(0))
            return all_gather_list_plan(comm.rank, comm.size, spec, (spec,) * comm.size)
        outputs.append(output_tensor)
        return _all_gather_into_plan(comm.rank, comm.size, spec, output_spec)

    return _exchange("all_gather", plan, [input_tensor], outputs, group, async_op)


all_gather_single = all_gather_into_tensor  # the name since torch 2.13


def all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
    """Reduces `tensor` of all ranks in place; all ranks get the same bits. See `Communicator.all_reduce`.

    `async_op` is the same on all ranks. Sparse tensors are refused: torch.distributed.all_reduce takes them.
    In a graph of torch.compile this is torch's own call.
    """
    if _is_outside(group):
        return None
    if torch.compiler.is_compiling():
        return dist.all_reduce(tensor, op, _torch_group(group), async_op)
    with torch.no_grad():
        return communicator_of(group, tensor).all_reduce(plain(tensor), op, async_op=async_op)


def reduce_scatter(
    output: Tensor,
    input_list: Sequence[Tensor],
    op: Any = dist.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """Reduces input_list[r] of all ranks into `output` of rank r. The tensors may differ in shape."""
    if _is_outside(group):
        return None
    if torch.compiler.is_compiling():
        return dist.reduce_scatter(output, list(input_list), op, _torch_group(group), async_op)
    with torch.no_grad():
        output, inputs = plain(output), _all_plain(input_list)
        return communicator_of(group, output).reduce_scatter(output, inputs, op, async_op=async_op)


def reduce_scatter_tensor(
    output: Tensor,
    input: Tensor,
    op: Any = dist.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """Reduces piece r of `input` of all ranks, cut along dim 0, into `output` of rank r."""
    if _is_outside(group):
        return None
    if torch.compiler.is_compiling():
        return dist.reduce_scatter_tensor(output, input, op, _torch_group(group), async_op)
    with torch.no_grad():
        output, input = plain(output), plain(input)
        return communicator_of(group, output).reduce_scatter(output, input, op, async_op=async_op)


def _all_plain(tensors: Any) -> Any:
    return [plain(tensor) for tensor in tensors] if isinstance(tensors, (list, tuple)) else tensors


def _exchange(
    op: str,
    plan: Callable[[Communicator], _C.PreparedExchange],
    inputs: Any,
    outputs: Any,
    group: Any,
    async_op: bool,
) -> _Handle | None:
    if _is_outside(group):
        return None
    first = inputs[0] if isinstance(inputs, (list, tuple)) and inputs else None
    comm = communicator_of(group, first)
    with torch.no_grad():
        return comm.exchange(lambda: plan(comm), inputs, outputs, async_op=async_op, op=op)


# ---- plans ------------------------------------------------------------------------------------------------


def _splits(sizes: Any, name: str) -> tuple[int, ...] | None:
    """The sizes as a tuple; None (equal pieces) for None and, as in torch, for an empty list."""
    if sizes is None:
        return None
    if not isinstance(sizes, (list, tuple)):
        raise TypeError(f"{name} must be a list of ints, not {type(sizes).__name__}")
    return tuple(whole_number(size, f"{name}[{rank}]") for rank, size in enumerate(sizes)) or None


@lru_cache(maxsize=256)
def _all_gather_into_plan(rank, size, spec, output_spec) -> _C.PreparedExchange:
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
    return concatenation_plan(rank, spec, sizes)


# ---- groups and ranks -------------------------------------------------------------------------------------


def _torch_group(group: Any) -> Any:
    if isinstance(group, Communicator):
        return group.group
    return dist.group.WORLD if group is None else group


def _is_outside(group: Any) -> bool:
    # By value: it is an int, and in a graph of torch 2.11 not the same object.
    return isinstance(group, int) and group == dist.GroupMember.NON_GROUP_MEMBER


def _peer(group: Any, global_rank: int | None, group_rank: int | None, name: str) -> int:
    """The peer's rank in the group, given as a global rank or as a rank of the group."""
    if (global_rank is None) == (group_rank is None):
        if global_rank is not None:
            raise ValueError(f"give {name} (a global rank) or group_{name} (a rank of the group), not both")
        hint = "; receiving from any source is not supported" if name == "src" else ""
        raise ValueError(f"{name} must name a rank{hint}")
    if group_rank is not None:
        return group_rank
    global_rank = whole_number(global_rank, name)
    group = _torch_group(group)
    if group is dist.group.WORLD:
        return global_rank
    try:
        return dist.get_group_rank(group, global_rank)
    except ValueError:
        ranks = dist.get_process_group_ranks(group)
        raise ValueError(f"{name} {global_rank} (global) is not one of the group's ranks {ranks}") from None
