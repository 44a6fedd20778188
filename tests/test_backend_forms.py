"""Calls of the backend "pipecomm" in all forms that torch's process groups have give what gloo gives."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from test_backend import both, gloo_group, group_of

from pipecomm_ext import PipeCommTimeout

MAX = dist.ReduceOp.MAX
LIMIT = timedelta(seconds=40)


def with_options(options, **fields):
    for name, value in fields.items():
        setattr(options, name, value)
    return options


def forms(group, rank: int):
    """The tensors that calls of methods of the group write, by the form of the call."""
    mine, pieces = torch.ones(2) * (rank + 1), [torch.ones(2) * (rank + 1 + dst) for dst in range(2)]
    given = pieces if rank == 1 else []

    def two() -> list[torch.Tensor]:
        return [torch.zeros(2), torch.zeros(2)]

    calls = {
        "broadcast, root": lambda out: group.broadcast(out.copy_(mine), 1),
        "broadcast, root, timeout": lambda out: group.broadcast(out.copy_(mine), 1, LIMIT),
        "broadcast, keywords": lambda out: group.broadcast(tensor=out.copy_(mine), root=1, timeout=LIMIT),
        "broadcast, nothing": lambda out: group.broadcast([out.copy_(mine)]),
        "broadcast, options": lambda out: group.broadcast(
            tensors=[out.copy_(mine)], opts=with_options(dist.BroadcastOptions(), rootRank=1)
        ),
        "allreduce, operator": lambda out: group.allreduce(out.copy_(mine), MAX),
        "allreduce, keywords": lambda out: group.allreduce([out.copy_(mine)], op=MAX, timeout=LIMIT),
        "allreduce, nothing": lambda out: group.allreduce(tensors=[out.copy_(mine)]),
        "allreduce_coalesced": lambda out: group.allreduce_coalesced(
            [out.copy_(mine), torch.ones(3)], with_options(dist.AllreduceCoalescedOptions(), reduceOp=MAX)
        ),
        "scatter, root": lambda out: group.scatter(out, given, 1, LIMIT),
        "scatter, keywords": lambda out: group.scatter(output_tensor=out, input_tensors=given, root=1),
        "reduce_scatter, operator": lambda out: group.reduce_scatter(out, pieces, MAX),
        "reduce_scatter, keywords": lambda out: group.reduce_scatter(
            output=out, input=pieces, op=MAX, timeout=LIMIT
        ),
        "reduce_scatter, nothing": lambda out: group.reduce_scatter(out, pieces),
        "reduce_scatter_single": lambda out: group.reduce_scatter_single(
            out, torch.cat(pieces), with_options(dist.ReduceScatterOptions(), reduceOp=MAX)
        ),
        "all_to_all_single, timeout": lambda out: group.all_to_all_single(out, mine, [], [], LIMIT),
    }
    reductions = {
        "reduce, operator": lambda out: group.reduce(out.copy_(mine), 0, MAX),
        "reduce, timeout": lambda out: group.reduce(out.copy_(mine), 0, MAX, LIMIT),
        "reduce, keywords": lambda out: group.reduce(tensor=out.copy_(mine), root=0, op=MAX),
        "reduce, options": lambda out: group.reduce(
            [out.copy_(mine)], with_options(dist.ReduceOptions(), rootRank=0, reduceOp=MAX)
        ),
    }
    if rank == 0:
        calls |= reductions
    for name, call in calls.items():
        out = torch.zeros(2)
        assert call(out).wait()
        yield name, out
    for name, call in reductions.items() if rank == 1 else ():
        assert call(torch.zeros(2)).wait(), name
    for outs in (two(), two()):
        assert group.allgather(outs, mine, timeout=LIMIT).wait()
        yield "allgather", torch.stack(outs)
    outs = two()
    assert group.gather(outs if rank == 1 else [], mine, 1).wait()
    yield "gather", torch.stack(outs)
    assert group.barrier(LIMIT).wait() and group.barrier(timeout=LIMIT).wait() and group.barrier().wait()


@both(2)
def test_methods_of_the_group_in_all_forms(world):
    ours, theirs = dict(forms(group_of(2), world.rank)), dict(forms(gloo_group(2), world.rank))
    for name, expected in theirs.items():
        assert torch.equal(ours[name], expected), f"{name}: {ours[name]}, not {expected}"
    assert ours.keys() == theirs.keys()


@both(1)
def test_wrong_forms_are_refused(world):
    group, tensor = group_of(1), torch.ones(1)
    for call in (
        lambda: group.allreduce(),
        lambda: group.allreduce([tensor], root=0),
        lambda: group.broadcast(tensor, 0, LIMIT, 3),
        lambda: group.reduce_scatter(tensor),
        lambda: group.allgather([tensor], tensors=tensor),
    ):
        with pytest.raises(TypeError, match="needs|does not take"):
            call()


@both(2)
def test_a_timeout_of_the_call_itself(world):
    group = dist.new_group([0, 1], backend="pipecomm", timeout=timedelta(seconds=200))
    short = timedelta(seconds=0.1)
    calls = [
        lambda: group.broadcast(torch.ones(1), 1, short),
        lambda: group.allreduce([torch.ones(1)], timeout=short),
        lambda: group.barrier(short),
    ]
    if world.rank == 0:
        for call in calls:
            with pytest.raises(PipeCommTimeout):
                call().wait()
    dist.barrier()
    if world.rank == 1:
        for call in calls:
            call().wait(LIMIT)


@both(2)
def test_a_shorter_timeout_of_the_group(world):
    """Set after the first call: calls that wait follow it, too."""
    group = dist.new_group([0, 1], backend="pipecomm", timeout=timedelta(seconds=90))
    dist.barrier(group)
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=0.2), group)
    calls = [
        lambda: dist.all_reduce(torch.ones(2), group=group),
        lambda: dist.barrier(group),
        lambda: dist.all_gather_single(torch.ones(2), torch.ones(1), group),
        lambda: dist.reduce_scatter_single(torch.ones(1), torch.ones(2), group=group),
        lambda: dist.all_reduce(torch.ones(50_000), group=group),
    ]
    began = time.monotonic()
    for call in calls if world.rank == 0 else ():
        with pytest.raises(PipeCommTimeout):
            call()
    assert time.monotonic() - began < 45
    dist.barrier()
    dist.distributed_c10d._set_pg_timeout(LIMIT, group)
    for call in calls if world.rank == 1 else ():
        call()
    dist.barrier(group)
