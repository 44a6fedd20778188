"""Packed sequences: each is split on its own, and one exchange gathers them all."""

from __future__ import annotations

import random

import pytest
import torch
from patterns import pattern
from ranks import on_ranks
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
from test_split_gather import grid

from pipecomm_ext import (
    cal_split_sizes_multi,
    packed_data_gather_forward_split_backward,
    packed_data_gather_forward_split_backward_with_cp,
    packed_data_split_forward_gather_backward,
    packed_data_split_forward_gather_backward_with_cp,
)


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


def check_packed(world, seed):
    rng = random.Random(seed)
    size, rank, comm = world.size, world.rank, world.comm
    for idx in range(20):
        num_dims, dtype, layout = rng.randint(1, 4), rng.choice(FLOATS), rng.choice(LAYOUTS)
        dim = rng.randrange(-num_dims, num_dims)
        lengths = random_lengths(rng, rng.randint(1, 9), 9)
        shape = [rng.randint(1, 3) for _ in range(num_dims)]
        shape[dim] = sum(lengths)
        shape = tuple(shape)
        where = (idx, shape, dtype, dim, lengths)
        whole, grad = numbers(shape, dtype, "whole", idx), numbers(shape, dtype, "gradient", idx)
        rows = split_rows(lengths, size)

        full = laid_out(whole, layout).requires_grad_()
        given = torch.tensor(lengths) if idx % 2 else lengths
        piece = packed_data_split_forward_gather_backward(full, comm, given, dim)
        assert_same(piece, packed_pieces(whole, dim, rows, rank), where)
        piece.backward(laid_out(packed_pieces(grad, dim, rows, rank), layout))
        assert_same(full.grad, scaled(grad, "down", size), where)

        if idx % 3 == 0:  # any rows will do for a gather
            rows = [random_lengths(rng, len(lengths), 4) for _ in range(size)]
            shape = list(shape)
            shape[dim] = sum(map(sum, rows))
            whole = numbers(tuple(shape), dtype, "whole", idx)
        mine = laid_out(packed_pieces(whole, dim, rows, rank), layout).requires_grad_()
        given = torch.tensor(rows) if idx % 2 else rows
        gathered = packed_data_gather_forward_split_backward(mine, given, comm, dim)
        assert_same(gathered, whole, where)
        own = numbers(tuple(shape), dtype, "gradient", idx, rank)
        gathered.backward(laid_out(own, layout))
        assert_same(mine.grad, scaled(packed_pieces(own, dim, rows, rank), "up", size), where)


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_packed(ranks, size):
    ranks.run(size, check_packed, 1)


@on_ranks(2)
def test_documented_example(world):
    packed = torch.arange(8)
    piece = packed_data_split_forward_gather_backward(packed, world.comm, [5, 3])
    assert piece.tolist() == [[0, 1, 2, 5, 6], [3, 4, 7]][world.rank]
    rows = cal_split_sizes_multi([5, 3], 2)
    assert packed_data_gather_forward_split_backward(piece, rows, world.comm).tolist() == list(range(8))


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


def check_packed_cp(world, ring_size, neighbours):
    state, ring, ulysses = grid(world, ring_size, neighbours)
    ulysses_size = world.size // ring_size
    for dim, lengths in [(0, [5, 3]), (-1, [1] * 5), (1, [0, 17, 4, 9])]:
        shape = [3, 2]
        shape[dim] = sum(lengths)
        shape = tuple(shape)
        whole, grad = numbers(shape, torch.float64, "whole"), numbers(shape, torch.float64, "gradient")
        rows = split_rows(lengths, ring_size)

        def my_part(tensor, dim=dim, rows=rows):
            local = packed_pieces(tensor, dim, rows, ring)
            return cut(local, dim, remainder_first(local.size(dim), ulysses_size), ulysses)

        full = whole.clone().requires_grad_()
        mine = packed_data_split_forward_gather_backward_with_cp(full, dim, lengths, parallel_state=state)
        assert_same(mine, my_part(whole))
        mine.backward(my_part(grad))
        assert_same(full.grad, grad / ulysses_size / ring_size)

        local = my_part(whole).clone().requires_grad_()
        gathered = packed_data_gather_forward_split_backward_with_cp(
            local, dim, torch.tensor(lengths), parallel_state=state
        )
        assert_same(gathered, whole)
        gathered.backward(grad)
        assert_same(local.grad, my_part(grad) * ring_size * ulysses_size)


