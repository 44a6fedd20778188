"""The backend "pipecomm" sums sparse tensors as plain torch does in one process."""

from __future__ import annotations

import contextlib
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from test_backend import both, ended, group_of

from pipecomm_ext import PipeCommMismatch
from pipecomm_ext.backend import sparse

ReduceOp = dist.ReduceOp


def sparse_of(rank: int, dtype: torch.dtype, dims: int) -> torch.Tensor:
    """Rank 1 has no entry; the others have some in common, and one twice."""
    generator = torch.Generator().manual_seed(rank)
    num = 0 if rank == 1 else 5 + rank
    indices = torch.randint(0, 4, (dims, num), generator=generator)
    values = torch.randint(1, 9, (num, 3), generator=generator).to(dtype)
    return torch.sparse_coo_tensor(indices, values, (4,) * dims + (3,), check_invariants=True)


@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
@both(1, 2, 4)
def test_sparse_tensors_are_summed(world, async_op):
    group, size, rank = group_of(world.size), world.size, world.rank
    works, results = [], []
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for dims in (1, 2):
            results.append((sparse_of(rank, dtype, dims), dtype, dims))
            works.append(dist.all_reduce(results[-1][0], group=group, async_op=async_op))
    for work in reversed(works):
        ended(work)
    for result, dtype, dims in results:
        expected = sum(sparse_of(src, torch.float64, dims).to_dense() for src in range(size))
        assert result.is_sparse and result.dtype == dtype
        assert torch.equal(result.to_dense().to(torch.float64), expected)


@both(2)
def test_sparse_tensors_that_do_not_fit_are_refused(world):
    group, rank = group_of(world.size), world.rank
    with pytest.raises(ValueError, match="sparse tensors supports SUM, not MAX"):
        dist.all_reduce(sparse_of(0, torch.float32, 2), ReduceOp.MAX, group)
    with pytest.raises(ValueError, match="layout torch.sparse_coo, not torch.sparse_csr"):
        dist.all_reduce(torch.eye(3).to_sparse_csr(), group=group)
    with pytest.raises(PipeCommMismatch, match="called all_reduce with SUM"):
        dist.all_reduce(sparse_of(0, torch.float32, 1 + rank), group=group)
    with pytest.raises(PipeCommMismatch, match="called all_reduce with SUM"):
        dist.all_reduce(sparse_of(0, (torch.float32, torch.float64)[rank], 1), group=group)
    with pytest.raises(ValueError, match=r"tensors\[0\] must be a dense tensor, not sparse_coo"):
        dist.all_reduce_coalesced([sparse_of(0, torch.float32, 1)] * 2, group=group)
    dist.barrier(group)


@both(2)
def test_an_exchange_that_cannot_be_posted_is_refused_once(world):
    group, rank = group_of(world.size), world.rank
    no_plan = mock.patch.object(sparse, "whole_plan", lambda *args: "no plan")
    with no_plan if rank == 0 else contextlib.nullcontext():
        with pytest.raises((TypeError, PipeCommMismatch), match="plan must"):
            dist.all_reduce(sparse_of(rank, torch.float32, 1), group=group)
    result = sparse_of(rank, torch.float32, 1)
    dist.all_reduce(result, group=group)
    expected = sum(sparse_of(src, torch.float32, 1).to_dense() for src in range(world.size))
    assert torch.equal(result.to_dense(), expected)
