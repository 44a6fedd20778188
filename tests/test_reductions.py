"""Reductions of the Communicator against sums in one process, and the same bits on all ranks."""

from __future__ import annotations

import functools
import random
import time

import pytest
import torch
import torch.distributed as torch_dist
from patterns import awaited, bytes_of
from ranks import on_ranks

from pipecomm_ext import _C, PipeCommMismatch, PipeCommTimeout, Work
from pipecomm_ext.communicator import reductions
from pipecomm_ext.communicator.communicator import engine_of

ReduceOp = torch_dist.ReduceOp
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
UNSIGNED = [torch.uint16, torch.uint32, torch.uint64]
FEW = [torch.bfloat16, torch.float32, torch.int16, torch.bool]  # where others share their code
LENGTHS = (0, 1, 7, 5_000, 40_001)
OPERATORS = {
    "SUM": lambda a, b: a + b,
    "PRODUCT": lambda a, b: a * b,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


def values(length: int, dtype: torch.dtype, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + length)
    if dtype.is_floating_point:
        return (torch.randn(length, generator=generator, dtype=torch.float64)).to(dtype)
    if dtype == torch.bool:
        return torch.randint(0, 2, (length,), generator=generator).bool()
    return torch.randint(0, 120, (length,), generator=generator).to(dtype)


def names_for(dtype: torch.dtype) -> list[str]:
    """The operators of reductions of these dtypes."""
    return [
        "SUM",
        "PRODUCT",
        "MIN",
        "MAX",
        *(["AVG"] if dtype.is_floating_point else ["BAND", "BOR", "BXOR"]),
    ]


def truth(name: str, tensors: list[torch.Tensor], hosts: str | None = None) -> torch.Tensor:
    """Reduces in rank order, float16 and bfloat16 in float32, integers as int64, whose low bits are right.

    With the hosts of ranks: over those of each host, then over the hosts, in the order of their first ranks.
    """
    dtype = tensors[0].dtype
    wide = torch.int64 if not dtype.is_floating_point else dtype
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else wide
    combine = OPERATORS["SUM" if name == "AVG" else name]
    of_hosts: dict[str, list[torch.Tensor]] = {}
    for host, tensor in zip(hosts or "a" * len(tensors), tensors, strict=True):
        of_hosts.setdefault(host, []).append(tensor.to(wide))
    total = functools.reduce(combine, [functools.reduce(combine, some) for some in of_hosts.values()])
    total = total / len(tensors) if name == "AVG" else total
    if dtype == torch.bool:
        return total.bool() if name != "BXOR" else (total % 2).bool()
    return total.to(dtype)


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, *UNSIGNED, torch.bool], ids=str)
@on_ranks(1, 2)
def test_all_reduce(world, dtype):
    check_all_reduce(world, dtype)


@pytest.mark.parametrize("dtype", FEW, ids=str)
@on_ranks(3, 4)
def test_all_reduce_of_more_ranks(world, dtype):
    check_all_reduce(world, dtype)


@on_ranks(1, 2, 3)
def test_bools_of_any_bytes(world):
    """All bytes but 0 are true, as in uint8 tensors that are viewed as bool; results are 0 or 1."""
    check_all_reduce(world, torch.bool, lambda length, _, rank: values(length, torch.uint8, rank) % 4)


def check_all_reduce(world, dtype, bytes_as=values):
    """`bytes_as` makes tensors, maybe of another dtype, whose bytes are viewed as `dtype`."""
    comm, size = world.comm, world.size
    for length in LENGTHS:
        everybody = [bytes_as(length, dtype, rank) for rank in range(size)]
        for name in names_for(dtype):
            expected = truth(name, [each if each.dtype == dtype else each != 0 for each in everybody])
            for async_op in (False, True):
                tensor = everybody[world.rank].clone()
                awaited(comm.all_reduce(tensor.view(dtype), getattr(ReduceOp, name), async_op=async_op))
                assert bytes_of(tensor) == bytes_of(expected), (length, name)


@on_ranks(1, 2, 3)
def test_a_reduce_scatter_into_any_place_of_its_input(world):
    comm, size, rank = world.comm, world.size, world.rank
    for length in (8, 5_000):
        for begin in (0, 1, length - 1, max(0, rank * length - 1), rank * length, (size - 1) * length + 1):
            for form in ("sync", "async", "list"):
                memory = torch.arange((size + 1.0) * length)
                source, output = memory[: size * length], memory[begin : begin + length]
                expected = source[rank * length : (rank + 1) * length] * size
                if form == "list":
                    comm.reduce_scatter(output, source.split(length))
                elif form == "sync":
                    comm.reduce_scatter(output, source)
                else:
                    comm.reduce_scatter(output, source, async_op=True).wait()
                assert torch.equal(output, expected), (length, begin, form)


