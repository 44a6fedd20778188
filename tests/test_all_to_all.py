"""all_to_all and all_to_all_many: the right bytes, errors on all ranks alike, no needless copies."""

from __future__ import annotations

import random
import warnings

import pytest
import torch
import torch.distributed as dist
from patterns import DTYPES, pattern
from ranks import on_ranks
from sequence_cases import FLOATS, KINDS, LAYOUTS, all_to_all_cases, assert_same, cut, error_of, laid_out

from pipecomm_ext import Communicator, PipeCommMismatch, all_to_all, all_to_all_many

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
    ranks.run(size, check_cases, all_to_all_cases(size, KINDS, FLOATS, seed=1))


@pytest.mark.parametrize("size", [1, 4, 5, 6, 7, 8])
def test_every_pair_of_dims_on_other_numbers_of_ranks(ranks, size):
    cases = all_to_all_cases(size, [KINDS[size % len(KINDS)], "explicit"], FLOATS, seed=2)
    ranks.run(size, check_cases, random.Random(3).sample(cases, 80))


@pytest.mark.parametrize("size", [1, 4])
def test_every_dtype(ranks, size):
    cases = []
    for dtype in DTYPES:
        cases += all_to_all_cases(size, ["both uneven"], [dtype], seed=4)[2:8]
    ranks.run(size, check_cases, cases)


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


@on_ranks(2, 3)
def test_what_needs_no_gradient_is_not_exchanged_by_the_backward(world):
    size, is_needed = world.size, (True, False, True)
    wholes = [pattern((4 * size, size + n, 3), torch.float64, n) for n in range(3)]
    inputs = [
        cut(whole, 0, [4] * size, world.rank).clone().requires_grad_(needs)
        for whole, needs in zip(wholes, is_needed, strict=True)
    ]
    outputs = all_to_all_many(
        inputs, world.comm, 1, 0, scatter_sizes=[[1] * (size - 1) + [n + 1] for n in range(3)]
    )
    assert [output.requires_grad for output in outputs] == list(is_needed)
    for whole, output, n in zip(wholes, outputs, range(3), strict=True):
        assert_same(output.detach(), cut(whole, 1, [1] * (size - 1) + [n + 1], world.rank))
    sum((n + 1) * output.sum() for n, output in enumerate(outputs)).backward()
    for n, (tensor, needs) in enumerate(zip(inputs, is_needed, strict=True)):
        assert torch.equal(tensor.grad, torch.full_like(tensor, n + 1)) if needs else tensor.grad is None
    forward, backward = [op for op in world.comm.flight_record() if op["op"] == "all_to_all"][-2:]
    for op, kept in ((forward, (0, 1, 2)), (backward, (0, 2))):
        sent = [message["bytes"] for message in op["messages"] if message["direction"] == "send"]
        peers = [rank for rank in range(size) if rank != world.rank]
        widths = [sum(1 + n * (rank == size - 1) for n in kept) for rank in range(size)]
        moved = [widths[peer if op is forward else world.rank] * 4 * 3 * 8 for peer in peers]
        assert sorted(sent) == sorted(moved)
    with torch.no_grad():
        assert not any(output.requires_grad for output in all_to_all_many(inputs, world.comm, 2, 0))


@on_ranks(2)
def test_ranks_that_disagree_about_what_needs_a_gradient(world):
    inputs = [torch.ones(2, 2, requires_grad=True), torch.ones(2, 2, requires_grad=world.rank == 0)]
    outputs = all_to_all_many(inputs, world.comm, 1, 0)
    with pytest.raises(PipeCommMismatch, match="the same inputs must require a gradient on all ranks"):
        sum(output.sum() for output in outputs).backward()
    first, _ = all_to_all_many(inputs, world.comm, 1, 0, gather_size=4)
    world.comm.barrier()
    assert first.shape == (4, 1)


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
    for error_kind, error_text in ranks.run(3, refuse_and_go_on, [0, 1, 2], bad, {}):
        assert error_kind == kind and text in error_text


