"""pipecomm_ext.distributed: torch.distributed's calls, and what it does beyond torch's limits."""

from __future__ import annotations

import datetime
import gc
import inspect
import random

import pytest
import torch
import torch.distributed as torch_dist
from patterns import DTYPES, pattern, poison
from ranks import on_ranks, once_a_test
from sequence_cases import assert_same, cut, error_of, laid_out, random_lengths, remainder_first

from pipecomm_ext import Work, get_communicator
from pipecomm_ext import distributed as dist


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


# ---- point to point ---------------------------------------------------------------------------------------


@on_ranks(2, 3)
def test_ring(world):
    following, previous = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    expected = pattern((5, 2), torch.float32, previous)
    mine, received = pattern((5, 2), torch.float32, world.rank), poison((5, 2), torch.float32)
    ops = [dist.P2POp(dist.isend, mine, following), dist.P2POp(dist.irecv, received, previous)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert_same(received, expected)

    received = poison((5, 2), torch.float32).requires_grad_()  # as pipeline schedules allocate them
    handles = [dist.irecv(received, src=previous, tag=1), dist.isend(mine, dst=following, tag=1)]
    for work in handles:
        assert isinstance(work, Work)
        work.wait()
        work.wait()
    assert_same(received, expected)


@on_ranks(2)
def test_blocking_calls_and_torchs_own_ops(world):
    tensor = pattern(7, torch.int64, world.rank)
    if world.rank == 0:
        dist.send(tensor, 1)
        assert dist.recv(tensor, group_src=1) == 1
    else:
        received = poison(7, torch.int64)
        assert dist.recv(received, 0) == 0
        assert_same(received, pattern(7, torch.int64, 0))
        dist.send(tensor, group_dst=0)
    other = 1 - world.rank
    received = poison(3, torch.float64)
    [work] = dist.batch_isend_irecv(
        [
            torch_dist.P2POp(torch_dist.isend, pattern(3, torch.float64, world.rank), other),
            torch_dist.P2POp(torch_dist.irecv, received, other),
        ]
    )
    work.wait()
    assert_same(received, pattern(3, torch.float64, other))


@on_ranks(2)
def test_an_empty_batch_and_dropped_handles(world):
    assert dist.batch_isend_irecv([]) == []
    if world.rank == 0:
        for position in range(20):
            dist.isend(pattern(1000, torch.float32, position), 1)
        gc.collect()
    else:
        for position in range(20):
            received = poison(1000, torch.float32)
            dist.recv(received, 0)
            assert_same(received, pattern(1000, torch.float32, position))


@once_a_test
def subgroup(world):
    """Group ranks that are not the global ones."""
    return torch_dist.new_group([1, 2, 4])


@on_ranks(5)
def test_peers_are_global_ranks_and_groups_are_respected(world):
    group = subgroup(world)
    data = pattern(4, torch.float32, "broadcast")
    tensor = data.clone() if world.rank == 2 else poison(4, torch.float32)
    dist.broadcast(tensor, src=2, group=group)
    if world.rank not in (1, 2, 4):
        assert_same(tensor, poison(4, torch.float32))
        assert dist.recv(tensor, 4, group) == -1
        assert dist.isend(tensor, 4, group) is None and dist.barrier(group) is None
        assert dist.batch_isend_irecv([dist.P2POp(dist.isend, tensor, 4, group)]) == []
        return
    assert_same(tensor, data)
    dist.broadcast(tensor, group=group, group_src=0)
    if world.rank == 4:
        dist.send(tensor, 1, group)
        dist.send(tensor, group_dst=1, group=group)
    else:
        assert dist.recv(tensor, 4, group) == 4
        assert_same(tensor, data)
    kind, text = error_of(dist.isend, tensor, 3, group)
    assert kind == "ValueError" and "dst 3 (global) is not one of the group's ranks [1, 2, 4]" in text
    dist.barrier(group)
    dist.barrier(get_communicator(group), async_op=True).wait()


def misuse(world):
    tensor = torch.zeros(3)
    other = 1 - world.rank
    errors = [
        error_of(dist.recv, tensor),
        error_of(dist.send, tensor),
        error_of(dist.send, tensor, other, group_dst=other),
        error_of(dist.send, tensor, 1.0),
        error_of(dist.send, tensor, other, tag=15),
        error_of(dist.P2POp, dist.send, tensor, other),
        error_of(dist.P2POp, dist.isend, "tensor", other),
        error_of(dist.batch_isend_irecv, [dist.isend]),
        error_of(dist.batch_isend_irecv, dist.P2POp(dist.isend, tensor, other)),
        error_of(
            dist.batch_isend_irecv,
            [dist.P2POp(dist.isend, tensor, other), dist.P2POp(dist.irecv, tensor, other, world.pair)],
        ),
    ]
    dist.barrier()
    return errors


def misuse_with_a_second_group(world):
    world.pair = torch_dist.new_group([0, 1])
    return misuse(world)


def test_misuse_of_point_to_point(ranks):
    expected = [
        ("ValueError", "src must name a rank; receiving from any source is not supported"),
        ("ValueError", "dst must name a rank"),
        ("ValueError", "give dst (a global rank) or group_dst (a rank of the group), not both"),
        ("TypeError", "dst must be an int, not float"),
        ("ValueError", "channel 15"),
        ("ValueError", "op must be isend or irecv, not send"),
        ("TypeError", "tensor must be a torch.Tensor, not str"),
        ("TypeError", "p2p_op_list[0] must be a P2POp, not function"),
        ("TypeError", "p2p_op_list must be a list, not P2POp"),
        ("ValueError", "all elements must have the same group, p2p_op_list[1] has another one"),
    ]
    for errors in ranks.run(2, misuse_with_a_second_group):
        for (kind, text), (expected_kind, expected_text) in zip(errors, expected, strict=True):
            assert kind == expected_kind and expected_text in text


# ---- collectives ------------------------------------------------------------------------------------------


def check_all_to_all_single(world, seed):
    rng = random.Random(seed)
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
        if work:
            work.wait()
        for src, part in enumerate(output.split(received_lengths)):
            assert_same(part, parts[src][rank], (idx, src))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_all_to_all_single(ranks, size):
    ranks.run(size, check_all_to_all_single, 1)


def check_lists(world, seed):
    """Any shape and dtype for each pair of ranks, zero sizes too."""
    rng = random.Random(seed)
    size, rank = world.size, world.rank
    for idx in range(10):
        specs = {
            (src, dst): (tuple(rng.randint(0, 4) for _ in range(rng.randint(0, 3))), rng.choice(DTYPES))
            for src in range(size)
            for dst in range(size)
        }
        outputs = [poison(*specs[src, rank]) for src in range(size)]
        inputs = [pattern(*specs[rank, dst], idx, rank, dst) for dst in range(size)]
        work = dist.all_to_all(outputs, inputs, async_op=idx % 2 == 0)
        if work:
            work.wait()
        for src, output in enumerate(outputs):
            assert_same(output, pattern(*specs[src, rank], idx, src, rank))

        gathered = [poison(*specs[src, 0]) for src in range(size)]
        work = dist.all_gather(gathered, pattern(*specs[rank, 0], idx, rank), async_op=idx % 2 == 0)
        if work:
            work.wait()
        for src, output in enumerate(gathered):
            assert_same(output, pattern(*specs[src, 0], idx, src))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_lists(ranks, size):
    ranks.run(size, check_lists, 2)


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


@on_ranks(3)
def test_torch_gives_the_same(world):
    """The same script over torch.distributed, where its limits allow."""
    results = []
    for module in (torch_dist, dist):
        torch.manual_seed(world.rank)
        tensor = torch.randn(6, 2)
        output, gathered = torch.zeros(6, 2), torch.zeros(18, 2)
        module.all_to_all_single(output, tensor)
        module.all_gather_into_tensor(gathered, tensor)
        parts = [torch.zeros(6, 2) for _ in range(3)]
        module.all_gather(parts, tensor)
        module.broadcast(tensor, 1)
        module.barrier()
        results.append(torch.cat([output, gathered, *parts, tensor]))
    assert torch.equal(*results)


# ---- errors -----------------------------------------------------------------------------------------------

COLLECTIVE_MISUSE = [
    (
        lambda x: dist.all_to_all_single(x, x, [4, 1], [2, 2]),
        "ValueError",
        "sum of output_split_sizes [4, 1] is 5",
    ),
    (
        lambda x: dist.all_to_all_single(x, x, [4], [2, 2]),
        "ValueError",
        "output_split_sizes needs one entry for each of",
    ),
    (
        lambda x: dist.all_to_all_single(x[:3], x[:3]),
        "ValueError",
        "dim 0 of input of shape [3, 2] must divide by the 2",
    ),
    (
        lambda x: dist.all_to_all_single(x, x, input_split_sizes=[2.0, 2.0]),
        "TypeError",
        "input_split_sizes[0] must be an int, not float",
    ),
    (
        lambda x: dist.all_to_all_single(x, x, [True, 3]),
        "TypeError",
        "output_split_sizes[0] must be an int, not bool",
    ),
    (lambda x: dist.all_to_all_single(x.double(), x), "ValueError", "must agree in dtype"),
    (
        lambda x: dist.all_to_all([x, x], [x]),
        "ValueError",
        "one input and one output for each of the 2 ranks",
    ),
    (
        lambda x: dist.all_to_all(x, [x, x]),
        "TypeError",
        "output_tensor_list must be a list of tensors, not Tensor",
    ),
    (lambda x: dist.all_gather([x, x, x], x), "ValueError", "one output for each of the 2 ranks, got 3"),
    (lambda x: dist.all_gather([x, 1], x), "TypeError", "tensor_list[1] must be a torch.Tensor, not int"),
    (lambda x: dist.all_gather_into_tensor(x, x), "ValueError", "neither concatenated nor stacked"),
    (lambda x: dist.broadcast(x), "ValueError", "src must name a rank"),
    (lambda x: dist.broadcast(x, 2), "ValueError", "2"),
]


def misuse_collective(world, idx, bad_ranks):
    call, _, _ = COLLECTIVE_MISUSE[idx]
    tensor = torch.zeros(4, 2)
    error = error_of(call, tensor) if world.rank in bad_ranks else error_of(dist.barrier)
    gathered = torch.zeros(8, 2)
    dist.all_gather_into_tensor(gathered, tensor)
    return error


@pytest.mark.parametrize("idx", range(len(COLLECTIVE_MISUSE)))
@pytest.mark.parametrize("bad_ranks", [[0, 1], [1]], ids=["everywhere", "on one rank"])
def test_misuse_of_collectives_is_refused_everywhere(ranks, idx, bad_ranks):
    _, kind, text = COLLECTIVE_MISUSE[idx]
    errors = ranks.run(2, misuse_collective, idx, bad_ranks)
    assert errors[1][0] == kind and all(text in error_text for _, error_text in errors)
    assert errors[0][0] == (kind if 0 in bad_ranks else "PipeCommMismatch")


@on_ranks(2)
def test_barrier_with_a_timeout(world):
    short = datetime.timedelta(seconds=0.05)
    if world.rank == 0:  # nobody joins in time: an error here alone, and the barrier stays open
        assert error_of(dist.barrier, timeout=short)[0] == "PipeCommTimeout"
        dist.send(torch.zeros(1), 1)
    else:
        dist.recv(torch.zeros(1), 0)
        dist.barrier()
    dist.barrier(timeout=datetime.timedelta(seconds=20))
    kind, text = error_of(dist.barrier, async_op=True, timeout=short)
    assert kind == "ValueError" and "pass it to the handle's wait()" in text
    dist.barrier()


def disagree(world):
    """Right on each rank alone, wrong together."""
    mine = torch.zeros(2 + world.rank, 3)
    splits = [[2, 2], [1, 3]][world.rank]
    errors = [
        error_of(dist.all_gather, [torch.zeros(2 + world.rank, 3) for _ in range(2)], mine),
        error_of(dist.all_to_all_single, torch.zeros(4, 3), torch.zeros(4, 3), splits, splits),
        error_of(dist.broadcast, mine, 0),
    ]
    dist.barrier()
    return errors


def test_disagreement_is_an_error_on_both_ends(ranks):
    for errors in ranks.run(2, disagree):
        assert [kind for kind, _ in errors] == ["PipeCommMismatch"] * 3
