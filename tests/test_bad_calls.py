"""Wrong calls raise the right error, which names the mistake, and leave the communicator usable.

Either the calling rank refuses before anything is sent, or the two ends find the disagreement and both raise,
naming both descriptions. Unusual calls that are legal are in test_p2p.py.
"""

from __future__ import annotations

import math
import pickle
import re
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
from patterns import assert_same, pattern, poison
from ranks import on_ranks

from pipecomm_ext import (
    _C,
    Communicator,
    PipeCommMismatch,
    Recv,
    Send,
)


def assert_usable(comm: Communicator, key: object) -> None:
    """A full exchange with the next and previous rank, on both channels, and a barrier."""
    following, previous = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    received = [poison(33, torch.float32) for _ in range(2)]
    ops = [
        Send(pattern(33, torch.float32, key, comm.rank, channel), following, channel) for channel in (0, 1)
    ]
    ops += [Recv(received[channel], previous, channel) for channel in (0, 1)]
    comm.batch_p2p(ops)
    for channel in (0, 1):
        assert_same(received[channel], pattern(33, torch.float32, key, previous, channel))
    comm.barrier()


def ones() -> torch.Tensor:
    return torch.ones(4)


# ---- refused on the calling rank -------------------------------------------------------------------------

# name: (call, exception, pattern of the message). Every other wrong argument is in reliability/bad_inputs.py.
REFUSED = {
    "tensor of a batch": (
        lambda c: c.batch_p2p([Send(ones(), 1), Recv("x", 1)]),
        TypeError,
        r"ops\[1\].*str",
    ),
    "own recv shorter than own send": (
        lambda c: c.batch_p2p([Send(torch.ones(6), 0), Recv(torch.ones(5), 0)]),
        ValueError,
        r"\[6\].*\[5\]|\[5\].*\[6\]",
    ),
    "own recv of another dtype": (
        lambda c: c.batch_p2p([Send(ones(), 0), Recv(torch.ones(4, dtype=torch.int32), 0)]),
        ValueError,
        r"float32.*int32|int32.*float32",
    ),
    "recv into a conjugate view": (
        lambda c: c.recv(torch.ones(3, dtype=torch.complex64).conj(), 1),
        ValueError,
        r"conj",
    ),
}


@on_ranks(2)
@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_anything_is_sent(world, name):
    """One rank makes the call, the other none: nothing was sent, and both continue."""
    call, expected, message = REFUSED[name]
    if world.rank == 0:
        with pytest.raises(expected, match=message) as caught:
            call(world.comm)
        assert type(caught.value) is expected, (
            f"{type(caught.value).__name__} is not exactly {expected.__name__}"
        )
    assert_usable(world.comm, name)


@on_ranks(2)
def test_a_batch_is_refused_as_a_whole(world):
    """The good operations before a bad one are not posted."""
    if world.rank == 0:
        received = poison(4, torch.float32)
        with pytest.raises(ValueError):
            world.comm.batch_p2p([Send(ones(), 1), Recv(received, 1), Send(ones(), 5)])
        assert_same(received, poison(4, torch.float32))
    assert_usable(world.comm, "whole")


@on_ranks(4)
def test_a_global_rank_where_a_group_rank_is_meant_is_explained(world):
    """Peers are ranks of the group: in a group of the global ranks 2 and 3, global rank 3 is peer 1."""
    group = dist.new_group([2, 3])
    if world.rank >= 2:
        with Communicator(group, device="cpu") as comm:
            with pytest.raises(ValueError, match=r"\b3\b.*0\.\.1"):
                comm.send(ones(), 3)
            assert_usable(comm, "sub-group")
    else:
        with pytest.raises(ValueError, match=f"rank {world.rank}.*not a member"):
            Communicator(group, device="cpu")


@on_ranks(2)
def test_accepted_kinds_of_peers(world):
    """Whatever operator.index takes, except bool."""
    peer = np.int64(1 - world.rank)
    received = poison(3, torch.int32)
    world.comm.batch_p2p([Send(pattern(3, torch.int32, world.rank), peer), Recv(received, peer, np.uint8(0))])
    assert_same(received, pattern(3, torch.int32, int(peer)))


