"""torch.compile: the operations are custom operators in one graph, forward and backward."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from sequence_cases import assert_same, error_of, numbers, remainder_first

import pipecomm_ext  # noqa: F401  (registers the operators)
from pipecomm_ext import (
    all_to_all,
    cal_split_sizes_multi,
    gather_forward_split_backward,
    load_balanced_gather_forward_split_backward,
    load_balanced_split_forward_gather_backward,
    packed_data_gather_forward_split_backward,
    packed_data_split_forward_gather_backward,
    split_forward_gather_backward,
    ulysses_attention,
)


def compiled(function, **kwargs):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager", **kwargs)


def check_against_eager(function, x, **kwargs):
    """Same bytes in forward and backward as without compilation."""
    results = []
    for call in (function, compiled(function, **kwargs)):
        x.grad = None
        result = call(x)
        result.backward(numbers(tuple(result.shape), result.dtype, "gradient"))
        results.append((result, x.grad))
    (eager, eager_grad), (graph, graph_grad) = results
    assert_same(graph, eager)
    assert_same(graph_grad, eager_grad)


def attention_like(group, size):
    """Uneven heads and sequence, both directions of the all-to-all, with arithmetic in between."""
    lengths, heads = remainder_first(4 * size + 1, size), remainder_first(2 * size + 1, size)

    def function(x):
        whole_sequence = all_to_all(x.sin(), group, 2, 1, sum(lengths))
        mixed = whole_sequence.cumsum(1) * 0.5
        back = all_to_all(mixed, group, scatter_dim=1, gather_dim=-2, gather_sizes=heads)
        return back.cos()

    return function, (2, lengths, 2 * size + 1, 3)


@on_ranks(1, 2)
def test_all_to_all_in_one_graph(world):
    for group in (dist.group.WORLD, None, world.comm):
        function, (batch, lengths, heads, width) = attention_like(group, world.size)
        x = numbers((batch, lengths[world.rank], heads, width), torch.float32, world.rank).requires_grad_()
        check_against_eager(function, x)


@on_ranks(2)
def test_split_and_gather_in_one_graph(world):
    size, group = world.size, world.group
    sequences = [5, 3, 4]
    rows = cal_split_sizes_multi(sequences, size).tolist()
    functions = [
        lambda x: split_forward_gather_backward(x.sin(), group, 0).cos(),
        lambda x: split_forward_gather_backward(x.sin(), group, -2, [12, 0], "up").cos(),
        lambda x: gather_forward_split_backward(x.sin(), group, 1).cos(),
        lambda x: gather_forward_split_backward(x.sin(), group, 0, [12] * size, None).cos(),
        lambda x: load_balanced_split_forward_gather_backward(x.sin(), group).cos(),
        lambda x: load_balanced_gather_forward_split_backward(x.sin(), group).cos(),
        lambda x: packed_data_gather_forward_split_backward(
            packed_data_split_forward_gather_backward(x.sin(), group, sequences).cos(), rows, group
        ),
    ]
    for function in functions:
        check_against_eager(function, numbers((12, 3), torch.float64, "x").requires_grad_())


@on_ranks(2)
def test_lengths_of_too_many_pieces_are_no_packed_sequences(world):
    function = compiled(lambda x: split_forward_gather_backward(x, world.group, 0, [1, 2, 3, 2]))
    with pytest.raises(ValueError, match="one entry for each of the 2 ranks, got 4"):
        function(numbers((8, 3), torch.float32, "x"))


@on_ranks(2)
def test_dynamic_shapes(world):
    """One graph for several lengths; the split rule is part of it."""
    function = compiled(lambda x: all_to_all(x, world.group, 1, 0) * 2, dynamic=True)
    for length in (4, 6, 10):
        x = numbers((length, 6), torch.float32, world.rank)
        assert_same(function(x), all_to_all(x, world.comm, 1, 0) * 2)


@on_ranks(2)
def test_changed_arguments_compile_again(world):
    function = compiled(lambda x, dims: all_to_all(x, world.group, *dims))
    x = numbers((4, 6, 2), torch.float32, world.rank)
    for dims in [(1, 0), (0, 1), (2, 0)]:
        assert_same(function(x, dims), all_to_all(x, world.comm, *dims))


def run_opcheck(world):
    operators = torch.ops.pipecomm_ext
    group = world.group.group_name
    x = numbers((2, 4, 2 * world.size + 1), torch.float64, world.rank).requires_grad_()
    sizes = remainder_first(2 * world.size + 1, world.size)
    equal = [4] * world.size
    checks = [
        (operators.all_to_all, (x, group, 2, 1, None, None, None)),
        (operators.all_to_all, (x, group, -1, 0, 2 * world.size, sizes[::-1], None)),
        (operators.all_to_all_many, ([x], group, 2, 1, sizes, equal, True)),
        (
            operators.all_to_all_many,
            ([x, x.detach().int()], group, 2, 1, sizes * 2, equal * 2, False),
        ),
        (operators.split, (x, group, 2, None, 1, None, "down")),
        (operators.split, (x, group, 2, sizes[::-1], 1, None, None)),
        (operators.split, (x, group, 1, [2, 2] if world.size == 1 else [1] * 4, 2, None, "up")),
        (operators.gather, (x, group, 2, None, 1, None, "up")),
        (operators.gather, (x, group, 1, None, 0, None, "up")),
    ]
    for operator, arguments in checks:
        torch.library.opcheck(operator, arguments)
    return len(checks)


@pytest.mark.parametrize("size", [1, 2])
def test_opcheck(ranks, size):
    assert ranks.run(size, run_opcheck) == [9] * size


def refuse_at_run_time(world):
    """What only the ranks together can know is wrong is refused by the compiled graph too."""
    function = compiled(lambda x: all_to_all(x, world.group, 1, 0))
    error = error_of(function, numbers((3 + world.rank, 4), torch.float32, 0))
    assert function(numbers((4, 4), torch.float32, 0)).shape == (8, 2)
    return error


def test_unequal_lengths_in_a_graph(ranks):
    for kind, text in ranks.run(2, refuse_at_run_time):
        assert kind == "PipeCommMismatch" and "[3, 4]" in text and "[4, 4]" in text


@on_ranks(2)
def test_a_closed_communicator_in_a_graph(world):
    comm = world.fresh_comm()
    function = compiled(lambda x: all_to_all(x, comm, 1, 0))
    x = numbers((2, 2), torch.float32, 0)
    assert function(x).shape == (4, 1)
    comm.close()
    with pytest.raises(
        ValueError, match="the Communicator that a compiled function was traced with is closed"
    ):
        function(x)


@on_ranks(2, 3)
def test_ulysses_attention_in_one_graph(world):
    """With grouped heads that do not divide, and uneven lengths; one graph for several lengths."""
    for group in (world.comm, None):
        graphs = []

        def count(graph, inputs, graphs=graphs):
            graphs.append(graph)
            return graph.forward

        def function(x, length, group=group):
            q, k, v = x.split([5, 3, 3], 2)
            out = ulysses_attention(q.sin(), k, v, None, group, gather_size=length, is_causal=True)
            return out.cos()

        torch._dynamo.reset()
        call = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=True)
        for length in (7, 8, 9):
            mine = remainder_first(length, world.size)[world.rank]
            x = numbers((2, mine, 11, 16), torch.float64, world.rank, length).requires_grad_()
            expected = function(x, length)
            [grad] = torch.autograd.grad(expected.sum(), x)
            got = call(x, length)
            torch.testing.assert_close(got, expected)
            torch.testing.assert_close(torch.autograd.grad(got.sum(), x)[0], grad)
        torch._dynamo.reset()
        once = torch.compile(function, fullgraph=True, backend=count, dynamic=True)
        with torch.no_grad():
            for length in range(13, 18):  # lengths that are no other dim: equal ones share a symbol
                mine = remainder_first(length, world.size)[world.rank]
                once(numbers((2, mine, 11, 16), torch.float64, world.rank, length), length)
        assert len(graphs) == 1
