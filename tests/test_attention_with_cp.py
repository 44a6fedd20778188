"""attention_with_cp over ring x Ulysses groups against attention of the whole: values, gradients, errors."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from sequence_cases import cut, numbers, remainder_first
from test_zigzag_attention import HEADS, SEQ, plain_attention, weights_of, whole_tensors, zigzag

from pipecomm_ext import (
    PipeCommMismatch,
    attention_with_cp,
    parallel_state,
    split_forward_gather_backward_with_cp,
    ulysses_attention,
    zigzag_attention,
)
from pipecomm_ext.parallel_state import ParallelState


def state_of(num_ulysses: int) -> ParallelState:
    """Ulysses groups of consecutive ranks, ring groups across them."""
    rank, size = dist.get_rank(), dist.get_world_size()
    ulysses = [list(range(first, first + num_ulysses)) for first in range(0, size, num_ulysses)]
    rings = [list(range(first, size, num_ulysses)) for first in range(num_ulysses)]
    groups = [[dist.new_group(ranks) for ranks in some] for some in (ulysses, rings)]
    return ParallelState(groups[0][rank // num_ulysses], groups[1][rank % num_ulysses])


def my_piece(tensor, state):
    """Of my two zigzag slices, my Ulysses piece."""
    slices = zigzag(tensor, state.get_ring_rank(), state.get_ring_group_size())
    sizes = remainder_first(slices.size(SEQ), state.get_ulysses_group_size())
    return cut(slices, SEQ, sizes, state.get_ulysses_rank())


def check_equal(state, length, heads, kv_heads, is_causal, chunks="auto", attention=None):
    whole = whole_tensors(2, length, heads, kv_heads)
    expected = plain_attention(*whole, is_causal)
    (expected * weights_of(expected)).sum().backward()
    local = [my_piece(tensor.detach(), state).requires_grad_() for tensor in whole]
    is_even = length % (2 * state.get_ring_group_size() * state.get_ulysses_group_size()) == 0
    result = attention_with_cp(
        *local,
        attention,
        is_causal=is_causal,
        chunks=chunks,
        gather_size=None if is_even else length,
        parallel_state=state,
    )
    torch.testing.assert_close(result, my_piece(expected, state), rtol=1e-10, atol=1e-10)
    (result * my_piece(weights_of(expected), state)).sum().backward()
    for leaf, full in zip(local, whole, strict=True):
        torch.testing.assert_close(leaf.grad, my_piece(full.grad, state), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 2), (5, 5), (7, 3), (1, 1)])
@on_ranks(4)
def test_ring_by_ulysses(world, heads, kv_heads, is_causal):
    """Two by two: chunks that some ranks have no heads of, slices of unequal lengths or of none."""
    state = state_of(2)
    for length, chunks in ((16, 1), (16, 3), (13, 2), (3, 3)):
        check_equal(state, length, heads, kv_heads, is_causal, chunks)
    check_equal(state, 10, heads, kv_heads, is_causal, "auto", plain_attention)


@on_ranks(3, 4)
def test_one_group_or_none(world):
    for state in (state_of(1), state_of(world.size), ParallelState()):
        for is_causal in (True, False):
            check_equal(state, 24, 8, 2, is_causal, 2)
            check_equal(state, 13, 5, 5, is_causal, 1)


@on_ranks(4)
def test_default_groups_and_the_split_over_both(world):
    state = state_of(2)
    parallel_state.initialize_sequence_parallel(state.get_ulysses_group(), state.get_ring_group())
    try:
        whole = whole_tensors(1, 16, 4, 2)
        pieces = [split_forward_gather_backward_with_cp(tensor, SEQ) for tensor in whole]
        result = attention_with_cp(*pieces, is_causal=True)
        expected = split_forward_gather_backward_with_cp(plain_attention(*whole, True), SEQ)
        torch.testing.assert_close(result, expected)
    finally:
        parallel_state.destroy()


@on_ranks(4)
def test_ulysses_attention_of_zigzag_attention(world):
    """The two levels put together by hand."""
    state, length = state_of(2), 20
    whole = whole_tensors(1, length, 4, 2)
    inner = functools.partial(
        zigzag_attention, process_group=state.get_ring_group(), is_causal=True, gather_size=length
    )
    pieces = [my_piece(tensor, state) for tensor in whole]
    result = ulysses_attention(*pieces, inner, state.get_ulysses_group(), chunks=2, gather_size=length // 2)
    torch.testing.assert_close(result, my_piece(plain_attention(*whole, True), state))


@on_ranks(4)
def test_other_dims(world):
    state = state_of(2)
    whole = whole_tensors(1, 16, 4, 2)
    pieces = [my_piece(tensor, state)[0].transpose(0, 1) for tensor in whole]
    result = attention_with_cp(*pieces, is_causal=True, heads_dim=0, seq_dim=-2, parallel_state=state)
    expected = my_piece(plain_attention(*whole, True), state)[0].transpose(0, 1)
    torch.testing.assert_close(result, expected)


@on_ranks(4)
def test_second_derivatives(world):
    """create_graph sends gradients through the graph; then backward through them."""
    state, length = state_of(2), 9

    def second(tensors, call):
        first = torch.autograd.grad(call(*tensors).sin().sum(), tensors, create_graph=True)
        return torch.autograd.grad(sum((grad * grad).sum() for grad in first), tensors)

    call = functools.partial(
        attention_with_cp,
        attention=plain_attention,
        is_causal=True,
        chunks=2,
        gather_size=length,
        parallel_state=state,
    )
    whole = whole_tensors(1, length, 6, 2)
    expected = second(whole, functools.partial(plain_attention, is_causal=True))
    got = second([my_piece(tensor.detach(), state).requires_grad_() for tensor in whole], call)
    for mine, full in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, my_piece(full, state), rtol=1e-9, atol=1e-9)


@pytest.mark.slow
@on_ranks(4)
def test_in_one_graph_for_all_lengths(world):
    state, graphs = state_of(2), []

    def function(x, length):
        q, k, v = x.split([5, 3, 3], HEADS)
        return attention_with_cp(q.sin(), k, v, is_causal=True, gather_size=length, parallel_state=state)

    def piece(length):
        return my_piece(numbers((2, length, 11, 16), torch.float64, length), state).requires_grad_()

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend=count, dynamic=True)
    for length in (81, 82, 87):  # no other dims: equal ones share a symbol
        x = piece(length)
        results = compiled(x, length), function(x, length)
        torch.testing.assert_close(*results)
        grads = [torch.autograd.grad(result.cos().sum(), x)[0] for result in results]
        torch.testing.assert_close(*grads)
    assert len(graphs) == 1


# ---- errors -----------------------------------------------------------------------------------------------


WRONG = {
    "mask": (
        lambda q, k, v: ((q, k, v), {"attn_mask": torch.ones(16, 16)}),
        ValueError,
        "attn_mask may depend",
    ),
    "heads": (lambda q, k, v: ((q[:, :, :1], k, v), {}), ValueError, "they must have 1 to 1"),
    "gather": (lambda q, k, v: ((q, k, v), {"gather_size": 40}), ValueError, "gather_size"),
    "no tensor": (lambda q, k, v: ((None, k, v), {}), TypeError, "q must be"),
    "chunks": (lambda q, k, v: ((q, k, v), {"chunks": 0}), ValueError, "chunks must be positive"),
    "state": (lambda q, k, v: ((q, k, v), {"is_causal": 1}), TypeError, "is_causal must be a bool"),
}


@pytest.mark.parametrize("num_heads", [4, 1])
@pytest.mark.parametrize("case", WRONG)
@on_ranks(4)
def test_wrong_arguments_of_one_rank(world, case, num_heads):
    """All ranks of both groups hear of it, and the next call works."""
    if case == "heads":
        num_heads = 4
    state = state_of(2)
    change, kind, text = WRONG[case]
    heads = (num_heads, min(num_heads, 2), min(num_heads, 2))
    q, k, v = (numbers((1, 4, count, 4), torch.float64, "x", world.rank) for count in heads)
    for wrong in range(4):
        changed, keywords = change(q, k, v) if world.rank == wrong else ((q, k, v), {})
        keywords = {"is_causal": True, "chunks": 2, "parallel_state": state, **keywords}
        with pytest.raises(kind if world.rank == wrong else PipeCommMismatch, match=text):
            attention_with_cp(*changed, **keywords)
        check_equal(state, 16, 4, 2, True, 2)


@pytest.mark.parametrize("failing_call", [0, 1, 3])
@on_ranks(4)
def test_attention_that_raises_on_one_rank(world, failing_call):
    """The others do not wait for it: its Ulysses group hears of it, and a ring that has chunks to come."""
    state, calls = state_of(2), []

    def attention(q, k, v, is_causal):
        calls.append(0)
        if world.rank == 1 and len(calls) == failing_call + 1:
            raise RuntimeError("out of luck")
        return q.clone()

    q, k, v = (numbers((1, 4, 8, 4), torch.float64, "x", world.rank) for _ in range(3))
    with pytest.raises(RuntimeError if world.rank == 1 else PipeCommMismatch, match="out of luck"):
        attention_with_cp(q, k, v, attention, is_causal=True, chunks=3, parallel_state=state)
    check_equal(state, 16, 4, 2, True, 2)


@on_ranks(4)
def test_attention_that_raises_with_the_last_keys(world):
    """Nobody waits then; its Ulysses group hears of it, and the next call works on all."""
    state = state_of(2)

    def attention(q, k, v, is_causal):
        if world.rank == 1:
            raise RuntimeError("out of luck")
        return q.clone()

    q, k, v = (numbers((1, 4, 8, 4), torch.float64, "x", world.rank) for _ in range(3))

    def call():
        attention_with_cp(q, k, v, attention, is_causal=True, chunks=1, parallel_state=state)

    if world.rank in (0, 1):
        with pytest.raises((RuntimeError, PipeCommMismatch), match="out of luck"):
            call()
    else:
        call()
    check_equal(state, 16, 4, 2, True, 2)


@on_ranks(4)
def test_other_lengths_on_another_rank_of_the_ring(world):
    state = state_of(2)
    q = numbers((1, 4 if world.rank < 2 else 6, 4, 4), torch.float64, "q")
    with pytest.raises(PipeCommMismatch, match="so give gather_size"):
        attention_with_cp(q, q, q, is_causal=True, chunks=2, parallel_state=state)
    check_equal(state, 16, 4, 2, True, 2)


@on_ranks(4)
def test_other_numbers_of_chunks_on_another_rank_of_the_ring(world):
    state = state_of(2)
    q = numbers((1, 4, 8, 4), torch.float64, "q")
    with pytest.raises(PipeCommMismatch):
        attention_with_cp(q, q, q, is_causal=True, chunks=2 + world.rank // 2, parallel_state=state)
    check_equal(state, 16, 4, 2, True, 2)


@on_ranks(1)
def test_without_a_parallel_state(world):
    q = torch.ones(1, 2, 1, 1)
    with pytest.raises(RuntimeError, match="there is no parallel state"):
        attention_with_cp(q, q, q, is_causal=True)