@on_ranks(2, 3)
def test_forms_of_tensors(world):
    comm, size, rank = world.comm, world.size, world.rank
    whole = torch.arange(24.0).view(4, 6)
    for view in (whole.t(), whole[:, ::2], whole[1], whole[2, 3]):
        tensor, expected = view, view * size
        comm.all_reduce(tensor)
        assert torch.equal(tensor, expected)
    scattered = torch.empty(3, 2, dtype=torch.int32)
    source = torch.arange(6 * size, dtype=torch.int32)
    for form in (source.view(3 * size, 2), source.view(size, 3, 2)):
        comm.reduce_scatter(scattered, form + rank)
        expected = (source * size + sum(range(size))).view(size, 3, 2)[rank]
        assert torch.equal(scattered, expected)
        gathered = torch.empty_like(form)
        comm.all_gather(gathered, scattered)
        assert torch.equal(gathered, (source * size + sum(range(size))).view(form.shape))
    comm.all_gather(gathered, scattered, async_op=True).wait()
    complexes = torch.full((3,), complex(rank, 1))
    comm.all_reduce(complexes)
    assert torch.equal(complexes, torch.full((3,), complex(sum(range(size)), size)))


@on_ranks(3)
def test_a_dropped_handle_is_reduced_and_the_bits_are_the_same_everywhere(world):
    """Ranks join at different times in each run, and finish in a different order."""
    comm, size = world.comm, world.size
    everybody = [torch.randn(20_000, generator=torch.Generator().manual_seed(rank)) for rank in range(size)]
    bits = set()
    rng = random.Random(world.rank)
    for _ in range(15):
        line = reductions.Line(1)
        world_tensors = [everybody[world.rank].clone() for _ in range(3)]
        handles = []
        for tensor in world_tensors:
            handles.append(
                reductions.begin_all_reduce(comm, engine_of(comm), [tensor], ReduceOp.SUM, False, line)
            )
            sum(range(rng.randrange(20_000)))  # some time
        rng.shuffle(handles)
        for handle in handles:
            handle.wait(20)
            handle.wait()
        bits.update(map(bytes_of, world_tensors))
    dropped = everybody[world.rank].clone()
    comm.all_reduce(dropped, async_op=True)
    comm.barrier()
    waited = everybody[world.rank].clone()
    comm.all_reduce(waited)
    for _ in range(2000):
        if torch.equal(dropped, waited):
            break
        time.sleep(0.01)
    assert torch.equal(dropped, waited)
    assert len(bits) == 1
    gathered = torch.empty(size * 20_000)
    comm.all_gather(gathered, world_tensors[0])
    assert {bytes_of(part) for part in gathered.split(20_000)} == bits


@on_ranks(2)
def test_what_is_refused_or_does_not_fit(world):
    comm, ones = world.comm, torch.ones(4)
    for call in (
        lambda: comm.all_reduce(ones, ReduceOp.BAND),
        lambda: comm.all_reduce(ones.long(), ReduceOp.AVG),
        lambda: comm.all_reduce(ones.to(torch.complex64), ReduceOp.MAX),
        lambda: comm.reduce_scatter(ones[:3], ones),
        lambda: comm.all_gather(ones, ones),
    ):
        with pytest.raises(ValueError):
            call()
    with pytest.raises(TypeError, match="ReduceOp"):
        comm.all_reduce(ones, "sum")
    with pytest.raises(PipeCommMismatch):  # operators
        comm.all_reduce(ones, ReduceOp.SUM if world.rank else ReduceOp.MAX)
    with pytest.raises(PipeCommMismatch):  # lengths
        comm.all_reduce(torch.ones(4 + world.rank))
    with pytest.raises(PipeCommMismatch):  # dtypes
        comm.all_reduce(torch.ones(4, dtype=torch.int32 if world.rank else torch.float32))
    with pytest.raises(ValueError if world.rank else PipeCommMismatch):  # one rank refuses
        comm.all_reduce(ones, ReduceOp.BAND if world.rank else ReduceOp.SUM)
    comm.all_reduce(ones)
    assert torch.equal(ones, torch.full((4,), 2.0))