@on_ranks(2)
def test_an_exchange_follows_one_of_its_own_communicator(world):
    comm, other = world.fresh_comm(), world.fresh_comm()
    spec = ((2,), torch.float32)
    plan = _C.plan_all_to_all_single(world.rank, 2, spec, spec, [1, 1], [1, 1])
    given, taken = torch.ones(2), torch.ones(2)
    work = other.exchange(plan, [given], [taken], async_op=True)
    for wrong in (work, _C.join_works([work, work])):
        with pytest.raises(TypeError, match="after must be the Work of one exchange of this communicator"):
            comm.exchange(plan, [given], [taken], channel=0, after=wrong)
    work.wait()
    comm.exchange(plan, [given], [taken], channel=0)


@on_ranks(2)
def test_a_constructor_with_other_arguments_is_refused_by_both(world):
    """The constructor of the second rank raises, and the first call of the other one."""
    with pytest.raises(PipeCommMismatch, match=r"channels: [23] on rank [01], [23] on rank [01]"):
        Communicator(world.group, device="cpu", channels=2 + world.rank).barrier()
    assert_usable(world.fresh_comm(), "after")


# ---- found by the two ends -------------------------------------------------------------------------------

# What rank 0 sends, and rank 1 receives.
MISMATCHES = {
    "nothing sent": ((0,), torch.float32, (3,), torch.float32),
    "nothing expected": ((3,), torch.float32, (0,), torch.float32),
    "shorter": ((3,), torch.float32, (5,), torch.float32),
    "longer": ((5,), torch.float32, (3,), torch.float32),
    "much longer": ((10**6,), torch.float32, (3,), torch.float32),
    "other dtype of equal bytes": ((4,), torch.float32, (4,), torch.int32),
    "other dtype and shape of equal bytes": ((2,), torch.float64, (4,), torch.float32),
    "other shape of equal elements": ((2, 6), torch.float32, (3, 4), torch.float32),
    "other number of dims": ((12,), torch.float32, (12, 1), torch.float32),
    "scalar and one element": ((), torch.float32, (1,), torch.float32),
}


def assert_mismatch(error: PipeCommMismatch, world, *specs: tuple) -> None:
    """Asserts that it has both descriptions, as text and as data, and both ranks."""
    text = str(error)
    ours, theirs = specs if world.rank == 0 else reversed(specs)
    for side, (shape, dtype) in ((error.ours, ours), (error.theirs, theirs)):
        assert side == {
            "op": "p2p",
            "dtype": str(dtype)[6:],
            "shape": shape,
            "num_bytes": math.prod(shape) * dtype.itemsize,
        }
    assert pickle.loads(pickle.dumps(error)).theirs == error.theirs
    for shape, dtype in specs:
        assert f"{str(dtype)[6:]}{list(shape)}" in text, text
    assert "rank 0" in text and "rank 1" in text, text
    assert (error.rank, error.peer, error.channel) == (world.rank, 1 - world.rank, 0)
    assert isinstance(error.seq, int) and error.op == "p2p"


@on_ranks(2)
@pytest.mark.parametrize("receiver_first", [False, True], ids=["sender first", "receiver first"])
@pytest.mark.parametrize("name", MISMATCHES)
def test_both_ends_of_a_mismatch_raise(world, name, receiver_first):
    """The receive buffer is unchanged, later messages match again, and other channels are not affected."""
    sent_shape, sent_dtype, shape, dtype = MISMATCHES[name]
    if (world.rank == 1) != receiver_first:
        time.sleep(0.02)
    if world.rank == 0:
        with pytest.raises(PipeCommMismatch) as caught:
            world.comm.send(pattern(sent_shape, sent_dtype), 1)
        assert (caught.value.dtype, caught.value.shape) == (str(sent_dtype)[6:], sent_shape)
    else:
        received = poison(shape, dtype)
        with pytest.raises(PipeCommMismatch) as caught:
            world.comm.recv(received, 0)
        assert_same(received, poison(shape, dtype), "a refused receive")
        assert (caught.value.dtype, caught.value.shape) == (str(dtype)[6:], shape)
    assert_mismatch(caught.value, world, (sent_shape, sent_dtype), (shape, dtype))
    assert_usable(world.comm, name)


