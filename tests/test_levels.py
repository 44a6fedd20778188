"""Reductions and gathers in two levels, as over several hosts, against sums in one process. The ranks of
these tests are on one host and are told that they are on several; over hosts: test_hosts.py."""

from __future__ import annotations

import random
import time
from unittest import mock

import pytest
import torch
from patterns import bytes_of
from ranks import on_ranks
from test_reductions import FEW, ReduceOp, names_for, truth, values

from pipecomm_ext import PipeCommMismatch
from pipecomm_ext.communicator import reductions
from pipecomm_ext.communicator.communicator import engine_of
from pipecomm_ext.communicator.continuation import Line, finish_in_background
from pipecomm_ext.communicator.plans import MAX_WHOLE_BYTES
from pipecomm_ext.communicator.reduce_operators import Operator
from pipecomm_ext.core.levels import levels_among

# The host of each rank.
LAYOUTS = {4: ["aabb", "abba"], 6: ["aaabbb", "abcabc", "abbcca"]}


def places(layout: str) -> list[dict[str, str | None]]:
    return [{"boot_id": None if name == "?" else name, "pid_namespace": "pid:[1]"} for name in layout]


def line_over(world, layout: str) -> Line:
    levels = levels_among(world.rank, places(layout))
    assert levels is not None
    return Line(1, lambda: levels)


@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        ("aabb", ((0, 1), (2, 3))),
        ("abab", ((0, 2), (1, 3))),
        ("cabbca", ((0, 4), (1, 5), (2, 3))),
        ("aaaa", None),
        ("abcd", None),
        ("aaab", None),
        ("aa??", None),
        ("a", None),
    ],
)
def test_the_levels_of_hosts(layout, ranks):
    for rank in range(len(layout)):
        levels = levels_among(rank, places(layout))
        assert (levels.ranks if levels else None) == ranks
        if levels:
            assert levels.local[levels.place] == levels.across[levels.host] == rank
            assert {layout[other] for other in levels.local} == {layout[rank]}


@pytest.mark.parametrize("dtype", FEW, ids=str)
@on_ranks(4, 6)
def test_all_reduce(world, dtype):
    names = names_for(dtype)
    layouts = LAYOUTS[world.size]
    for layout in layouts if dtype in (torch.bfloat16, torch.int16) else layouts[:1]:
        line = line_over(world, layout)
        for length in (MAX_WHOLE_BYTES // dtype.itemsize + 1, 40_001):
            everybody = [values(length, dtype, rank) for rank in range(world.size)]
            for idx, name in enumerate(names):
                expected, op = truth(name, everybody, layout), getattr(ReduceOp, name)
                tensor = everybody[world.rank].clone()
                if (world.rank + idx) % 2:  # some ranks wait for it, others do not
                    reductions.all_reduce(world.comm, engine_of(world.comm), tensor, op, line)
                else:
                    reductions.begin_all_reduce(
                        world.comm, engine_of(world.comm), [tensor], op, False, line
                    ).wait()
                assert bytes_of(tensor) == bytes_of(expected), (layout, length, name)


@on_ranks(4)
def test_all_reduce_of_other_forms(world):
    line, rank, size = line_over(world, "abab"), world.rank, world.size
    for whole in (torch.arange(40_000.0).view(200, 200).t(), torch.ones(2, 30_000)[:, ::2]):
        tensor = whole + rank
        reductions.all_reduce(world.comm, engine_of(world.comm), tensor, ReduceOp.SUM, line)
        assert torch.equal(tensor, whole * size + 6)
    numbers = torch.full((20_000,), complex(rank, 1), dtype=torch.complex64)
    for op, expected in [(ReduceOp.SUM, complex(6, 4)), (ReduceOp.AVG, complex(1.5, 1))]:
        tensor = numbers.clone()
        reductions.all_reduce(world.comm, engine_of(world.comm), tensor, op, line)
        assert torch.equal(tensor, torch.full_like(tensor, expected))
    tensor = torch.ones(20_000)
    reductions.all_reduce(
        world.comm, engine_of(world.comm), tensor, torch.distributed._make_nccl_premul_sum(2.0), line
    )
    assert torch.equal(tensor, torch.full_like(tensor, 8))
    parts = [torch.full((10_000 + idx,), float(rank)) for idx in range(3)]
    reductions.begin_all_reduce(world.comm, engine_of(world.comm), parts, ReduceOp.SUM, False, line).wait()
    assert all(torch.equal(part, torch.full_like(part, 6)) for part in parts)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int16], ids=str)
@on_ranks(4, 6)
def test_reduce_scatter(world, dtype):
    size, rank = world.size, world.rank
    for layout in LAYOUTS[size]:
        line = line_over(world, layout)
        for lengths in ([9_001] * size, [20_000 * (other % 3) + other for other in range(size)]):
            everybody = [values(sum(lengths), dtype, other) for other in range(size)]
            for name in ("SUM", "MAX", "AVG") if dtype.is_floating_point else ("SUM", "BXOR"):
                expected = truth(name, everybody, layout).split(lengths)[rank]
                output, op = torch.empty(lengths[rank], dtype=dtype), getattr(ReduceOp, name)
                pieces = list(everybody[rank].split(lengths))
                brought = everybody[rank] if len(set(lengths)) == 1 else pieces
                if rank % 2:
                    reductions.reduce_scatter(world.comm, engine_of(world.comm), output, brought, op, line)
                else:
                    reductions.begin_reduce_scatter(
                        world.comm, engine_of(world.comm), [output], brought, op, False, line
                    ).wait()
                assert bytes_of(output) == bytes_of(expected), (layout, lengths, name)


