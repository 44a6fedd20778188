"""Gradients of attention where autograd does not use all that arrived: heads that are switched off, inputs
that are frozen, ranks without heads. The exchanges of gradients are collective all the same.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from attention_cases import HEADS, SEQ, assert_close, plain_attention, way_of, whole_tensors
from ranks import on_ranks
from test_compiled_operations import compiled
from torch.utils.checkpoint import checkpoint

from pipecomm_ext import PipeCommMismatch

LENGTH = 12


def attention_without(off):
    """Attention that is zero for the heads `off`, and unknown to autograd if it gets none but these."""

    def attention(q, k, v, is_causal=False, heads=None):
        heads = range(q.size(HEADS)) if heads is None else heads
        if set(heads) <= set(off):
            return torch.zeros_like(q)
        is_on = torch.tensor([head not in off for head in heads], dtype=q.dtype)
        return plain_attention(q, k, v, is_causal) * is_on[:, None]

    return attention


def check(world, name, chunks, whole, attention, use=lambda call, *tensors: call(*tensors)):
    """Compares result and gradients with those of attention of the whole sequence."""
    # What a receive buffer may hold before it is written.
    junk = [world.comm.empty(tuple(tensor.shape), tensor.dtype).fill_(7.7) for tensor in whole]
    del junk
    way = way_of(name, world, chunks)
    (expected := attention(*whole)).sin().sum().backward()
    local = way.leaves(whole)
    result = use(lambda *tensors: way.function(*tensors, attention, is_causal=False), *local)
    assert_close(result, way.piece(expected))
    result.sin().sum().backward()
    for mine, full in zip(local, whole, strict=True):
        if full.requires_grad:
            assert_close(mine.grad, way.piece(full.grad))


@on_ranks(2)
@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("off", [[1], [0], [1, 3], [0, 2], [0, 1], [2, 3], [0, 1, 3]])
def test_heads_that_are_switched_off(world, off, chunks):
    check(world, "ulysses", chunks, whole_tensors(1, LENGTH, 4, 4), attention_without(off))


@on_ranks(4)
@pytest.mark.parametrize("off", [[1], [0, 1]])
def test_heads_that_are_switched_off_over_a_ring(world, off):
    check(world, "ring by ulysses", 2, whole_tensors(1, LENGTH, 4, 4), attention_without(off))


@on_ranks(2)
@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (3, 1), (1, 1)])
def test_inputs_that_are_frozen(world, heads, kv_heads, chunks):
    for needs in itertools.product((False, True), repeat=3):
        if any(needs):
            whole = whole_tensors(1, LENGTH, heads, kv_heads)
            for tensor, need in zip(whole, needs, strict=True):
                tensor.requires_grad_(need)
            check(world, "ulysses", chunks, whole, plain_attention)


def with_weight(weight, used):
    """Attention that multiplies the heads `used` by a parameter."""

    def attention(q, k, v, is_causal=False, heads=None):
        heads = range(q.size(HEADS)) if heads is None else heads
        result = plain_attention(q, k, v, is_causal)
        is_used = torch.tensor([head in used for head in heads], dtype=q.dtype)
        return result * (1 + (weight - 1) * is_used)[:, None] if is_used.any() else result

    return attention


@on_ranks(2, 4)
@pytest.mark.parametrize("name", ["ulysses", "ring by ulysses"])
@pytest.mark.parametrize(
    ("heads", "chunks", "used"),
    [(1, 1, [0]), (2, 1, [0, 1]), (4, 2, [0, 2]), (4, 2, [1, 3]), (8, 4, [2, 6]), (8, 4, [3])],
)
def test_a_parameter_of_attention(world, name, heads, chunks, used):
    """Beside inputs that need no gradient it would have one on some ranks, or in some chunks, only: all ranks
    refuse it, and say what to do.
    """
    way, weight = way_of(name, world, chunks), torch.nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
    attention = with_weight(weight, used)
    whole = [tensor.detach() for tensor in whole_tensors(1, LENGTH, heads, heads)]
    local = way.leaves(whole)
    with pytest.raises((ValueError, PipeCommMismatch), match=r"call q\.requires_grad_\(\) on all ranks"):
        way.function(*local, attention, is_causal=False)
    with torch.no_grad():
        assert_close(way.function(*local, attention, is_causal=False), way.piece(attention(*whole)))
    local[0].requires_grad_()
    result = way.function(*local, attention, is_causal=False)
    result.sin().sum().backward()
    mine = torch.zeros(1, dtype=weight.dtype) if weight.grad is None else weight.grad.reshape(1)
    of_all = torch.empty(world.size, dtype=weight.dtype)
    world.comm.all_gather(of_all, mine)
    weight.grad = None
    attention(*whole).sin().sum().backward()
    assert_close(of_all.sum(), weight.grad)


@on_ranks(2)
@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_result_has_a_backward_only_if_an_input_has(world, is_compiled):
    """So layers that are frozen cost no backward."""
    way, weight = way_of("ulysses", world, 1), torch.nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
    attention = with_weight(weight, [0, 1])
    local = way.leaves([tensor.detach() for tensor in whole_tensors(1, LENGTH, 2, 2)])
    if is_compiled:
        torch._dynamo.reset()
    function = torch.compile(way.function, backend="aot_eager") if is_compiled else way.function
    assert not function(*local, plain_attention, is_causal=False).requires_grad
    with pytest.raises(ValueError, match=r"call q\.requires_grad_\(\) on all ranks"):
        function(*local, attention, is_causal=False)


@on_ranks(2)
@pytest.mark.parametrize("off", [[0, 1], [1]])
def test_a_checkpoint_recomputes_at_the_same_point(world, off):
    def recomputed(call, *tensors):
        return checkpoint(call, *tensors, use_reentrant=False)

    check(world, "ulysses", 2, whole_tensors(1, LENGTH, 4, 4), attention_without(off), recomputed)


@on_ranks(2)
def test_gradients_of_one_input_and_twice(world):
    """torch.autograd.grad of a part, and a second backward through a graph that is kept."""
    whole = whole_tensors(1, LENGTH, 4, 4)
    way, attention = way_of("ulysses", world, 2), attention_without([0])
    local = way.leaves(whole)
    expected = torch.autograd.grad(attention(*whole).sin().sum(), whole)
    result = way.function(*local, attention, is_causal=False).sin().sum()
    for idx in (0, 1, 2, 0):
        [grad] = torch.autograd.grad(result, local[idx], retain_graph=True)
        assert_close(grad, way.piece(expected[idx]))


@on_ranks(2, 3)
@pytest.mark.parametrize("name", ["ulysses", "zigzag"])
@pytest.mark.parametrize("off", [[], [0]])
@pytest.mark.parametrize("needed", [(0,), (1,), (0, 1, 2)])
@pytest.mark.parametrize("is_linear", [True, False])
def test_double_backward_with_fewer_heads_than_ranks(world, name, off, needed, is_linear):
    """If the loss is linear in the result, only attention has a second derivative."""
    tokens = 2 * world.size
    whole = whole_tensors(1, tokens, 2 if off else 1, 2 if off else 1)
    for idx, tensor in enumerate(whole):
        tensor.requires_grad_(idx in needed)
    way, attention = way_of(name, world, 1), attention_without(off)

    def second(call, tensors):
        tensors = [tensors[idx] for idx in needed]
        result = call()
        loss = result.sum() if is_linear else (result**2).sum()
        first = torch.autograd.grad(loss, tensors, create_graph=True)
        return torch.autograd.grad(sum((grad**2).sum() for grad in first), tensors)

    local = way.leaves(whole)
    expected = second(lambda: attention(*whole), whole)
    for mine, full in zip(
        second(lambda: way.function(*local, attention, is_causal=False), local), expected, strict=True
    ):
        assert_close(mine, way.piece(full, dim=SEQ))


@on_ranks(2)
@pytest.mark.parametrize(("heads", "off"), [(1, []), (4, [0]), (4, [0, 1])])
def test_in_a_compiled_graph(world, heads, off):
    way, attention = way_of("ulysses", world, 1), attention_without(off)
    graph = compiled(way.function, dynamic=False)  # symbolic numbers of heads would take half a minute

    def use(call, *tensors):
        return graph(*tensors, attention, is_causal=False)

    check(world, "ulysses", 1, whole_tensors(1, LENGTH, heads, heads), attention, use)
