"""ulysses_attention: values, its chunks and when they are sent, the heads of each rank.

Tests that it shares with other attentions are in test_sequence_attention.py.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from attention_cases import HEADS, plain_attention, ulysses_way, whole_tensors
from ranks import on_ranks
from sequence_cases import Seen, num_posted, numbers

from pipecomm_ext import gather_forward_split_backward, ulysses_attention
from pipecomm_ext.sequence_parallel import ulysses
from pipecomm_ext.sequence_parallel.head_chunks import best_num_chunks, head_chunks, kv_head_of


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (8, 2), (5, 5), (6, 1), (1, 1), (7, 3)])
@on_ranks(1, 3, 4)
def test_equal_to_attention_of_the_whole(world, heads, kv_heads):
    for chunks, (length, is_causal) in itertools.product((1, 3), ((11, True), (2, False))):
        ulysses_way(world, chunks).check(whole_tensors(2, length, heads, kv_heads), is_causal)


@on_ranks(2)
def test_communication_runs_beside_attention(world):
    """While a chunk is computed, exchanges of the next ones' heads and of the last result are in flight; the
    same in the backward.
    """
    world.comm.barrier()
    comm, seen, start = world.comm, [], num_posted(world.comm)

    def note(what):
        seen.append((what, num_posted(comm) - start))

    def attention(q, k, v):
        return plain_attention(Seen.apply(note, q), k, v)

    local = [numbers((1, 3, 8, 4), torch.float64, name, world.rank).requires_grad_() for name in "qkv"]
    ulysses_attention(*local, attention, comm, chunks=4).sum().backward()
    # Forward: three exchanges in, then one out after each chunk, and in for the last chunk. Backward: eight
    # before, three back, then those of attention's first chunk, and the last one back.
    assert seen == [("forward", 3), ("forward", 5), ("forward", 6), ("forward", 7)] + [
        ("backward", 11),
        ("backward", 13),
        ("backward", 14),
        ("backward", 15),
    ]


@on_ranks(2)
def test_own_attention(world):
    """It gets whole sequences, some heads, no more key/value heads than exist, and the keywords."""
    shapes = []

    def attention(q, k, v, factor):
        shapes.append((tuple(q.shape), tuple(k.shape)))
        return q * factor

    q, k, v = (
        numbers((1, 3, 8, 4), torch.float32, "q"),
        *(numbers((1, 3, 4, 4), torch.float32, name) for name in "kv"),
    )
    result = ulysses_attention(q, k, v, attention, world.comm, chunks=2, factor=3)
    assert torch.equal(result, q * 3) and result.data_ptr() != q.data_ptr()
    assert shapes == [((1, 6, 2, 4), (1, 6, 1, 4))] * 2


@on_ranks(3)
def test_heads_that_do_not_divide_come_one_for_each_query_head(world):
    seen = []

    def attention(q, k, v):
        seen.append((q.size(HEADS), k.size(HEADS)))
        return plain_attention(q, k, v)

    q, k, v = (numbers((1, 2, heads, 4), torch.float64, "x", world.rank) for heads in (8, 2, 2))
    ulysses_attention(q, k, v, attention, world.comm, chunks=1)
    assert seen == [(3, 1), (3, 3), (2, 1)][world.rank : world.rank + 1]  # heads 3, 4, 5 read 0, 1, 1


# ---- which heads, how many chunks -------------------------------------------------------------------------


def test_every_head_goes_to_one_rank_with_what_it_reads():
    for kv_heads, group, num_ranks, num_chunks in itertools.product(
        range(1, 7), (1, 1.5, 2, 3, 8), range(1, 6), (1, 2, 3, 5)
    ):
        num_heads = int(kv_heads * group)
        heads = head_chunks(num_heads, kv_heads, num_ranks, num_chunks)
        taken = []
        for rank in range(num_ranks):
            arrived = []
            for chunk in range(num_chunks):
                start, size = heads.q_starts[chunk][rank], heads.q_sizes[chunk][rank]
                kv_start, kv_size = heads.kv_starts[chunk][rank], heads.kv_sizes[chunk][rank]
                arrived += range(kv_start, kv_start + kv_size)
                taken.append((rank, start, size))
                assert {
                    kv_head_of(head, heads.num_heads, kv_heads) for head in range(start, start + size)
                } <= set(arrived)
            assert len(arrived) == len(set(arrived))  # once
            read = {
                kv_head_of(head, heads.num_heads, kv_heads)
                for r, start, size in taken
                if r == rank
                for head in range(start, start + size)
            }
            assert read == set(arrived)  # and only what is read
        assert [head for _, start, size in taken for head in range(start, start + size)] == list(
            range(num_heads)
        )
        if kv_heads % num_ranks == 0 and num_heads % kv_heads == 0:
            assert heads.received == tuple(range(kv_heads))  # nothing twice


@on_ranks(2, 3)
def test_ranks_with_other_lengths_choose_alike(world):
    """The model gets the same numbers on all ranks, also on one without tokens."""
    asked = []

    def note(transport, device, *numbers):
        asked.append(numbers)
        return 1

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ulysses, "best_num_chunks", note)
        for length in (world.size - 1, 5):
            ulysses_way(world).check(whole_tensors(2, length, 4, 2), False)
    told = torch.tensor(asked, dtype=torch.float64)
    everywhere = gather_forward_split_backward(told[None], world.comm, 0)
    assert torch.equal(everywhere, told.expand_as(everywhere)) and told.all()


def test_number_of_chunks():
    assert best_num_chunks("shm", "cpu", 1 << 30, 1e12, 8) == 1
    assert best_num_chunks("tcp", "cpu", 1 << 10, 1e3, 8) == 1  # a message costs more than it hides
    assert best_num_chunks("tcp", "cpu", 1 << 30, 1e11, 8) == 8
    assert best_num_chunks("tcp", "cpu", 1 << 30, 1e11, 1) == 1
    assert 1 < best_num_chunks("nccl", "cuda", 1 << 28, 1e12, 16) <= 16
