"""The NCCL path: bytes against what every rank can compute, streams, captures, checks, failures."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
from gpu_world import DEADLINE_S, nccl_comm
from patterns import DTYPES, assert_same, pattern, poison
from ranks import on_ranks

import pipecomm_ext
from pipecomm_ext import (
    _C,
    Communicator,
    PipeCommAborted,
    PipeCommError,
    PipeCommMismatch,
    PipeCommTimeout,
    Recv,
    Send,
)


def on_gpu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cuda()


# ---- point to point --------------------------------------------------------------------------------------


@on_ranks(1, deadline=DEADLINE_S)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_rank_sends_to_itself(world, dtype):
    comm = nccl_comm(world)
    for shape in ((0,), (1,), (17, 3), (1 << 20,)):
        sent, received = on_gpu(pattern(shape, dtype, "self")), on_gpu(poison(shape, dtype))
        comm.batch_p2p([Send(sent, 0), Recv(received, 0)])
        assert_same(received.cpu(), sent.cpu(), shape)


@on_ranks(3, deadline=DEADLINE_S)
def test_ranks_connect_when_they_need_each_other(world):
    """While the user of the third rank calls nothing; memory is taken then, and told."""
    comm = nccl_comm(world)
    assert comm.nccl_usage == (0, 0) and comm.transport_reason.endswith("nothing is connected yet")
    if world.rank < 2:
        for channel in (0, 0, 1):
            received = on_gpu(poison(1000, torch.int16))
            comm.batch_p2p(
                [
                    Send(on_gpu(pattern(1000, torch.int16, world.rank)), 1 - world.rank, channel),
                    Recv(received, 1 - world.rank, channel),
                ]
            )
            assert_same(received.cpu(), pattern(1000, torch.int16, 1 - world.rank))
    num_comms, num_bytes = comm.nccl_usage
    assert num_comms == (4 if world.rank < 2 else 0) and (num_bytes > 0) == (world.rank < 2)
    comm.barrier()
    shared = on_gpu(torch.full((5,), float(world.rank)))
    comm.broadcast(shared, 2)
    assert shared.tolist() == [2.0] * 5
    assert comm.nccl_usage[0] == (5 if world.rank < 2 else 1)
    assert f"for {comm.nccl_usage[0]} NCCL communicators" in comm.transport_reason
    (facts,) = (
        each for each in pipecomm_ext.info()["communicators"] if each["nccl_communicators"] == num_comms + 1
    )
    assert facts["transport"] == "nccl" and facts["device"].startswith("cuda:")


@on_ranks(2, 3, deadline=DEADLINE_S)
@pytest.mark.parametrize("async_op", [False, True])
def test_neighbours_exchange_on_two_channels(world, async_op):
    comm = nccl_comm(world)
    assert comm.transport == "nccl"
    following, previous = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    for round_idx, numel in enumerate((0, 1, 4097, 3_000_000)):
        outgoing = [on_gpu(pattern(numel, torch.bfloat16, world.rank, way, round_idx)) for way in range(2)]
        incoming = [on_gpu(poison(numel, torch.bfloat16)) for _ in range(2)]
        work = comm.batch_p2p(
            [
                Send(outgoing[0], following, 0),
                Recv(incoming[0], previous, 0),
                Send(outgoing[1], previous, 1),
                Recv(incoming[1], following, 1),
            ],
            async_op=async_op,
        )
        if async_op:
            work.wait()
        assert_same(incoming[0].cpu(), pattern(numel, torch.bfloat16, previous, 0, round_idx), numel)
        assert_same(incoming[1].cpu(), pattern(numel, torch.bfloat16, following, 1, round_idx), numel)


@on_ranks(2, deadline=DEADLINE_S)
def test_both_send_first_on_different_channels(world):
    """Larger than any buffer of NCCL: only works if channels progress independently."""
    comm, peer = nccl_comm(world), 1 - world.rank
    numel = 64 << 20
    sent = on_gpu(pattern(numel, torch.uint8, world.rank))
    received = on_gpu(poison(numel, torch.uint8))
    works = [comm.isend(sent, peer, channel=world.rank), comm.irecv(received, peer, channel=peer)]
    for work in works:
        work.wait()
    assert_same(received.cpu(), pattern(numel, torch.uint8, peer), numel)


@on_ranks(2, deadline=DEADLINE_S)
def test_a_thousand_messages_and_strided_receives(world):
    comm, peer = nccl_comm(world), 1 - world.rank
    sent = [on_gpu(pattern(idx % 7, torch.int32, world.rank, idx)) for idx in range(500)]
    received = [on_gpu(poison(idx % 7, torch.int32)) for idx in range(500)]
    table = torch.zeros(5, 12, device="cuda")
    column = on_gpu(pattern((5, 3), torch.float32, world.rank))
    comm.batch_p2p(
        [Send(tensor, peer) for tensor in sent]
        + [Recv(tensor, peer) for tensor in received]
        + [Send(column, peer), Recv(table[:, 1::4], peer)]
    )
    for idx, tensor in enumerate(received):
        assert_same(tensor.cpu(), pattern(idx % 7, torch.int32, peer, idx), idx)
    assert_same(table[:, 1::4].contiguous().cpu(), pattern((5, 3), torch.float32, peer), "columns")
    assert not table[:, ::4].any()


@on_ranks(2, deadline=DEADLINE_S)
def test_more_than_two_gibibytes(world):
    if torch.cuda.mem_get_info()[0] < 3 * world.size * (5 << 30):
        pytest.skip("too little device memory")
    comm, peer = nccl_comm(world), 1 - world.rank
    numel = (1 << 31) + 64
    if world.rank == 0:
        tensor = torch.arange(numel, device="cuda", dtype=torch.int64).to(torch.uint8)
        comm.send(tensor, peer)
    else:
        tensor = torch.zeros(numel, device="cuda", dtype=torch.uint8)
        comm.recv(tensor, peer)
        assert torch.equal(tensor[: 1 << 10].cpu(), torch.arange(1 << 10).to(torch.uint8))
        assert torch.equal(tensor[-64:].cpu(), torch.arange(numel - 64, numel).to(torch.uint8))
        assert tensor[: 1 << 31].view(-1, 256).sum(dtype=torch.int64).item() == (1 << 23) * 255 * 128


# ---- collectives -----------------------------------------------------------------------------------------


@on_ranks(2, 3, deadline=DEADLINE_S)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.uint8, torch.complex128], ids=str)
def test_all_to_all_of_uneven_columns(world, dtype):
    comm = nccl_comm(world)
    rows, columns = 6, [3 * rank + 1 for rank in range(world.size)]
    spec = ((rows, sum(columns)), dtype, columns, [rows] * world.size)
    plan = _C.plan_all_to_all(world.rank, world.size, [spec], 1, 0)
    whole = torch.cat([pattern((rows, sum(columns)), dtype, rank) for rank in range(world.size)])
    first = sum(columns[: world.rank])
    expected = whole[:, first : first + columns[world.rank]].contiguous()
    for async_op in (False, True):
        output = on_gpu(poison(tuple(expected.shape), dtype))
        mine = on_gpu(pattern((rows, sum(columns)), dtype, world.rank))
        work = comm.exchange(plan, [mine], [output], async_op=async_op, op="all_to_all")
        if async_op:
            work.synchronize()
            assert work.is_completed()
        assert_same(output.cpu(), expected, async_op)


@on_ranks(2, 3, deadline=DEADLINE_S)
def test_broadcast_and_barrier(world):
    comm = nccl_comm(world)
    for source in range(world.size):
        expected = pattern(100_003, torch.float16, source)
        tensor = on_gpu(expected if world.rank == source else poison(100_003, torch.float16))
        comm.broadcast(tensor, source)
        assert_same(tensor.cpu(), expected, source)
    comm.barrier()


# ---- streams -------------------------------------------------------------------------------------------


@on_ranks(2, deadline=DEADLINE_S)
def test_operations_follow_the_current_stream(world):
    """The producer is slow and the consumer reads at once: only stream order makes the result right."""
    comm, peer = nccl_comm(world), 1 - world.rank
    stream = torch.cuda.Stream()
    for round_idx in range(20):
        with torch.cuda.stream(stream):
            sent = torch.zeros(1 << 20, device="cuda")
            received = torch.zeros(1 << 20, device="cuda")
            torch.cuda._sleep(20_000_000)
            sent += round_idx + world.rank
            if round_idx % 2:
                comm.batch_p2p([Send(sent, peer), Recv(received, peer)])
            else:
                comm.batch_p2p([Send(sent, peer), Recv(received, peer)], async_op=True).wait()
            sent.zero_()
            assert received.sum().item() == (round_idx + peer) * (1 << 20)  # read on this stream


# ---- checks and failures ---------------------------------------------------------------------------------


@on_ranks(2, deadline=DEADLINE_S)
@pytest.mark.parametrize("check", ["auto", "full"])
def test_a_disagreement_about_a_message_fails_both(world, check):
    comm = nccl_comm(world, check=check)
    tensor = torch.zeros(4 if world.rank == 0 else 6, device="cuda")
    with pytest.raises(PipeCommMismatch, match=r"float32\[4\].*float32\[6\]|float32\[6\].*float32\[4\]"):
        (comm.isend(tensor, 1) if world.rank == 0 else comm.irecv(tensor, 0)).synchronize()
        comm.barrier()  # it is compared behind the transfer, so that may have been over
    with pytest.raises(PipeCommMismatch):
        comm.barrier()


@on_ranks(2, deadline=DEADLINE_S)
@pytest.mark.parametrize("check", ["auto", "full"])
def test_a_disagreement_about_a_collective_fails_both(world, check):
    comm = nccl_comm(world, check=check)
    tensor = torch.zeros(4 if world.rank == 0 else 6, device="cuda")
    with pytest.raises(PipeCommMismatch, match=r"broadcast of float32\[[46]\]"):
        comm.broadcast(tensor, 0)
        comm.barrier()  # it is compared in parallel with the transfer, so the call may have returned
    with pytest.raises(PipeCommMismatch):
        comm.barrier()


@on_ranks(2, deadline=DEADLINE_S)
def test_a_collective_that_one_rank_refuses_fails_both(world):
    comm = nccl_comm(world)
    for _ in range(2):  # one that both refuse does not
        with pytest.raises(ValueError, match="is on cpu"):
            comm.broadcast(torch.zeros(4), 0)
    tensor = torch.full((4,), float(world.rank), device="cuda")
    comm.broadcast(tensor, 1)
    assert tensor.tolist() == [1.0] * 4
    with pytest.raises(ValueError if world.rank == 0 else PipeCommMismatch, match="is on cpu"):
        comm.broadcast(torch.zeros(4) if world.rank == 0 else torch.zeros(4, device="cuda"), 0)
        comm.barrier()
    with pytest.raises(PipeCommMismatch, match="refused by rank 0"):
        comm.barrier()


@on_ranks(2, deadline=DEADLINE_S)
def test_wrong_tensors_are_rejected(world):
    comm, peer = nccl_comm(world), 1 - world.rank
    for tensor, text in (
        (torch.zeros(4), "is on cpu"),
        (torch.zeros(1, device="cuda").expand(4), "expanded"),
    ):
        with pytest.raises(ValueError, match=text):
            comm.recv(tensor, peer)
    tensor = torch.zeros(4, device="cuda")
    with pytest.raises(ValueError, match="share memory"):
        comm.batch_p2p([Send(tensor, peer), Recv(tensor, peer)])


@on_ranks(2, deadline=DEADLINE_S)
def test_a_message_that_nobody_sends_times_out(world):
    comm = nccl_comm(world, timeout=5)
    tensor = torch.zeros(4, device="cuda")
    comm.connect([1 - world.rank], channels=[0])
    ends_at = time.monotonic() + 40
    while comm.nccl_usage[0] < 2 and time.monotonic() < ends_at:
        time.sleep(0.01)
    comm.barrier()
    began = time.monotonic()
    if world.rank == 0:
        work = comm.irecv(tensor, 1)
        with pytest.raises(PipeCommTimeout, match="still|is not done"):
            work.wait(timeout=0.2)
        with pytest.raises(PipeCommTimeout, match="timed out on the device"):
            work.synchronize()
        assert time.monotonic() - began < 10
    else:
        with pytest.raises(PipeCommTimeout):
            while time.monotonic() - began < 20:
                comm.batch_p2p([])
                time.sleep(0.05)


@on_ranks(2, deadline=DEADLINE_S)
def test_abort_frees_a_kernel_that_waits(world):
    comm = nccl_comm(world)
    comm.barrier()  # else the constructor of the other rank may hear of the abort
    work = comm.irecv(torch.zeros(4, device="cuda"), 1 - world.rank)
    comm.barrier()
    if world.rank == 0:
        comm.abort("enough")
    with pytest.raises(PipeCommAborted, match="enough"):
        work.synchronize()
    began = time.monotonic()
    comm.close()
    torch.cuda.synchronize()
    assert time.monotonic() - began < 15


def receive_until_killed(world):
    comm: Communicator = nccl_comm(world)
    tensor = torch.zeros(1 << 28, device="cuda", dtype=torch.uint8)
    if world.rank == 1:
        world.mark("ready")
        time.sleep(60)
        os._exit(1)
    work = comm.irecv(tensor, 1)
    world.mark("ready")
    try:
        work.synchronize()
    except PipeCommError as error:
        raised_at = time.monotonic()
        comm.close()
        return type(error).__name__, error.origin_rank, raised_at, time.monotonic()
    return None


def test_a_killed_peer_is_noticed(ranks):
    with ranks.disposable(2, receive_until_killed) as world:
        world.await_marks("ready", deadline=DEADLINE_S)
        died_at = world.signal(1, signal.SIGKILL)
        outcome = world.collect(deadline=60)[0]
    name, origin, raised_at, closed_at = outcome.value
    assert (name, origin) == ("PipeCommPeerLost", 1)
    assert raised_at - died_at < 2 and closed_at - died_at < 15
