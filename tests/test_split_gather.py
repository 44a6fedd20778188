"""Split and gather: contiguous, zigzag and packed pieces, alone and over ring and Ulysses groups together."""

from __future__ import annotations

import functools
import itertools
import random
import re
from types import SimpleNamespace

import pytest
import torch
from patterns import DTYPES, pattern
from ranks import on_ranks
from sequence_cases import (
    FLOATS,
    LAYOUTS,
    check_gather,
    check_refused,
    check_split,
    cut,
    grid,
    numbers,
    random_lengths,
    remainder_first,
)

from pipecomm_ext import (
    PipeCommMismatch,
    cal_split_sizes,
    cal_split_sizes_multi,
    gather_forward_split_backward,
    gather_forward_split_backward_with_cp,
    load_balanced_gather_forward_split_backward,
    load_balanced_split_forward_gather_backward,
    packed_data_gather_forward_split_backward,
    packed_data_gather_forward_split_backward_with_cp,
    packed_data_split_forward_gather_backward,
    packed_data_split_forward_gather_backward_with_cp,
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


def test_cal_split_sizes_multi():
    rows = cal_split_sizes_multi([5, 3], 2)
    assert rows.tolist() == [[3, 2], [2, 1]] and rows.dtype == torch.int64
    rows = cal_split_sizes_multi(torch.tensor([1, 0, 4]), 3)
    assert rows.tolist() == [[1, 0, 2], [0, 0, 1], [0, 0, 1]]
    assert cal_split_sizes_multi([], 3).shape == (3, 0)


# ---- contiguous pieces ------------------------------------------------------------------------------------


def pair_cases(size, seed, dtypes):
    """(shape of the whole, dtype, dim, sizes or None, grad_scale, layout)"""
    rng = random.Random(f"{seed} {size}")
    cases = []
    for num_dims in range(1, 6):
        for dim, kind in itertools.product(range(-num_dims, num_dims), ("even", "uneven", "explicit")):
            sizes = random_lengths(rng, size, 4) if kind == "explicit" else None
            remainder = rng.randint(0, 3) if kind == "uneven" else 0
            shape = [rng.randint(1, 3) for _ in range(num_dims)]
            shape[dim] = sum(sizes) if sizes else size * rng.randint(1, 2) + remainder
            options = rng.choice(["up", "down", None]), rng.choice(LAYOUTS)
            cases.append((tuple(shape), rng.choice(dtypes), dim, sizes, *options))
    return cases


def check_pairs(world, cases):
    size, comm = world.size, world.comm
    for idx, (shape, dtype, dim, sizes, grad_scale, layout) in enumerate(cases):
        scale = grad_scale if dtype in FLOATS else None
        make = numbers if dtype in FLOATS else pattern
        lengths = remainder_first(shape[dim], size) if sizes is None else sizes
        needed = None if len(set(lengths)) == 1 else tuple(lengths)
        whole, grad = make(shape, dtype, "whole", idx), make(shape, dtype, "gradient", idx)
        own = make(shape, dtype, "gradient", idx, world.rank)
        piece = functools.partial(cut, dim=dim, lengths=lengths, rank=world.rank)
        options = {"process_group": comm, "dim": dim, "grad_scale": scale}
        split = functools.partial(split_forward_gather_backward, split_sizes=sizes, **options)
        gather = functools.partial(gather_forward_split_backward, gather_sizes=needed, **options)
        try:
            check_split(split, piece, whole, grad, size, scale, layout)
            check_gather(gather, piece, whole, own, size, scale, layout)
        except AssertionError as error:
            raise AssertionError(f"case {idx}: {cases[idx]}") from error


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_contiguous_pieces(ranks, size):
    cases = pair_cases(size, 1, FLOATS)
    ranks.run(size, check_pairs, cases if size < 8 else cases[::7])


def test_contiguous_pieces_of_every_dtype(ranks):
    cases = [case for dtype in DTYPES for case in pair_cases(3, 2, [dtype])[2:15:6]]
    ranks.run(3, check_pairs, cases)


# ---- zigzag -----------------------------------------------------------------------------------------------


def zigzag(tensor, dim, size, rank):
    chunks = tensor.chunk(2 * size, dim) if tensor.size(dim) else [tensor] * 2 * size
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]], dim)


