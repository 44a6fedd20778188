"""Messages arrive where they belong and in order: channels, dtypes, sizes, layouts, handles."""

from __future__ import annotations

import gc
import random
import threading
import time

import pytest
import torch
from patterns import DTYPES, assert_same, pattern, poison
from ranks import on_ranks

from pipecomm_ext import Recv, Send, Work

EDGE_SIZES = [0, 1, 2, 15, 16, 17, 255, 4095, 4096, 4097, 65535, 65536, 65537]

# ---- order and channels ----------------------------------------------------------------------------------


def message(sender: int, receiver: int, channel: int, position: int) -> torch.Tensor:
    """Sizes differ from message to message, so that a swap cannot go unnoticed even by luck."""
    numel = 1 + (sender * 7 + receiver * 5 + channel * 3 + position * 11) % 29
    return pattern(numel, torch.float32, "message", sender, receiver, channel, position)


def neighbours(world) -> list[int]:
    """Previous and next stage; one rank if they are the same, but then it plays both parts."""
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
def test_activations_and_gradients_in_one_batch_are_never_swapped(world, seed):
    """Each rank orders sends and receives of the two channels as it likes."""
    rng = random.Random(f"{seed} {world.rank}")
    sends, recvs = pipeline_traffic(world, num_micro=8)
    ops = interleave({**sends, 2: [r for r, _ in recvs[0]], 3: [r for r, _ in recvs[1]]}, rng)
    world.comm.batch_p2p(ops)
    for channel in recvs:
        for position, (recv, expected) in enumerate(recvs[channel]):
            assert_same(recv.tensor, expected, f"channel {channel}, message {position}")


@on_ranks(2, 3, 4, 5)
@pytest.mark.parametrize("seed", range(4))
def test_activations_and_gradients_in_separate_batches_are_never_swapped(world, seed):
    """The same traffic cut into random batches, other ones on every rank, waited for in random order."""
    rng = random.Random(f"{seed} {world.rank}")
    sends, recvs = pipeline_traffic(world, num_micro=8)
    ops = interleave({**sends, 2: [r for r, _ in recvs[0]], 3: [r for r, _ in recvs[1]]}, rng)
    works = []
    while ops:
        num_ops = rng.randint(1, 4)
        works.append(world.comm.batch_p2p(ops[:num_ops], async_op=True))
        ops = ops[num_ops:]
    rng.shuffle(works)
    for work in works:
        work.wait()
    for channel in recvs:
        for position, (recv, expected) in enumerate(recvs[channel]):
            assert_same(recv.tensor, expected, f"channel {channel}, message {position}")


@on_ranks(2, 3)
def test_channels_are_independent(world):
    """A channel whose messages nobody receives yet does not hold up another."""
    previous, following = neighbours(world)
    late = world.comm.isend(message(world.rank, following, 0, 0), following, channel=0)
    expected = message(previous, world.rank, 1, 0)
    received = poison(expected.shape, expected.dtype)
    world.comm.batch_p2p(
        [Send(message(world.rank, following, 1, 0), following, 1), Recv(received, previous, 1)]
    )
    assert_same(received, expected)
    assert not late.is_completed()
    world.comm.barrier()
    expected = message(previous, world.rank, 0, 0)
    received = poison(expected.shape, expected.dtype)
    world.comm.recv(received, previous, channel=0)
    late.wait()
    assert_same(received, expected)


@on_ranks(2, 4)
def test_all_pairs_at_once(world):
    others = [rank for rank in range(world.size) if rank != world.rank]
    sends = [Send(message(world.rank, other, 0, 0), other) for other in others]
    expected = [message(other, world.rank, 0, 0) for other in others]
    recvs = [
        Recv(poison(tensor.shape, tensor.dtype), other)
        for other, tensor in zip(others, expected, strict=True)
    ]
    world.comm.batch_p2p(sends + recvs)
    for recv, tensor in zip(recvs, expected, strict=True):
        assert_same(recv.tensor, tensor, f"from rank {recv.peer}")


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


@on_ranks(2)
def test_both_ranks_send_first_above_any_buffer(world):
    """Large messages in both directions, sends posted first on both sides: no deadlock."""
    numel = 64 * 2**20
    peer = 1 - world.rank
    received = torch.empty(numel, dtype=torch.uint8)
    send = world.comm.isend(torch.full((numel,), 10 + world.rank, dtype=torch.uint8), peer)
    recv = world.comm.irecv(received, peer)
    send.wait()
    recv.wait()
    assert received.eq(10 + peer).all()


# ---- what is moved ---------------------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_moves_as_bytes(world, dtype):
    peer = 1 - world.rank
    received = poison((3, 5), dtype)
    world.comm.batch_p2p([Send(pattern((3, 5), dtype, world.rank), peer), Recv(received, peer)])
    assert_same(received, pattern((3, 5), dtype, peer))


@on_ranks(2)
def test_edge_sizes_between_guards(world):
    """Every size of the edges, at misaligned offsets, between guard bytes that must not change."""
    peer = 1 - world.rank
    guard = 64
    for size_idx, num_bytes in enumerate(EDGE_SIZES):
        offset = guard + size_idx % 16
        buffer = poison(num_bytes + 2 * guard + 16, torch.uint8)
        source = torch.zeros(num_bytes + 3, dtype=torch.uint8)[3:]
        source.copy_(pattern(num_bytes, torch.uint8, world.rank, num_bytes))
        world.comm.batch_p2p([Send(source, peer), Recv(buffer[offset : offset + num_bytes], peer)])
        assert_same(
            buffer[offset : offset + num_bytes], pattern(num_bytes, torch.uint8, peer, num_bytes), num_bytes
        )
        outside = torch.cat([buffer[:offset], buffer[offset + num_bytes :]])
        assert_same(outside, poison(outside.shape, torch.uint8), f"guards of {num_bytes} bytes")


