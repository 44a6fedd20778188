"""all_to_all and all_to_all_many move the right bytes, say no on all ranks alike, and copy no more than they
must.
"""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist
from patterns import DTYPES, pattern
from ranks import on_ranks
from sequence_cases import FLOATS, KINDS, LAYOUTS, all_to_all_cases, assert_same, cut, error_of, laid_out

from pipecomm_ext import Communicator, all_to_all, all_to_all_many

# ---- values -----------------------------------------------------------------------------------------------


def check_cases(world, cases):
    """Forward and backward against slices of one global tensor."""
    for idx, case in enumerate(cases):
        where = f"case {idx}: {case}"
        differentiable = case.dtype.is_floating_point or case.dtype.is_complex
        whole = pattern(case.whole_shape, case.dtype, "input", idx)
        mine = cut(whole, case.gather_dim, case.gather_sizes, world.rank)
        mine = laid_out(mine, case.layout).requires_grad_(differentiable)
        dims = case.scatter_dim, case.gather_dim
        if idx % 2:  # counted from the end
            dims = tuple(dim - len(case.shape) for dim in dims)
        output = all_to_all(mine, world.comm, *dims, **case.arguments)
        assert_same(output, cut(whole, case.scatter_dim, case.scatter_sizes, world.rank), where)
        assert output.is_contiguous(), where
        assert output.untyped_storage().data_ptr() != mine.untyped_storage().data_ptr() or not output.numel()
        if not differentiable:
            continue
        whole_grad = pattern(case.whole_shape, case.dtype, "gradient", idx)
        grad = cut(whole_grad, case.scatter_dim, case.scatter_sizes, world.rank)
        output.backward(laid_out(grad, LAYOUTS[idx % 3]))
        assert_same(mine.grad, cut(whole_grad, case.gather_dim, case.gather_sizes, world.rank), where)


@pytest.mark.parametrize("size", [2, 3])
def test_every_pair_of_dims_and_every_kind_of_sizes(ranks, size):
    ranks.run(size, check_cases, all_to_all_cases(size, KINDS, FLOATS, seed=1), deadline=60)


@pytest.mark.parametrize("size", [1, 4, 5, 6, 7, 8])
def test_every_pair_of_dims_on_other_numbers_of_ranks(ranks, size):
    cases = all_to_all_cases(size, [KINDS[size % len(KINDS)], "explicit"], FLOATS, seed=2)
    ranks.run(size, check_cases, random.Random(3).sample(cases, 80), deadline=60)


@pytest.mark.parametrize("size", [1, 4])
def test_every_dtype(ranks, size):
    cases = []
    for dtype in DTYPES:
        cases += all_to_all_cases(size, ["both uneven"], [dtype], seed=4)[2:8]
    ranks.run(size, check_cases, cases, deadline=60)


@on_ranks(2)
def test_documented_example(world):
    """Three tokens over two ranks, three channels: from MindSpeed-MM's behaviour."""
    tokens = torch.arange(9.0).reshape(1, 3, 3)
    mine = cut(tokens, 1, [2, 1], world.rank).contiguous().requires_grad_()
    output = all_to_all(mine, world.comm, gather_size=3)
    assert output.tolist() == cut(tokens, 2, [2, 1], world.rank).tolist()
    output.sum().backward()
    assert mine.grad.shape == mine.shape


@on_ranks(2, 3)
def test_process_groups_and_communicators_are_equal_arguments(world):
    mine = pattern((4, world.size, 6), torch.float32, world.rank)
    expected = all_to_all(mine, world.comm, 1, 2)
    for group in (None, dist.group.WORLD):
        assert_same(all_to_all(mine, group, 1, 2), expected)