@on_ranks(1, 2, 3, 5)
def test_zigzag(world):
    rng, comm = random.Random(5), world.comm
    for idx in range(20):
        num_dims, dtype, layout = rng.randint(1, 5), rng.choice(FLOATS), rng.choice(LAYOUTS)
        dim = rng.randrange(-num_dims, num_dims)
        shape = [rng.randint(1, 3) for _ in range(num_dims)]
        shape[dim] = 2 * world.size * rng.randint(0, 3)
        whole, grad, own = (
            numbers(tuple(shape), dtype, idx, *key) for key in [("whole",), ("gradient",), (world.rank,)]
        )
        split = functools.partial(load_balanced_split_forward_gather_backward, process_group=comm, dim=dim)
        gather = functools.partial(load_balanced_gather_forward_split_backward, process_group=comm, dim=dim)
        piece = functools.partial(zigzag, dim=dim, size=world.size, rank=world.rank)
        check_split(split, piece, whole, grad, world.size, layout=layout)
        check_gather(gather, piece, whole, own, world.size, layout=layout)


def test_reorder_output():
    assert reorder_output(torch.tensor([0, 3, 1, 2]), 0, 2, None).tolist() == [0, 1, 2, 3]
    for cp_size in (1, 2, 3, 65):
        whole = torch.arange(2 * cp_size * 2 * 3).reshape(2, -1, 3)
        shards = torch.cat([zigzag(whole, 1, cp_size, rank) for rank in range(cp_size)], 1)
        for dim in (1, -2):
            assert torch.equal(reorder_output(shards, 0, cp_size, None, dim), whole)
    assert reorder_output(torch.zeros(0, 3), 0, 2, None).shape == (0, 3)
    weights, x = torch.tensor([1.0, 10, 100, 1000]), torch.zeros(4, requires_grad=True)
    (weights * reorder_output(x, 0, 2, None)).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [1, 1000, 10, 100]
    with pytest.raises(ValueError, match="length 6 of dim 0 must be divisible by 2 \\* cp_size = 4"):
        reorder_output(torch.zeros(6), 0, 2, None)
    with pytest.raises(IndexError, match="dim 1 is out of range"):
        reorder_output(torch.zeros(4), 0, 2, None, 1)


# ---- packed sequences -----------------------------------------------------------------------------------


def packed_pieces(tensor, dim, rows, rank):
    """Rank's piece of each sequence, one after the other; rows[rank][sequence]."""
    lengths = [sum(row[sequence] for row in rows) for sequence in range(len(rows[0]))]
    pieces = []
    for sequence in range(len(lengths)):
        whole_sequence = cut(tensor, dim, lengths, sequence)
        pieces.append(cut(whole_sequence, dim, [row[sequence] for row in rows], rank))
    return torch.cat(pieces, dim)


def split_rows(lengths, size):
    return [list(row) for row in zip(*(remainder_first(length, size) for length in lengths), strict=True)]


@on_ranks(1, 2, 3, 8)
def test_packed(world):
    rng, size, comm = random.Random(1), world.size, world.comm
    for idx in range(20 if size < 8 else 6):
        num_dims, dtype, layout = rng.randint(1, 4), rng.choice(FLOATS), rng.choice(LAYOUTS)
        dim = rng.randrange(-num_dims, num_dims)
        lengths = random_lengths(rng, rng.randint(1, 9), 9)
        rows = split_rows(lengths, size)
        any_rows = [random_lengths(rng, len(lengths), 4) for _ in range(size)]  # will do for a gather
        given = [torch.tensor, list][idx % 2]
        shape = [rng.randint(1, 3) for _ in range(num_dims)]

        def whole(rows, *key, shape=shape, dim=dim, dtype=dtype, idx=idx):
            shape[dim] = sum(map(sum, rows))
            return numbers(tuple(shape), dtype, idx, *key)

        def piece(tensor, dim=dim, rows=rows):
            return packed_pieces(tensor, dim, rows, world.rank)

        split = functools.partial(
            packed_data_split_forward_gather_backward,
            process_group=comm,
            sequence_lengths=given(lengths),
            dim=dim,
        )
        check_split(split, piece, whole(rows, "whole"), whole(rows, "gradient"), size, layout=layout)
        rows = any_rows if idx % 3 == 0 else rows
        gather = functools.partial(
            packed_data_gather_forward_split_backward,
            all_split_sizes=given(rows),
            process_group=comm,
            dim=dim,
        )
        own = whole(rows, "gradient", world.rank)
        my_piece = functools.partial(piece, rows=rows)
        check_gather(gather, my_piece, whole(rows, "whole"), own, size, layout=layout)


