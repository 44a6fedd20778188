"""attention_with_cp over ring x Ulysses groups: values, groups, compiled graphs.

Tests that it shares with other attentions are in test_sequence_attention.py.
"""

from __future__ import annotations

import functools

import pytest
import torch
from attention_cases import (
    HEADS,
    SEQ,
    assert_close,
    cp_way,
    my_piece,
    plain_attention,
    state_of,
    whole_tensors,
)
from ranks import on_ranks
from sequence_cases import numbers

from pipecomm_ext import (
    PipeCommMismatch,
    attention_with_cp,
    parallel_state,
    split_forward_gather_backward_with_cp,
    ulysses_attention,
    zigzag_attention,
)
from pipecomm_ext.parallel_state import ParallelState


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 2), (5, 5), (7, 3), (1, 1)])
@on_ranks(4)
def test_ring_by_ulysses(world, heads, kv_heads, is_causal):
    """Two by two: chunks that some ranks have no heads of, slices of unequal lengths or of none."""
    state = state_of(2)
    for length, chunks in ((16, 1), (16, 3), (13, 2), (3, 3)):
        cp_way(state, chunks).check(whole_tensors(2, length, heads, kv_heads), is_causal)
    cp_way(state).check(whole_tensors(2, 10, heads, kv_heads), is_causal, plain_attention)


@on_ranks(3, 4)
def test_one_group_or_none(world):
    for state in (state_of(1), state_of(world.size), ParallelState()):
        for is_causal in (True, False):
            cp_way(state, 2).check(whole_tensors(2, 24, 8, 2), is_causal)
            cp_way(state, 1).check(whole_tensors(2, 13, 5, 5), is_causal)


@on_ranks(4)
def test_default_groups_and_the_split_over_both(world):
    state = state_of(2)
    parallel_state.initialize_sequence_parallel(state.get_ulysses_group(), state.get_ring_group())
    try:
        whole = whole_tensors(1, 16, 4, 2)
        pieces = [split_forward_gather_backward_with_cp(tensor, SEQ) for tensor in whole]
        result = attention_with_cp(*pieces, is_causal=True)
        expected = split_forward_gather_backward_with_cp(plain_attention(*whole, True), SEQ)
        assert_close(result, expected)
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
    assert_close(result, my_piece(plain_attention(*whole, True), state))


@pytest.mark.slow
@on_ranks(4)
def test_in_one_graph_for_all_lengths(world):
    state, graphs = state_of(2), []

    def function(x, whole):
        q, k, v = x.split([5, 3, 3], HEADS)
        length = whole.size(0)
        return attention_with_cp(q.sin(), k, v, is_causal=True, gather_size=length, parallel_state=state)

    def piece(length):
        return my_piece(numbers((2, length, 11, 16), torch.float64, length), state).requires_grad_()

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend=count)
    for length in (81, 82, 87):
        x, whole = piece(length), torch.empty(length, 0)
        torch._dynamo.mark_dynamic(x, SEQ)
        torch._dynamo.mark_dynamic(whole, 0)
        results = compiled(x, whole), function(x, whole)
        torch.testing.assert_close(*results)
        grads = [torch.autograd.grad(result.cos().sum(), x)[0] for result in results]
        torch.testing.assert_close(*grads)
    assert len(graphs) == 1


@on_ranks(4)
def test_attention_that_raises_with_the_last_keys(world):
    """No rank waits then; its Ulysses group gets the error, and the next call works on all."""
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
    cp_way(state).check(whole_tensors(2, 16, 4, 2), True)


@on_ranks(1)
def test_without_a_parallel_state(world):
    q = torch.ones(1, 2, 1, 1)
    with pytest.raises(RuntimeError, match="there is no parallel state"):
        attention_with_cp(q, q, q, is_causal=True)