@on_ranks(2)
@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0, 2), (2, 3, 4, 5), (1,) * 12, (2,) * 10])
def test_shapes_of_any_rank(world, shape):
    peer = 1 - world.rank
    received = poison(shape, torch.float32)
    world.comm.batch_p2p([Send(pattern(shape, torch.float32, world.rank), peer), Recv(received, peer)])
    assert_same(received, pattern(shape, torch.float32, peer))


@on_ranks(2)
def test_empty_messages_keep_their_place_in_the_order(world):
    peer = 1 - world.rank
    sizes = [3, 0, 0, 2, 0]
    recvs = [Recv(poison(numel, torch.int16), peer) for numel in sizes]
    sends = [Send(pattern(numel, torch.int16, world.rank, idx), peer) for idx, numel in enumerate(sizes)]
    world.comm.batch_p2p(sends + recvs)
    for idx, recv in enumerate(recvs):
        assert_same(recv.tensor, pattern(sizes[idx], torch.int16, peer, idx), idx)


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
        assert tensor.count_nonzero() == len(starts) + 1


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


def transposed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.t()


def every_second(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:, ::2]


def conjugated(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex64).conj()


def negated(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex64).conj().imag


def expanded(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:1].expand(7, -1)


@on_ranks(2)
@pytest.mark.parametrize("view", [transposed, every_second, conjugated, negated, expanded])
def test_a_view_is_sent_by_its_values(world, view):
    peer = 1 - world.rank
    values = {rank: view(torch.arange(24.0).reshape(4, 6) + 100 * rank + 1j * rank) for rank in range(2)}
    if view in (transposed, every_second, expanded):
        values = {rank: tensor.real for rank, tensor in values.items()}
    expected = values[peer].resolve_conj().resolve_neg().contiguous()
    received = poison(expected.shape, expected.dtype)
    world.comm.batch_p2p([Send(values[world.rank], peer), Recv(received, peer)])
    assert torch.equal(received, expected)


@on_ranks(2)
def test_a_strided_receive_writes_its_elements_only(world):
    peer = 1 - world.rank
    target = poison((6, 8), torch.int32)
    world.comm.batch_p2p([Send(pattern((3, 8), torch.int32, world.rank), peer), Recv(target[::2], peer)])
    assert_same(target[::2], pattern((3, 8), torch.int32, peer))
    assert_same(target[1::2], poison((3, 8), torch.int32), "rows between")


@on_ranks(2)
def test_a_strided_irecv_is_in_place_when_the_wait_returns(world):
    peer = 1 - world.rank
    target = poison((5, 4), torch.float32)
    recv = world.comm.irecv(target.t(), peer)
    world.comm.send(pattern((4, 5), torch.float32, world.rank), peer)
    recv.wait()
    assert_same(target.t(), pattern((4, 5), torch.float32, peer))


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
def test_receiving_is_seen_by_autograd(world):
    """A receive into a tensor that a graph saved makes backward raise, as any in-place change does."""
    peer = 1 - world.rank
    weight = torch.ones(4, requires_grad=True)
    saved = torch.full((4,), 3.0)
    loss = (weight * saved).sum()
    world.comm.batch_p2p([Send(torch.zeros(4), peer), Recv(saved, peer)])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@on_ranks(2)
def test_a_leaf_may_be_filled_under_no_grad_and_sent_with_its_graph(world):
    peer = 1 - world.rank
    leaf = torch.zeros(4, requires_grad=True)
    sent = (torch.full((4,), float(world.rank), requires_grad=True) * 2).contiguous()
    with torch.no_grad():
        world.comm.batch_p2p([Send(sent, peer), Recv(leaf, peer)])
    assert torch.equal(leaf.detach(), torch.full((4,), 2.0 * peer)) and leaf.requires_grad


# ---- handles ---------------------------------------------------------------------------------------------


@on_ranks(2)
def test_dropped_handles_are_delivered(world):
    """The operation holds its tensors; neither the handle nor the sender's tensor need live."""
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


@on_ranks(2)
def test_waiting_twice_and_from_another_thread(world):
    peer = 1 - world.rank
    received = poison(10, torch.int32)
    work = world.comm.batch_p2p(
        [Send(pattern(10, torch.int32, world.rank), peer), Recv(received, peer)], async_op=True
    )
    assert isinstance(work, Work)
    errors = []

    def wait():
        try:
            work.wait()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=wait) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    work.wait()
    work.wait(timeout=1)
    assert not errors and work.is_completed()
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
    errors = []

    def talk(channel):
        try:
            for idx in range(50):
                received = poison(257, torch.int32)
                comm.batch_p2p(
                    [
                        Send(pattern(257, torch.int32, world.rank, channel, idx), peer, channel),
                        Recv(received, peer, channel),
                    ]
                )
                assert_same(received, pattern(257, torch.int32, peer, channel, idx), (channel, idx))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=talk, args=(channel,)) for channel in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


@on_ranks(2)
def test_an_empty_batch_is_complete(world):
    assert world.comm.batch_p2p([]) is None
    work = world.comm.batch_p2p([], async_op=True)
    assert work.is_completed()
    work.wait()
