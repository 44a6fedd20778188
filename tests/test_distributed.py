"""A program for torch.distributed gives the same with pipecomm_ext.distributed, where more is legal.

Point-to-point, broadcast and barrier; the other collectives are in test_distributed_collectives.py.
"""

from __future__ import annotations

import importlib

import pytest
import torch
import torch.distributed as torch_dist
from patterns import assert_same, pattern, poison
from ranks import on_ranks

import pipecomm_ext
from pipecomm_ext import PipeCommMismatch
from pipecomm_ext import distributed as dist


def ring(world) -> tuple[int, int]:
    """(next, previous) rank."""
    return (world.rank + 1) % world.size, (world.rank - 1) % world.size


def stage_step(api, world) -> list[torch.Tensor]:
    """One program for torch.distributed and for ours: every p2p call, both channels, broadcast, barrier."""
    following, previous = ring(world)
    received = [poison(5, torch.float32) for _ in range(6)]
    sent = [pattern(5, torch.float32, world.rank, idx) for idx in range(6)]
    works = api.batch_isend_irecv(
        [
            api.P2POp(api.isend, sent[0], following, tag=0),
            api.P2POp(api.irecv, received[0], peer=previous, tag=0),
            api.P2POp(api.isend, sent[1], previous, tag=1),
            api.P2POp(op=api.irecv, tensor=received[1], group_peer=following, tag=1),
        ]
    )
    for work in works:
        work.wait()
    handles = [api.irecv(received[2], previous), api.isend(sent[2], following)]
    handles += [
        api.irecv(received[3], group_src=following, tag=1),
        api.isend(sent[3], group_dst=previous, tag=1),
    ]
    for handle in handles:
        handle.wait()
    if world.rank == 0:
        api.send(sent[4], dst=following)
        assert api.recv(received[4], src=previous) == previous
    else:
        assert api.recv(received[4], group_src=previous) == previous
        api.send(sent[4], group_dst=following)
    if world.rank == 1:
        received[5].copy_(sent[5])
    assert api.broadcast(received[5], src=1) is None
    work = api.broadcast(received[5], group_src=1, async_op=True)
    work.wait()
    assert api.barrier() is None
    api.barrier(async_op=True).wait()
    return received


@on_ranks(2, 3)
def test_a_program_gives_the_same_with_an_import_swapped(world):
    ours, theirs = stage_step(dist, world), stage_step(torch_dist, world)
    for idx, (actual, expected) in enumerate(zip(ours, theirs, strict=True)):
        assert_same(actual, expected, idx)


def test_every_other_name_is_torchs_own():
    differ = {
        name
        for name in dir(torch_dist)
        if not name.startswith("__") and getattr(dist, name) is not getattr(torch_dist, name)
    }
    assert differ == {*dist.__all__, "Work"} & {*dir(torch_dist)} and dist.Work is pipecomm_ext.Work
    assert {*dir(torch_dist), *dist.__all__} <= set(dir(dist))
    assert dist.group.WORLD is torch_dist.group.WORLD and dist.ReduceOp.SUM == torch_dist.ReduceOp.SUM
    with pytest.raises(
        AttributeError, match="neither pipecomm_ext.distributed nor torch.distributed has .* 'al"
    ):
        dist.al_reduce  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'al_reduce'"):
        from pipecomm_ext.distributed import al_reduce  # noqa: F401
    with pytest.raises(ModuleNotFoundError, match="'pipecomm_ext.distributed' is not a package"):
        importlib.import_module("pipecomm_ext.distributed.fsdp")  # not a second copy of torch's


@on_ranks(2)
def test_a_training_script_with_one_line_changed(world):
    """Reductions, groups and queries are torch's, messages are ours; a compiled function may ask, too."""
    from pipecomm_ext.distributed import ReduceOp, all_reduce, new_group

    assert dist.is_initialized() and (dist.get_rank(), dist.get_world_size()) == (world.rank, 2)
    group = new_group([1, 0])
    total = torch.tensor([world.rank + 1.0])
    all_reduce(total, op=ReduceOp.MAX, group=group)
    dist.all_reduce(total, group=group)
    gathered = [torch.empty(1) for _ in range(2)]
    dist.all_gather(gathered, total + dist.get_rank(), group=group)
    assert [tensor.item() for tensor in gathered] == [4.0, 5.0]
    compiled = torch.compile(lambda x: x * dist.get_world_size(), backend="eager", fullgraph=True)
    assert compiled(torch.ones(1)).item() == 2
    dist.destroy_process_group(group)


