"""torch.compile: every operation stays in one graph, for all lengths, and calls keep their order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from relay_cases import topology_of
from sequence_cases import assert_same, error_of, num_posted, numbers
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from pipecomm_ext import (
    StageRelay,
    all_to_all,
    all_to_all_many,
    distributed,
    gather_forward_split_backward,
    load_balanced_gather_forward_split_backward,
    load_balanced_split_forward_gather_backward,
    split_forward_gather_backward,
)
from pipecomm_ext.communicator.communicator import graph_name
from pipecomm_ext.distributed import P2POp, batch_isend_irecv, irecv, isend

LENGTHS = range(13, 23)  # ten, of which none is the length of another dim: equal ones would share a symbol


IS_TORCH_213 = torch.__version__ >= "2.13"


def compiled(function: Callable, backend: Any = "aot_eager") -> Callable:
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend=backend, dynamic=True)


def check_lengths(function: Callable, inputs_of: Callable[[int], list[torch.Tensor]]) -> None:
    """Equal results and gradients with and without compilation, of one graph for ten lengths."""
    counter = CompileCounterWithBackend("aot_eager")
    graph = compiled(function, counter)
    for length in LENGTHS:
        outcomes = []
        for call in (function, graph):
            inputs = inputs_of(length)
            results = call(*inputs)
            recorded = [result for result in results if result.requires_grad]
            if recorded:
                torch.autograd.backward(recorded, [numbers(tuple(out.shape), out.dtype) for out in recorded])
            outcomes.append((results, [result.requires_grad for result in results], inputs))
        (results, require, inputs), (graph_results, graph_require, graph_inputs) = outcomes
        assert graph_require == require
        for actual, expected in zip(graph_results, results, strict=True):
            assert_same(actual, expected, length)
        for actual, expected in zip(graph_inputs, inputs, strict=True):
            grads = [torch.zeros(()) if x.grad is None else x.grad for x in (actual, expected)]
            assert_same(*grads, length)
    assert counter.frame_count == 1, counter.frame_count


def inputs_with_gradient(length: int, rank: int) -> list[torch.Tensor]:
    return [numbers((length, 4), torch.float64, rank, key).requires_grad_() for key in ("x", "y")]


@on_ranks(2)
def test_all_to_all_splits_and_gathers(world):
    """Lengths that do not divide where they need not; zigzag pieces are quarters."""
    for group in (world.comm, None):

        def function(x, y, group=group):
            heads = all_to_all(x.sin(), group, 0, 1)
            sequence = all_to_all(heads * 2, group, 1, 0, scatter_sizes=[4, 4], gather_size=x.size(0))
            piece = split_forward_gather_backward(y.cos(), group, 0)
            whole = gather_forward_split_backward(x * 3, group, 0)
            zigzag = load_balanced_split_forward_gather_backward(torch.cat([y] * 4), group)
            return sequence, piece, whole, load_balanced_gather_forward_split_backward(zigzag.sin(), group)

        check_lengths(function, lambda length: inputs_with_gradient(length, world.rank))


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
        ({"scatter_sizes": [1, 2, 3]}, "scatter_sizes needs one entry for each rank, got 3"),
        ({"gather_sizes": [[4, 4], None]}, "gather_sizes needs one list for each of the 1 tensors, got 2"),
    ]:
        arguments = {"scatter_dim": 1, "gather_dim": 0, **arguments}
        function = compiled(lambda x, arguments=arguments: all_to_all_many([x], world.comm, **arguments)[0])
        with pytest.raises(RuntimeError, match=told):  # of torch.compile, which traces the call
            function(x)


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


def ordered_calls(world, x, y):
    """Calls without data between them, of whose results the ranks use different ones."""
    peer, comm = 1 - world.rank, world.comm
    first, second, unused = (torch.empty_like(x) for _ in range(3))
    for buffer, sent in ((first, x), (unused, y), (second, y)):
        batch_isend_irecv([P2POp(isend, sent, peer), P2POp(irecv, buffer, peer)])
    [whole] = all_to_all_many([x], comm, 1, 0)
    comm.broadcast(unused, 0)
    [other] = all_to_all_many([y], comm, 1, 0)
    comm.send(x, peer) if world.rank else comm.recv(torch.empty_like(x), peer)
    return (other, second, whole.detach()) if world.rank else (other, first)


@pytest.mark.skipif(IS_TORCH_213, reason="torch 2.13 saves tokens of effects, and fails")
@on_ranks(2)
def test_activation_checkpoints(world):
    """They compute again what lies between the exchanges, whose results are saved in a graph."""

    def block(x):
        heads = all_to_all(x.sin(), world.comm, 1, 0)
        return all_to_all(heads.cos() * 2, world.comm, 0, 1).sin()

    def function(x, y):
        first = checkpoint(block, x, use_reentrant=False)
        return (checkpoint(block, first * y, use_reentrant=False),)

    check_lengths(function, lambda length: inputs_with_gradient(2 * length, world.rank))
    x, y = inputs_with_gradient(6, world.rank)
    before = num_posted(world.comm)
    compiled(function)(x, y)[0].sum().backward()
    assert num_posted(world.comm) == before + 8


@pytest.mark.slow
@on_ranks(2)
def test_inductor_keeps_the_order(world):
    """Inductor moves what does not depend on each other. The gradient's graph has calls of its own."""
    import torch._inductor.config as inductor

    inputs = [numbers((6, 4), torch.float64, world.rank, key).requires_grad_() for key in ("x", "y")]
    world.comm.barrier()
    with inductor.patch(compile_threads=1, force_disable_caches=True):
        outcomes = []
        for call in (ordered_calls, compiled(ordered_calls, "inductor")):
            before = num_posted(world.comm)
            results = call(world, *inputs)
            [grad] = torch.autograd.grad(results[0], inputs[1], torch.ones_like(results[0]))
            outcomes.append(([*results, grad], num_posted(world.comm) - before))
    (results, num_calls), (graph_results, num_graph_calls) = outcomes
    assert num_graph_calls == num_calls
    for actual, expected in zip(graph_results, results, strict=True):
        assert_same(actual, expected)


