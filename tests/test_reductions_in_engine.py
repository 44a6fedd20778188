"""Reductions that the engine does in one operation, as over NCCL: which ones, of what tensors, and what
becomes of the results. In place of NCCL a stand-in reduces tensors of the host."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from test_backend import both, ended, group_of

from pipecomm_ext import PipeCommMismatch
from pipecomm_ext.backend import collectives
from pipecomm_ext.communicator import reductions
from pipecomm_ext.communicator.communicator import engine_of
from pipecomm_ext.communicator.plans import MAX_WHOLE_BYTES
from pipecomm_ext.communicator.traced import done_work

ReduceOp = dist.ReduceOp
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [torch.int8, torch.uint8, torch.int32, torch.uint32, torch.int64, torch.uint64]
COMBINE = {"SUM": torch.sum, "AVG": torch.mean, "PRODUCT": torch.prod, "MIN": torch.amin, "MAX": torch.amax}


class StandIn:
    """An engine of CPU tensors with the reductions of NCCL, which notes them."""

    def __init__(self, comm) -> None:
        self._comm, self.calls, self.shapes = comm, [], []

    def can_reduce(self, op, reduction, dtype):
        is_known = dtype in FLOATS or (dtype in INTEGERS and reduction != "AVG")
        return op == "all_gather" or (is_known and reduction in COMBINE)

    def reduce(self, op, output, input, reduction, root, async_op):
        comm = self._comm
        assert op == "all_gather" or self.can_reduce(op, reduction, input.dtype)
        assert isinstance(async_op, bool) and (output is None) == (op == "reduce" and comm.rank != root)
        for tensor in (input,) if output is None else (input, output):
            assert tensor.is_contiguous() and not tensor.is_conj()
        self.calls.append(op)
        self.shapes.append(tuple((output if op == "reduce_scatter" else input).shape))  # the ranks compare it
        everybody = [torch.empty_like(input) for _ in range(comm.size)]
        comm.all_to_all([input] * comm.size, everybody)
        if op == "all_gather":
            output.copy_(torch.stack(everybody).view(output.shape))
        elif output is not None:
            wide = [tensor.to(torch.float64) for tensor in everybody]
            total = COMBINE[reduction](torch.stack(wide), 0)
            pieces = total.view(comm.size, -1) if op == "reduce_scatter" else None
            output.copy_((total if pieces is None else pieces[comm.rank]).view(output.shape))
        return done_work()

    def all_reduce(self, *_):  # these are for tensors in host memory
        return False

    reduce_scatter = all_gather = all_reduce

    def exchange(self, *args):
        return engine_of(self._comm).exchange(*args)


def brought(shape, dtype: torch.dtype, rank: int) -> torch.Tensor:
    """Small whole numbers, whose sums and products are exact in every dtype."""
    numbers = (torch.arange(torch.Size(shape).numel()) * 7 + rank) % 3 + 1
    return (numbers.to(dtype) * (1j if dtype.is_complex else 1)).view(shape)


def reduced(name: str, shape, dtype: torch.dtype, size: int) -> torch.Tensor:
    wide = torch.complex128 if dtype.is_complex else torch.float64
    return COMBINE[name](torch.stack([brought(shape, wide, rank) for rank in range(size)]), 0).to(dtype)


# Names and dtypes, and whether the engine reduces them: the others are exchanged.
CASES = [
    *[(name, dtype, True) for name in ("SUM", "PRODUCT", "MIN", "MAX") for dtype in (*FLOATS, *INTEGERS)],
    *[("AVG", dtype, True) for dtype in FLOATS],
    ("SUM", torch.complex64, True),
    ("AVG", torch.complex128, True),
    ("PRODUCT", torch.complex64, False),
    ("SUM", torch.int16, False),
    ("MAX", torch.int16, False),
]


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@on_ranks(1, 2, 3)
def test_which_reductions_the_engine_does(world, is_async):
    comm, size, rank = world.comm, world.size, world.rank
    for name, dtype, is_in_engine in CASES:
        engine, op = StandIn(comm), getattr(ReduceOp, name)
        tensor = brought((5,), dtype, rank)
        handle = reductions.begin_all_reduce(comm, engine, [tensor], op, not is_async, None)
        handle.wait()
        expected = reduced(name, (5,), dtype, size)
        assert torch.equal(tensor, expected), (name, dtype)
        assert engine.calls == ["all_reduce"] * is_in_engine, (name, dtype)
        for root in range(size):
            tensor = brought((5,), dtype, rank)
            reductions.begin_reduce(comm, engine, tensor, op, root, not is_async).wait()
            assert torch.equal(tensor, expected if rank == root else brought((5,), dtype, rank)), (
                name,
                dtype,
            )
        whole, piece = brought((size, 4), dtype, rank), torch.empty(4, dtype=dtype)
        reductions.begin_reduce_scatter(comm, engine, [piece], whole, op, not is_async).wait()
        assert torch.equal(piece, reduced(name, (size, 4), dtype, size)[rank]), (name, dtype)
        expected_calls = ["all_reduce", *["reduce"] * size, "reduce_scatter"]
        assert engine.calls == expected_calls * is_in_engine, (name, dtype)
    for op, dtype in [(ReduceOp.BOR, torch.int32), (ReduceOp.SUM, torch.bool)]:
        engine, tensor = StandIn(comm), torch.ones(3, dtype=dtype)
        reductions.all_reduce(comm, engine, tensor, op)
        assert torch.equal(tensor, torch.ones(3, dtype=dtype)) and not engine.calls


@on_ranks(2, 3)
def test_tensors_of_other_forms(world):
    comm, size, rank = world.comm, world.size, world.rank
    engine = StandIn(comm)
    tensor = brought((4, 6), torch.float32, rank).t()[::2]
    before = tensor.clone()
    reductions.all_reduce(comm, engine, tensor, dist._make_nccl_premul_sum(2.0))
    everybody = [brought((4, 6), torch.float32, each).t()[::2] for each in range(size)]
    assert torch.equal(tensor, 2 * sum(everybody)) and not torch.equal(tensor, before)

    parts = [brought((3,), torch.float32, rank), brought((2, 2), torch.float32, rank).t()]
    reductions.begin_all_reduce(comm, engine, parts, ReduceOp.MAX, False, None).wait()
    assert torch.equal(parts[0], reduced("MAX", (3,), torch.float32, size))
    assert torch.equal(parts[1], reduced("MAX", (2, 2), torch.float32, size).t())

    conjugates, total = torch.full((size, 2), complex(rank, 1)).conj(), torch.empty(2, dtype=torch.complex64)
    reductions.begin_reduce_scatter(comm, engine, [total], conjugates, ReduceOp.SUM, False).wait()
    assert torch.equal(total, torch.full((2,), complex(sum(range(size)), -size)))

    pieces = [torch.full((2,), float(rank + other)) for other in range(size)]
    outputs = torch.empty(4)[::2]
    reductions.reduce_scatter(comm, engine, outputs, pieces, ReduceOp.SUM)
    assert torch.equal(outputs, torch.full((2,), float(sum(range(size)) + size * rank)))

    gathered = torch.empty(2, size, dtype=torch.bool).t()
    reductions.all_gather(comm, engine, gathered, torch.tensor([rank == 1, True]))
    assert gathered.tolist() == [[each == 1, True] for each in range(size)]
    assert engine.calls == ["all_reduce", "all_reduce", "reduce_scatter", "reduce_scatter", "all_gather"]
    assert engine.shapes == [(3, 4), (7,), (2, 2), (2,), (2,)]  # complex numbers have one dim more

    uneven = [torch.full((other + 1,), float(rank)) for other in range(size)]
    output = torch.empty(rank + 1)
    reductions.begin_reduce_scatter(comm, engine, [output], uneven, ReduceOp.SUM, False).wait()
    assert torch.equal(output, torch.full((rank + 1,), float(sum(range(size))))) and len(engine.calls) == 5


@on_ranks(3)
def test_a_refusal_names_the_operation(world):
    """Also where the ranks exchange tensors."""
    comm = world.comm
    for engine in (StandIn(comm), engine_of(comm)):
        if world.rank == 1:
            with pytest.raises(ValueError, match="BAND is for integers"):
                reductions.begin_reduce(comm, engine, torch.ones(2), ReduceOp.BAND, 0, True)
            assert comm.flight_record()[-1]["op"] == "reduce"
        else:
            with pytest.raises(PipeCommMismatch, match="refused by rank 1: ValueError: BAND is for integers"):
                reductions.begin_reduce(comm, engine_of(comm), torch.ones(2), ReduceOp.SUM, 0, True).wait()


@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
@both(2, 3)
def test_calls_of_the_backend(world, async_op):
    group, size, rank = group_of(world.size), world.size, world.rank
    calls = []

    def stand_in(comm):
        engine = StandIn(comm)
        engine.calls = calls
        return engine

    length = MAX_WHOLE_BYTES
    with mock.patch.object(collectives, "engine_of", stand_in):
        tensor = torch.full((length,), float(rank))
        ended(dist.all_reduce(tensor, group=group, async_op=async_op))
        assert torch.all(tensor == sum(range(size)))
        ended(dist.reduce(tensor.fill_(rank), size - 1, ReduceOp.MAX, group, async_op))
        assert torch.all(tensor == rank) and calls == ["all_reduce", "reduce"]
        piece, whole = torch.empty(length), torch.full((size * length,), float(rank))
        ended(dist.reduce_scatter_tensor(piece, whole, group=group, async_op=async_op))
        assert torch.all(piece == sum(range(size)))
        ended(dist.reduce_scatter(piece, list(whole.chunk(size)), ReduceOp.AVG, group, async_op))
        assert torch.all(piece == sum(range(size)) / size)
        ended(dist.all_gather_into_tensor(whole, piece.fill_(rank), group, async_op))
        assert torch.equal(whole.view(size, -1)[:, 0], torch.arange(size).float())
        assert calls[2:] == ["reduce_scatter", "reduce_scatter", "all_gather"]
        tensors = [torch.full((4,), float(rank)), torch.full((3,), rank, dtype=torch.int64)]
        with dist._coalescing_manager(group, async_ops=async_op) as works:
            for each in tensors:
                dist.all_reduce(each, group=group)
        if async_op:
            works.wait()
        assert all(torch.all(each == sum(range(size))) for each in tensors)
        assert calls[5:] == ["all_reduce", "all_reduce"]