@on_ranks(2)
def test_torchs_operations_are_accepted_in_a_batch(world):
    """P2POps made with torch's class and functions, mixed with ours."""
    following, previous = ring(world)
    received = [poison(3, torch.int32) for _ in range(2)]
    works = dist.batch_isend_irecv(
        [
            torch_dist.P2POp(torch_dist.isend, pattern(3, torch.int32, world.rank, 0), following),
            dist.P2POp(torch_dist.isend, pattern(3, torch.int32, world.rank, 1), following),
            dist.P2POp(dist.irecv, received[0], previous),
            torch_dist.P2POp(torch_dist.irecv, received[1], previous),
        ]
    )
    for work in works:
        work.wait()
    for idx in range(2):
        assert_same(received[idx], pattern(3, torch.int32, previous, idx), idx)


@on_ranks(4)
def test_peers_are_global_ranks_on_a_sub_group(world):
    """Global ranks 3 and 1 are ranks 0 and 1 of their group; group_ arguments are ranks of the group."""
    members = [[3, 1], [2, 0]]
    groups = [torch_dist.new_group(ranks) for ranks in members]
    mine = 0 if world.rank in members[0] else 1
    group = groups[mine]
    peer = sum(members[mine]) - world.rank
    group_peer = torch_dist.get_group_rank(group, peer)
    sent = pattern(4, torch.int32, world.rank)
    expected = pattern(4, torch.int32, peer)

    def check(exchange):
        received = poison(4, torch.int32)
        for work in exchange(received):
            work.wait()
        assert_same(received, expected)

    check(lambda received: [dist.isend(sent, peer, group), dist.irecv(received, peer, group)])
    check(
        lambda received: [
            dist.isend(sent, group=group, group_dst=group_peer),
            dist.irecv(received, group=group, group_src=group_peer),
        ]
    )
    check(
        lambda received: dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, sent, peer, group),
                dist.P2POp(dist.irecv, received, group=group, group_peer=group_peer),
            ]
        )
    )
    check(
        lambda received: dist.batch_isend_irecv(
            [
                torch_dist.P2POp(torch_dist.isend, sent, peer, group),
                torch_dist.P2POp(torch_dist.irecv, received, peer, group),
            ]
        )
    )
    for source in members[mine]:
        for arguments in ({"src": source}, {"group_src": torch_dist.get_group_rank(group, source)}):
            tensor = pattern(4, torch.int32, world.rank)
            dist.broadcast(tensor, group=group, **arguments)
            assert_same(tensor, pattern(4, torch.int32, source))
    dist.barrier(group)
    outsider = 0 if mine == 0 else 1
    with pytest.raises(ValueError, match=rf"\b{outsider}\b.*not one of the group's ranks"):
        dist.send(sent, outsider, group)
    other = torch_dist.GroupMember.NON_GROUP_MEMBER
    assert dist.isend(sent, peer, other) is None and dist.recv(sent, peer, other) == -1
    assert dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, peer, other)]) == []


# ---- where torch has limits ------------------------------------------------------------------------------


@on_ranks(2)
def test_waiting_twice_is_legal(world):
    following, previous = ring(world)
    handles = [dist.isend(torch.ones(3), following), dist.irecv(torch.zeros(3), previous)]
    for handle in handles * 2:
        handle.wait()


@on_ranks(2)
@pytest.mark.parametrize("dtype", [torch.bool, torch.complex64, torch.float8_e4m3fn], ids=str)
def test_strided_tensors_of_any_dtype(world, dtype):
    following, previous = ring(world)
    received = poison((4, 3), dtype)
    works = [
        dist.isend(pattern((4, 3), dtype, world.rank).t(), following),
        dist.irecv(received.t(), previous),
    ]
    for work in works:
        work.wait()
    assert_same(received, pattern((4, 3), dtype, previous))


