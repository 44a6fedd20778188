"""Tensors that gloo's calls take, the backend "pipecomm" takes as well: of other classes, shapes, devices."""

from __future__ import annotations

import contextlib
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from test_backend import both, gloo_group, group_of

from pipecomm_ext import PipeCommMismatch
from pipecomm_ext.backend.endpoint import Endpoint
from pipecomm_ext.communicator import level_steps
from pipecomm_ext.communicator.reduce_operators import operator_for


@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
@both(2)
def test_results_of_functional_collectives_are_tensors(world, async_op):
    from torch.distributed import _functional_collectives as funcol

    group, rank, peer, results = group_of(2), world.rank, 1 - world.rank, []
    for is_waited in (False, True):

        def lazy(*shape: int, is_waited=is_waited) -> torch.Tensor:
            result = funcol.all_reduce(torch.ones(shape) * (rank + 1), "sum", group)
            assert isinstance(result, funcol.AsyncCollectiveTensor)
            return result.trigger_wait() if is_waited else result

        outs = [lazy(4) for _ in range(3)] + [torch.zeros(shape) for shape in (8, 2, 4, 4, 4, 2)]
        rows = [[torch.zeros(4), torch.zeros(4)] for _ in range(2)]
        sent = [lazy(4), lazy(4)]
        calls = [
            dist.all_reduce(outs[0], group=group, async_op=async_op),
            dist.broadcast(outs[1], 0, group, async_op),
            dist.reduce(outs[2], 1, group=group, async_op=async_op),
            dist.all_gather_single(outs[3], lazy(4), group, async_op),
            dist.reduce_scatter_single(outs[4], lazy(4), group=group, async_op=async_op),
            dist.all_to_all_single(outs[5], lazy(4), group=group, async_op=async_op),
            dist.all_gather(rows[0], lazy(4), group, async_op),
            dist.all_to_all(rows[1], [lazy(4), lazy(4)], group, async_op),
            dist.scatter(outs[6], sent if rank == 0 else None, 0, group, async_op),
            dist.reduce_scatter(outs[8], [lazy(2), lazy(2)], group=group, async_op=async_op),
        ]
        ops = [dist.P2POp(dist.isend, lazy(4), peer, group), dist.P2POp(dist.irecv, outs[7], peer, group)]
        for work in [*calls, *dist.batch_isend_irecv(ops)]:
            assert work is None or work.wait()
        results.append([out.tolist() for out in (*outs, *rows[0], *rows[1])])
    lazily, plainly = results
    assert lazily == plainly and plainly[0] == [6.0] * 4


@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
@both(2)
def test_all_to_all_single_of_other_shapes(world, async_op):
    """Each side is split along its own dim 0."""
    results = []
    for group in (group_of(2), gloo_group(2)):
        outs = [
            torch.zeros(8),
            torch.zeros(4, 2),
            torch.zeros(2, 2, 2),
            torch.zeros(6),
            torch.zeros(2, 4).t(),
        ]
        sources = [torch.arange(8.0).view(4, 2), torch.arange(8.0).view(2, 4), torch.arange(8.0)]
        sources += [torch.arange(6.0).view(3, 2), torch.arange(8.0)]
        splits: list = [(None, None)] * 5
        splits[3] = ([2, 4], [1, 2]) if world.rank == 0 else ([4, 2], [2, 1])
        for out, source, (received, sent) in zip(outs, sources, splits, strict=True):
            if group is not group_of(2):
                out, source = out.contiguous(), source.contiguous()
            work = dist.all_to_all_single(out, source + world.rank, received, sent, group, async_op)
            assert work is None or work.wait()
            results.append(out.tolist())
    assert results[:5] == results[5:]


@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
@both(2)
def test_shapes_of_equal_numbers_of_elements(world, async_op):
    """As every backend of torch, in collectives of one tensor: elements have the order of memory."""
    results = []
    for group in (group_of(2), gloo_group(2)):
        for scale in (1, 100):
            shape = (2 * scale, 3 * scale) if world.rank == 0 else (3 * scale, 2 * scale)
            mine = torch.arange(6.0 * scale**2).view(shape)
            outs = [
                mine.clone(),
                mine.clone(),
                mine.clone(),
                torch.zeros(2 * shape[0], shape[1]),
                torch.zeros(shape),
            ]
            outs.append(torch.zeros(shape))
            calls = [
                dist.all_reduce(outs[0], group=group, async_op=async_op),
                dist.reduce(outs[1], 0, group=group, async_op=async_op),
                dist.broadcast(outs[2], 0, group, async_op),
                dist.all_gather_single(outs[3], mine, group, async_op),
                dist.reduce_scatter_single(outs[4], torch.cat([mine, mine]), group=group, async_op=async_op),
                dist.reduce_scatter(outs[5], [mine, mine + 1], group=group, async_op=async_op),
            ]
            for work in calls:
                assert work is None or work.wait()
            del outs[1 : 1 + world.rank]  # what a reduce leaves on other ranks is not defined
            results.append(outs)
    half = len(results) // 2
    for ours, gloos in zip(results[:half], results[half:], strict=True):
        assert all(torch.equal(*pair) for pair in zip(ours, gloos, strict=True))


@both(2)
def test_the_default_device_does_not_matter(world):
    group = group_of(2)
    for async_op in (False, True):
        tensors = [torch.eye(20, 2).to_sparse(), torch.ones(50_000, 2).t()]
        with torch.device("meta"):
            for tensor in tensors:
                work = dist.all_reduce(tensor, group=group, async_op=async_op)
                assert work is None or work.wait()
        assert tensors[0].to_dense().sum() == 4 and tensors[1].sum() == 200_000


@both(2)
def test_wrong_calls_that_other_ranks_learn_of(world):
    """Each would otherwise wait until its timeout."""
    group, told = group_of(2), pytest.raises(PipeCommMismatch, match="refused by rank 0")
    dist.barrier(group)
    tensor = torch.ones(4).to_sparse() if world.rank == 0 else torch.ones(4)
    with told if world.rank else pytest.raises(ValueError, match="must be a dense tensor"):
        dist.all_to_all_single(tensor, tensor, group=group)
    fails = mock.patch.object(Endpoint, "wait_for_devices", side_effect=RuntimeError("CUDA error"))
    with fails if world.rank == 0 else contextlib.nullcontext():
        with told if world.rank else pytest.raises(RuntimeError, match="CUDA error"):
            dist.barrier(group)
    dist.barrier(group)


def test_the_default_device_does_not_matter_to_reductions_in_two_levels():
    class Exchanges:
        def rows(self, num: int, length: int, dtype: torch.dtype) -> list[torch.Tensor]:
            return [torch.full((length,), 2.0, dtype=dtype, device="cpu") for _ in range(num)]

        def scatter(self, *args) -> None:
            """Rank 1's piece is already in its row."""

    op = operator_for(dist.ReduceOp.SUM, torch.float32, torch.device("cpu"))
    pieces = [torch.ones(3), torch.ones(3)]
    with torch.device("meta"), pytest.raises(StopIteration) as end:
        steps = level_steps._reduced(Exchanges(), [0, 1], 0, pieces, op)
        while True:
            next(steps)
    assert end.value.value.tolist() == [3.0] * 3