@on_ranks(3)
def test_one_exchange_whatever_the_number_of_sequences(world):
    counters = world.comm._c.copy_counters
    lengths = [7, 1, 0, 12, 3] * 10
    full = torch.zeros(sum(lengths), 4, requires_grad=True)
    before = counters()["num_exchanges"]
    piece = packed_data_split_forward_gather_backward(full, world.comm, lengths)
    assert counters()["num_exchanges"] == before
    piece.sum().backward()
    assert counters()["num_exchanges"] == before + 1
    mine = piece.detach().requires_grad_()
    rows = cal_split_sizes_multi(lengths, 3)
    gathered = packed_data_gather_forward_split_backward(mine, rows, world.comm)
    assert counters()["num_exchanges"] == before + 2
    gathered.sum().backward()
    assert counters()["num_exchanges"] == before + 2


# ---- ring and Ulysses together ----------------------------------------------------------------------------


GRIDS = [(1, 1), (2, 1), (2, 2), (4, 2), (4, 4), (6, 2), (8, 2)]


def check_cp(world, ring_size, neighbours):
    state, ring, ulysses = grid(ring_size, neighbours)
    ulysses_size = world.size // ring_size
    assert state.is_ring_enable() == (ring_size > 1) and state.get_ring_rank() == ring
    assert state.is_ulysses_enable() == (ulysses_size > 1) and state.get_ulysses_rank() == ulysses

    def check(split, gather, shape, dim, of_ring):
        """`of_ring(tensor)` is the part that the ranks of my Ulysses group hold together."""

        def my_part(tensor):
            local = of_ring(tensor)
            return cut(local, dim, remainder_first(local.size(dim), ulysses_size), ulysses)

        whole, grad = numbers(shape, torch.float64, "whole"), numbers(shape, torch.float64, "gradient")
        options = {"dim": dim, "parallel_state": state}
        check_split(functools.partial(split, **options), my_part, whole, grad, world.size)
        check_gather(functools.partial(gather, **options), my_part, whole, grad, world.size)

    for dim, length in [(-1, 2 * ring_size), (0, 12 * ring_size), (2, 26 * ring_size)]:
        gather = functools.partial(gather_forward_split_backward_with_cp, gather_size=length)
        of_ring = functools.partial(zigzag, dim=dim, size=ring_size, rank=ring)
        check(split_forward_gather_backward_with_cp, gather, (length, 2, length), dim, of_ring)
    for dim, lengths in [(0, [5, 3]), (-1, [1] * 5), (1, [0, 17, 4, 9])]:
        shape = [3, 2]
        shape[dim] = sum(lengths)
        of_ring = functools.partial(packed_pieces, dim=dim, rows=split_rows(lengths, ring_size), rank=ring)
        check(
            functools.partial(packed_data_split_forward_gather_backward_with_cp, seq_lens=lengths),
            functools.partial(
                packed_data_gather_forward_split_backward_with_cp, seq_lens=torch.tensor(lengths)
            ),
            tuple(shape),
            dim,
            of_ring,
        )


@pytest.mark.parametrize("size, ring_size", GRIDS, ids=str)
def test_context_parallel(ranks, size, ring_size):
    for neighbours in ("ring", "ulysses"):
        ranks.run(size, check_cp, ring_size, neighbours)


@on_ranks(4)
def test_the_default_parallel_state(world):
    with pytest.raises(RuntimeError, match="initialize_sequence_parallel"):
        parallel_state.get_parallel_state()
    state, ring, ulysses = grid(2, "ring")
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
    """The state of another package, with the same methods and more."""

    def __init__(self, state):
        self._state = state

    def __getattr__(self, name):
        return getattr(self._state, name)


def test_a_foreign_state_with_nothing_enabled():
    """Its groups are not read: it has none."""
    full = torch.arange(6.0, requires_grad=True)
    state = SimpleNamespace(is_ring_enable=lambda: False, is_ulysses_enable=lambda: False)
    for result in (
        split_forward_gather_backward_with_cp(full, 0, parallel_state=state),
        gather_forward_split_backward_with_cp(full, 0, 6, parallel_state=state),
    ):
        assert torch.equal(result, full) and result.data_ptr() != full.data_ptr()


