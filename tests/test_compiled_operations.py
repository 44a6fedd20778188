"""torch.compile: every operation stays in one graph, for all lengths, and calls keep their order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from relay_cases import topology_of
from sequence_cases import assert_same, error_of, num_posted, numbers, remainder_first
from torch.utils.checkpoint import checkpoint

from pipecomm_ext import (
    StageRelay,
    all_to_all,
    all_to_all_many,
    cal_split_sizes_multi,
    distributed,
    gather_forward_split_backward,
    load_balanced_gather_forward_split_backward,
    load_balanced_split_forward_gather_backward,
    packed_data_gather_forward_split_backward,
    packed_data_split_forward_gather_backward,
    split_forward_gather_backward,
    ulysses_attention,
)
from pipecomm_ext.communicator.communicator import graph_name
from pipecomm_ext.distributed import P2POp, batch_isend_irecv, irecv, isend

LENGTHS = range(13, 18)  # of which none is the length of another dim: equal ones would share a symbol


IS_TORCH_213 = torch.__version__ >= "2.13"


def compiled(function: Callable, backend: Any = "aot_eager", dynamic: bool | None = True) -> Callable:
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend=backend, dynamic=dynamic)


def check_lengths(
    function: Callable,
    inputs_of: Callable[[int], list[torch.Tensor]],
    lengths: Sequence[int] = LENGTHS,
    dims: Sequence[int] = (),
) -> None:
    """Checks equal results and gradients with and without compilation, and one graph for all lengths.

    Only `dims`, one of each input, are symbolic, which compiles faster; without them all dims are.
    """
    from torch._dynamo.testing import CompileCounterWithBackend  # imports what only ranks need

    counter = CompileCounterWithBackend("aot_eager")
    graph = compiled(function, counter, dynamic=None if dims else len(lengths) > 1)
    for length in lengths:
        outcomes = []
        for call in (function, graph):
            inputs = inputs_of(length)
            for tensor, dim in zip(inputs, dims, strict=False):
                torch._dynamo.mark_dynamic(tensor, dim)
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


# ---- all-to-all, split, gather ----------------------------------------------------------------------------


@on_ranks(1, 2)
def test_all_to_all_of_uneven_pieces(world):
    """Heads and sequence, there and back, with arithmetic in between; every way to pass the group."""
    size, groups = world.size, (dist.group.WORLD, None, world.comm)
    lengths, heads = remainder_first(4 * size + 1, size), remainder_first(2 * size + 1, size)

    def function(x):
        results = []
        for group in groups:
            whole_sequence = all_to_all(x.sin(), group, 2, 1, sum(lengths))
            mixed = whole_sequence.cumsum(1) * 0.5
            back = all_to_all(mixed, group, scatter_dim=1, gather_dim=-2, gather_sizes=heads)
            results.append(back.cos())
        return results

    shape = (2, lengths[world.rank], 2 * size + 1, 3)
    inputs = [numbers(shape, torch.float32, world.rank)]
    check_lengths(function, lambda _: [inputs[0].clone().requires_grad_()], [1])


@on_ranks(2)
def test_all_to_all_splits_and_gathers(world):
    """Lengths that are not divisible unless they must be; zigzag pieces are quarters."""
    groups = (world.comm, None)

    def function(x, y):
        results = []
        for group in groups:
            heads = all_to_all(x.sin(), group, 0, 1)
            results.append(all_to_all(heads * 2, group, 1, 0, scatter_sizes=[4, 4], gather_size=x.size(0)))
            results.append(split_forward_gather_backward(y.cos(), group, 0))
            results.append(gather_forward_split_backward(x * 3, group, 0))
            zigzag = load_balanced_split_forward_gather_backward(torch.cat([y] * 4), group)
            results.append(load_balanced_gather_forward_split_backward(zigzag.sin(), group))
        return results

    check_lengths(function, lambda length: inputs_with_gradient(length, world.rank))


@on_ranks(2)
def test_sizes_scales_and_packed_sequences(world):
    group, sequences = world.group, [5, 3, 4]
    rows = cal_split_sizes_multi(sequences, world.size).tolist()

    def function(x):
        packed = packed_data_split_forward_gather_backward(x.sin(), group, sequences).cos()
        return [
            split_forward_gather_backward(x.sin(), group, -2, [12, 0], "up").cos(),
            gather_forward_split_backward(x.sin(), group, 1).cos(),
            gather_forward_split_backward(x.sin(), group, 0, [12] * world.size, None).cos(),
            packed_data_gather_forward_split_backward(packed, rows, group),
        ]

    check_lengths(function, lambda _: [numbers((12, 3), torch.float64, "x").requires_grad_()], [1])


@on_ranks(2)
def test_changed_arguments_compile_again(world):
    function = compiled(lambda x, dims: all_to_all(x, world.group, *dims))
    x = numbers((4, 6, 2), torch.float32, world.rank)
    for dims in [(1, 0), (0, 1)]:
        assert_same(function(x, dims), all_to_all(x, world.comm, *dims))


@on_ranks(2)
def test_ulysses_attention(world):
    """With grouped heads that are not divisible by the ranks, and uneven lengths."""

    def function(x, whole):
        q, k, v = x.split([5, 3, 3], 2)
        options = {"gather_size": whole.size(0), "is_causal": True}
        return [ulysses_attention(q.sin(), k, v, None, **options).cos()]

    def inputs_of(length):
        mine = remainder_first(length, world.size)[world.rank]
        x = numbers((2, mine, 11, 16), torch.float64, world.rank, length).requires_grad_()
        return [x, torch.empty(length, 0)]

    check_lengths(function, inputs_of, dims=(1, 0))


# ---- several tensors --------------------------------------------------------------------------------------


def qkv(length: int, rank: int) -> list[torch.Tensor]:
    """q, k, v of a divisible sequence, with heads that are not divisible; the last one has no gradient."""
    q, k = (numbers((length, heads, 3), torch.float64, rank, heads).requires_grad_() for heads in (5, 4))
    return [q, k, numbers((length, 6, 3), torch.float64, rank).int()]


@on_ranks(2)
def test_several_tensors(world):
    """In the default group, and in that of a communicator."""
    scatter_sizes = [[2, 3], [2, 2], None]

    def function(q, k, ids):
        there = all_to_all_many([q.sin(), k, ids], None, 1, 0, scatter_sizes=scatter_sizes)
        results = [there[0].cumsum(0), there[1].cos(), there[2]]
        sizes = [3, q.size(0) - 3]
        results += all_to_all_many([q, k], world.comm, 0, -2, scatter_sizes=[sizes, sizes])
        return results + all_to_all_many([ids], world.comm, 1, 0, 2 * ids.size(0))

    check_lengths(function, lambda length: qkv(length, world.rank), dims=(0, 0, 0))


# ---- errors -----------------------------------------------------------------------------------------------


@on_ranks(2)
def test_unequal_lengths(world):
    """The graph refuses what only the ranks together can find wrong, and the next call works."""
    comm = world.comm
    many = compiled(lambda x: all_to_all_many([x], comm, 1, 0)[0])
    single = torch.compile(lambda x: all_to_all(x, world.group, 1, 0), fullgraph=True, backend="aot_eager")
    for function in (many, single):
        kind, text = error_of(function, numbers((3 + world.rank, 4), torch.float32, 0))
        assert kind == "PipeCommMismatch" and "unequal lengths along dim 0" in text, text
        assert function(numbers((4, 4), torch.float32, 0)).shape == (8, 2)


@on_ranks(2)
def test_lists_that_do_not_fit(world):
    x, comm = numbers((4, 6), torch.float32, world.rank), world.comm  # made outside of the graph

    def in_many(**sizes):
        return lambda x: all_to_all_many([x], comm, 1, 0, **sizes)

    for call, kind, told in [  # RuntimeError is of torch.compile, which traces the call
        (in_many(scatter_sizes=[1, 2, 3]), RuntimeError, "needs one entry for each rank, got 3"),
        (in_many(gather_sizes=[[4, 4], None]), RuntimeError, "one list for each of the 1 tensors, got 2"),
        (lambda x: split_forward_gather_backward(x, world.group, 0, [1, 1, 1, 1]), ValueError,
         "one entry for each of the 2 ranks, got 4"),
    ]:  # fmt: skip
        with pytest.raises(kind, match=told):
            compiled(call)(x)


@on_ranks(2)
def test_a_channel_that_is_not_there_and_a_communicator_that_is_closed(world):
    comm, x = world.fresh_comm(), numbers((2, 2), torch.float32, 0)
    kind, text = error_of(compiled(lambda x: comm.send(x, 1 - world.rank, channel=99)), x)
    assert kind == "ValueError" and "channel" in text, text
    function = compiled(lambda x: all_to_all(x, comm, 1, 0))
    assert function(x).shape == (4, 1)
    comm.close()
    told = "the Communicator that a compiled function was traced with is closed"
    with pytest.raises(ValueError, match=told):
        function(x)


@on_ranks(2)
def test_a_buffer_that_requires_grad(world):
    """It is legal only without recording, as without compilation."""
    x, comm = numbers((3,), torch.float64, world.rank).requires_grad_(), world.comm
    if world.rank == 1:
        for call in (lambda x: comm.recv(x, 0), lambda x: comm.broadcast(x, 0)):
            with pytest.raises(RuntimeError, match="requires grad; receive into a tensor that does not"):
                compiled(call)(x)
    with torch.no_grad():
        compiled(lambda x: comm.broadcast(x, 0))(x)
    assert_same(x, numbers((3,), torch.float64, 0))


@on_ranks(2)
def test_a_stage_relay_that_is_gone(world):
    relay = StageRelay(topology_of(world, [1, 1]))
    link = relay.name_in_graphs, "forward", 0, 1
    del relay
    with pytest.raises(ValueError, match="the StageRelay that a compiled function was traced with is gone"):
        torch.ops.pipecomm_ext.relay_receive(torch.empty(0), *link, [3, 4], torch.float64)


# ---- order ------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_calls_are_neither_dropped_nor_merged(world):
    """Each rank uses a result that the other does not, and both make the same call with equal arguments."""
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
    """Calls without data dependencies, of which the ranks use different results."""
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
    """They recompute what is between the exchanges, whose results are saved in a graph."""

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
    """Inductor reorders independent operations. The gradient's graph has calls of its own."""
    import torch._inductor.config as inductor

    inputs = inputs_with_gradient(6, world.rank)
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
def test_stage_relay(world):
    """From stage 0 to 1 and back, through weights on each; the second tensor has no gradient."""
    topology = topology_of(world, [1, 2])
    cases = [("replicated", "leader"), ("replicated", "mean"), (("sharded", -2), "leader")]
    relays = [StageRelay(topology, layout=layout, grad_reduce=reduce) for layout, reduce in cases]
    is_first = topology.is_pipeline_first_stage()

    def piece(x, relay):
        longer = (x.size(0) + 1) // 2
        if relay is not relays[2]:
            return x
        return x[:longer] if world.rank == 1 else x[longer:]

    def function(x, weight):
        shape, results = list(x.shape), []
        for relay in relays:
            if is_first:
                results.append(relay.relay(x.sin() * weight, shape, x.dtype, 0, 1))
                results.append(relay.relay(None, shape, x.dtype, 1, 0) * weight)
                results.append(relay.relay(x.int(), shape, torch.int32, 0, 1))
            else:
                mine = piece(weight, relay)
                received = relay.relay(None, shape, x.dtype, 0, 1)
                results.append(relay.relay(received.cos() * mine, shape, x.dtype, 1, 0))
                results.append(received * mine)
                results.append(relay.relay(None, shape, torch.int32, 0, 1) + 1)
        return results

    check_lengths(function, lambda length: inputs_with_gradient(length, 0), dims=(0, 0))


