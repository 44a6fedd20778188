"""Gradients of the sequence-parallel operations: double backward, autograd wrappers, asynchronous calls."""

from __future__ import annotations

import time

import pytest
import torch
from ranks import on_ranks
from sequence_cases import Seen, assert_same, num_posted, numbers, remainder_first
from torch.autograd import forward_ad

from pipecomm_ext import (
    PipeCommMismatch,
    all_to_all,
    all_to_all_many,
    cal_split_sizes_multi,
    gather_forward_split_backward,
    load_balanced_gather_forward_split_backward,
    load_balanced_split_forward_gather_backward,
    packed_data_gather_forward_split_backward,
    packed_data_split_forward_gather_backward,
    split_forward_gather_backward,
)

# Every operation as (call(x, comm, async_op=False), local shape of x on rank r of P).
TOKENS, CHANNELS = 12, 5
SEQUENCES = [7, 5]


def pieces(size):
    return remainder_first(TOKENS, size)


def sequence_rows(size):
    return cal_split_sizes_multi(SEQUENCES, size)


def second_of(result):
    """The second tensor of the result of `all_to_all_many`."""
    return (result[0][1], result[1]) if isinstance(result, tuple) else result[1]


def my_tokens(*others):
    return lambda rank, size: (pieces(size)[rank], *others)


def all_tokens(rank, size):
    return TOKENS, 2


