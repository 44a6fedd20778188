"""Memory of operations in flight, under an allocator that gives out again what it gets back at once."""

from __future__ import annotations

import os

import torch
from gpu_world import DEADLINE_S, comm_on, nccl_comm, on_devices
from patterns import assert_same, pattern
from ranks import on_ranks

from pipecomm_ext import _C, Recv, Send

NUMEL = 1 << 16


@on_ranks(2, deadline=DEADLINE_S)
@on_devices
def test_dropped_tensors_are_not_given_out_before_their_time(world, device):
    """Behind a device that is busy: all but the results is dropped at once and its memory asked for again."""
    comm, peer = comm_on(world, device), 1 - world.rank
    side = torch.cuda.Stream() if device == "cuda" else None
    for round_idx in range(60 if side is not None else 8):
        mine = pattern(NUMEL, torch.uint8, world.rank, round_idx).to(device)
        if side is not None:
            torch.cuda._sleep(5_000_000)
        received, sent = torch.empty_like(mine), mine.clone()
        work = comm.batch_p2p([Send(sent, peer), Recv(received, peer)], async_op=True)
        del sent
        garbage = [torch.full((NUMEL,), 0xEE, dtype=torch.uint8, device=device) for _ in range(4)]
        if side is not None:
            with torch.cuda.stream(side):
                garbage += [torch.full((NUMEL,), 0xDD, dtype=torch.uint8, device=device) for _ in range(4)]
        work.wait()
        del work, garbage
        assert_same(received.cpu(), pattern(NUMEL, torch.uint8, peer, round_idx), round_idx)


@on_ranks(2, deadline=DEADLINE_S)
@on_devices
def test_staging_of_dropped_exchanges(world, device):
    """Strided pieces go through staging; a second exchange begins while the first one is under way."""
    comm, peer = comm_on(world, device), 1 - world.rank
    spec = ((64, 48), torch.bfloat16, [24, 24], [64, 64])
    plan = _C.plan_all_to_all(world.rank, 2, [spec], 1, 0)
    for round_idx in range(30):
        pending = []
        for call_idx in range(2):
            mine = pattern((64, 48), torch.bfloat16, world.rank, round_idx, call_idx).to(device)
            output = torch.empty(128, 24, dtype=torch.bfloat16, device=device)
            pending.append((comm.exchange(plan, [mine], [output], async_op=True), output))
            del mine
        for call_idx, (work, output) in enumerate(pending):
            work.wait()
            theirs = pattern((64, 48), torch.bfloat16, peer, round_idx, call_idx)
            columns = theirs[:, 24 * world.rank : 24 * world.rank + 24].contiguous()
            assert_same(output[64 * peer : 64 * peer + 64].cpu(), columns, (round_idx, call_idx))


@on_ranks(2, deadline=DEADLINE_S)
def test_nothing_is_kept_after_close(world):
    comm, peer = nccl_comm(world), 1 - world.rank
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(20):
        sent, received = (torch.zeros(NUMEL, device="cuda") for _ in range(2))
        work = comm.batch_p2p([Send(sent, peer), Recv(received, peer)], async_op=True)
        del sent, received
    work.synchronize()
    del work
    comm.close()
    assert torch.cuda.memory_allocated() == before


def use_expandable_segments(world):
    """After close, streams and memory of ours must mean nothing to the allocator."""
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    comm, peer = nccl_comm(world), 1 - world.rank
    spec = ((64, 48), torch.bfloat16, [24, 24], [64, 64])
    plan = _C.plan_all_to_all(world.rank, 2, [spec], 1, 0)
    for _ in range(5):
        received = torch.zeros(NUMEL, device="cuda")
        works = [
            comm.exchange(
                plan,
                [torch.zeros(64, 48, dtype=torch.bfloat16, device="cuda")],
                [torch.zeros(128, 24, dtype=torch.bfloat16, device="cuda")],
                async_op=True,
            ),
            comm.batch_p2p(
                [Send(torch.ones(NUMEL, device="cuda"), peer), Recv(received, peer)], async_op=True
            ),
        ]
        for work in works:
            work.wait()
    assert torch.all(received == 1)
    assert any(segment["is_expandable"] for segment in torch.cuda.memory_snapshot())
    del received, works, work
    comm.close()
    torch.cuda.empty_cache()
    more = torch.full((NUMEL,), 2.0, device="cuda")
    assert more.sum().item() == 2.0 * NUMEL
    return torch.cuda.memory_allocated() == more.nbytes


def test_expandable_segments_after_close(ranks):
    with ranks.disposable(2, use_expandable_segments) as world:
        outcomes = world.collect(deadline=DEADLINE_S)
    assert [(outcome.status, outcome.value) for outcome in outcomes] == [("returned", True)] * 2, "\n".join(
        map(str, outcomes)
    )


@on_ranks(1, deadline=DEADLINE_S)
@on_devices
def test_a_message_to_oneself_outlives_its_tensors(world, device):
    comm = comm_on(world, device)
    for round_idx in range(20):
        received = torch.empty(NUMEL, dtype=torch.uint8, device=device)
        sent = pattern(NUMEL, torch.uint8, round_idx).to(device)
        work = comm.batch_p2p([Send(sent, 0), Recv(received, 0)], async_op=True)
        del sent
        garbage = torch.full((NUMEL,), 0xEE, dtype=torch.uint8, device=device)
        work.wait()
        del garbage
        assert_same(received.cpu(), pattern(NUMEL, torch.uint8, round_idx), round_idx)
