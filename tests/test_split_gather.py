"""Split and gather, contiguous and zigzag, alone and over ring and Ulysses groups together."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist
from patterns import DTYPES, pattern
from ranks import on_ranks, once_a_test
from sequence_cases import (
    FLOATS,
    LAYOUTS,
    assert_same,
    cut,
    error_of,
    laid_out,
    numbers,
    random_lengths,
    remainder_first,
    scaled,
)

import pipecomm_ext
from pipecomm_ext import (
    cal_split_sizes,
    gather_forward_split_backward,
    gather_forward_split_backward_with_cp,
    load_balanced_gather_forward_split_backward,
    load_balanced_split_forward_gather_backward,
    parallel_state,
    reorder_output,
    split_forward_gather_backward,
    split_forward_gather_backward_with_cp,
)
from pipecomm_ext.core.extension import _C

# ---- sizes ------------------------------------------------------------------------------------------------


def test_cal_split_sizes():
    assert cal_split_sizes(10, 4) == [3, 3, 2, 2]
    assert cal_split_sizes(2, 4) == [1, 1, 0, 0]
    assert cal_split_sizes(torch.tensor(5), 2) == [3, 2]
    for length in range(40):
        for size in range(1, 10):
            expected = remainder_first(length, size)
            assert cal_split_sizes(length, size) == _C.remainder_first(length, size) == expected
    assert all(type(piece) is int for piece in cal_split_sizes(torch.tensor(5), 2))
    for bad, kind in [((-1, 2), ValueError), ((3, 0), ValueError), ((3.0, 2), TypeError)]:
        with pytest.raises(kind):
            cal_split_sizes(*bad)


def test_cal_split_sizes_multi():
    rows = pipecomm_ext.cal_split_sizes_multi([5, 3], 2)
    assert rows.tolist() == [[3, 2], [2, 1]] and rows.dtype == torch.int64
    assert pipecomm_ext.cal_split_sizes_multi(torch.tensor([1, 0, 4]), 3).tolist() == [
        [1, 0, 2],
        [0, 0, 1],
        [0, 0, 1],
    ]
    assert pipecomm_ext.cal_split_sizes_multi([], 3).shape == (3, 0)


# ---- contiguous pieces ------------------------------------------------------------------------------------


def pair_cases(size, seed, dtypes):
    """(shape of the whole, dtype, dim, sizes or None, grad_scale, layout)"""
    rng = random.Random(f"{seed} {size}")
    cases = []
    for num_dims in range(1, 6):
        for dim in range(-num_dims, num_dims):
            for kind in ("even", "uneven", "explicit"):
                sizes = random_lengths(rng, size, 4) if kind == "explicit" else None
                length = (
                    sum(sizes) if sizes else size * rng.randint(1, 2) + (kind == "uneven") * rng.randint(0, 3)
                )
                shape = [rng.randint(1, 3) for _ in range(num_dims)]
                shape[dim] = length
                cases.append(
                    (
                        tuple(shape),
                        rng.choice(dtypes),
                        dim,
                        sizes,
                        rng.choice(["up", "down", None]),
                        rng.choice(LAYOUTS),
                    )
                )
    return cases


def check_pairs(world, cases):
    size, rank, comm = world.size, world.rank, world.comm
    for idx, (shape, dtype, dim, sizes, grad_scale, layout) in enumerate(cases):
        where = f"case {idx}: {cases[idx]}"
        differentiable = dtype.is_floating_point or dtype.is_complex
        can_scale = dtype in FLOATS
        make = numbers if can_scale else pattern
        lengths = remainder_first(shape[dim], size) if sizes is None else sizes
        whole, grad = make(shape, dtype, "whole", idx), make(shape, dtype, "gradient", idx)
        full = laid_out(whole, layout).requires_grad_(differentiable)
        scale = grad_scale if can_scale else None

        piece = split_forward_gather_backward(full, comm, dim, sizes, scale)
        assert_same(piece, cut(whole, dim, lengths, rank), where)
        assert piece.is_contiguous(), where
        assert piece.untyped_storage().nbytes() == piece.numel() * piece.itemsize, where
        if differentiable:
            piece.backward(laid_out(cut(grad, dim, lengths, rank), layout))
            assert_same(full.grad, scaled(grad, scale, size), where)

        mine = laid_out(cut(whole, dim, lengths, rank), layout).requires_grad_(differentiable)
        equal = len(set(lengths)) == 1
        gathered = gather_forward_split_backward(mine, comm, dim, None if equal else tuple(lengths), scale)
        assert_same(gathered, whole, where)
        assert gathered.is_contiguous(), where
        if differentiable:  # every rank has a gradient of its own
            own = make(shape, dtype, "gradient", idx, rank)
            gathered.backward(laid_out(own, layout))
            assert_same(mine.grad, scaled(cut(own, dim, lengths, rank), scale, size), where)


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_contiguous_pieces(ranks, size):
    cases = pair_cases(size, 1, FLOATS)
    ranks.run(size, check_pairs, cases if size < 8 else cases[::4])


def test_contiguous_pieces_of_every_dtype(ranks):
    cases = [case for dtype in DTYPES for case in pair_cases(3, 2, [dtype])[2:15:6]]
    ranks.run(3, check_pairs, cases)


@on_ranks(2)
def test_documented_examples(world):
    comm, rank = world.comm, world.rank
    for grad_scale, expected in [("down", [5, 10, 15]), (None, [10, 20, 30]), ("up", [20, 40, 60])]:
        full = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
        piece = split_forward_gather_backward(full, comm, 0, grad_scale=grad_scale)
        assert piece.tolist() == [[1.0, 2.0], [3.0]][rank]
        piece.backward(torch.tensor([[10.0, 20.0], [30.0]][rank]))
        assert full.grad.tolist() == expected
    mine = torch.tensor([[1.0, 2.0], [3.0]][rank], requires_grad=True)
    gathered = gather_forward_split_backward(mine, comm, 0, gather_sizes=[2, 1])
    assert gathered.tolist() == [1, 2, 3]
    gathered.backward(torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]][rank]))
    assert mine.grad.tolist() == [[2, 4], [12]][rank]


@on_ranks(3)
def test_split_then_gather_is_gradient_neutral(world):
    full = numbers((7, 2), torch.float64, "x").requires_grad_()
    grad = numbers((7, 2), torch.float64, "g")
    piece = split_forward_gather_backward(full, world.group, 0)
    gather_forward_split_backward(piece, world.group, 0, [3, 2, 2]).backward(grad)
    assert torch.equal(full.grad, grad * 3 / 3)


# ---- zigzag -----------------------------------------------------------------------------------------------


def zigzag(tensor, dim, size, rank):
    chunks = tensor.chunk(2 * size, dim) if tensor.size(dim) else [tensor] * 2 * size
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]], dim)


def check_zigzag(world, seed):
    rng = random.Random(seed)
    size, rank, comm = world.size, world.rank, world.comm
    for idx in range(20):
        num_dims, dtype = rng.randint(1, 5), rng.choice(FLOATS)
        dim = rng.randrange(-num_dims, num_dims)
        shape = [rng.randint(1, 3) for _ in range(num_dims)]
        shape[dim] = 2 * size * rng.randint(0, 3)
        layout = rng.choice(LAYOUTS)
        whole, grad = (
            numbers(tuple(shape), dtype, "whole", idx),
            numbers(tuple(shape), dtype, "gradient", idx),
        )
        full = laid_out(whole, layout).requires_grad_()
        piece = load_balanced_split_forward_gather_backward(full, comm, dim)
        assert_same(piece, zigzag(whole, dim, size, rank), (idx, shape, dim))
        piece.backward(zigzag(grad, dim, size, rank))
        assert_same(full.grad, scaled(grad, "down", size), (idx, shape, dim))

        mine = laid_out(zigzag(whole, dim, size, rank), layout).requires_grad_()
        gathered = load_balanced_gather_forward_split_backward(mine, comm, dim)
        assert_same(gathered, whole, (idx, shape, dim))
        own = numbers(tuple(shape), dtype, "gradient", idx, rank)
        gathered.backward(laid_out(own, layout))
        assert_same(mine.grad, scaled(zigzag(own, dim, size, rank), "up", size), (idx, shape, dim))


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_zigzag(ranks, size):
    ranks.run(size, check_zigzag, 5)


@on_ranks(2)
def test_zigzag_documented_example(world):
    full = torch.arange(8.0, requires_grad=True)
    piece = load_balanced_split_forward_gather_backward(full, world.comm)
    assert piece.tolist() == [[0, 1, 6, 7], [2, 3, 4, 5]][world.rank]
    piece.backward(torch.full((4,), 1.0 + world.rank))
    assert full.grad.tolist() == [0.5, 0.5, 1, 1, 1, 1, 0.5, 0.5]


def test_reorder_output():
    assert reorder_output(torch.tensor([0, 3, 1, 2]), 0, 2, None).tolist() == [0, 1, 2, 3]
    for cp_size in (1, 2, 3, 65):
        whole = torch.arange(2 * cp_size * 2 * 3).reshape(2, -1, 3)
        shards = torch.cat([zigzag(whole, 1, cp_size, rank) for rank in range(cp_size)], 1)
        for dim in (1, -2):
            assert torch.equal(reorder_output(shards, 0, cp_size, None, dim), whole)
    assert reorder_output(torch.zeros(0, 3), 0, 2, None).shape == (0, 3)
    with pytest.raises(ValueError, match="length 6 of dim 0 must be divisible by 2 \\* cp_size = 4"):
        reorder_output(torch.zeros(6), 0, 2, None)
    with pytest.raises(IndexError, match="dim 1 is out of range"):
        reorder_output(torch.zeros(4), 0, 2, None, 1)


# ---- ring and Ulysses together ----------------------------------------------------------------------------


@once_a_test
def grid(world, ring_size, neighbours):
    """(ParallelState, ring rank, Ulysses rank); `neighbours` says which group's ranks follow each other."""
    ulysses_size = world.size // ring_size
    place = {}
    for rank in range(world.size):
        place[rank] = (
            (rank % ring_size, rank // ring_size)
            if neighbours == "ring"
            else (rank // ulysses_size, rank % ulysses_size)
        )
    ring, ulysses = place[world.rank]
    groups = {}
    for u in range(ulysses_size):
        groups["ring", u] = dist.new_group([rank for rank in place if place[rank][1] == u])
    for r in range(ring_size):
        groups["ulysses", r] = dist.new_group([rank for rank in place if place[rank][0] == r])
    state = parallel_state.ParallelState(groups["ulysses", ring], groups["ring", ulysses])
    return state, ring, ulysses


GRIDS = [(1, 1), (2, 1), (2, 2), (4, 2), (4, 4), (6, 2), (8, 2)]


def check_cp(world, ring_size, neighbours):
    state, ring, ulysses = grid(world, ring_size, neighbours)
    ulysses_size = world.size // ring_size
    assert state.is_ring_enable() == (ring_size > 1) and state.get_ring_rank() == ring
    assert state.is_ulysses_enable() == (ulysses_size > 1) and state.get_ulysses_rank() == ulysses
    for idx, length in enumerate([2 * ring_size, 12 * ring_size, 26 * ring_size]):
        dim = [-1, 0, 2][idx]
        shape = (length, 2, length)
        whole, grad = numbers(shape, torch.float64, "whole"), numbers(shape, torch.float64, "gradient")
        ring_grad = zigzag(grad, dim, ring_size, ring) if ring_size > 1 else grad
        ring_local = zigzag(whole, dim, ring_size, ring) if ring_size > 1 else whole
        lengths = remainder_first(ring_local.size(dim), ulysses_size)
        expected = cut(ring_local, dim, lengths, ulysses)

        full = whole.clone().requires_grad_()
        mine = split_forward_gather_backward_with_cp(full, dim, parallel_state=state)
        assert_same(mine, expected)
        assert mine.data_ptr() != full.data_ptr() and mine.is_contiguous()
        mine.backward(cut(ring_grad, dim, lengths, ulysses))
        assert_same(full.grad, grad / ulysses_size / ring_size)

        local = expected.clone().requires_grad_()
        gathered = gather_forward_split_backward_with_cp(local, dim, length, parallel_state=state)
        assert_same(gathered, whole)
        gathered.backward(grad)
        assert_same(local.grad, cut(ring_grad, dim, lengths, ulysses) * ring_size * ulysses_size)


@pytest.mark.parametrize("size, ring_size", GRIDS, ids=str)
def test_context_parallel(ranks, size, ring_size):
    for neighbours in ("ring", "ulysses"):
        ranks.run(size, check_cp, ring_size, neighbours)


@on_ranks(8)
def test_context_parallel_documented_example(world):
    state, ring, ulysses = grid(world, 2, "ulysses")
    mine = split_forward_gather_backward_with_cp(torch.arange(12), 0, parallel_state=state)
    assert mine.tolist() == [[[0, 1], [2, 9], [10], [11]], [[3, 4], [5, 6], [7], [8]]][ring][ulysses]


@on_ranks(4)
def test_the_default_parallel_state(world):
    with pytest.raises(RuntimeError, match="initialize_sequence_parallel"):
        parallel_state.get_parallel_state()
    state, ring, ulysses = grid(world, 2, "ring")
    try:
        mine = parallel_state.initialize_sequence_parallel(state.get_ulysses_group(), state.get_ring_group())
        assert parallel_state.get_parallel_state() is mine
        split = split_forward_gather_backward_with_cp(torch.arange(8), 0)
        assert split.tolist() == [[[0, 1], [6, 7]], [[2, 3], [4, 5]]][ring][ulysses]
        assert gather_forward_split_backward_with_cp(split, 0, 8).tolist() == list(range(8))
        theirs = AnotherState(state)
        assert split_forward_gather_backward_with_cp(torch.arange(8), 0, parallel_state=theirs).equal(split)
        ring_only = parallel_state.initialize_sequence_parallel(ring_group=state.get_ring_group())
        assert not ring_only.is_ulysses_enable() and ring_only.get_ulysses_group_size() == 1
    finally:
        parallel_state.destroy()
        parallel_state.destroy()


class AnotherState:
    """Of another package, with the same methods and more."""

    def __init__(self, state):
        self._state = state

    def __getattr__(self, name):
        return getattr(self._state, name)


class RingOff:
    """A foreign state with nothing enabled, whose groups must not be asked for."""

    def is_ring_enable(self):
        return False

    is_ulysses_enable = is_ring_enable


def test_a_foreign_state_with_nothing_enabled():
    full = torch.arange(6.0, requires_grad=True)
    for result in (
        split_forward_gather_backward_with_cp(full, 0, parallel_state=RingOff()),
        gather_forward_split_backward_with_cp(full, 0, 6, parallel_state=RingOff()),
    ):
        assert torch.equal(result, full) and result.data_ptr() != full.data_ptr()


def refuse_cp(world, bad_rank):
    """A gather_size that one rank of the grid gets wrong is refused on the whole grid."""
    state, _, _ = grid(world, 2, "ring")
    mine = torch.zeros(4)
    good = 4 * world.size
    bad = {0: good + 4, 1: good + 1, 2: "16"}
    errors = [
        error_of(
            gather_forward_split_backward_with_cp,
            mine,
            0,
            bad[kind] if world.rank == bad_rank else good,
            parallel_state=state,
        )
        for kind in bad
    ]
    whole = gather_forward_split_backward_with_cp(mine, 0, good, parallel_state=state)
    assert whole.shape == (good,)
    return errors


@pytest.mark.parametrize("bad_rank", [0, 3])
def test_context_parallel_refusal_reaches_the_whole_grid(ranks, bad_rank):
    errors = ranks.run(4, refuse_cp, bad_rank)
    expected = [
        ("ValueError", "gather_size 20 means a length of 5 along dim 0, not 4"),
        ("ValueError", "gather_size must be divisible by 2 * ring size = 2 * 2, and 17 is not"),
        ("TypeError", "gather_size must be an int, not str"),
    ]
    for rank in range(4):
        for (kind, text), (bad_kind, bad_text) in zip(errors[rank], expected, strict=True):
            assert bad_text in text
            assert kind == (bad_kind if rank == bad_rank else "PipeCommMismatch")


# ---- errors -----------------------------------------------------------------------------------------------


def refuse_gather(world, bad_ranks, bad):
    arguments = dict(bad if world.rank in bad_ranks else {})
    length = arguments.pop("length", 2)
    zigzag_gather = arguments.pop("zigzag", False)
    gather = load_balanced_gather_forward_split_backward if zigzag_gather else gather_forward_split_backward
    error = error_of(gather, torch.zeros(length, 2), **{"process_group": world.comm, "dim": 0, **arguments})
    assert gather_forward_split_backward(torch.zeros(2, 2), world.comm, 0).shape == (4, 2)
    return error


BAD_GATHERS = {
    "dim": ({"dim": 2}, "IndexError", "dim 2 is out of range for a tensor of 2 dims"),
    "unknown scale": (
        {"grad_scale": "Up"},
        "ValueError",
        'grad_scale must be "up", "down" or None, not \'Up\'',
    ),
    "short": (
        {"gather_sizes": [2]},
        "ValueError",
        "gather_sizes needs one entry for each of the 2 ranks, got 1",
    ),
    "long": (
        {"gather_sizes": [2, 2, 2]},
        "ValueError",
        "gather_sizes needs one entry for each of the 2 ranks, got 3",
    ),
    "empty": (
        {"gather_sizes": []},
        "ValueError",
        "gather_sizes needs one entry for each of the 2 ranks, got 0",
    ),
    "not my length": (
        {"gather_sizes": [3, 3]},
        "ValueError",
        "of gather_sizes [3, 3] is 3, but the tensor has length 2",
    ),
    "tensor": (
        {"gather_sizes": torch.tensor([2, 2])},
        "ValueError",
        "gather_sizes must be a list of one length per rank",
    ),
}


@pytest.mark.parametrize("name", BAD_GATHERS)
@pytest.mark.parametrize("bad_ranks", [[0, 1], [1]], ids=["everywhere", "on one rank"])
def test_bad_arguments_of_a_gather(ranks, name, bad_ranks):
    bad, kind, text = BAD_GATHERS[name]
    errors = ranks.run(2, refuse_gather, bad_ranks, bad)
    assert errors[1][0] == kind and all(text in error_text for _, error_text in errors)
    assert errors[0][0] == (kind if 0 in bad_ranks else "PipeCommMismatch")


@pytest.mark.parametrize("zigzag", [False, True])
def test_unequal_lengths_without_gather_sizes(ranks, zigzag):
    bad = {"length": 4, "zigzag": True} if zigzag else {"length": 3}
    if zigzag:
        errors = ranks.run(2, refuse_unequal_zigzag)
    else:
        errors = ranks.run(2, refuse_gather, [1], bad)
    for kind, text in errors:
        assert kind == "PipeCommMismatch" and "[2, 2]" in text
        assert (
            text.endswith("unequal lengths along dim 0, 2 and 3, so give gather_sizes")
            or zigzag
            or (text.endswith("unequal lengths along dim 0, 3 and 2, so give gather_sizes"))
        )


def refuse_unequal_zigzag(world):
    gather = load_balanced_gather_forward_split_backward
    error = error_of(gather, torch.zeros(2 + 2 * world.rank, 2), world.comm)
    assert gather(torch.zeros(2, 2), world.comm).shape == (4, 2)
    return error


def refuse_split(world):
    full, comm = torch.zeros(6, 2), world.comm
    split = split_forward_gather_backward
    return [
        error_of(split, full, comm, 2),
        error_of(split, full, comm, 0, [3, 3, 0]),
        error_of(split, full, comm, 0, [5, 2]),
        error_of(split, full, comm, 0, [7, -1]),
        error_of(split, full, comm, 0, torch.tensor([3, 3])),
        error_of(split, full, comm, 0, grad_scale="Down"),
        error_of(load_balanced_split_forward_gather_backward, full, comm, 0),
        error_of(load_balanced_split_forward_gather_backward, full, comm, -1),
        error_of(load_balanced_gather_forward_split_backward, torch.zeros(3), comm),
    ]


def test_bad_arguments_of_a_split(ranks):
    expected = [
        ("IndexError", "dim 2 is out of range for a tensor of 2 dims"),
        ("ValueError", "split_sizes needs one entry for each of the 2 ranks, got 3: [3, 3, 0]"),
        ("ValueError", "sum of split_sizes [5, 2] is 7, but the tensor has length 6"),
        ("ValueError", "split_sizes must not be negative, got [7, -1]"),
        ("ValueError", "split_sizes must be a list of one length per rank, not Tensor"),
        ("ValueError", 'grad_scale must be "up", "down" or None, not \'Down\''),
        ("ValueError", "6"),
        ("ValueError", "2"),
        ("ValueError", "6"),
    ]
    for errors in ranks.run(2, refuse_split):
        for (kind, text), (expected_kind, expected_text) in zip(errors, expected, strict=True):
            assert kind == expected_kind and expected_text in text


@on_ranks(2)
def test_a_split_is_local(world):
    """Nobody else takes part in a forward split; its backward is one exchange."""
    counters = world.comm._c.copy_counters
    before = counters()["num_exchanges"]
    if world.rank == 0:
        split_forward_gather_backward(torch.zeros(3), world.comm, 0)
    full = torch.zeros(5, 3, requires_grad=True)
    piece = split_forward_gather_backward(full, world.comm, 0)
    assert counters()["num_exchanges"] == before
    piece.sum().backward()
    assert counters()["num_exchanges"] == before + 1
    local = torch.zeros(2, 3, requires_grad=True)
    gathered = gather_forward_split_backward(local, world.comm, 0)
    assert counters()["num_exchanges"] == before + 2
    gathered.sum().backward()
    assert counters()["num_exchanges"] == before + 2