# ---- stage relay ------------------------------------------------------------------------------------------


@on_ranks(3)
@pytest.mark.parametrize(
    ("layout", "grad_reduce"),
    [("replicated", "leader"), ("replicated", "mean"), (("sharded", -2), "leader")],
)
def test_stage_relay(world, layout, grad_reduce):
    """From stage 0 to 1 and back, through weights on each; the second tensor has no gradient."""
    relay = StageRelay(topology_of(world, [1, 2]), layout=layout, grad_reduce=grad_reduce)
    is_first = relay.topology.is_pipeline_first_stage()

    def piece(x):
        longer = (x.size(0) + 1) // 2
        return x if layout == "replicated" else x[:longer] if world.rank == 1 else x[longer:]

    def function(x, weight):
        shape = list(x.shape)
        if is_first:
            sent = relay.relay(x.sin() * weight, shape, x.dtype, 0, 1)
            received = relay.relay(None, shape, x.dtype, 1, 0) * weight
            return sent, received, relay.relay(x.int(), shape, torch.int32, 0, 1)
        weight = piece(weight)
        received = relay.relay(None, shape, x.dtype, 0, 1)
        sent = relay.relay(received.cos() * weight, shape, x.dtype, 1, 0)
        return sent, received * weight, relay.relay(None, shape, torch.int32, 0, 1) + 1

    def inputs_of(length):
        return [numbers((length, 4), torch.float64, key).requires_grad_() for key in ("x", "weight")]

    check_lengths(function, inputs_of)


# ---- point to point, broadcast, memory --------------------------------------------------------------------


@on_ranks(2)
def test_batches(world):
    """Two whose messages fit each other, and one whose result nobody uses. None is differentiable."""
    peer = 1 - world.rank
    for group in (world.comm, None):

        def function(x, y, group=group):
            first, second, unused = (
                torch.empty_like(x),
                world.comm.empty(x.shape, x.dtype),
                torch.empty_like(x),
            )
            for buffer, sent in ((first, x.sin() * y), (unused, y), (second, x.cos())):
                sends = P2POp(isend, sent, peer, group)
                for work in batch_isend_irecv([sends, P2POp(irecv, buffer, group=group, group_peer=peer)]):
                    work.wait()
            assert batch_isend_irecv([]) == []
            return first * y, second - first

        check_lengths(function, lambda length: inputs_with_gradient(length, world.rank))