# Calls with a tensor of a shape; each gives an async_op.
CALLS = {
    "all_reduce": lambda comm, shape, async_op: comm.all_reduce(torch.ones(shape), async_op=async_op),
    "reduce_scatter": lambda comm, shape, async_op: comm.reduce_scatter(
        torch.empty(shape), torch.ones(comm.size, *shape), async_op=async_op
    ),
    "reduce_scatter of a list": lambda comm, shape, async_op: comm.reduce_scatter(
        torch.empty(shape), [torch.ones(shape)] * comm.size, async_op=async_op
    ),
    "all_gather": lambda comm, shape, async_op: comm.all_gather(
        torch.empty(comm.size, *shape), torch.ones(shape), async_op=async_op
    ),
}


@pytest.mark.parametrize("scale", [1, 100], ids=["small", "large"])
@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("name", CALLS)
@on_ranks(2)
def test_equal_numbers_of_elements_in_other_shapes_are_refused(world, name, async_op, scale):
    """Large all_reduces take two exchanges. Both ends are told the shapes and the name of the call."""
    comm, rank = world.comm, world.rank
    for shapes in [((2 * scale, 3 * scale), (3 * scale, 2 * scale)), ((4,), (2, 2)), ((), (1,))]:
        with pytest.raises(PipeCommMismatch) as caught:
            awaited(CALLS[name](comm, shapes[rank], async_op))
        error = caught.value
        assert error.op == error.ours.op == error.theirs.op == name.partition(" ")[0]
        assert (error.ours.shape, error.theirs.shape) == (shapes[rank], shapes[1 - rank])
    for shape in [(2 * scale, 3 * scale), (4,), ()]:
        awaited(CALLS[name](comm, shape, async_op))


@on_ranks(2)
def test_handles_are_works(world):
    comm = world.comm
    works = [call(comm, (3,), True) for call in CALLS.values()]
    assert all(isinstance(work, Work) for work in works)
    assert [work.number for work in works] == list(range(works[0].number, works[0].number + len(works)))
    for work in works:
        work.wait()
    for name, call in CALLS.items():
        if world.rank == 0:
            work = call(comm, (3,), True)
            with pytest.raises(PipeCommTimeout, match=r"is not done after 0.05 s of wait\(\)") as caught:
                work.wait(0.05)
            assert (caught.value.op, caught.value.rank) == (name.partition(" ")[0], 0)
            assert (caught.value.peer, caught.value.shape) == (1, (3,))
        torch_dist.barrier(world.group)
        if world.rank == 1:
            work = call(comm, (3,), True)
        work.wait()


@on_ranks(2)
def test_operators_that_differ_name_the_call(world):
    with pytest.raises(PipeCommMismatch) as caught:
        world.comm.all_reduce(torch.ones(2), ReduceOp.SUM if world.rank else ReduceOp.MAX)
    assert caught.value.op == caught.value.theirs.op == "all_reduce"


@pytest.mark.parametrize("dtype", [torch.uint4, torch.int1, torch.uint8], ids=str)
@on_ranks(2)
def test_gathers_of_dtypes_that_torch_does_not_copy(world, dtype):
    comm = world.comm
    everybody = torch.arange(12, dtype=torch.uint8).view(2, 3, 2)
    gathered = torch.zeros(2, 2, 3, dtype=torch.uint8)
    for async_op in (False, True):
        output = gathered.zero_().view(dtype).transpose(1, 2)
        awaited(comm.all_gather(output, everybody[world.rank].view(dtype), async_op=async_op))
        assert torch.equal(gathered.transpose(1, 2), everybody)
        mine = everybody[world.rank].t().contiguous().t()
        output = gathered.zero_().view(2, 3, 2).view(dtype)
        awaited(comm.all_gather(output, mine.view(dtype), async_op=async_op))
        assert torch.equal(gathered.view(2, 3, 2), everybody)


def test_what_one_process_cannot_reduce_is_refused():
    ones = torch.ones(4, 6)
    for tensors, name, told in [
        ([ones, torch.ones(6, 4).t()], "SUM", "must be contiguous and agree"),
        ([ones, ones.double()], "SUM", "must be contiguous and agree"),
        ([], "SUM", "the reduction of no tensors"),
        ([ones, ones], "BAND", "not defined for float32"),
        ([ones, ones], "MEDIAN", "no reduction is called MEDIAN"),
    ]:
        with pytest.raises(ValueError, match=told):
            _C.reduce(torch.empty(4, 6), tensors, name)
    saved = torch.ones(3, requires_grad=True).exp()
    loss = saved.square().sum()
    _C.reduce(saved.detach(), [torch.zeros(3)], "SUM")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
