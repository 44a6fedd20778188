"""A program for torch.distributed has the same results with pipecomm_ext.distributed, which allows more."""

from __future__ import annotations

import datetime
import importlib
import inspect
import random
import re

import pytest
import torch
import torch.distributed as torch_dist
from patterns import DTYPES, awaited, pattern, poison
from ranks import on_ranks
from sequence_cases import assert_same, cut, laid_out, random_lengths, remainder_first

import pipecomm_ext
from pipecomm_ext import PipeCommMismatch, PipeCommTimeout
from pipecomm_ext import distributed as dist


def ring(world) -> tuple[int, int]:
    """(next, previous) rank."""
    return (world.rank + 1) % world.size, (world.rank - 1) % world.size


def stage_step(api, members, group=None) -> list[torch.Tensor]:
    """One program for torch.distributed and for ours: every p2p call on both channels, the collectives.

    Peers are global ranks, those of group_ arguments ranks of the group.
    """
    size, rank = len(members), torch_dist.get_rank()
    me = members.index(rank)
    to_next, to_previous = (me + 1) % size, (me - 1) % size
    following, previous = members[to_next], members[to_previous]
    received = [poison(5, torch.float32) for _ in range(6)]
    sent = [pattern(5, torch.float32, rank, idx) for idx in range(6)]
    works = api.batch_isend_irecv(
        [
            api.P2POp(api.isend, sent[0], following, group, tag=0),
            api.P2POp(api.irecv, received[0], peer=previous, group=group, tag=0),
            api.P2POp(api.isend, sent[1], previous, group, tag=1),
            api.P2POp(op=api.irecv, tensor=received[1], group=group, group_peer=to_next, tag=1),
        ]
    )
    works += [api.irecv(received[2], previous, group), api.isend(sent[2], following, group)]
    works += [
        api.irecv(received[3], group=group, group_src=to_next, tag=1),
        api.isend(sent[3], group=group, group_dst=to_previous, tag=1),
    ]
    for work in works:
        work.wait()
    if me == 0:
        api.send(sent[4], dst=following, group=group)
        assert api.recv(received[4], src=previous, group=group) == previous
    else:
        assert api.recv(received[4], group=group, group_src=to_previous) == previous
        api.send(sent[4], group=group, group_dst=to_next)
    if me == 1:
        received[5].copy_(sent[5])
    assert api.broadcast(received[5], src=members[1], group=group) is None
    api.broadcast(received[5], group=group, group_src=1, async_op=True).wait()
    mine = pattern((2 * size, 2), torch.float32, rank)
    exchanged, gathered = torch.zeros_like(mine), poison((2 * size**2, 2), torch.float32)
    parts = [torch.zeros_like(mine) for _ in range(size)]
    api.all_to_all_single(exchanged, mine, group=group)
    api.all_gather_into_tensor(gathered, mine, group=group)
    api.all_gather(parts, mine, group=group)
    assert api.barrier(group) is None
    api.barrier(group, async_op=True).wait()
    return [*received, exchanged, gathered, *parts]


def check_the_same(members, group=None) -> None:
    ours, theirs = stage_step(dist, members, group), stage_step(torch_dist, members, group)
    for idx, (actual, expected) in enumerate(zip(ours, theirs, strict=True)):
        assert_same(actual, expected, idx)


@on_ranks(2, 3)
def test_a_program_gives_the_same_with_an_import_swapped(world):
    check_the_same(range(world.size))


def test_every_other_name_is_torchs_own():
    differ = {
        name
        for name in dir(torch_dist)
        if not name.startswith("__") and getattr(dist, name) is not getattr(torch_dist, name)
    }
    assert differ == {*dist.__all__} & {*dir(torch_dist)}
    assert {*dir(torch_dist), *dist.__all__} <= set(dir(dist))
    assert dist.group.WORLD is torch_dist.group.WORLD and dist.ReduceOp.SUM == torch_dist.ReduceOp.SUM
    with pytest.raises(
        AttributeError, match="neither pipecomm_ext.distributed nor torch.distributed has .* 'al"
    ):
        dist.al_reduce  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'al_reduce'"):
        from pipecomm_ext.distributed import al_reduce  # noqa: F401
    with pytest.raises(ModuleNotFoundError, match="'pipecomm_ext.distributed' is not a package"):
        importlib.import_module("pipecomm_ext.distributed.fsdp")  # not a second copy of torch's