@pytest.mark.parametrize("name", BAD_ARGUMENTS)
def test_bad_arguments_on_one_rank_are_refused_everywhere(ranks, name):
    bad, kind, text = BAD_ARGUMENTS[name]
    errors = ranks.run(3, refuse_and_go_on, [1], bad, {})
    assert errors[1][0] == kind and text in errors[1][1]
    for error_kind, error_text in (errors[0], errors[2]):
        assert error_kind == "PipeCommMismatch"
        assert "was refused by rank 1" in error_text and text in error_text


CURE = "give gather_size, their sum, or gather_sizes"


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("gather_dim", [1, -2])
def test_unequal_lengths_without_gather_size(ranks, size, gather_dim):
    bad = {"shape": (2, 5, size * 2), "gather_dim": gather_dim}
    for kind, text in ranks.run(size, refuse_and_go_on, [size - 1], bad, {}):
        assert kind == "PipeCommMismatch"
        assert f"[2, 4, {size * 2}]" in text and f"[2, 5, {size * 2}]" in text
        assert "ranks hold unequal lengths along dim" in text and text.endswith(CURE)


@pytest.mark.parametrize("transport", ["shm", "c10d"])
@on_ranks(3)
def test_the_cure_of_unequal_lengths_is_named_where_it_was_left_out(world, transport):
    comm, length = world.shared_comm(transport=transport), 4 if world.rank == 2 else 5
    tensor = torch.zeros(2, length, 6)
    for inputs, sizes, is_told in [
        ([tensor, tensor[..., :3]], {}, True),
        ([tensor, tensor[..., :3]], {"gather_sizes": [[5, 5, 4], None]}, True),
        ([tensor], {"gather_size": 14} if world.rank == 2 else {}, world.rank != 2),
        ([torch.zeros(2, 5, 6 + 3 * (world.rank == 2))], {}, False),  # another difference
    ]:
        kind, text = error_of(all_to_all_many, inputs, comm, **sizes)
        assert kind == "PipeCommMismatch" and text.endswith(CURE) == is_told, text
        assert ("dim 1, " in text) == is_told
    outputs = all_to_all_many([tensor, tensor[..., :3]], comm, gather_size=14)
    assert [output.shape for output in outputs] == [(2, 14, 2), (2, 14, 1)]


@on_ranks(4)
def test_heads_that_do_not_belong_together(world):
    """Of 8 query heads and 2 key heads, ranks 2 and 3 would get query heads without a key head."""

    def exchange(*num_heads, **sizes):
        all_to_all_many([torch.zeros(1, 2, heads, 3) for heads in num_heads], world.comm, **sizes)

    for num_heads in ((8, 2, 2), (6, 4, 4)):
        with pytest.warns(UserWarning, match=r"key and value heads .* with scatter_sizes") as caught:
            exchange(*num_heads)
        assert f"lengths {list(num_heads)} of dim 2 are divided over 4 ranks" in str(caught[0].message)
        assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        exchange(8, 4, 4)
        exchange(6, 6, 6)
        exchange(8, 4, 4, scatter_sizes=[[2, 2, 2, 2], [1, 1, 1, 1], [1, 1, 1, 1]])
        exchange(8, 5, scatter_sizes=[None, [1, 1, 1, 2]])


def test_ranks_that_disagree(ranks):
    """Arguments that are right on each rank by themselves, and do not fit together."""
    for bad in ({"scatter_dim": 0, "scatter_sizes": [2, 0, 0]}, {"scatter_sizes": [6, 0, 0]}):
        for kind, text in ranks.run(3, refuse_and_go_on, [2], bad, {}):
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
    for errors in ranks.run(2, refuse_many):
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
    mine, other = ranks.run(2, refuse_what_is_no_dense_tensor)
    assert [kind for kind, _ in mine] == ["TypeError", "ValueError", "ValueError"]
    assert all(kind == "PipeCommMismatch" and "refused by rank 0" in text for kind, text in other)


# ---- cost -------------------------------------------------------------------------------------------------


def count_passes(world, shape, dims, arguments):
    """Copy passes of a forward and of a backward, each one exchange that allocates nothing once warm."""
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