@pytest.mark.parametrize("size, ring_size", [(1, 1), (2, 1), (2, 2), (4, 2), (8, 4)], ids=str)
def test_packed_context_parallel(ranks, size, ring_size):
    for neighbours in ("ring", "ulysses"):
        ranks.run(size, check_packed_cp, ring_size, neighbours)


@on_ranks(4)
def test_packed_context_parallel_documented_example(world):
    state, ring, ulysses = grid(world, 2, "ulysses")
    mine = packed_data_split_forward_gather_backward_with_cp(torch.arange(8), 0, [5, 3], parallel_state=state)
    assert mine.tolist() == [[[0, 1, 2], [5, 6]], [[3, 4], [7]]][ring][ulysses]


# ---- errors -----------------------------------------------------------------------------------------------


def refuse_split(world):
    state, _, _ = grid(world, 1, "ring")
    packed = torch.zeros(6, 2)
    bad = [[], [4, 1], [4, 3], [7, -1], torch.tensor([2.0, 4.0]), 6]
    errors = []
    for lengths in bad:
        errors.append(error_of(packed_data_split_forward_gather_backward, packed, world.comm, lengths))
        with_cp = error_of(
            packed_data_split_forward_gather_backward_with_cp, packed, 0, lengths, parallel_state=state
        )
        assert with_cp[0] == errors[-1][0]
    return errors


def test_bad_lengths(ranks):
    expected = [
        ("ValueError", "there must be at least one sequence length"),
        ("ValueError", "sum of all sequence lengths is 5, but the tensor has length 6"),
        ("ValueError", "sum of all sequence lengths is 7, but the tensor has length 6"),
        ("ValueError", "-1"),
        ("TypeError", "a sequence length must be an int, not float"),
        ("ValueError", "sequence lengths must be a list or a 1-d tensor, not int"),
    ]
    for errors in ranks.run(2, refuse_split):
        for (kind, text), (expected_kind, expected_text) in zip(errors, expected, strict=True):
            assert kind == expected_kind and expected_text in text


BAD_ROWS = [
    ([[2, 1]], "ValueError", "need one row for each of the 2 ranks, got 1"),
    ([[2, 1], [2]], "ValueError", "rank 0 has 2 sequences, rank 1 has 1"),
    ([[], []], "ValueError", "at least one sequence"),
    (
        [[3, 1], [3, 1]],
        "ValueError",
        "of the split sizes [3, 1] is 4, but the tensor has length 3",
    ),
    ([[4, -1], [4, -1]], "ValueError", "must not be negative, got [4, -1]"),
    (3, "ValueError", "all_split_sizes must be a tensor [ranks, sequences], not int"),
    ([3, 3], "ValueError", "all_split_sizes[0] must be a list of one length per rank, not int"),
    (torch.ones(2, 2), "TypeError", "all_split_sizes[0][0] must be an int, not float"),
]


def refuse_gather(world, idx, bad_ranks):
    mine, good = pattern((3, 2), torch.float32, world.rank), [[2, 1], [1, 2]]
    rows = BAD_ROWS[idx][0] if world.rank in bad_ranks else good
    error = error_of(packed_data_gather_forward_split_backward, mine, rows, world.comm)
    assert packed_data_gather_forward_split_backward(mine, good, world.comm).shape == (6, 2)
    return error


@pytest.mark.parametrize("idx", range(len(BAD_ROWS)))
@pytest.mark.parametrize("bad_ranks", [[0, 1], [1]], ids=["everywhere", "on one rank"])
def test_bad_rows_are_refused_everywhere(ranks, idx, bad_ranks):
    _, kind, text = BAD_ROWS[idx]
    errors = ranks.run(2, refuse_gather, idx, bad_ranks)
    assert errors[1][0] == kind and all(text in error_text for _, error_text in errors)
    assert errors[0][0] == (kind if 0 in bad_ranks else "PipeCommMismatch")
