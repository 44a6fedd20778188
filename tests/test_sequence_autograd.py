"""Gradients of the sequence-parallel operations: gradcheck, double backward, and what wraps autograd."""

from __future__ import annotations

import pytest
import torch
from ranks import on_ranks
from sequence_cases import assert_same, cut, numbers, remainder_first
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

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

# Every operation as (call(x, comm), local shape of x on rank r of P), for 12 tokens of 3 channels.
TOKENS, CHANNELS = 12, 5
SEQUENCES = [7, 5]


def pieces(size):
    return remainder_first(TOKENS, size)


def sequence_rows(size):
    return cal_split_sizes_multi(SEQUENCES, size)


OPERATIONS = {
    "all_to_all": (
        lambda x, comm: all_to_all(x, comm, 1, 0, TOKENS),
        lambda rank, size: (pieces(size)[rank], CHANNELS),
    ),
    "all_to_all_many": (
        lambda x, comm: all_to_all_many([x, 2 * x], comm, 1, 0, TOKENS)[1],
        lambda rank, size: (pieces(size)[rank], CHANNELS),
    ),
    "split": (lambda x, comm: split_forward_gather_backward(x, comm, 0), lambda rank, size: (TOKENS, 2)),
    "split unscaled": (
        lambda x, comm: split_forward_gather_backward(x, comm, 0, grad_scale=None),
        lambda rank, size: (TOKENS, 2),
    ),
    "gather": (
        lambda x, comm: gather_forward_split_backward(x, comm, 0, pieces(comm.size)),
        lambda rank, size: (pieces(size)[rank], 2),
    ),
    "gather down": (
        lambda x, comm: gather_forward_split_backward(x, comm, 0, pieces(comm.size), "down"),
        lambda rank, size: (pieces(size)[rank], 2),
    ),
    "zigzag split": (load_balanced_split_forward_gather_backward, lambda rank, size: (TOKENS, 2)),
    "zigzag gather": (load_balanced_gather_forward_split_backward, lambda rank, size: (TOKENS // size, 2)),
    "packed split": (
        lambda x, comm: packed_data_split_forward_gather_backward(x, comm, SEQUENCES),
        lambda rank, size: (TOKENS, 2),
    ),
    "packed gather": (
        lambda x, comm: packed_data_gather_forward_split_backward(x, sequence_rows(comm.size), comm),
        lambda rank, size: (int(sequence_rows(size)[rank].sum()), 2),
    ),
}


def local_input(world, name):
    shape = OPERATIONS[name][1](world.rank, world.size)
    return numbers(shape, torch.float64, name, world.rank).requires_grad_()


def check_gradients_of_one_rank(world, name):
    """On one rank the operations are the identity, whose numerical derivatives torch knows."""
    x = local_input(world, name)
    call = OPERATIONS[name][0]
    assert torch.autograd.gradcheck(lambda x: call(x, world.comm), [x])
    assert torch.autograd.gradgradcheck(lambda x: call(x, world.comm), [x])


@pytest.mark.parametrize("name", OPERATIONS)
def test_gradcheck(ranks, name):
    ranks.run(1, check_gradients_of_one_rank, name)


def check_numerical_gradient(world):
    """d(sum of all ranks' losses) / dx of the all-to-all, by central differences in lockstep."""
    name = "all_to_all"
    x = local_input(world, name)
    weight = numbers(
        (TOKENS, remainder_first(CHANNELS, world.size)[world.rank]), torch.float64, "w", world.rank
    )

    def total_loss(x):
        loss = (all_to_all(x, world.comm, 1, 0, TOKENS).sin() * weight).sum()
        return gather_forward_split_backward(loss.detach().reshape(1), world.comm, 0).sum()

    (all_to_all(x, world.comm, 1, 0, TOKENS).sin() * weight).sum().backward()
    step = 1e-6
    for rank in range(world.size):
        for token, channel in [(0, 0), (1, CHANNELS - 1), (pieces(world.size)[rank] - 1, 2)]:
            losses = []
            for sign in (1, -1):
                moved = x.detach().clone()
                if world.rank == rank:
                    moved[token, channel] += sign * step
                losses.append(total_loss(moved))
            if world.rank == rank:
                numerical = (losses[0] - losses[1]) / (2 * step)
                torch.testing.assert_close(x.grad[token, channel], numerical, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("size", [2, 3])
def test_gradients_over_ranks_are_numerical_derivatives(ranks, size):
    ranks.run(size, check_numerical_gradient)


def check_double_backward(world, name):
    """Backward is linear in the gradient, and differentiating it gives the operation itself again."""
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


@pytest.mark.parametrize("name", OPERATIONS)
def test_double_backward(ranks, name):
    for size in (1, 2, 3):
        ranks.run(size, check_double_backward, name)


@on_ranks(2)
def test_double_backward_equals_the_model(world):
    """A gradient penalty through the all-to-all, against the same in one process."""
    tokens = numbers((TOKENS, CHANNELS), torch.float64, "whole")
    whole = tokens.clone().requires_grad_()
    [first] = torch.autograd.grad(whole.pow(3).sum(), whole, create_graph=True)
    first.pow(2).sum().backward()
    x = cut(tokens, 0, pieces(2), world.rank).clone().requires_grad_()
    [mine] = torch.autograd.grad(all_to_all(x, world.comm, 1, 0, TOKENS).pow(3).sum(), x, create_graph=True)
    mine.pow(2).sum().backward()
    torch.testing.assert_close(x.grad, cut(whole.grad, 0, pieces(2), world.rank))


# ---- the order of backwards ---


@on_ranks(2, 3)
@pytest.mark.parametrize("transport", ["c10d", "shm"])
@pytest.mark.parametrize("name", ["all_to_all", "all_to_all_many"])
def test_backwards_in_another_order_are_told(world, transport, name):
    """Gradients of one shape would change places."""
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
@pytest.mark.parametrize("transport", ["c10d", "shm"])
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


# ---- what wraps autograd ----------------------------------------------------------------------------------


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


def block(x, comm):
    hidden = all_to_all(x.sin(), comm, 1, 0, TOKENS)
    hidden = all_to_all(hidden.cos(), comm, 0, 1, scatter_sizes=pieces(comm.size), gather_size=CHANNELS)
    return gather_forward_split_backward(hidden, comm, 0, pieces(comm.size))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(ranks, use_reentrant):
    ranks.run(2, check_checkpointing, use_reentrant)


def check_checkpointing(world, use_reentrant):
    grads = []
    for checkpointed in (False, True):
        x = local_input(world, "all_to_all")
        result = (
            checkpoint(block, x, world.comm, use_reentrant=use_reentrant)
            if checkpointed
            else block(x, world.comm)
        )
        result.pow(2).sum().backward()
        grads.append(x.grad)
    assert_same(*grads)


@on_ranks(2)
def test_hooks_and_accumulation(world):
    """Gradients accumulate over calls; a tensor hook sees the exchanged gradient."""
    seen = []
    x = local_input(world, "split")
    for _ in range(3):
        piece = split_forward_gather_backward(x, world.comm, 0)
        piece.register_hook(seen.append)
        piece.sum().backward()
    assert len(seen) == 3
    assert torch.equal(x.grad, torch.full_like(x, 1.5))


@on_ranks(2)
def test_expanded_gradients_are_read_by_their_strides(world):
    x = local_input(world, "gather")
    gather_forward_split_backward(x, world.comm, 0, pieces(2)).sum().backward()  # stride 0 everywhere
    assert torch.equal(x.grad, torch.full_like(x, 2.0))
    x = local_input(world, "all_to_all")
    all_to_all(x, world.comm, 1, 0, TOKENS).sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))


@on_ranks(2)
def test_results_may_be_changed_in_place(world):
    x = local_input(world, "split")
    piece = split_forward_gather_backward(x, world.comm, 0)
    piece.mul_(3)
    piece.sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 1.5))