@on_ranks(3)
def test_large_messages(world):
    """Larger than what travels inline, on every route: in place, packed, unpacked."""
    whole = pattern((2, 3 * 1024, 40), torch.float32, "large")
    for scatter_dim, gather_dim in [(0, 1), (1, 0), (2, 1), (1, 2)]:
        scatter_sizes = [whole.size(scatter_dim) - 1, 1, 0]
        gather_sizes = [0, whole.size(gather_dim) - 1, 1]
        mine = cut(whole, gather_dim, gather_sizes, world.rank)
        output = all_to_all(
            mine,
            world.comm,
            scatter_dim,
            gather_dim,
            scatter_sizes=scatter_sizes,
            gather_sizes=gather_sizes,
        )
        assert_same(output, cut(whole, scatter_dim, scatter_sizes, world.rank))


# ---- several tensors --------------------------------------------------------------------------------------


def check_many(world, seed):
    """q, k, v of different heads and dtypes, and int64 positions, in one exchange."""
    rng = random.Random(seed)
    size = world.size
    heads = [rng.randint(0, 3) for _ in range(size)]
    lengths = [rng.randint(0, 4) for _ in range(size)]
    kinds = [
        (heads, torch.float32),
        (heads[::-1], torch.bfloat16),
        ([1] * size, torch.int64),
        (heads, torch.float64),
    ]
    wholes = [
        pattern((2, sum(lengths), sum(pieces), 3), dtype, seed, n) for n, (pieces, dtype) in enumerate(kinds)
    ]
    inputs = [cut(whole, 1, lengths, world.rank).contiguous() for whole in wholes]
    for tensor in inputs:
        tensor.requires_grad_(tensor.dtype.is_floating_point)
    before = world.comm._c.copy_counters()["num_exchanges"]
    outputs = all_to_all_many(
        inputs, world.comm, 2, 1, scatter_sizes=[pieces for pieces, _ in kinds], gather_sizes=lengths
    )
    assert world.comm._c.copy_counters()["num_exchanges"] == before + 1
    assert isinstance(outputs, list)
    for whole, output, (pieces, _) in zip(wholes, outputs, kinds, strict=True):
        assert_same(output, cut(whole, 2, pieces, world.rank))
    assert not outputs[2].requires_grad
    grads = [pattern(whole.shape, whole.dtype, "gradient", n) for n, whole in enumerate(wholes)]
    used = [0, 3]  # the gradient of what is not used is zero
    torch.autograd.backward(
        [outputs[n] for n in used], [cut(grads[n], 2, kinds[n][0], world.rank) for n in used]
    )
    assert world.comm._c.copy_counters()["num_exchanges"] == before + 2
    for n in used:
        assert_same(inputs[n].grad, cut(grads[n], 1, lengths, world.rank))
    assert not inputs[1].grad.any() and inputs[2].grad is None


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_many_tensors_are_one_exchange(ranks, size):
    for seed in range(4):
        ranks.run(size, check_many, seed)


# ---- errors -----------------------------------------------------------------------------------------------


def refuse_and_go_on(world, bad_ranks, bad, good):
    """Calls with `bad` on the bad ranks and `good` elsewhere; then all with `good`, which must work."""
    shape = (2, 4, world.size * 2)
    arguments = dict(bad if world.rank in bad_ranks else good)
    tensor = torch.zeros(arguments.pop("shape", shape))
    arguments = {"scatter_dim": 2, "gather_dim": 1, **arguments}
    error = error_of(all_to_all, tensor, world.comm, **arguments)
    good = {"scatter_dim": 2, "gather_dim": 1, **good}
    assert all_to_all(torch.zeros(shape), world.comm, **good).shape == (2, 4 * world.size, 2)
    return error


