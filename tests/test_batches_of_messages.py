"""What `Communicator.batch_p2p` takes, and the attributes of `distributed.P2POp`."""

from __future__ import annotations

import copy
import json
import pickle

import pytest
import torch
import torch.distributed as torch_dist
from ranks import on_ranks

from pipecomm_ext import PipeCommMismatch, Recv, Send, distributed

APIS = {"torch": torch_dist, "ours": distributed}


@on_ranks(2)
@pytest.mark.parametrize("module", APIS)
def test_operations_of_torch_and_ours(world, module):
    api, other = APIS[module], 1 - world.rank
    sent, received = torch.full((3,), float(world.rank)), torch.empty(2, 3)
    ops = [
        api.P2POp(api.isend, sent, other),
        Send(sent + 10, other, 1),
        api.P2POp(api.irecv, received[0], group=world.group, group_peer=other),
        Recv(received[1], other, 1),
    ]
    world.comm.batch_p2p(tuple(ops))
    assert received[:, 0].tolist() == [other, other + 10]


@on_ranks(2)
def test_what_can_be_read_only_once_is_refused(world):
    """A generator would lose the operations that a check has read."""
    tensor, other = torch.ones(3), 1 - world.rank
    messages = [torch_dist.P2POp(torch_dist.isend, tensor, other), Send(tensor, other)]
    for ops in ((op for op in messages), iter(messages), {1: messages[0]}, None):
        with pytest.raises(TypeError, match=r"ops must be a list or a tuple, not \w+"):
            world.comm.batch_p2p(ops)


@on_ranks(4)
@pytest.mark.parametrize("module", APIS)
def test_an_operation_knows_its_group_and_both_ranks_of_its_peer(world, module):
    api, group = APIS[module], torch_dist.new_group([1, 3])
    op = api.P2POp(api.isend, torch.ones(1), group_peer=1)
    assert (op.peer, op.group_peer, op.group) == (1, 1, torch_dist.group.WORLD)
    if world.rank in (1, 3):
        for which in ({"peer": 3}, {"group_peer": 1}):
            op = api.P2POp(api.irecv, torch.ones(1), group=group, **which)
            assert (op.peer, op.group_peer, op.group) == (3, 1, group)


@on_ranks(2)
def test_descriptions_of_a_mismatch_are_dicts_with_attributes(world):
    other = 1 - world.rank
    with pytest.raises(PipeCommMismatch) as caught:
        world.comm.batch_p2p([Send(torch.ones(2), other), Recv(torch.empty(3), other)])
    ours = caught.value.ours
    assert isinstance(ours, dict) and list(ours) == ["op", "dtype", "shape", "num_bytes"]
    assert json.loads(json.dumps(ours)) == {**ours, "shape": list(ours.shape)}
    for same in (ours, copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert (same.op, same.dtype, same.shape, same.num_bytes) == tuple(ours.values())
    with pytest.raises(AttributeError, match="size"):
        ours.size  # noqa: B018