# ---- point to point, broadcast, memory --------------------------------------------------------------------


@on_ranks(2)
def test_batches(world):
    """Two whose messages match, and one whose result is not used. None is differentiable."""
    peer, groups = 1 - world.rank, (world.comm, None)

    def function(x, y):
        results = []
        for group in groups:
            first, unused = torch.empty_like(x), torch.empty_like(x)
            second = world.comm.empty(x.shape, x.dtype)
            for buffer, sent in ((first, x.sin() * y), (unused, y), (second, x.cos())):
                sends = P2POp(isend, sent, peer, group)
                for work in batch_isend_irecv([sends, P2POp(irecv, buffer, group=group, group_peer=peer)]):
                    work.wait()
            assert batch_isend_irecv([]) == []
            results += [first * y, second - first]
        return results

    check_lengths(function, lambda length: inputs_with_gradient(length, world.rank))


@pytest.mark.skipif(IS_TORCH_213, reason="torch 2.13 does not trace its P2POp")
@on_ranks(2)
def test_batches_of_a_communicator(world):
    """With torch's elements, views as buffers and two channels."""
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
def test_messages_one_by_one_and_broadcasts(world):
    peer, groups = 1 - world.rank, (world.comm, None)

    def function(x, y):
        alone = torch.empty_like(x)
        if world.rank == 0:
            world.comm.send(x * 2, peer)
            distributed.recv(alone, peer)
        else:
            world.comm.recv(alone, peer)
            distributed.send(y, peer)
        results = [x * y, y + alone]
        for group in groups:
            sent, received = x.sin(), (x * y).detach()
            distributed.broadcast(sent, 0, group)
            world.comm.broadcast(received, 1)
            distributed.broadcast(y.detach().clone(), group_src=0, group=group)  # not used
            results += [sent.cos(), received * y]
        return results

    check_lengths(function, lambda length: inputs_with_gradient(length, world.rank))


