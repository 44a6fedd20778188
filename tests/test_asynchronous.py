"""async_op=True: results on their way, and gradients that are exchanged beside what is computed."""

from __future__ import annotations

import pytest
import torch
from ranks import on_ranks
from sequence_cases import assert_same, num_posted, numbers
from test_sequence_autograd import CHANNELS, TOKENS, pieces, sequence_rows
from torch.autograd import forward_ad

from pipecomm_ext import (
    PipeCommMismatch,
    all_to_all,
    all_to_all_many,
    gather_forward_split_backward,
    load_balanced_gather_forward_split_backward,
    load_balanced_split_forward_gather_backward,
    packed_data_gather_forward_split_backward,
    packed_data_split_forward_gather_backward,
    split_forward_gather_backward,
)


def first_of(result):
    """Of `all_to_all_many`: the first tensor instead of the list."""
    if isinstance(result, tuple):
        return result[0][0], result[1]
    return result[0]


# (call(x, comm, **async_op), local shape of x on rank r of P)
OPERATIONS = {
    "all_to_all": (
        lambda x, comm, **how: all_to_all(x, comm, 1, 0, TOKENS, **how),
        lambda rank, size: (pieces(size)[rank], CHANNELS),
    ),
    "all_to_all_many": (
        lambda x, comm, **how: first_of(all_to_all_many([x, x.detach().int()], comm, 1, 0, TOKENS, **how)),
        lambda rank, size: (pieces(size)[rank], CHANNELS),
    ),
    "split": (
        lambda x, comm, **how: split_forward_gather_backward(x, comm, 0, **how),
        lambda rank, size: (TOKENS, 2),
    ),
    "gather": (
        lambda x, comm, **how: gather_forward_split_backward(x, comm, 0, pieces(comm.size), **how),
        lambda rank, size: (pieces(size)[rank], 2),
    ),
    "zigzag split": (load_balanced_split_forward_gather_backward, lambda rank, size: (TOKENS, 2)),
    "zigzag gather": (load_balanced_gather_forward_split_backward, lambda rank, size: (TOKENS // size, 2)),
    "packed split": (
        lambda x, comm, **how: packed_data_split_forward_gather_backward(x, comm, [7, 5], **how),
        lambda rank, size: (TOKENS, 2),
    ),
    "packed gather": (
        lambda x, comm, **how: packed_data_gather_forward_split_backward(
            x, sequence_rows(comm.size), comm, **how
        ),
        lambda rank, size: (int(sequence_rows(size)[rank].sum()), 2),
    ),
}


@pytest.mark.parametrize("name", OPERATIONS)
@on_ranks(1, 3)
def test_equal_to_the_operation_that_waits(world, name):
    """Values, gradients, and gradients of gradients."""
    call, shape_of = OPERATIONS[name]
    start = numbers(shape_of(world.rank, world.size), torch.float64, name, world.rank)

    def derivatives(run):
        x = start.clone().requires_grad_()
        result = run(x)
        [first] = torch.autograd.grad((result * result.detach().cos()).sin().sum(), x, create_graph=True)
        [second] = torch.autograd.grad((first * first).sum(), x)
        return result, first, second

    def later(x):
        result, work = call(x, world.comm, async_op=True)
        work.wait()
        work.wait()
        assert work.is_completed()
        work.synchronize()
        return result

    expected = derivatives(lambda x: call(x, world.comm))
    for mine, its in zip(derivatives(later), expected, strict=True):
        assert_same(mine, its)
    with torch.no_grad():
        assert_same(later(start.clone().requires_grad_()), expected[0])
    result, work = call(start, world.comm, async_op=True)
    work.wait()
    assert_same(result, expected[0]) if world.size > 1 else None
    assert not result.requires_grad


class _Seen(torch.autograd.Function):
    @staticmethod
    def forward(ctx, note, tensor):
        ctx.note = note
        return tensor.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.note()
        return None, grad


@on_ranks(2)
def test_what_was_computed_meanwhile_runs_beside_the_exchange_of_gradients(world):
    comm = world.comm
    x, other = (numbers((2, 4), torch.float64, name, world.rank).requires_grad_() for name in "xo")
    comm.barrier()
    before = num_posted(comm)
    seen = []
    result, work = all_to_all(x, comm, 1, 0, 4, async_op=True)
    meanwhile = _Seen.apply(lambda: seen.append(num_posted(comm) - before), other)
    work.wait()
    (result.sum() * meanwhile.sum()).backward()
    assert seen == [2]  # the exchange of gradients had been posted


@on_ranks(2)
def test_results_that_are_used_without_wait_have_gradients_too(world):
    """Their values are not promised, but the backward is whole, on all ranks."""
    x = numbers((2, 4), torch.float64, "x", world.rank).requires_grad_()
    result, work = all_to_all(x, world.comm, 1, 0, 4, async_op=True)
    early = 3 * result
    early.sum().backward()
    assert_same(x.grad, torch.full((2, 4), 3.0, dtype=torch.float64))
    work.wait()

    x.grad = None
    result, work = all_to_all(x, world.comm, 1, 0, 4, async_op=True)
    early = 3 * result
    work.wait()
    (early.sum() + result.sum()).backward()
    assert_same(x.grad, torch.full((2, 4), 4.0, dtype=torch.float64))


@on_ranks(2)
def test_what_saved_a_result_before_wait_is_refused_by_autograd(world):
    x = numbers((2, 4), torch.float64, "x", world.rank).requires_grad_()
    result, work = all_to_all(x, world.comm, 1, 0, 4, async_op=True)
    squared = result * result
    work.wait()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squared.sum().backward()


@on_ranks(2)
def test_errors_come_with_wait(world):
    x = torch.zeros(2 + world.rank, 4)
    with pytest.raises(PipeCommMismatch, match="so give gather_size"):
        all_to_all(x, world.comm, 1, 0, async_op=True)[1].wait()
    with pytest.raises(ValueError if world.rank == 0 else PipeCommMismatch, match="must differ"):
        all_to_all(torch.zeros(2, 4), world.comm, 1, 1 if world.rank == 0 else 0, async_op=True)[1].wait()
    result, _ = all_to_all(torch.ones(2, 4), world.comm, 1, 0, async_op=True)  # a dropped handle is legal
    world.comm.barrier()
    del result


@on_ranks(2)
def test_forward_mode(world):
    x = numbers((2, 4), torch.float64, "x", world.rank)
    with forward_ad.dual_level():
        result, work = all_to_all(forward_ad.make_dual(x, 2 * x), world.comm, 1, 0, 4, async_op=True)
        work.wait()
        primal, tangent = forward_ad.unpack_dual(result)
        assert_same(tangent, 2 * primal)