@on_ranks(2)
def test_a_training_script_with_one_line_changed(world):
    """Reductions, groups and queries are torch's, messages are ours; also in a compiled function."""
    from pipecomm_ext.distributed import ReduceOp, all_reduce, new_group

    assert dist.is_initialized() and (dist.get_rank(), dist.get_world_size()) == (world.rank, 2)
    group = new_group([1, 0])
    total = torch.tensor([world.rank + 1.0])
    all_reduce(total, op=ReduceOp.MAX, group=group)
    dist.all_reduce(total, group=group)
    gathered = [torch.empty(1) for _ in range(2)]
    dist.all_gather(gathered, total + dist.get_rank(), group=group)
    assert [tensor.item() for tensor in gathered] == [4.0, 5.0]
    compiled = torch.compile(lambda x: x * dist.get_world_size(), backend="eager", fullgraph=True)
    assert compiled(torch.ones(1)).item() == 2
    dist.destroy_process_group(group)


@on_ranks(2)
def test_torchs_operations_are_accepted_in_a_batch(world):
    """P2POps made with torch's class and functions, mixed with ours."""
    following, previous = ring(world)
    received = [poison(3, torch.int32) for _ in range(2)]
    works = dist.batch_isend_irecv(
        [
            torch_dist.P2POp(torch_dist.isend, pattern(3, torch.int32, world.rank, 0), following),
            dist.P2POp(torch_dist.isend, pattern(3, torch.int32, world.rank, 1), following),
            dist.P2POp(dist.irecv, received[0], previous),
            torch_dist.P2POp(torch_dist.irecv, received[1], previous),
        ]
    )
    for work in works:
        work.wait()
    for idx in range(2):
        assert_same(received[idx], pattern(3, torch.int32, previous, idx), idx)


@on_ranks(5)
def test_ranks_of_a_sub_group_and_those_outside_of_it(world):
    members = [1, 2, 4]
    group, tensor = torch_dist.new_group(members), poison(4, torch.int32)
    if world.rank in members:
        check_the_same(members, group)
        with pytest.raises(ValueError, match=r"dst 3 \(global\) is not one of the group's ranks \[1, 2, 4\]"):
            dist.isend(tensor, 3, group)
        dist.barrier(pipecomm_ext.get_communicator(group))
    else:
        assert dist.isend(tensor, 4, group) is None and dist.barrier(group) is None
        assert dist.recv(tensor, 4, group) == -1 and dist.broadcast(tensor, 2, group) is None
        assert dist.batch_isend_irecv([dist.P2POp(dist.isend, tensor, 4, group)]) == []
        assert_same(tensor, poison(4, torch.int32))