BAD_ARGUMENTS = {
    "same dims": ({"scatter_dim": 1}, "ValueError", "must differ, both are 1"),
    "same dims, one negative": ({"scatter_dim": -2}, "ValueError", "must differ, both are 1"),
    "scatter_dim out of range": (
        {"scatter_dim": 3},
        "IndexError",
        "scatter_dim 3 is out of range for a tensor of 3",
    ),
    "gather_dim out of range": (
        {"gather_dim": -4},
        "IndexError",
        "gather_dim -4 is out of range for a tensor of 3",
    ),
    "dim no int": ({"scatter_dim": 1.5}, "TypeError", "scatter_dim must be an int, not float"),
    "wrong sum": (
        {"scatter_sizes": [1, 1, 1]},
        "ValueError",
        "sum of scatter_sizes [1, 1, 1] is 3, but the tensor has length 6",
    ),
    "short list": (
        {"scatter_sizes": [3, 3]},
        "ValueError",
        "scatter_sizes needs one entry for each of the 3 ranks, got 2",
    ),
    "long list": (
        {"gather_sizes": [4, 4, 4, 4]},
        "ValueError",
        "gather_sizes needs one entry for each of the 3 ranks, got 4",
    ),
    "empty list": (
        {"gather_sizes": []},
        "ValueError",
        "gather_sizes needs one entry for each of the 3 ranks, got 0",
    ),
    "negative": (
        {"scatter_sizes": [7, -1, 0]},
        "ValueError",
        "scatter_sizes must not be negative, got [7, -1, 0]",
    ),
    "not my length": (
        {"gather_sizes": [5, 5, 5]},
        "ValueError",
        "of gather_sizes [5, 5, 5] is 5, but the tensor has length 4",
    ),
    "gather_size": (
        {"gather_size": 30},
        "ValueError",
        "of gather_sizes [10, 10, 10] is 10, but the tensor has length 4",
    ),
    "gather_size and lists": (
        {"gather_size": 13, "gather_sizes": [4, 4, 4]},
        "ValueError",
        "do not add up to gather_size 13",
    ),
    "no list": (
        {"scatter_sizes": torch.tensor([2, 2, 2])},
        "ValueError",
        "scatter_sizes must be a list of one length per rank, not Tensor",
    ),
    "no ints": (
        {"scatter_sizes": [2.0, 2.0, 2.0]},
        "TypeError",
        "scatter_sizes[0] must be an int, not float",
    ),
    "0-d": ({"shape": ()}, "IndexError", "scatter_dim 2 is out of range for a tensor of 0 dims"),
}


@pytest.mark.parametrize("name", BAD_ARGUMENTS)
def test_bad_arguments_on_all_ranks(ranks, name):
    bad, kind, text = BAD_ARGUMENTS[name]
    for error_kind, error_text in ranks.run(3, refuse_and_go_on, [0, 1, 2], bad, {}, deadline=15):
        assert error_kind == kind and text in error_text


@pytest.mark.parametrize("name", BAD_ARGUMENTS)
def test_bad_arguments_on_one_rank_are_refused_everywhere(ranks, name):
    bad, kind, text = BAD_ARGUMENTS[name]
    errors = ranks.run(3, refuse_and_go_on, [1], bad, {}, deadline=15)
    assert errors[1][0] == kind and text in errors[1][1]
    for error_kind, error_text in (errors[0], errors[2]):
        assert error_kind == "PipeCommMismatch"
        assert "was refused by rank 1" in error_text and text in error_text


@pytest.mark.parametrize("size", [2, 3])
def test_unequal_lengths_without_gather_size(ranks, size):
    bad = {"shape": (2, 5, size * 2)}
    for kind, text in ranks.run(size, refuse_and_go_on, [size - 1], bad, {}, deadline=15):
        assert kind == "PipeCommMismatch"
        assert f"[2, 4, {size * 2}]" in text and f"[2, 5, {size * 2}]" in text


def test_ranks_that_disagree(ranks):
    """Arguments that are right on each rank by themselves, and do not fit together."""
    for bad in ({"scatter_dim": 0, "scatter_sizes": [2, 0, 0]}, {"scatter_sizes": [6, 0, 0]}):
        for kind, text in ranks.run(3, refuse_and_go_on, [2], bad, {}, deadline=15):
            assert kind == "PipeCommMismatch" and "nothing was transferred" in text


def refuse_many(world):
    tensor = torch.zeros(2, 3, 4)
    return [
        error_of(all_to_all_many, inputs, world.comm, **arguments)
        for inputs, arguments in [
            (tensor, {}),
            ([], {}),
            ([tensor, 3], {}),
            ([tensor, torch.zeros(2, 3, 4, 5)], {}),
            ([tensor, tensor], {"scatter_sizes": [[2, 2]]}),
            ([tensor, tensor], {"gather_sizes": 3}),
        ]
    ]