@on_ranks(2)
def test_dims_beyond_those_in_the_message_are_compared(world):
    lengths = [2, 3] if world.rank == 0 else [3, 2]
    with pytest.raises(PipeCommMismatch, match="with other further dims"):
        if world.rank == 0:
            world.comm.send(torch.ones([1] * 8 + lengths), 1)
        else:
            world.comm.recv(torch.empty([1] * 8 + lengths), 0)
    assert_usable(world.comm, "many dims")


@on_ranks(2)
def test_two_swapped_messages_are_found(world):
    """A batch that receives in another order than the peer sends."""
    shapes = [(3,), (4, 4)]
    if world.rank == 0:
        with pytest.raises(PipeCommMismatch, match=re.escape("float32[3]")):
            world.comm.batch_p2p([Send(pattern(shape, torch.float32), 1) for shape in shapes])
    else:
        with pytest.raises(PipeCommMismatch, match=re.escape("float32[4, 4]")):
            world.comm.batch_p2p([Recv(poison(shape, torch.float32), 0) for shape in reversed(shapes)])
    assert_usable(world.comm, "swapped")


@on_ranks(2)
def test_each_of_several_mismatches_reaches_its_sender(world):
    """Even if all of them are found before the sender sees the first one."""
    if world.rank == 0:
        works = [world.comm.isend(torch.ones(2), 1) for _ in range(8)]
        dist.barrier(world.group)
    else:
        dist.barrier(world.group)
        works = [world.comm.batch_p2p([Recv(torch.ones(3), 0) for _ in range(8)], async_op=True)]
    for work in works:
        with pytest.raises(PipeCommMismatch):
            work.wait()
    assert_usable(world.comm, "several")


@on_ranks(3)
def test_a_mismatch_concerns_its_two_ends_only(world):
    """Rank 2 exchanges messages with both meanwhile, and the good messages of the same batch arrive."""
    if world.rank == 2:
        received = [poison(5, torch.int32) for _ in range(2)]
        world.comm.batch_p2p([Recv(received[peer], peer) for peer in range(2)])
        for peer in range(2):
            assert_same(received[peer], pattern(5, torch.int32, peer))
    else:
        bad = Send(torch.ones(2), 1) if world.rank == 0 else Recv(torch.ones(3), 0)
        with pytest.raises(PipeCommMismatch):
            world.comm.batch_p2p([bad, Send(pattern(5, torch.int32, world.rank), 2)])
    assert_usable(world.comm, "third")


@on_ranks(2)
def test_a_mismatch_reaches_a_handle_that_is_waited_for_later_and_again(world):
    if world.rank == 0:
        work = world.comm.isend(torch.ones(2), 1)
    else:
        work = world.comm.irecv(torch.ones(3), 0)
    assert_usable(world.comm, "before the wait")
    for _ in range(2):
        with pytest.raises(PipeCommMismatch):
            work.wait()
    assert work.is_completed()


@on_ranks(2, 4)
def test_another_collective_is_named_beside_the_own_one(world):
    with pytest.raises(PipeCommMismatch, match="broadcast.*barrier|barrier.*broadcast"):
        world.comm.barrier() if world.rank == 1 else world.comm.broadcast(ones(), 0)
    assert_usable(world.comm, "another collective")


@on_ranks(2, 3)
@pytest.mark.parametrize("empty", [False, True], ids=["full", "own and empty"])
def test_lists_of_as_many_bytes_of_another_dtype(world, empty):
    """Only pieces with elements: empty ones have no dtype to compare."""
    dtype = torch.int32 if world.rank == 1 else torch.float32
    shapes = [(0 if empty and rank != world.rank else 4, 2) for rank in range(world.size)]
    inputs = [pattern(shape, dtype, world.rank) for shape in shapes]
    outputs = [poison(shape, dtype) for shape in shapes]
    if empty:
        world.comm.all_to_all(inputs, outputs)
    else:
        with pytest.raises(PipeCommMismatch, match=r"int32\[4, 2\].*float32|float32\[4, 2\].*int32"):
            world.comm.all_to_all(inputs, outputs)
        assert_same(outputs[0 if world.rank == 1 else 1], poison((4, 2), dtype), "not received")
    assert_usable(world.comm, "lists")