OPERATIONS = {
    "all_to_all": (
        lambda x, comm, **how: all_to_all(x, comm, 1, 0, TOKENS, **how),
        my_tokens(CHANNELS),
    ),
    "all_to_all_many": (
        lambda x, comm, **how: second_of(all_to_all_many([x, 2 * x], comm, 1, 0, TOKENS, **how)),
        my_tokens(CHANNELS),
    ),
    "split": (lambda x, comm, **how: split_forward_gather_backward(x, comm, 0, **how), all_tokens),
    "split unscaled": (
        lambda x, comm, **how: split_forward_gather_backward(x, comm, 0, grad_scale=None, **how),
        all_tokens,
    ),
    "gather": (
        lambda x, comm, **how: gather_forward_split_backward(x, comm, 0, pieces(comm.size), **how),
        my_tokens(2),
    ),
    "gather down": (
        lambda x, comm, **how: gather_forward_split_backward(x, comm, 0, pieces(comm.size), "down", **how),
        my_tokens(2),
    ),
    "zigzag split": (load_balanced_split_forward_gather_backward, all_tokens),
    "zigzag gather": (load_balanced_gather_forward_split_backward, lambda rank, size: (TOKENS // size, 2)),
    "packed split": (
        lambda x, comm, **how: packed_data_split_forward_gather_backward(x, comm, SEQUENCES, **how),
        all_tokens,
    ),
    "packed gather": (
        lambda x, comm, **how: packed_data_gather_forward_split_backward(
            x, sequence_rows(comm.size), comm, **how
        ),
        lambda rank, size: (int(sequence_rows(size)[rank].sum()), 2),
    ),
}


def local_input(world, name):
    shape = OPERATIONS[name][1](world.rank, world.size)
    return numbers(shape, torch.float64, name, world.rank).requires_grad_()


@pytest.mark.parametrize("name", OPERATIONS)
@on_ranks(1)
def test_gradcheck(world, name):
    """On one rank the operations are the identity, whose numerical derivatives torch knows."""
    x = local_input(world, name)
    call = OPERATIONS[name][0]
    assert torch.autograd.gradcheck(lambda x: call(x, world.comm), [x])
    assert torch.autograd.gradgradcheck(lambda x: call(x, world.comm), [x])


@pytest.mark.parametrize("name", OPERATIONS)
@on_ranks(1, 2, 3)
def test_double_backward(world, name):
    """Backward is linear in the gradient, and differentiating it yields the operation itself again."""
    call = OPERATIONS[name][0]
    x = local_input(world, name)
    y = call(x, world.comm)
    grad = numbers(tuple(y.shape), torch.float64, "grad", world.rank).requires_grad_()
    [x_grad] = torch.autograd.grad(y, x, grad, create_graph=True)
    assert x_grad.requires_grad and x_grad.shape == x.shape
    direction = numbers(tuple(x.shape), torch.float64, "direction", name, world.rank)
    [twice] = torch.autograd.grad(x_grad, grad, direction, create_graph=True)
    assert_same(twice, call(direction, world.comm))

    # Three levels deep through a non-linear function: all of them are the same pair of steps.
    cube = call(x, world.comm).pow(3).sum()
    [first] = torch.autograd.grad(cube, x, create_graph=True)
    [second] = torch.autograd.grad(first.sum(), x, create_graph=True)
    [third] = torch.autograd.grad(second.sum(), x)
    assert third.shape == x.shape and torch.isfinite(third).all()


# ---- the order of backwards ---


@on_ranks(2, 3)
@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.parametrize("name", ["all_to_all", "all_to_all_many"])
def test_backwards_in_another_order_are_told(world, transport, name):
    """Gradients of one shape would be swapped."""
    comm, call = world.shared_comm(transport=transport), OPERATIONS[name][0]
    x, y = local_input(world, name), local_input(world, name)
    for is_refused in (True, False):
        losses = [call(x, comm).sum(), (10 * call(y, comm)).sum()]
        if is_refused and world.rank == 0:
            losses.reverse()
        for loss in losses:
            if is_refused:
                with pytest.raises(PipeCommMismatch, match="and backwards run in the same order"):
                    loss.backward()
                assert x.grad is None and y.grad is None
            else:
                loss.backward()
    assert_same(10 * x.grad, y.grad)


@on_ranks(2)
@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_refused_and_interleaved_calls_do_not_disturb_the_numbers(world, transport):
    """A collective that one rank refuses, messages, and forwards that only one rank records."""
    comm, peer = world.shared_comm(transport=transport), 1 - world.rank
    x = numbers((4, 2), torch.float64, world.rank).requires_grad_()
    with pytest.raises((ValueError, IndexError, PipeCommMismatch)):
        all_to_all(x, comm, 1, 0 if world.rank else 7)
    comm.send(torch.ones(1), peer) if world.rank else comm.recv(torch.ones(1), peer)
    with torch.set_grad_enabled(world.rank == 0):
        all_to_all(x, comm, 1, 0)
    y = all_to_all(x, comm, 1, 0)
    comm.barrier()
    [grad] = torch.autograd.grad(y, x, torch.ones_like(y), create_graph=True)
    assert_same(grad, torch.ones_like(x))


@on_ranks(2)
def test_a_split_of_one_rank_does_not_disturb_the_others(world):
    """It is local, which is why the order of its backwards is not checked."""
    x = torch.ones(4, requires_grad=True)
    if world.rank == 0:
        split_forward_gather_backward(x, world.comm, 0)
    split_forward_gather_backward(x, world.comm, 0).sum().backward()
    assert x.grad.tolist() == [0.5] * 4


# ---- wrappers of autograd ---------------------------------------------------------------------------------


@on_ranks(2, 3)
@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_forward_mode(world, name, requires_grad):
    """Tangents move as values do; a rank without one has zeros."""
    call = OPERATIONS[name][0]
    x = local_input(world, name).detach().requires_grad_(requires_grad)
    direction = numbers(tuple(x.shape), torch.float64, "direction", name, world.rank)
    has_tangent = world.rank != 1
    with torch.no_grad():
        expected = call(direction if has_tangent else torch.zeros_like(direction), world.comm)
        value = call(x, world.comm)
    with forward_ad.dual_level():
        y = call(forward_ad.make_dual(x, direction) if has_tangent else x, world.comm)
        primal, tangent = forward_ad.unpack_dual(y * y)
        assert y.requires_grad == requires_grad
    torch.testing.assert_close(primal, value * value)
    torch.testing.assert_close(tangent, 2 * value * expected)


@on_ranks(2)
def test_forward_mode_beside_integers(world):
    x, ids = torch.ones(2, 2), torch.arange(4).reshape(2, 2)
    with forward_ad.dual_level():
        y, moved = all_to_all_many([forward_ad.make_dual(x, 3 * x), ids], world.comm, 1, 0)
        assert torch.equal(forward_ad.unpack_dual(y).tangent, torch.full((4, 1), 3.0))
    assert torch.equal(moved, all_to_all(ids, world.comm, 1, 0))


@on_ranks(2)
def test_no_grad_and_inference_mode(world):
    for name, (call, _) in OPERATIONS.items():
        x = local_input(world, name)
        expected = call(x, world.comm).detach()
        with torch.no_grad():
            result = call(x, world.comm)
        assert not result.requires_grad
        assert_same(result, expected)
        with torch.inference_mode():
            assert_same(call(x, world.comm), expected)
            result = call(x * 1, world.comm)
            assert result.is_inference()
        assert_same(result.clone(), expected)


@on_ranks(2)
def test_autocast(world):
    """Nothing is cast: the dtype of the input stays, also between layers that autocast does cast."""
    x = numbers((6, 4), torch.float32, world.rank).requires_grad_()
    layer = torch.nn.Linear(4, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert all_to_all(x, world.comm, 1, 0).dtype == torch.float32
        hidden = layer(x)
        result = gather_forward_split_backward(all_to_all(hidden, world.comm, 1, 0), world.comm, 1)
        assert result.dtype == torch.bfloat16
        result.sum().backward()
    assert x.grad.dtype == torch.float32 and x.grad.isfinite().all()


@on_ranks(2)
@pytest.mark.parametrize("operation", [split_forward_gather_backward, gather_forward_split_backward])
def test_gradients_of_float8_are_not_scaled(world, operation):
    x = torch.ones(4).to(torch.float8_e4m3fn).requires_grad_()
    with pytest.raises(ValueError, match="cannot be scaled: pass grad_scale=None"):
        operation(x, world.comm, 0)
    y = operation(x, world.comm, 0, grad_scale=None)
    y.backward(torch.ones_like(y))
    assert x.grad.float().tolist() == [1.0] * 4
    with torch.no_grad():
        assert operation(x, world.comm, 0).dtype == x.dtype


@on_ranks(2)
def test_hooks_and_accumulation(world):
    """Gradients accumulate over calls; a tensor hook sees the gradient; results may be changed in place."""
    seen = []
    x = local_input(world, "split")
    for factor in (1, 2, 3):
        piece = split_forward_gather_backward(x, world.comm, 0)
        piece.mul_(factor)
        piece.register_hook(seen.append)
        piece.sum().backward()
    assert len(seen) == 3
    assert torch.equal(x.grad, torch.full_like(x, 3.0))


# ---- async_op=True: results in flight, and gradients that overlap with computation ------------------------


@pytest.mark.parametrize("name", OPERATIONS)
@on_ranks(1, 3)
def test_equal_to_the_operation_that_waits(world, name):
    """Values, gradients, and gradients of gradients."""
    call, start = OPERATIONS[name][0], local_input(world, name).detach()

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


@on_ranks(2)
def test_what_was_computed_meanwhile_runs_beside_the_exchange_of_gradients(world):
    comm = world.comm
    x, other = (numbers((2, 4), torch.float64, name, world.rank).requires_grad_() for name in "xo")
    comm.barrier()
    before = num_posted(comm)
    seen = []
    result, work = all_to_all(x, comm, 1, 0, 4, async_op=True)
    meanwhile = Seen.apply(lambda what: seen.append((what, num_posted(comm) - before)), other)
    work.wait()
    (result.sum() * meanwhile.sum()).backward()
    assert seen == [("forward", 1), ("backward", 2)]  # the exchange of gradients had been posted


@on_ranks(2)
def test_results_that_are_used_without_wait_have_gradients_too(world):
    """Their values are undefined, but the backward is complete, on all ranks."""
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


@pytest.mark.parametrize("needs_grad", [False, True])
@on_ranks(2)
def test_an_input_that_is_written_before_wait_is_refused(world, needs_grad):
    x = numbers((2, 4), torch.float64, "x", world.rank).requires_grad_(needs_grad)
    _, work = all_to_all(x, world.comm, 1, 0, 4, async_op=True)
    with torch.no_grad():
        x.add_(1)
    for ask in (work.wait, work.is_completed, work.synchronize, work.wait):  # no later call takes it back
        with pytest.raises(RuntimeError, match="was written between the call and wait"):
            ask()
    _, work = all_to_all(x, world.comm, 1, 0, 4, async_op=True)
    work.wait()
    _, other = all_to_all(x, world.comm, 1, 0, 4, async_op=True)
    while not other.is_completed():
        time.sleep(0.001)
    with torch.no_grad():
        x.add_(1)  # it may be written by now
    work.wait()
    other.wait()


@on_ranks(2)
def test_a_buffer_that_is_filled_piece_by_piece(world):
    """A piece is written while another one is in flight: torch counts the writes of the buffer only."""
    buffer, in_flight = torch.zeros(4, 4, 2), []
    for idx, piece in enumerate(buffer):
        piece = piece.detach() if idx % 2 else piece
        piece.fill_(2 * idx + world.rank)
        in_flight.append(all_to_all(piece, world.comm, 1, 0, async_op=True))
    for idx, (result, work) in enumerate(in_flight):
        work.wait()
        assert result.flatten().tolist() == [2 * idx] * 4 + [2 * idx + 1] * 4
    whole = torch.zeros(4, 6)
    _, work = all_to_all(whole.view(2, 12), world.comm, 1, 0, async_op=True)  # a view of all of it is judged
    whole.add_(1)
    with pytest.raises(RuntimeError, match="was written between the call and wait"):
        work.wait()


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
def test_forward_mode_of_an_asynchronous_call(world):
    x = numbers((2, 4), torch.float64, "x", world.rank)
    with forward_ad.dual_level():
        result, work = all_to_all(forward_ad.make_dual(x, 2 * x), world.comm, 1, 0, 4, async_op=True)
        work.wait()
        primal, tangent = forward_ad.unpack_dual(result)
        assert_same(tangent, 2 * primal)
