"""Messages arrive at the right place and in order: channels, dtypes, sizes, layouts, handles."""

from __future__ import annotations

import functools
import gc
import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from patterns import DTYPES, assert_same, pattern, poison
from ranks import on_ranks

from pipecomm_ext import Recv, Send, Work

EDGE_SIZES = [0, 1, 2, 15, 16, 17, 255, 4095, 4096, 4097, 65535, 65536, 65537]

# ---- order and channels ----------------------------------------------------------------------------------


def message(sender: int, receiver: int, channel: int, position: int) -> torch.Tensor:
    """Sizes differ from message to message, so that a swap is always detected; some are 0."""
    numel = (sender * 7 + receiver * 5 + channel * 3 + position * 11) % 23
    return pattern(numel, torch.float32, "message", sender, receiver, channel, position)


def neighbours(world) -> list[int]:
    """The previous and the next stage; if they are the same rank, it has both roles."""
    return [(world.rank - 1) % world.size, (world.rank + 1) % world.size]


def interleave(per_channel: dict[int, list], rng: random.Random) -> list:
    """A random merge that keeps the order within each channel."""
    queues = [list(queue) for queue in per_channel.values()]
    merged = []
    while any(queues):
        queue = rng.choice([queue for queue in queues if queue])
        merged.append(queue.pop(0))
    return merged


Sends = dict[int, list[Send]]  # by channel
Expected = dict[int, list[tuple[Recv, torch.Tensor]]]


def pipeline_traffic(world, num_micro: int) -> tuple[Sends, Expected]:
    """Activations to the next rank on channel 0, gradients to the previous on channel 1, as a ring."""
    previous, following = neighbours(world)
    sends = {0: [], 1: []}
    recvs = {0: [], 1: []}
    for channel, destination, source in [(0, following, previous), (1, previous, following)]:
        for position in range(num_micro):
            sends[channel].append(
                Send(message(world.rank, destination, channel, position), destination, channel)
            )
            expected = message(source, world.rank, channel, position)
            recv = Recv(poison(expected.shape, expected.dtype), source, channel)
            recvs[channel].append((recv, expected))
    return sends, recvs


@on_ranks(2, 3, 4, 5)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("longest", [10**6, 4], ids=["one batch", "separate batches"])
def test_activations_and_gradients_are_never_swapped(world, longest, seed):
    """Each rank interleaves sends and receives of the two channels at random, and cuts them into batches of
    random lengths that it waits for in random order.
    """
    rng = random.Random(f"{seed} {world.rank}")
    sends, recvs = pipeline_traffic(world, num_micro=8)
    ops = interleave({**sends, 2: [r for r, _ in recvs[0]], 3: [r for r, _ in recvs[1]]}, rng)
    works = []
    while ops:
        num_ops = len(ops) if longest > len(ops) else rng.randint(1, longest)
        works.append(world.comm.batch_p2p(ops[:num_ops], async_op=True))
        ops = ops[num_ops:]
    rng.shuffle(works)
    for work in works:
        work.wait()
    for channel in recvs:
        for position, (recv, expected) in enumerate(recvs[channel]):
            assert_same(recv.tensor, expected, f"channel {channel}, message {position}")


@on_ranks(2)
def test_every_channel_of_a_communicator_works(world):
    comm = world.shared_comm(channels=15)
    peer = 1 - world.rank
    recvs = [Recv(poison(3, torch.int32), peer, channel) for channel in range(15)]
    sends = [
        Send(pattern(3, torch.int32, world.rank, channel), peer, channel) for channel in reversed(range(15))
    ]
    comm.batch_p2p(recvs + sends)
    for channel, recv in enumerate(recvs):
        assert_same(recv.tensor, pattern(3, torch.int32, peer, channel), f"channel {channel}")


# ---- what is moved ---------------------------------------------------------------------------------------


SHAPES = [(), (1,), (0,), (3, 0, 2), (2, 3, 4, 5), (1,) * 12, (2,) * 10]
SPECS = [((3, 5), dtype) for dtype in DTYPES] + [(shape, torch.float32) for shape in SHAPES]


def swap(world, sent: torch.Tensor, received: torch.Tensor) -> None:
    """Sends to the other of two ranks, and receives from it."""
    peer = 1 - world.rank
    world.comm.batch_p2p([Send(sent, peer), Recv(received, peer)])


@on_ranks(2)
@pytest.mark.parametrize(("shape", "dtype"), SPECS, ids=str)
def test_every_dtype_moves_as_bytes_in_any_shape(world, shape, dtype):
    received = poison(shape, dtype)
    swap(world, pattern(shape, dtype, world.rank), received)
    assert_same(received, pattern(shape, dtype, 1 - world.rank))


