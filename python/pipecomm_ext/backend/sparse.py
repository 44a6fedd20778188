"""All-reduce of sparse tensors in COO layout: every rank gets the entries of all ranks and sums them itself.

As with gloo the operator is SUM, and the ranks' tensors may differ in their entries only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from ..communicator.communicator import engine_of
from ..communicator.continuation import Continuation, Line, begin
from ..communicator.plans import whole_plan
from ..communicator.reduction_steps import Exchanges
from ..core.extension import _C
from ..core.tensor_specs import spec_of, specs_of
from .arguments import operator_name

_WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


def begin_sparse_all_reduce(comm: Any, tensor: Tensor, op: Any, waits: bool, line: Line) -> Continuation:
    """Sums `tensor` in place, which is coalesced then.

    Raises:
        ValueError: another operator than SUM, or another layout than torch.sparse_coo.
    """
    with comm.collective("all_reduce"):
        if tensor.layout != torch.sparse_coo:
            raise ValueError(f"all_reduce supports the sparse layout torch.sparse_coo, not {tensor.layout}")
        if getattr(op, "op", op) != ReduceOp.SUM:
            raise ValueError(f"all_reduce of sparse tensors supports SUM, not {operator_name(op)}")
        mine = tensor.detach().coalesce()
    exchanges = Exchanges(comm, engine_of(comm), "all_reduce", waits, line)
    steps = exchanges.refusing(_steps(exchanges, tensor, mine), 2)
    return begin(comm, steps, [mine.values()], exchanges.waits, line)


def _steps(exchanges: Exchanges, tensor: Tensor, mine: Tensor) -> Iterator[_C.Work]:
    """Two exchanges: the numbers of entries, with what the ranks must agree on; then the entries as bytes."""
    rank, size = exchanges.rank, exchanges.size
    num_dims, shape = mine.sparse_dim(), list(tensor.shape)
    tag = f"all_reduce SUM {tensor.dtype} sparse {num_dims} of {shape}"
    count = torch.tensor([mine._nnz()], device=tensor.device)
    counts = count.repeat(size)
    yield exchanges.run(whole_plan(rank, size, (1,), torch.int64, -1, tag), [count], [counts])

    entries = counts.tolist()
    entry_shape = mine.values().shape[1:]
    bytes_each = 8 * num_dims + entry_shape.numel() * tensor.dtype.itemsize
    own = torch.cat([_bytes(mine.indices()), _bytes(mine.values())])
    pieces = [own if src == rank else own.new_empty(num * bytes_each) for src, num in enumerate(entries)]
    outputs = [own.new_empty(own.shape) if src == rank else piece for src, piece in enumerate(pieces)]
    plan = _C.plan_all_gather_list(rank, size, spec_of(own, "entries"), specs_of(outputs, "entries"))
    yield exchanges.run(plan, [own], outputs)

    indices, values = [], []
    for piece, num in zip(pieces, entries, strict=True):
        end = 8 * num_dims * num
        indices.append(piece[:end].view(torch.int64).view(num_dims, num))
        values.append(piece[end:].view(tensor.dtype).view(num, *entry_shape))
    with torch.no_grad():
        tensor.copy_(_sum(indices, values, tensor))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _sum(indices: Sequence[Tensor], values: Sequence[Tensor], like: Tensor) -> Tensor:
    """Sums the entries of all ranks, those of equal indices in rank order."""
    wide = torch.cat(list(values)).to(_WIDE.get(like.dtype, like.dtype))
    every = torch.sparse_coo_tensor(
        torch.cat(list(indices), 1), wide, like.shape, device=wide.device, check_invariants=False
    )
    return every.coalesce().to(like.dtype)