@pytest.mark.parametrize("name", dist.__all__)
def test_arguments_are_those_of_torch(name):
    if name == "all_gather_single" and not hasattr(torch_dist, name):
        pytest.skip("torch < 2.13 has another name")
    ours, theirs = (
        [(p.name, p.default, p.kind) for p in inspect.signature(getattr(module, name)).parameters.values()]
        for module in (dist, torch_dist)
    )
    if name == "barrier":  # torch < 2.13 has no timeout
        assert ours.pop() == ("timeout", None, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        theirs = theirs[:3]
    assert ours == theirs


# ---- where torch has limits ------------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("dtype", [torch.bool, torch.complex64, torch.float8_e4m3fn], ids=str)
def test_strided_tensors_of_any_dtype_and_waiting_twice(world, dtype):
    following, previous = ring(world)
    received = poison((4, 3), dtype)
    works = [
        dist.isend(pattern((4, 3), dtype, world.rank).t(), following),
        dist.irecv(received.t(), previous),
    ]
    for work in works * 2:
        assert isinstance(work, pipecomm_ext.Work)
        work.wait()
    assert_same(received, pattern((4, 3), dtype, previous))
    assert dist.batch_isend_irecv([]) == []


@on_ranks(2)
def test_a_leaf_that_requires_grad_may_be_received_into_as_in_torch(world):
    """Pipeline schedules allocate such buffers."""
    following, previous = ring(world)
    leaf = torch.zeros(3, requires_grad=True)
    works = [dist.isend(torch.full((3,), 1.0 + world.rank), following), dist.irecv(leaf, previous)]
    for work in works:
        work.wait()
    assert torch.equal(leaf.detach(), torch.full((3,), 1.0 + previous))


# ---- collectives ------------------------------------------------------------------------------------------


@on_ranks(2)
def test_the_same_call_with_tensors_of_other_strides(world):
    """A plan prepared for one memory layout is not used for another one."""
    expected = torch.cat([pattern((4, 4), torch.int32, rank).chunk(2)[world.rank] for rank in range(2)])
    for is_transposed in (False, True, False):
        sent = pattern((4, 4), torch.int32, world.rank)
        received = poison((4, 4), torch.int32)
        if is_transposed:
            sent, received = sent.t().contiguous().t(), received.t()
        dist.all_to_all_single(received, sent)
        assert_same(received, expected)


@on_ranks(1, 2, 3, 4)
def test_all_to_all_single(world):
    rng = random.Random(1)
    size, rank = world.size, world.rank
    for idx in range(12):
        dtype = rng.choice(DTYPES)
        row = tuple(rng.randint(1, 3) for _ in range(rng.randint(0, 3)))
        even = idx % 3 == 0
        lengths = [[2] * size if even else random_lengths(rng, size, 4) for _ in range(size)]
        received_lengths = [sent[rank] for sent in lengths]
        parts = [
            [pattern((lengths[src][dst], *row), dtype, idx, src, dst) for dst in range(size)]
            for src in range(size)
        ]
        output = laid_out(poison((sum(received_lengths), *row), dtype), ["contiguous", "sliced"][idx % 2])
        mine = torch.empty((sum(lengths[rank]), *row), dtype=dtype)
        for dst, part in enumerate(mine.split(lengths[rank])):
            part.copy_(parts[rank][dst])
        work = dist.all_to_all_single(
            output,
            laid_out(mine, ["contiguous", "reversed", "sliced"][idx % 3]),
            None if even else received_lengths,
            None if even else lengths[rank],
            async_op=idx % 2 == 0,
        )
        assert (work is None) == (idx % 2 == 1)
        awaited(work)
        for src, part in enumerate(output.split(received_lengths)):
            assert_same(part, parts[src][rank], (idx, src))


@on_ranks(1, 2, 4)
def test_lists(world):
    """Any shape and dtype for each pair of ranks, including zero sizes."""
    rng = random.Random(2)
    size, rank = world.size, world.rank
    for idx in range(10):
        specs = {
            (src, dst): (tuple(rng.randint(0, 4) for _ in range(rng.randint(0, 3))), rng.choice(DTYPES))
            for src in range(size)
            for dst in range(size)
        }
        outputs = [poison(*specs[src, rank]) for src in range(size)]
        inputs = [pattern(*specs[rank, dst], idx, rank, dst) for dst in range(size)]
        awaited(dist.all_to_all(outputs, inputs, async_op=idx % 2 == 0))
        for src, output in enumerate(outputs):
            assert_same(output, pattern(*specs[src, rank], idx, src, rank))

        gathered = [poison(*specs[src, 0]) for src in range(size)]
        awaited(dist.all_gather(gathered, pattern(*specs[rank, 0], idx, rank), async_op=idx % 2 == 0))
        for src, output in enumerate(gathered):
            assert_same(output, pattern(*specs[src, 0], idx, src))


@on_ranks(1, 2, 3)
def test_all_gather_into_tensor(world):
    size, rank = world.size, world.rank
    for length in (0, 1, size, 2 * size + 1, 3 * size - 1):
        whole = pattern((length, 3), torch.bfloat16, length)
        output = poison((length, 3), torch.bfloat16)
        dist.all_gather_into_tensor(output, cut(whole, 0, remainder_first(length, size), rank))
        assert_same(output, whole)
    stacked = poison((size, 2, 3), torch.int16)
    work = dist.all_gather_into_tensor(stacked, pattern((2, 3), torch.int16, rank), async_op=True)
    work.wait()
    for src in range(size):
        assert_same(stacked[src], pattern((2, 3), torch.int16, src))
    scalars = poison(size, torch.float32)
    dist.all_gather_single(scalars, torch.tensor(float(rank)))
    assert scalars.tolist() == list(range(size))


# ---- errors -----------------------------------------------------------------------------------------------

# The texts; every kind of wrong argument is in reliability/bad_inputs.py.
REFUSED = [
    (lambda x: dist.send(x, 1, group_dst=1), "give dst (a global rank) or group_dst (a rank of the group)"),
    (lambda x: dist.isend(x), "dst must name a rank"),
    (lambda x: dist.recv(x), "src must name a rank; receiving from any source is not supported"),
    (
        lambda x: dist.send(x, 1, tag=15),
        "channel 15 is not in 0..14; 14 is the highest channel, and so the highest tag= of torch.distributed",
    ),
    (lambda x: dist.P2POp(dist.broadcast, x, 1), "op must be isend or irecv, not broadcast"),
    (
        lambda x: dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, x, 1), dist.P2POp(dist.irecv, x, 1, torch_dist.new_group([0, 1]))]
        ),
        "all elements must have the same group, p2p_op_list[1] has another one",
    ),
]