def test_bad_arguments_of_many(ranks):
    expected = [
        ("TypeError", "inputs must be a list of tensors, not Tensor"),
        ("ValueError", "inputs must hold at least one tensor"),
        ("TypeError", "inputs[1] must be a torch.Tensor, not int"),
        ("ValueError", "inputs must have the same number of dims, got 3 and 4"),
        ("ValueError", "scatter_sizes needs one list for each of the 2 tensors, got 1"),
        ("ValueError", "gather_sizes must be a list of lengths, or one such list per tensor, not 3"),
    ]
    for errors in ranks.run(2, refuse_many, deadline=15):
        assert errors == expected


def refuse_what_is_no_dense_tensor(world):
    bad = ["text", torch.zeros(2, 2, 2, device="meta"), torch.zeros(2, 2, 2).to_sparse()]
    errors = [
        error_of(all_to_all, tensor if world.rank == 0 else torch.zeros(2, 2, 2), world.comm)
        for tensor in bad
    ]
    assert all_to_all(torch.zeros(2, 2, 2), world.comm).shape == (2, 4, 1)
    return errors


def test_what_is_no_dense_tensor_is_refused_everywhere(ranks):
    mine, other = ranks.run(2, refuse_what_is_no_dense_tensor, deadline=15)
    assert [kind for kind, _ in mine] == ["TypeError", "ValueError", "ValueError"]
    assert all(kind == "PipeCommMismatch" and "refused by rank 0" in text for kind, text in other)


# ---- cost -------------------------------------------------------------------------------------------------


def count_passes(world, shape, dims, arguments):
    """Copy passes of a forward and of a backward, each of which is one exchange and, once warm, allocates
    nothing.
    """
    mine = torch.zeros(shape, requires_grad=True)
    counters = world.comm._c.copy_counters
    passes, allocations = [], []
    for _ in range(4):
        before = counters()
        output = all_to_all(mine, world.comm, *dims, **arguments)
        middle = counters()
        output.backward(torch.zeros_like(output))
        after = counters()
        assert middle["num_exchanges"] - before["num_exchanges"] == 1
        assert after["num_exchanges"] - middle["num_exchanges"] == 1
        passes.append(
            (middle["num_passes"] - before["num_passes"], after["num_passes"] - middle["num_passes"])
        )
        allocations.append(after["num_staging_allocations"] - before["num_staging_allocations"])
    assert len(set(passes)) == 1
    assert allocations[2:] == [0, 0]
    return passes[0]


@pytest.mark.parametrize(
    "batch, dims, passes",
    [
        (1, (2, 1), (1, 1)),  # heads -> sequence: pack; backward unpack
        (1, (1, 2), (1, 1)),  # sequence -> heads: unpack; backward pack
        (1, (1, 0), (0, 0)),  # the leading dims: nothing is copied
        (2, (2, 1), (2, 2)),
        (2, (0, 1), (1, 1)),
    ],
    ids=str,
)
def test_copy_passes(ranks, batch, dims, passes):
    """Pack if more than one run precedes the scatter dim, unpack if more than one precedes the gather dim."""
    shape = [batch, 6, 4, 5]
    shape[dims[0]] = 6
    for arguments in ({}, {"scatter_sizes": [4, 2]}):
        assert ranks.run(2, count_passes, shape, dims, arguments) == [passes] * 2


@on_ranks(2)
def test_a_communicator_of_one_rank_in_a_larger_world(world):
    groups = [dist.new_group([rank]) for rank in range(world.size)]
    with Communicator(groups[world.rank]) as comm:
        mine = pattern((3, 4), torch.float32, world.rank)
        output = all_to_all(mine, comm, 0, 1)
        assert_same(output, mine)
        assert output.data_ptr() != mine.data_ptr()
