"""zigzag_attention: values, balance, what is exchanged.

Tests that it shares with other attentions are in test_sequence_attention.py.
"""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from attention_cases import SEQ, plain_attention, whole_tensors, zigzag, zigzag_way
from ranks import on_ranks
from sequence_cases import numbers
from torch.autograd import forward_ad

from pipecomm_ext import load_balanced_split_forward_gather_backward, zigzag_attention
from pipecomm_ext.sequence_parallel.zigzag_exchange import ZigzagLayout, read_plan


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (8, 2), (5, 5), (7, 3)])
@on_ranks(1, 2, 3, 4)
def test_equal_to_attention_of_the_whole(world, heads, kv_heads, is_causal):
    """Also with slices of unequal lengths, and without slices on some ranks."""
    for length in (24, 13, 2 * world.size - 1, 1):
        zigzag_way(world).check(whole_tensors(2, length, heads, kv_heads), is_causal)


@on_ranks(2, 4)
def test_takes_what_the_zigzag_split_gives(world):
    whole = whole_tensors(1, 16, 4, 2, dtype=torch.float32)
    pieces = [load_balanced_split_forward_gather_backward(tensor, world.comm, SEQ) for tensor in whole]
    result = zigzag_attention(*pieces, None, world.comm, is_causal=True)
    expected = load_balanced_split_forward_gather_backward(plain_attention(*whole, True), world.comm, SEQ)
    torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@on_ranks(2)
def test_dtypes(world, dtype):
    whole = whole_tensors(1, 8, 4, 2, dtype=dtype)
    result = zigzag_attention(*zigzag_way(world).leaves(whole), None, world.comm, is_causal=True)
    assert result.dtype == dtype
    expected = plain_attention(*(tensor.double() for tensor in whole), True)
    mine = zigzag(expected, world.rank, world.size)
    tolerance = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(result.double(), mine, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("is_causal", [True, False])
@on_ranks(1, 2, 3, 4)
def test_every_rank_has_as_many_pairs(world, is_causal):
    """The pairs of a query and a key that it reads."""
    length = 6 * world.size
    pairs, calls = [], []

    def counting(q, k, v, *, is_causal):
        ones = torch.ones(1, q.size(SEQ), k.size(SEQ), dtype=torch.bool)
        read = ones.tril(k.size(SEQ) - q.size(SEQ)) if is_causal else ones
        pairs.append(int(read.sum()))
        calls.append((q.size(SEQ), k.size(SEQ)))
        return q.clone()

    local = zigzag_way(world).leaves(whole_tensors(1, length, 2, 2))
    zigzag_attention(*local, counting, world.comm, is_causal=is_causal)
    whole = length * (length + 1) // 2 if is_causal else length**2
    assert sum(pairs) == whole / world.size
    if is_causal and world.size > 1:
        assert calls == [(3, 3 * (world.rank + 1)), (3, length - 3 * world.rank)]
    else:
        assert calls == [(6, length)]


def test_ranks_get_what_they_read_and_no_more():
    for num_ranks, is_causal in itertools.product(range(2, 6), (True, False)):
        num_elements = 0
        for rank in range(num_ranks):
            spec = ((1, 4, 3, 2), torch.float32)
            layout = ZigzagLayout(rank, (spec, spec), SEQ, (2,) * 2 * num_ranks, is_causal)
            for _, boxes in read_plan(layout).recvs:
                num_elements += sum(torch.Size(extent).numel() for _, _, extent in boxes)
        slices = sum(2 * num_ranks - rank if is_causal else 2 * num_ranks for rank in range(num_ranks))
        assert num_elements == slices * 2 * (2 * 3 * 2)  # of k and v, two places of 3 heads, 2 channels


@on_ranks(3)
def test_one_exchange_forward_and_one_backward(world):
    world.comm.barrier()
    start = world.comm.flight_record()[-1]["number"]
    local = zigzag_way(world).leaves(whole_tensors(1, 12, 4, 2))
    result = zigzag_attention(*local, None, world.comm, is_causal=True)
    result.sum().backward()
    posted = [flight["op"] for flight in world.comm.flight_record() if flight["number"] > start]
    assert posted == ["all_to_all"] * 2


@on_ranks(2)
def test_forward_mode(world):
    """Tangents of keys and values are exchanged, too."""
    whole = [tensor.detach() for tensor in whole_tensors(1, 8, 4, 2)]
    tangents = [numbers(tuple(tensor.shape), torch.float64, "t", idx) for idx, tensor in enumerate(whole)]
    call = functools.partial(
        zigzag_attention, attention=plain_attention, process_group=world.comm, is_causal=True
    )

    def tangent_of(function, tensors, tangents):
        with forward_ad.dual_level():
            duals = [forward_ad.make_dual(*pair) for pair in zip(tensors, tangents, strict=True)]
            return forward_ad.unpack_dual(function(*duals)).tangent

    expected = tangent_of(functools.partial(plain_attention, is_causal=True), whole, tangents)
    got = tangent_of(call, zigzag_way(world).leaves(whole), zigzag_way(world).leaves(tangents))
    torch.testing.assert_close(got, zigzag(expected, world.rank, 2))


@on_ranks(3)
def test_backwards_that_do_not_read_keys(world):
    """The exchange of gradients is collective, whatever attention does with its arguments."""
    local = zigzag_way(world).leaves(whole_tensors(1, 4, 2, 2))  # most second slices are empty
    if world.rank == 1:
        result = zigzag_attention(
            *local, lambda q, k, v, is_causal: q.clone(), world.comm, is_causal=True, gather_size=4
        )
    else:
        result = zigzag_attention(*local, None, world.comm, is_causal=True, gather_size=4)
    result.sum().backward()
    assert all(leaf.grad is not None for leaf in local)


@on_ranks(2)
def test_keywords_for_attention(world):
    whole = whole_tensors(1, 8, 4, 2)
    result = zigzag_attention(
        *zigzag_way(world).leaves(whole),
        None,
        world.comm,
        is_causal=True,
        scale=0.25,
        dropout_p=0.0,
        attn_mask=None,
    )
    expected = plain_attention(whole[0] * 0.5, *whole[1:], True)  # 1/4 is half of 1/sqrt(4)
    torch.testing.assert_close(result, zigzag(expected, world.rank, 2))
