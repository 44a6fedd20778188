"""all_to_all and all_to_all_many: the right bytes, the same errors on all ranks, no needless copies."""

from __future__ import annotations

import functools
import itertools
import random
import warnings

import pytest
import torch
import torch.distributed as dist
from patterns import DTYPES, pattern
from ranks import on_ranks
from sequence_cases import (
    FLOATS,
    KINDS,
    LAYOUTS,
    AllToAllCase,
    all_to_all_cases,
    assert_same,
    check_refused,
    cut,
    error_of,
    laid_out,
)

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
    ranks.run(size, check_cases, random.Random(3).sample(cases, 16))


@pytest.mark.parametrize("size", [1, 4])
def test_every_dtype(ranks, size):
    cases = []
    for dtype in DTYPES:
        cases += all_to_all_cases(size, ["both uneven"], [dtype], seed=4)[2:8]
    ranks.run(size, check_cases, cases)


@on_ranks(2, 3)
def test_process_groups_and_communicators_are_equal_arguments(world):
    mine = pattern((4, world.size, 6), torch.float32, world.rank)
    expected = all_to_all(mine, world.comm, 1, 2)
    for group in (None, dist.group.WORLD):
        assert_same(all_to_all(mine, group, 1, 2), expected)


def test_large_messages(ranks):
    """Larger than inline payloads, with every handling: in place, packed, unpacked."""
    shape, cases = (2, 3 * 1024, 40), []
    for scatter_dim, gather_dim in [(0, 1), (1, 0), (2, 1), (1, 2)]:
        sizes = {
            "scatter_sizes": [shape[scatter_dim] - 1, 1, 0],
            "gather_sizes": [0, shape[gather_dim] - 1, 1],
        }
        cases.append(AllToAllCase(shape, torch.float32, scatter_dim, gather_dim, **sizes, arguments=sizes))
    ranks.run(3, check_cases, cases)


# ---- several tensors --------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
@on_ranks(1, 2, 3, 5)
def test_many_tensors_are_one_exchange(world, seed):
    """q, k, v of different heads and dtypes, and int64 positions."""
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
    used = [0, 3]  # the gradients of the others are zero
    torch.autograd.backward(
        [outputs[n] for n in used], [cut(grads[n], 2, kinds[n][0], world.rank) for n in used]
    )
    assert world.comm._c.copy_counters()["num_exchanges"] == before + 2
    for n in used:
        assert_same(inputs[n].grad, cut(grads[n], 1, lengths, world.rank))
    assert not inputs[1].grad.any() and inputs[2].grad is None


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


def check_usable(world) -> None:
    assert all_to_all(torch.zeros(2, 4, world.size * 2), world.comm).shape == (2, 4 * world.size, 2)


# Arguments for a tensor [2, 4, 6] over three ranks; more in reliability/bad_inputs.py, cpp/test_plan.cpp.
BAD_ARGUMENTS = {
    "empty": ({"gather_sizes": []}, ValueError, "one entry for each of the 3 ranks, got 0"),
    "gather_size": ({"gather_size": 30}, ValueError, "[10, 10, 10] is 10, but the tensor has length 4"),
    "both": ({"gather_size": 13, "gather_sizes": [4] * 3}, ValueError, "do not add up to gather_size 13"),
    "tensor": ({"scatter_sizes": torch.tensor([2] * 3)}, ValueError, "must be a list of one length per rank"),
    "0-d": ({"input_": torch.zeros(())}, IndexError, "scatter_dim 2 is out of range for a tensor of 0 dims"),
}


@pytest.mark.parametrize("name", BAD_ARGUMENTS)
@on_ranks(3)
def test_bad_arguments_are_refused_everywhere(world, name):
    bad, kind, text = BAD_ARGUMENTS[name]
    arguments = {"input_": torch.zeros(2, 4, 6), "process_group": world.comm, **bad}
    check_refused(world, functools.partial(all_to_all, **arguments), lambda: check_usable(world), kind, text)


