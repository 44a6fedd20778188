"""torch.compile: every operation stays in one graph, for all lengths, and calls keep their order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from ranks import on_ranks
from sequence_cases import assert_same, error_of, num_posted, numbers
from torch._dynamo.testing import CompileCounterWithBackend

from pipecomm_ext import all_to_all, all_to_all_many, gather_forward_split_backward

LENGTHS = range(13, 23)  # ten, of which none is the length of another dim: equal ones would share a symbol


def compiled(function: Callable, backend: Any = "aot_eager") -> Callable:
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend=backend, dynamic=True)


def check_lengths(
    function: Callable, inputs_of: Callable[[int], list[torch.Tensor]], backend="aot_eager"
) -> None:
    """Equal results and gradients with and without compilation, of one graph for ten lengths."""
    counter = CompileCounterWithBackend(backend)
    graph = compiled(function, counter)
    for length in LENGTHS:
        outcomes = []
        for call in (function, graph):
            inputs = inputs_of(length)
            results = call(*inputs)
            recorded = [result for result in results if result.requires_grad]
            if recorded:
                weights = [
                    numbers(tuple(out.shape), out.dtype, "weight", idx) for idx, out in enumerate(recorded)
                ]
                torch.autograd.backward(recorded, weights)
            grads = [
                tensor.grad for tensor in inputs if isinstance(tensor, torch.Tensor) and tensor.requires_grad
            ]
            outcomes.append((results, [result.requires_grad for result in results], grads))
        (results, requires, grads), (graph_results, graph_requires, graph_grads) = outcomes
        assert requires == graph_requires
        for actual, expected in zip([*graph_results, *graph_grads], [*results, *grads], strict=True):
            assert_same(actual, expected, length)
    assert counter.frame_count == 1, counter.frame_count


# ---- several tensors --------------------------------------------------------------------------------------


def qkv(length: int, rank: int) -> list[torch.Tensor]:
    """Of a sequence that divides, with heads that do not; the last one has no gradient."""
    q, k = (numbers((length, heads, 3), torch.float64, rank, heads).requires_grad_() for heads in (5, 4))
    return [q, k, numbers((length, 6, 3), torch.float64, rank).int()]


@on_ranks(2)
def test_several_tensors(world):
    q_sizes, kv_sizes = [2, 3], [2, 2]
    for group in (world.comm, None):

        def function(q, k, ids, group=group):
            q, k, ids = all_to_all_many(
                [q.sin(), k, ids], group, 1, 0, scatter_sizes=[q_sizes, kv_sizes, None]
            )
            return q.cumsum(0), k.cos(), ids

        check_lengths(function, lambda length: qkv(length, world.rank))

    def back(q, k, ids):
        sizes = [3, q.size(0) - 3]
        q, k = all_to_all_many([q, k], world.comm, 0, -2, scatter_sizes=[sizes, sizes])
        return q, k, all_to_all_many([ids], world.comm, 1, 0, 2 * ids.size(0))[0]

    check_lengths(back, lambda length: qkv(length, world.rank))


def check_mismatch(world) -> tuple[str, str]:
    """What only the ranks together can know is wrong is refused by the graph, and the next call works."""
    function = compiled(lambda x: all_to_all_many([x], world.comm, 1, 0)[0])
    error = error_of(function, numbers((13 + world.rank, 4), torch.float32, 0))
    assert function(numbers((14, 4), torch.float32, 0)).shape == (28, 2)
    return error


def test_several_tensors_of_unequal_lengths(ranks):
    for kind, text in ranks.run(2, check_mismatch):
        assert kind == "PipeCommMismatch" and "unequal lengths along dim 0" in text and "gather_size" in text


@on_ranks(2)
def test_lists_that_do_not_fit(world):
    x = numbers((4, 6), torch.float32, world.rank)
    for arguments, told in [
        ({"scatter_sizes": [1, 2, 3]}, "scatter_sizes needs one entry for each of the 2 ranks, got 3"),
        ({"gather_sizes": [[4, 4], None]}, "gather_sizes needs one list for each of the 1 tensors, got 2"),
        ({"scatter_dim": 2}, "scatter_dim 2 is out of range for a tensor of 2 dims"),
    ]:
        function = compiled(lambda x, arguments=arguments: all_to_all_many([x], world.comm, **arguments)[0])
        assert told in error_of(function, x)[1]


# ---- order ------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_calls_are_neither_dropped_nor_merged(world):
    """One rank uses what the other does not, and they call the same with equal arguments."""
    x = numbers((6, 4), torch.float64, 0)
    world.comm.barrier()

    def function(x):
        unused = all_to_all(x, world.comm, 1, 0)
        gather_forward_split_backward(x, world.comm, 0)
        [first] = all_to_all_many([x], world.comm, 1, 0)
        [again] = all_to_all_many([x], world.comm, 1, 0)
        return first + again + (unused if world.rank else 0)

    for call in (function, compiled(function)):
        before = num_posted(world.comm)
        call(x)
        assert num_posted(world.comm) == before + 4