@on_ranks(2)
def test_wrong_arguments(world):
    """Refused on the calling rank; the communicator stays usable."""
    for call, text in REFUSED:
        with pytest.raises(ValueError, match=re.escape(text)):
            call(torch.ones(3))
    test_torchs_operations_are_accepted_in_a_batch.rank_body(world)


# On one of two ranks, or both: all raise.
REFUSED_COLLECTIVES = [
    (lambda x: dist.all_to_all_single(x, x, [4, 1], [2, 2]), "sum of output_split_sizes [4, 1] is 5"),
    (lambda x: dist.all_to_all_single(x[:3], x[:3]), "dim 0 of input of shape [3, 2] must divide by the 2"),
    (lambda x: dist.all_to_all_single(x, x, [True, 3]), "output_split_sizes[0] must be an int, not bool"),
    (lambda x: dist.all_to_all_single(x.double(), x), "must agree in dtype"),
    (lambda x: dist.all_to_all_single(x[:2], x), "bytes to itself but receives"),
    (lambda x: dist.all_to_all_single(*[x.to_sparse()] * 2), "input must be a dense tensor"),
    (lambda x: dist.all_to_all([x, x], [x]), "one input and one output for each of the 2 ranks"),
    (lambda x: dist.all_gather([x, x, x], x), "one output for each of the 2 ranks, got 3"),
    (lambda x: dist.all_gather_into_tensor(x, x), "neither concatenated nor stacked"),
    (lambda x: dist.broadcast(x), "src must name a rank"),
]


@pytest.mark.parametrize("bad_ranks", [[0, 1], [1]], ids=["everywhere", "on one rank"])
@on_ranks(2)
def test_misuse_is_refused_everywhere(world, bad_ranks):
    tensor = torch.zeros(4, 2)
    for call, text in REFUSED_COLLECTIVES:
        is_bad = world.rank in bad_ranks
        with pytest.raises((ValueError, TypeError) if is_bad else PipeCommMismatch, match=re.escape(text)):
            call(tensor) if is_bad else dist.barrier()
        dist.all_gather_into_tensor(torch.zeros(8, 2), tensor)


@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
@on_ranks(2)
def test_all_to_all_single_of_other_shapes_and_in_place(world, async_op):
    """Each side is split along its own dim 0, as with torch. The ranks' inputs differ in dim 0 only."""
    results = []
    for api in (torch_dist, dist):
        for shape, source_shape in [((8,), (4, 2)), ((4, 2), (8,)), ((2, 4), (4, 2)), ((4, 2), (2, 4))]:
            output = torch.zeros(shape)
            source = torch.arange(8.0).view(source_shape) + 10 * world.rank
            awaited(api.all_to_all_single(output, source, async_op=async_op))
            results.append(output.tolist())
        output = torch.zeros(6)
        splits = ([2, 4], [1, 2]) if world.rank == 0 else ([4, 2], [2, 1])
        awaited(api.all_to_all_single(output, torch.arange(6.0).view(3, 2), *splits, async_op=async_op))
        results.append(output.tolist())
    assert results[:5] == results[5:]
    same = torch.arange(4.0) + 10 * world.rank
    awaited(dist.all_to_all_single(same, same, async_op=async_op))
    assert same.tolist() == ([0, 1, 10, 11] if world.rank == 0 else [2, 3, 12, 13])
    source = torch.ones((4, 3) if world.rank else (6, 2))
    with pytest.raises(PipeCommMismatch):
        awaited(dist.all_to_all_single(torch.empty_like(source), source, async_op=async_op))


