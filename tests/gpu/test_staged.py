"""CUDA tensors over c10d: staged through pinned host memory. Any number of ranks on one GPU."""

from __future__ import annotations

import torch
from patterns import assert_same, pattern, poison
from ranks import on_ranks

from pipecomm_ext import _C, Recv, Send

DEADLINE_S = 120.0


@on_ranks(2, 3, deadline=DEADLINE_S)
def test_messages_and_collectives(world):
    torch.cuda.set_device(world.rank % torch.cuda.device_count())
    comm = world.fresh_comm(device="cuda", transport="c10d", timeout=60)
    assert comm.transport == "c10d" and comm.device.type == "cuda"
    following, previous = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for numel in (0, 5, 300_000):
            sent = pattern(numel, torch.bfloat16, world.rank).cuda()
            table = poison((numel, 2), torch.bfloat16).cuda()
            torch.cuda._sleep(20_000_000)
            table.zero_()  # pending when the receive is posted
            comm.batch_p2p([Send(sent, following), Recv(table[:, 1], previous)], async_op=True).wait()
            assert_same(table[:, 1].contiguous().cpu(), pattern(numel, torch.bfloat16, previous), numel)
            assert not table[:, 0].any()
    plan = _C.plan_gather(world.rank, world.size, ((2, 3), torch.int32), 0, [2] * world.size)
    output = torch.zeros(2 * world.size, 3, dtype=torch.int32, device="cuda")
    comm.exchange(plan, [pattern((2, 3), torch.int32, world.rank).cuda()], [output])
    expected = torch.cat([pattern((2, 3), torch.int32, rank) for rank in range(world.size)])
    assert_same(output.cpu(), expected, "gather")
    tensor = torch.full((3,), world.rank, device="cuda")
    comm.broadcast(tensor, 1)
    assert tensor.tolist() == [1, 1, 1]