@on_ranks(2)
def test_edge_sizes_between_guards(world):
    """Every edge size, at misaligned offsets, between guard bytes that must not change."""
    peer = 1 - world.rank
    guard = 64
    for size_idx, num_bytes in enumerate(EDGE_SIZES):
        offset = guard + size_idx % 16
        buffer = poison(num_bytes + 2 * guard + 16, torch.uint8)
        source = torch.zeros(num_bytes + 3, dtype=torch.uint8)[3:]
        source.copy_(pattern(num_bytes, torch.uint8, world.rank, num_bytes))
        swap(world, source, buffer[offset : offset + num_bytes])
        assert_same(
            buffer[offset : offset + num_bytes], pattern(num_bytes, torch.uint8, peer, num_bytes), num_bytes
        )
        outside = torch.cat([buffer[:offset], buffer[offset + num_bytes :]])
        assert_same(outside, poison(outside.shape, torch.uint8), f"guards of {num_bytes} bytes")


@on_ranks(2)
@pytest.mark.timeout(110)
def test_more_than_2_to_the_31_bytes(world):
    """One message of 2^31 + 64 bytes; position-coded blocks show any wrap of an offset."""
    num_bytes, block = 2**31 + 64, 1 << 20
    tensor = torch.zeros(num_bytes, dtype=torch.uint8)
    starts = range(0, num_bytes, block)
    if world.rank == 0:
        for block_idx, start in enumerate(starts):
            tensor[start] = block_idx % 251 + 1
        tensor[-1] = 77
        world.comm.send(tensor, 1)
    else:
        world.comm.recv(tensor, 0)
        codes = tensor[::block].clone()
        assert codes.tolist() == [block_idx % 251 + 1 for block_idx in range(len(starts))]
        assert tensor[-1] == 77
        assert tensor.view(torch.int64).count_nonzero() == len(starts) + 1


@on_ranks(2)
def test_a_batch_of_100_000_operations(world):
    num_messages = 50_000
    peer = 1 - world.rank
    mine = torch.arange(num_messages, dtype=torch.int64) * 2 + world.rank
    theirs = torch.full((num_messages,), -1)
    ops = [Send(mine[idx], peer, idx % 2) for idx in range(num_messages)]
    ops += [Recv(theirs[idx], peer, idx % 2) for idx in range(num_messages)]
    world.comm.batch_p2p(ops)
    assert_same(theirs, torch.arange(num_messages, dtype=torch.int64) * 2 + peer)


VIEWS = {
    "transposed": lambda tensor: tensor.real.t(),
    "every second": lambda tensor: tensor.real[:, ::2],
    "conjugated": lambda tensor: tensor.conj(),
    "negated": lambda tensor: tensor.conj().imag,
    "expanded": lambda tensor: tensor.real[:1].expand(7, -1),
}


@on_ranks(2)
@pytest.mark.parametrize("view", VIEWS)
def test_a_view_is_sent_by_its_values(world, view):
    values = [VIEWS[view](torch.arange(24.0).reshape(4, 6) + 100 * rank + 1j * rank) for rank in range(2)]
    expected = values[1 - world.rank].resolve_conj().resolve_neg().contiguous()
    received = poison(expected.shape, expected.dtype)
    swap(world, values[world.rank], received)
    assert torch.equal(received, expected)


@on_ranks(2)
def test_a_strided_irecv_has_written_its_elements_only_when_the_wait_returns(world):
    peer, target = 1 - world.rank, poison((6, 8), torch.int32)
    recv = world.comm.irecv(target[::2].t(), peer)
    world.comm.send(pattern((8, 3), torch.int32, world.rank), peer)
    recv.wait()
    assert_same(target[::2].t(), pattern((8, 3), torch.int32, peer))
    assert_same(target[1::2], poison((3, 8), torch.int32), "rows between")


@on_ranks(3)
def test_the_same_tensor_may_go_to_several_peers(world):
    if world.rank == 0:
        tensor = pattern(1000, torch.float32, "shared")
        world.comm.batch_p2p([Send(tensor, 1), Send(tensor, 2), Send(tensor, 1)])
    else:
        recvs = [Recv(poison(1000, torch.float32), 0) for _ in range(2 if world.rank == 1 else 1)]
        world.comm.batch_p2p(recvs)
        for recv in recvs:
            assert_same(recv.tensor, pattern(1000, torch.float32, "shared"))