CURE = "give gather_size, their sum, or gather_sizes"


@pytest.mark.parametrize("gather_dim", [1, -2])
@on_ranks(2, 3)
def test_unequal_lengths_without_gather_size(world, gather_dim):
    length, width = 5 if world.rank == world.size - 1 else 4, 2 * world.size
    kind, text = error_of(all_to_all, torch.zeros(2, length, width), world.comm, gather_dim=gather_dim)
    assert kind == "PipeCommMismatch" and f"[2, 4, {width}]" in text and f"[2, 5, {width}]" in text
    assert text.startswith(f"rank {world.rank}: ranks hold unequal lengths along dim") and CURE in text
    assert "; this rank calls all_to_all of float32[2, " in text and "channel" not in text
    check_usable(world)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
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
        assert kind == "PipeCommMismatch" and (CURE in text) == is_told, text
        assert ("dim 1, " in text) == is_told
    outputs = all_to_all_many([tensor, tensor[..., :3]], comm, gather_size=14)
    assert [output.shape for output in outputs] == [(2, 14, 2), (2, 14, 1)]


@on_ranks(4)
def test_heads_that_do_not_belong_together(world):
    """With 8 query heads and 2 key heads, ranks 2 and 3 would get query heads without a key head."""

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


TENSOR = torch.zeros(2, 3, 4)
BAD_ARGUMENTS_OF_MANY = [
    ([], {}, ValueError, "inputs must hold at least one tensor"),
    ([TENSOR, 3], {}, TypeError, "inputs[1] must be a torch.Tensor, not int"),
    ([TENSOR, TENSOR[None]], {}, ValueError, "inputs must have the same number of dims, got 3 and 4"),
    ([TENSOR] * 2, {"scatter_sizes": [[2, 2]]}, ValueError, "one list for each of the 2 tensors, got 1"),
    ([TENSOR] * 2, {"gather_sizes": 3}, ValueError, "or one such list per tensor, not 3"),
]


@on_ranks(2)
def test_bad_arguments_of_many(world):
    for inputs, arguments, kind, text in BAD_ARGUMENTS_OF_MANY:
        call = functools.partial(all_to_all_many, inputs, world.comm, **arguments)
        check_refused(world, call, lambda: check_usable(world), kind, text)


# ---- cost -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [{}, {"scatter_sizes": [4, 2]}], ids=["even", "uneven"])
@pytest.mark.parametrize(
    ("batch", "dims", "num_passes"),
    [(1, (2, 1), 1), (1, (1, 2), 1), (1, (1, 0), 0), (2, (2, 1), 2), (2, (0, 1), 1)],
)
@on_ranks(2)
def test_what_a_call_costs(world, batch, dims, num_passes, arguments):
    """One exchange forward and one backward, each of few copies, which allocate nothing once warm.

    A call packs if more than one run precedes the scatter dim, unpacks if more than one precedes the other.
    """
    shape = [batch, 6, 4, 5]
    shape[dims[0]] = 6
    mine = torch.zeros(shape, requires_grad=True)
    counts = [world.comm._c.copy_counters()]
    for _ in range(4):
        output = all_to_all(mine, world.comm, *dims, **arguments)
        counts.append(world.comm._c.copy_counters())
        output.backward(torch.zeros_like(output))
        counts.append(world.comm._c.copy_counters())
    for before, after in itertools.pairwise(counts):
        assert after["num_exchanges"] - before["num_exchanges"] == 1
        assert after["num_passes"] - before["num_passes"] == num_passes
    assert counts[-1]["num_staging_allocations"] == counts[4]["num_staging_allocations"]


@on_ranks(2)
def test_a_communicator_of_one_rank_in_a_larger_world(world):
    groups = [dist.new_group([rank]) for rank in range(world.size)]
    with Communicator(groups[world.rank]) as comm:
        mine = pattern((3, 4), torch.float32, world.rank)
        output = all_to_all(mine, comm, 0, 1)
        assert_same(output, mine)
        assert output.data_ptr() != mine.data_ptr()