@pytest.mark.skipif(IS_TORCH_213, reason="torch 2.13 does not trace its P2POp")
@on_ranks(2)
def test_batches_of_a_communicator(world):
    """Of torch's elements, with views as buffers and two channels."""
    peer = 1 - world.rank

    def function(x, y):
        both = x.new_empty(2, *x.shape)
        ops = [
            dist.P2POp(dist.isend, x * y, peer),
            dist.P2POp(dist.isend, y.sin(), peer, tag=1),
            dist.P2POp(dist.irecv, both[1], peer, tag=1),
            dist.P2POp(dist.irecv, both[0], peer),
        ]
        world.comm.batch_p2p(ops)
        return both[0] * y, both[1] + x

    check_lengths(function, lambda length: inputs_with_gradient(length, world.rank))


@on_ranks(2)
def test_messages_one_by_one(world):
    peer = 1 - world.rank

    def function(x, y):
        alone = torch.empty_like(x)
        if world.rank == 0:
            world.comm.send(x * 2, peer)
            distributed.recv(alone, peer)
        else:
            world.comm.recv(alone, peer)
            distributed.send(y, peer)
        return x * y, y + alone

    check_lengths(function, lambda length: inputs_with_gradient(length, world.rank))


@on_ranks(2)
def test_broadcast(world):
    for group in (world.comm, None):

        def function(x, y, group=group):
            sent = x.sin()
            distributed.broadcast(sent, 0, group)
            received = (x * y).detach()
            world.comm.broadcast(received, 1)
            distributed.broadcast(y.detach().clone(), group_src=0, group=group)  # nobody uses it
            return sent.cos(), received * y

        check_lengths(function, lambda length: inputs_with_gradient(length, world.rank))


@on_ranks(2)
def test_a_buffer_that_requires_grad(world):
    """Is legal only without recording, as it is without compilation."""
    x = numbers((3,), torch.float64, world.rank).requires_grad_()
    if world.rank == 1:
        for call in (lambda x: world.comm.recv(x, 0), lambda x: world.comm.broadcast(x, 0)):
            with pytest.raises(RuntimeError, match="requires grad; receive into a tensor that does not"):
                compiled(call)(x)
    with torch.no_grad():
        compiled(lambda x: world.comm.broadcast(x, 0))(x)
    assert_same(x, numbers((3,), torch.float64, 0))


@on_ranks(2)
def test_a_stage_relay_that_is_gone(world):
    relay = StageRelay(topology_of(world, [1, 1]))
    link = id(relay), "forward", 0, 1
    del relay
    with pytest.raises(ValueError, match="the StageRelay that a compiled function was traced with is gone"):
        torch.ops.pipecomm_ext.relay_receive(torch.empty(0), *link, [3, 4], torch.float64)


@on_ranks(2)
def test_a_channel_that_is_not_there(world):
    function = compiled(lambda x: world.comm.send(x, 1 - world.rank, channel=99))
    kind, text = error_of(function, numbers((3,), torch.float64, 0))
    assert kind == "ValueError" and "channel" in text, text


# ---- opcheck ----------------------------------------------------------------------------------------------


@on_ranks(2)
def test_opcheck(world):
    """Schema, fake kernel, autograd and dynamic shapes of each operator."""
    operators, name, peer = torch.ops.pipecomm_ext, graph_name(world.comm), 1 - world.rank
    relay = StageRelay(topology_of(world, [1, 1]))
    link = id(relay), "forward", 0, 1
    x = numbers((3, 4), torch.float64, world.rank)
    anchor = torch.empty(0, requires_grad=True)
    batch = [x, x.int()], [peer, peer], [0, 1], [x.clone(), x.int()], [peer, peer], [0, 1]
    sizes = [2, 1] * 2, [4, 4] * 2
    checks = [
        (operators.all_to_all_many, ([x.clone().requires_grad_(), x.int()], name, 0, 1, *sizes, True)),
        (operators.batch_p2p, (*batch, name)),
        (operators.batch_p2p, (*batch, world.group.group_name)),
        (operators.broadcast, (x, name, 1)),
        (operators.empty, ([3, 0], torch.int32, name)),  # what is in memory differs from call to call
        (operators.relay_receive, (anchor, *link, [3, 4], torch.float64))
        if world.rank
        else (operators.relay_send, (x.clone().requires_grad_(), anchor, *link, [3, 4])),
    ]
    for operator, arguments in checks:
        torch.library.opcheck(operator, arguments)