@on_ranks(2)
def test_a_leaf_that_requires_grad_may_be_received_into_as_in_torch(world):
    following, previous = ring(world)
    leaf = torch.zeros(3, requires_grad=True)
    works = [dist.isend(torch.full((3,), 1.0 + world.rank), following), dist.irecv(leaf, previous)]
    for work in works:
        work.wait()
    assert torch.equal(leaf.detach(), torch.full((3,), 1.0 + previous))


@on_ranks(2)
def test_a_mismatch_raises_on_both_ends_and_the_next_call_works(world):
    with pytest.raises(PipeCommMismatch, match=r"float32\[2\].*float32\[3\]|float32\[3\].*float32\[2\]"):
        dist.send(torch.ones(2), 1) if world.rank == 0 else dist.recv(torch.ones(3), 0)
    test_torchs_operations_are_accepted_in_a_batch.rank_body(world)


@on_ranks(2)
@pytest.mark.parametrize(
    ("call", "expected", "message"),
    [
        ("peer too large", ValueError, r"\b2\b"),
        ("peer negative", ValueError, r"-1"),
        ("peer a float", TypeError, "float"),
        ("both ranks", ValueError, "not both"),
        ("no rank", ValueError, "dst must name a rank"),
        ("any source", ValueError, "any source is not supported"),
        ("tag too large", ValueError, "channel"),
        ("wrong function", ValueError, "op must be isend or irecv"),
        ("no tensor", TypeError, "list"),
        ("no P2POp", TypeError, r"p2p_op_list\[1\].*tuple"),
        ("no list", TypeError, "p2p_op_list must be a list"),
    ],
)
def test_wrong_arguments(world, call, expected, message):
    """Refused on the calling rank; the communicator stays in use."""
    ones = torch.ones(3)
    calls = {
        "peer too large": lambda: dist.send(ones, 2),
        "peer negative": lambda: dist.recv(ones, -1),
        "peer a float": lambda: dist.send(ones, 1.0),
        "both ranks": lambda: dist.send(ones, 1, group_dst=1),
        "no rank": lambda: dist.isend(ones),
        "any source": lambda: dist.recv(ones),
        "tag too large": lambda: dist.send(ones, 1, tag=15),
        "wrong function": lambda: dist.P2POp(dist.broadcast, ones, 1),
        "no tensor": lambda: dist.P2POp(dist.isend, [1.0], 1),
        "no P2POp": lambda: dist.batch_isend_irecv([dist.P2POp(dist.isend, ones, 1), (dist.isend, ones, 1)]),
        "no list": lambda: dist.batch_isend_irecv(dist.P2POp(dist.isend, ones, 1)),
    }
    if world.rank == 0:
        with pytest.raises(expected, match=message):
            calls[call]()
    test_torchs_operations_are_accepted_in_a_batch.rank_body(world)


@on_ranks(2, 3)
@pytest.mark.parametrize("source", [17, -1, None, 1.5])
def test_a_broadcast_that_one_rank_refuses_is_refused_by_all(world, source):
    if world.rank == 1:
        with pytest.raises((ValueError, TypeError)):
            dist.broadcast(torch.ones(3), source)
    else:
        with pytest.raises(PipeCommMismatch, match="rank 1") as caught:
            dist.broadcast(torch.ones(3), 0)
        assert caught.value.origin_rank == 1
    dist.barrier()


# ---- who has to be there -----------------------------------------------------------------------------------


@on_ranks(4)
def test_two_ranks_of_four_exchange_before_the_others_call_anything(world):
    """The first call included: nothing waits for ranks that have nothing to say."""
    group = torch_dist.new_group(list(range(4)))
    pair = {1: 3, 3: 1}
    if world.rank in pair:
        received = poison(50_000, torch.float32)
        sent = pattern(50_000, torch.float32, world.rank)
        if world.rank == 1:
            dist.send(sent, 3, group=group)
            dist.recv(received, 3, group=group)
        else:
            dist.recv(received, 1, group=group)
            dist.send(sent, 1, group=group)
        assert_same(received, pattern(50_000, torch.float32, pair[world.rank]))
    world.meet()
    # The others come to it later, and what else a rank has made does not matter.
    with pipecomm_ext.Communicator(group, device="cpu", channels=3) as other:
        other.barrier()
    everywhere = torch.full((3,), float(world.rank))
    dist.broadcast(everywhere, 2, group=group)
    assert everywhere.tolist() == [2.0] * 3