@on_ranks(4, 6)
def test_all_gather(world):
    size, rank = world.size, world.rank
    for layout in LAYOUTS[size]:
        line = line_over(world, layout)
        for dtype, length in ((torch.float64, 3_000), (torch.uint8, 30_001)):
            everybody = [values(length, dtype, other) for other in range(size)]
            for output in (
                torch.empty(size, length, dtype=dtype),
                torch.empty(length, size, dtype=dtype).t(),
            ):
                reductions.begin_all_gather(
                    world.comm, engine_of(world.comm), output, everybody[rank], bool(rank % 2), line
                ).wait()
                assert bytes_of(output) == bytes_of(torch.stack(everybody)), (layout, dtype)


@on_ranks(4)
def test_many_in_flight_with_delays_have_the_same_bits_in_every_run(world):
    """Some wait, some poll; the handles end in another order on each rank. Small ones come between."""
    comm, rank, size = world.comm, world.rank, world.size
    everybody = [torch.randn(20_000, generator=torch.Generator().manual_seed(other)) for other in range(size)]
    expected = truth("SUM", everybody, "abba")
    rng = random.Random(rank)
    for _ in range(8):
        line = line_over(world, "abba")
        handles, results = [], []
        for idx in range(6):
            time.sleep(rng.random() / 500)
            if idx == 4:
                small = torch.ones(3)
                reductions.all_reduce(comm, engine_of(comm), small, ReduceOp.SUM, line)
                assert small.tolist() == [size] * 3
            if idx % 3 == 2:
                whole = torch.empty(size, 20_000)
                handles.append(
                    reductions.begin_all_gather(comm, engine_of(comm), whole, everybody[rank], False, line)
                )
                finish_in_background(handles[-1])
                results.append((whole, torch.stack(everybody)))
                continue
            tensor = everybody[rank].clone()
            if idx == 3 and rng.random() < 0.5:
                reductions.all_reduce(comm, engine_of(comm), tensor, ReduceOp.SUM, line)
            else:
                handles.append(
                    reductions.begin_all_reduce(comm, engine_of(comm), [tensor], ReduceOp.SUM, False, line)
                )
                finish_in_background(handles[-1])
            results.append((tensor, expected))
        rng.shuffle(handles)
        for handle in handles:
            while rng.random() < 0.5 and not handle.is_completed():
                time.sleep(0.001)
            handle.wait(20)
        for result, truth_ in results:
            assert bytes_of(result) == bytes_of(truth_)


@on_ranks(4)
def test_disagreements_reach_all_ranks_and_the_next_call_works(world):
    comm, rank = world.comm, world.rank
    line = line_over(world, "aabb")
    calls = {
        "length": lambda: torch.ones(20_000 + (rank == 2)),
        "shape": lambda: torch.ones((100, 200) if rank == 2 else (200, 100)),
        "size": lambda: torch.ones(20_000 if rank != 2 else 20),  # of one level
        "dtype": lambda: torch.ones(20_000, dtype=torch.float64 if rank == 2 else torch.float32),
    }
    for make in calls.values():
        with pytest.raises(PipeCommMismatch):
            reductions.all_reduce(comm, engine_of(comm), make(), ReduceOp.SUM, line)
    with pytest.raises(PipeCommMismatch):
        reductions.all_reduce(
            comm, engine_of(comm), torch.ones(20_000), ReduceOp.MAX if rank == 2 else ReduceOp.SUM, line
        )
    refused = ValueError if rank == 2 else PipeCommMismatch
    with pytest.raises(refused):
        reductions.all_reduce(
            comm, engine_of(comm), torch.ones(20_000), ReduceOp.BAND if rank == 2 else ReduceOp.SUM, line
        )
    handle = None
    with pytest.raises(PipeCommMismatch):
        handle = reductions.begin_all_gather(
            comm,
            engine_of(comm),
            torch.empty(4 * (9_000 + rank // 3)),
            torch.ones(9_000 + rank // 3),
            False,
            line,
        )
        handle.wait()
    tensor = torch.ones(20_000)
    reductions.all_reduce(comm, engine_of(comm), tensor, ReduceOp.SUM, line)
    assert torch.equal(tensor, torch.full_like(tensor, 4))


@pytest.mark.parametrize("layout", ["aabb", "aaaa"])
@on_ranks(4)
def test_a_rank_without_memory_for_what_it_computes_refuses_the_next_exchange(world, layout):
    comm, rank = world.comm, world.rank
    line = Line(1) if layout == "aaaa" else line_over(world, layout)
    for waits in (False, True):
        tensor = torch.ones(20_000)
        if rank == 2:
            with (
                mock.patch.object(Operator, "reduce", side_effect=MemoryError("no memory is left")),
                pytest.raises(MemoryError),
            ):
                reductions.begin_all_reduce(comm, engine_of(comm), [tensor], ReduceOp.SUM, waits, line).wait()
        else:
            with pytest.raises(PipeCommMismatch, match=r"rank 2.*no memory is left"):
                reductions.begin_all_reduce(comm, engine_of(comm), [tensor], ReduceOp.SUM, waits, line).wait()
        tensor = torch.ones(20_000)
        reductions.all_reduce(comm, engine_of(comm), tensor, ReduceOp.SUM, line)
        assert torch.equal(tensor, torch.full_like(tensor, 4))