# ---- opcheck ----------------------------------------------------------------------------------------------


@on_ranks(1, 2)
def test_opcheck(world):
    """Schema, fake kernel, autograd and dynamic shapes of each operator; some in a group of one rank."""
    operators, name, size = torch.ops.pipecomm_ext, graph_name(world.comm), world.size
    group, peer = world.group.group_name, size - 1 - world.rank
    x = numbers((2, 4, 2 * size + 1), torch.float64, world.rank).requires_grad_()
    flat = numbers((3, 4), torch.float64, world.rank)
    sizes, equal = remainder_first(2 * size + 1, size), [4] * size
    checks = [
        (operators.all_to_all_many, ([x], group, 2, 0, sizes[::-1], [2] * size, False)),
        (operators.split, (x, group, 1, [2 // size] * (2 * size), 2, None, "up")),
        (operators.gather, (x, group, 2, None, 1, None, "up")),
    ]
    if size == 2:
        relay = StageRelay(topology_of(world, [1, 1]))
        link, anchor = (relay.name_in_graphs, "forward", 0, 1), torch.empty(0, requires_grad=True)
        number = torch.tensor(3)  # one that is not given differs from call to call
        batch = [flat, flat.int()], [peer] * 2, [0, 1], [flat.clone(), flat.int()], [peer] * 2, [0, 1]
        two, lists = [x, x.detach().int()], (sizes * 2, equal * 2)
        checks += [
            (operators.all_to_all_many, ([x], name, 2, 1, sizes, equal, True)),
            (operators.all_to_all_many, (two, group, 2, 1, *lists, False)),
            (operators.split, (x, group, 2, None, 1, None, "down")),
            (operators.split, (x, group, 2, sizes[::-1], 1, None, None)),
            (operators.gather, (x, group, 1, None, 0, None, "up")),
            (operators.batch_p2p, (*batch, name)),
            (operators.batch_p2p, (*batch, group)),
            (operators.broadcast, (flat, name, 1)),
            (operators.empty, ([3, 0], torch.int32, name)),  # its contents differ from call to call
            (operators.relay_receive, (anchor, *link, [3, 4], torch.float64, number))
            if world.rank
            else (operators.relay_send, (flat.clone().requires_grad_(), anchor, *link, [3, 4], number)),
        ]
    for operator, arguments in checks:
        torch.library.opcheck(operator, arguments)