@on_ranks(2)
def test_results_of_functional_collectives_are_tensors(world):
    from torch.distributed import _functional_collectives as funcol

    def lazy(*shape: int) -> torch.Tensor:
        result = funcol.all_reduce(torch.ones(shape) * (world.rank + 1), "sum", world.group)
        assert isinstance(result, funcol.AsyncCollectiveTensor)
        return result

    outs = [lazy(4), lazy(4), *(torch.zeros(shape) for shape in (8, 2, 4, 4, 2, 4))]
    rows = [[torch.zeros(4), torch.zeros(4)] for _ in range(2)]
    dist.all_reduce(outs[0])
    dist.broadcast(outs[1], 0)
    dist.all_gather_into_tensor(outs[2], lazy(4))
    dist.reduce_scatter_tensor(outs[3], lazy(4))
    dist.all_to_all_single(outs[4], lazy(4))
    dist.all_gather(rows[0], lazy(4))
    dist.all_to_all(rows[1], [lazy(4), lazy(4)])
    dist.reduce_scatter(outs[6], [lazy(2), lazy(2)])
    other = 1 - world.rank
    ops = [dist.P2POp(dist.isend, lazy(4), other), dist.P2POp(dist.irecv, outs[5], other)]
    for work in [*dist.batch_isend_irecv(ops), dist.isend(lazy(4), other), dist.irecv(outs[7], other)]:
        work.wait()
    sums = {0: 6.0, 3: 6.0, 6: 6.0}
    for idx, out in enumerate(outs):
        assert torch.equal(out + 0, torch.full_like(out + 0, sums.get(idx, 3.0))), idx
    assert all(torch.equal(row, torch.full((4,), 3.0)) for row in [*rows[0], *rows[1]])


@on_ranks(2)
def test_work_is_torchs(world):
    class Done(dist.Work):
        def wait(self, timeout: datetime.timedelta | None = None) -> bool:
            return True

    assert Done().wait()
    parts = [torch.empty(1), torch.empty(1)] if world.rank == 0 else None
    work = dist.gather(torch.ones(1), parts, 0, async_op=True)
    assert isinstance(work, dist.Work)
    work.wait()


@on_ranks(2)
def test_compiled_calls_outside_of_the_group_do_nothing(world):
    group = torch_dist.new_group([1])
    calls = {
        "all_reduce": lambda x: dist.all_reduce(x, group=group),
        "reduce_scatter": lambda x: dist.reduce_scatter(x, [x.clone()], group=group),
        "reduce_scatter_tensor": lambda x: dist.reduce_scatter_tensor(x, x.clone(), group=group),
    }
    if world.rank == 1 and torch.__version__ < "2.14":
        del calls["reduce_scatter"]  # whose options torch itself cannot trace; it is refused on members
    for name, call in calls.items():

        def step(x, call=call):
            call(x)
            return x + 1

        torch._dynamo.reset()
        result = torch.compile(step, backend="aot_eager", fullgraph=True)(torch.ones(3))
        assert torch.equal(result, torch.full((3,), 2.0)), name


@on_ranks(2)
def test_barrier_with_a_timeout(world):
    short = datetime.timedelta(seconds=0.05)
    if world.rank == 0:  # no other rank joins in time: only this rank raises, and the barrier stays open
        with pytest.raises(PipeCommTimeout):
            dist.barrier(timeout=short)
        dist.send(torch.zeros(1), 1)
    else:
        dist.recv(torch.zeros(1), 0)
        dist.barrier()
    dist.barrier(timeout=datetime.timedelta(seconds=20))
    with pytest.raises(ValueError, match=r"pass it to the handle's wait\(\)"):
        dist.barrier(async_op=True, timeout=short)
    dist.barrier()


# ---- which ranks must take part ----------------------------------------------------------------------------


@on_ranks(4)
def test_two_ranks_of_four_exchange_while_the_others_have_not_come(world):
    """Including the first call: nothing waits for ranks that do not take part."""
    group, peer = torch_dist.new_group(list(range(4))), 4 - world.rank
    if world.rank in (1, 3):
        received, sent = poison(50_000, torch.float32), pattern(50_000, torch.float32, world.rank)
        calls = [lambda: dist.send(sent, peer, group=group), lambda: dist.recv(received, peer, group=group)]
        for call in calls if world.rank == 1 else reversed(calls):
            call()
        assert_same(received, pattern(50_000, torch.float32, peer))
    world.meet()  # the others use `group` only after this
    # Other communicators of a rank do not matter.
    with pipecomm_ext.Communicator(group, device="cpu", channels=3) as other:
        other.barrier()
    everywhere = torch.full((3,), float(world.rank))
    dist.broadcast(everywhere, 2, group=group)
    assert everywhere.tolist() == [2.0] * 3