@pytest.mark.parametrize("bad_rank", [0, 3])
@on_ranks(4)
def test_context_parallel_refusal_reaches_the_whole_grid(world, bad_rank):
    """One rank of the grid passes a wrong gather_size."""
    state, _, _ = grid(2, "ring")
    gather = functools.partial(gather_forward_split_backward_with_cp, dim=0, parallel_state=state)
    for bad, kind, text in [
        (20, ValueError, "gather_size 20 means a length of 5 along dim 0, not 4"),
        (17, ValueError, "gather_size must be divisible by 2 * ring size = 2 * 2, and 17 is not"),
        ("16", TypeError, "gather_size must be an int, not str"),
    ]:
        is_bad = world.rank == bad_rank
        with pytest.raises(kind if is_bad else PipeCommMismatch, match=re.escape(text)):
            gather(torch.zeros(4), gather_size=bad if is_bad else 16)
    assert gather(torch.zeros(4), gather_size=16).shape == (16,)


# ---- errors -----------------------------------------------------------------------------------------------


def check_usable(world) -> None:
    assert gather_forward_split_backward(torch.zeros(2, 2), world.comm, 0).shape == (4, 2)


# Arguments for [2, 2] of two ranks; more in reliability/bad_inputs.py.
BAD_GATHERS = {
    "empty": ({"gather_sizes": []}, ValueError, "one entry for each of the 2 ranks, got 0"),
    "tensor": ({"gather_sizes": torch.tensor([2, 2])}, ValueError, "must be a list of one length per rank"),
}


@pytest.mark.parametrize("name", BAD_GATHERS)
@on_ranks(2)
def test_bad_arguments_of_a_gather(world, name):
    bad, kind, text = BAD_GATHERS[name]
    arguments = {"process_group": world.comm, "dim": 0, **bad}
    call = functools.partial(gather_forward_split_backward, torch.zeros(2, 2), **arguments)
    check_refused(world, call, lambda: check_usable(world), kind, text)


@on_ranks(2)
def test_unequal_lengths_without_gather_sizes(world):
    with pytest.raises(PipeCommMismatch, match="dim 0, (2 and 3|3 and 2), so give gather_sizes") as caught:
        gather_forward_split_backward(torch.zeros(2 + world.rank, 2), world.comm, 0)
    assert "[2, 2]" in str(caught.value)
    check_usable(world)
    with pytest.raises(PipeCommMismatch, match=r"\[2, 2\]"):
        load_balanced_gather_forward_split_backward(torch.zeros(2 + 2 * world.rank, 2), world.comm)
    check_usable(world)


# For tensors [3, 2] of two ranks; more in reliability/bad_inputs.py.
BAD_ROWS = [
    ([[3]], ValueError, "one entry for each of the 2 ranks, got 1"),
    ([[], []], ValueError, "lengths of the same sequences, at least one"),
    ([[2, 1], [3]], ValueError, "lengths of the same sequences, at least one"),
]


@on_ranks(2)
def test_bad_rows_are_refused_everywhere(world):
    mine = pattern((3, 2), torch.float32, world.rank)

    def gather(rows):
        return packed_data_gather_forward_split_backward(mine, rows, world.comm)

    def check_usable():
        assert gather([[2, 1], [1, 2]]).shape == (6, 2)

    for rows, kind, text in BAD_ROWS:
        check_refused(world, functools.partial(gather, rows), check_usable, kind, text)


@on_ranks(2)
def test_a_split_is_local(world):
    """No other rank takes part in a forward split; its backward is one exchange."""
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


@pytest.mark.parametrize("dtype", [torch.uint4, torch.int1, torch.uint8], ids=str)
@on_ranks(2)
def test_dtypes_that_torch_does_not_copy(world, dtype):
    whole = torch.arange(32, dtype=torch.uint8).view(4, 8)
    pairs = [
        (split_forward_gather_backward, gather_forward_split_backward),
        (load_balanced_split_forward_gather_backward, load_balanced_gather_forward_split_backward),
    ]
    for tensor in (whole, whole.t().contiguous().t()):
        for split, gather in pairs:
            gathered = gather(split(tensor.view(dtype), world.comm, 1), world.comm, 1)
            assert gathered.dtype == dtype and torch.equal(gathered.view(torch.uint8), whole), split
        pieces = packed_data_split_forward_gather_backward(tensor.view(dtype), world.comm, [5, 3], 1)
        rows = cal_split_sizes_multi([5, 3], 2)
        gathered = packed_data_gather_forward_split_backward(pieces, rows, world.comm, 1)
        assert torch.equal(gathered.view(torch.uint8), whole)
        ordered = reorder_output(tensor.view(dtype), 0, 2, None, 1).view(torch.uint8)
        assert torch.equal(ordered, reorder_output(whole, 0, 2, None, 1))