@on_ranks(1, 2)
def test_a_message_to_oneself_is_copied_within_the_batch(world):
    received = [poison(9, torch.int64) for _ in range(2)]
    ops = [Send(pattern(9, torch.int64, idx), world.rank) for idx in range(2)]
    ops += [Recv(tensor, world.rank) for tensor in received]
    world.comm.batch_p2p(ops)
    for idx, tensor in enumerate(received):
        assert_same(tensor, pattern(9, torch.int64, idx))


@on_ranks(2)
def test_a_leaf_may_be_filled_under_no_grad_and_sent_with_its_graph(world):
    leaf = torch.zeros(4, requires_grad=True)
    sent = (torch.full((4,), float(world.rank), requires_grad=True) * 2).contiguous()
    with torch.no_grad():
        swap(world, sent, leaf)
    assert torch.equal(leaf.detach(), torch.full((4,), 2.0 * (1 - world.rank))) and leaf.requires_grad


# ---- handles ---------------------------------------------------------------------------------------------


@on_ranks(2)
def test_dropped_handles_are_delivered(world):
    """The operation keeps its tensors; neither the handle nor the sender's tensor must be kept."""
    peer = 1 - world.rank
    for idx in range(50):
        world.comm.isend(pattern(1000, torch.float32, world.rank, idx), peer)
    gc.collect()
    for idx in range(50):
        received = poison(1000, torch.float32)
        world.comm.recv(received, peer)
        assert_same(received, pattern(1000, torch.float32, peer, idx), idx)


@on_ranks(2)
def test_a_buffer_that_is_resized_or_dropped_in_flight_is_still_delivered(world):
    peer = 1 - world.rank
    tensor = pattern(100_000, torch.float32, world.rank)
    work = world.comm.isend(tensor, peer)
    tensor.set_()
    del tensor
    received = poison(100_000, torch.float32)
    target = received.clone()
    recv = world.comm.irecv(target, peer)
    view = target.view(-1)
    del target
    recv.wait()
    work.wait()
    assert_same(view, pattern(100_000, torch.float32, peer))


def in_threads(calls) -> None:
    """Runs the calls in threads; raises the first of their errors."""
    with ThreadPoolExecutor(len(calls)) as pool:
        for future in [pool.submit(call) for call in calls]:
            future.result(timeout=60)


@on_ranks(2)
def test_waiting_twice_and_from_another_thread(world):
    peer = 1 - world.rank
    received = poison(10, torch.int32)
    work = world.comm.batch_p2p(
        [Send(pattern(10, torch.int32, world.rank), peer), Recv(received, peer)], async_op=True
    )
    assert isinstance(work, Work)
    in_threads([work.wait] * 4)
    work.wait()
    work.wait(timeout=1)
    assert work.is_completed()
    assert_same(received, pattern(10, torch.int32, peer))


@on_ranks(2)
def test_completion_is_seen_without_waiting(world):
    """is_completed() polls and never blocks; a send is complete once the receiver has accepted it."""
    if world.rank == 0:
        work = world.comm.isend(pattern(100, torch.uint8, "polled"), 1)
        time.sleep(0.05)
        assert not work.is_completed(), "nobody has posted the receive yet"
        world.comm.send(torch.zeros(1), 1, channel=1)
    else:
        world.comm.recv(torch.ones(1), 0, channel=1)
        received = poison(100, torch.uint8)
        work = world.comm.irecv(received, 0)
    until = time.monotonic() + 60
    while not work.is_completed():
        assert time.monotonic() < until
        time.sleep(0.001)
    if world.rank == 1:
        assert_same(received, pattern(100, torch.uint8, "polled"))


@on_ranks(2)
def test_threads_may_post_on_channels_of_their_own(world):
    comm = world.shared_comm(channels=4)
    peer = 1 - world.rank

    def talk(channel):
        for idx in range(50):
            sent, received = pattern(257, torch.int32, world.rank, channel, idx), poison(257, torch.int32)
            comm.batch_p2p([Send(sent, peer, channel), Recv(received, peer, channel)])
            assert_same(received, pattern(257, torch.int32, peer, channel, idx), (channel, idx))

    in_threads([functools.partial(talk, channel) for channel in range(4)])


@on_ranks(2)
def test_an_empty_batch_is_complete(world):
    assert world.comm.batch_p2p([]) is None
    work = world.comm.batch_p2p([], async_op=True)
    assert work.is_completed()
    work.wait()


@on_ranks(2)
def test_receiving_is_seen_by_autograd(world):
    """A receive into a tensor that a graph saved makes backward raise, as any in-place change does."""
    peer = 1 - world.rank
    weight = torch.ones(4, requires_grad=True)
    saved = torch.full((4,), 3.0)
    loss = (weight * saved).sum()
    world.comm.batch_p2p([Send(torch.zeros(4), peer), Recv(saved, peer)])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
