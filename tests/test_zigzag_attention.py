"""zigzag_attention against attention of the whole in one process: values, gradients, balance, errors."""

from __future__ import annotations

import functools
import itertools
import random

import pytest
import torch
from ranks import on_ranks
from sequence_cases import numbers, offsets, remainder_first
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from pipecomm_ext import PipeCommMismatch, load_balanced_split_forward_gather_backward, zigzag_attention
from pipecomm_ext.sequence_parallel.zigzag_exchange import ZigzagLayout, read_plan

SEQ, HEADS = 1, 2


def plain_attention(q, k, v, is_causal=False):
    """By the formula, of tensors [batch, sequence, heads, channels]; the last query reads the last key."""
    read = torch.arange(q.size(HEADS)) * k.size(HEADS) // q.size(HEADS)
    k, v = (tensor.index_select(HEADS, read) for tensor in (k, v))
    scores = torch.einsum("bqhc,bkhc->bhqk", q, k) / q.size(-1) ** 0.5
    if is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(scores.size(-1) - scores.size(-2) + 1)
        scores = scores.masked_fill(later, -torch.inf)
    return torch.einsum("bhqk,bkhc->bqhc", scores.softmax(-1), v)


def whole_tensors(batch, length, heads, kv_heads, channels=4, value_channels=None, dtype=torch.float64):
    shapes = [(heads, channels), (kv_heads, channels), (kv_heads, value_channels or channels)]
    names = zip("qkv", shapes, strict=True)
    return [numbers((batch, length, *shape), dtype, name).requires_grad_() for name, shape in names]


def weights_of(result):
    return numbers(tuple(result.shape), torch.float64, "w").to(result.dtype)


def zigzag(tensor, rank, num_ranks, dim=SEQ):
    """The two slices of a rank, one after the other."""
    sizes = remainder_first(tensor.size(dim), 2 * num_ranks)
    both = rank, 2 * num_ranks - 1 - rank
    return torch.cat([tensor.narrow(dim, offsets(sizes)[idx], sizes[idx]) for idx in both], dim)


def leaves(world, whole):
    return [
        zigzag(tensor.detach(), world.rank, world.size).requires_grad_(tensor.requires_grad)
        for tensor in whole
    ]


def check_equal(world, batch, length, heads, kv_heads, is_causal, attention=None, value_channels=None):
    whole = whole_tensors(batch, length, heads, kv_heads, value_channels=value_channels)
    expected = plain_attention(*whole, is_causal)
    (expected * weights_of(expected)).sum().backward()
    local = leaves(world, whole)
    gather_size = None if length % (2 * world.size) == 0 else length
    result = zigzag_attention(*local, attention, world.comm, is_causal=is_causal, gather_size=gather_size)
    mine = functools.partial(zigzag, rank=world.rank, num_ranks=world.size)
    torch.testing.assert_close(result, mine(expected), rtol=1e-10, atol=1e-10)
    (result * mine(weights_of(expected))).sum().backward()
    for leaf, full in zip(local, whole, strict=True):
        torch.testing.assert_close(leaf.grad, mine(full.grad), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (8, 2), (5, 5), (7, 3)])
@on_ranks(1, 2, 3, 4)
def test_equal_to_attention_of_the_whole(world, heads, kv_heads, is_causal):
    """Also with slices of unequal lengths, and with none for some ranks."""
    for length in (24, 13, 2 * world.size - 1, 1):
        check_equal(world, 2, length, heads, kv_heads, is_causal)


@on_ranks(3)
def test_random_cases(world):
    draw = random.Random(7)
    for _ in range(12):
        kv_heads, group = draw.randint(1, 3), draw.randint(1, 3)
        attention = draw.choice([None, plain_attention])
        where = draw.randint(1, 3), draw.randint(1, 20)
        check_equal(
            world, *where, kv_heads * group, kv_heads, draw.random() < 0.5, attention, draw.choice([1, 6])
        )


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
    result = zigzag_attention(*leaves(world, whole), None, world.comm, is_causal=True)
    assert result.dtype == dtype
    expected = plain_attention(*(tensor.double() for tensor in whole), True)
    mine = zigzag(expected, world.rank, world.size)
    tolerance = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(result.double(), mine, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("layout", ["batch heads seq", "seq heads", "heads seq", "seq batch heads"])
@on_ranks(2)
def test_layouts(world, layout):
    """Any order of dims, with batch dims or without."""
    names = layout.split()
    heads_dim, seq_dim = names.index("heads"), names.index("seq") - len(names) - 1
    lengths = {"batch": 2, "heads": 4, "seq": 8}
    whole = [numbers((*(lengths[name] for name in names), 4), torch.float64, name) for name in "qkv"]
    moved = [tensor.movedim((seq_dim, heads_dim), (-3, -2)) for tensor in whole]
    if "batch" not in names:
        moved = [tensor[None] for tensor in moved]
    expected = plain_attention(*moved, True)
    expected = (expected if "batch" in names else expected[0]).movedim((-3, -2), (seq_dim, heads_dim))
    mine = functools.partial(zigzag, rank=world.rank, num_ranks=2, dim=seq_dim)
    dims = {"heads_dim": heads_dim, "seq_dim": seq_dim}
    result = zigzag_attention(*map(mine, whole), None, world.comm, is_causal=True, **dims)
    torch.testing.assert_close(result, mine(expected))


@pytest.mark.parametrize("is_causal", [True, False])
@on_ranks(1, 2, 3, 4)
def test_every_rank_has_as_many_pairs(world, is_causal):
    """Of a query and a key that it reads."""
    length = 6 * world.size
    pairs, calls = [], []

    def counting(q, k, v, *, is_causal):
        ones = torch.ones(1, q.size(SEQ), k.size(SEQ), dtype=torch.bool)
        read = ones.tril(k.size(SEQ) - q.size(SEQ)) if is_causal else ones
        pairs.append(int(read.sum()))
        calls.append((q.size(SEQ), k.size(SEQ)))
        return q.clone()

    local = leaves(world, whole_tensors(1, length, 2, 2))
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
    local = leaves(world, whole_tensors(1, 12, 4, 2))
    result = zigzag_attention(*local, None, world.comm, is_causal=True)
    result.sum().backward()
    posted = [flight["op"] for flight in world.comm.flight_record() if flight["number"] > start]
    assert posted == ["all_to_all"] * 2


@on_ranks(2)
def test_gradients_of_some_inputs_only(world):
    whole = whole_tensors(1, 9, 4, 2)
    for needs in itertools.product((False, True), repeat=3):
        for tensor, need in zip(whole, needs, strict=True):
            tensor.grad = None
            tensor.requires_grad_(need)
        local = leaves(world, whole)
        result = zigzag_attention(*local, None, world.comm, is_causal=True, gather_size=9)
        assert result.requires_grad == any(needs)
        if any(needs):
            plain_attention(*whole, True).sum().backward()
            result.sum().backward()
        for leaf, full in zip(local, whole, strict=True):
            assert (leaf.grad is None) == (full.grad is None)
            if leaf.grad is not None:
                torch.testing.assert_close(leaf.grad, zigzag(full.grad, world.rank, 2))


@on_ranks(2, 3)
def test_second_derivatives(world):
    def second(tensors, call):
        first = torch.autograd.grad(call(*tensors).sin().sum(), tensors, create_graph=True)
        return torch.autograd.grad(sum((grad * grad).sum() for grad in first), tensors)

    whole = whole_tensors(1, 7, 4, 2)
    expected = second(whole, functools.partial(plain_attention, is_causal=True))
    arguments = {"process_group": world.comm, "is_causal": True, "gather_size": 7}
    got = second(
        leaves(world, whole), functools.partial(zigzag_attention, attention=plain_attention, **arguments)
    )
    for mine, full in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, zigzag(full, world.rank, world.size), rtol=1e-9, atol=1e-9)


@on_ranks(2)
def test_forward_mode(world):
    """Tangents of keys and values travel, too."""
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
    got = tangent_of(call, leaves(world, whole), leaves(world, tangents))
    torch.testing.assert_close(got, zigzag(expected, world.rank, 2))


@on_ranks(2)
def test_backward_twice_and_by_recomputation(world):
    whole = whole_tensors(1, 8, 4, 4)
    (plain_attention(*whole, True) ** 2).sum().backward()
    local = leaves(world, whole)
    call = functools.partial(zigzag_attention, process_group=world.comm, is_causal=True)
    loss = (call(*local) ** 2).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    (checkpoint(call, *local, use_reentrant=False) ** 2).sum().backward()
    (checkpoint(call, *local, use_reentrant=True) ** 2).sum().backward()
    for leaf, full in zip(local, whole, strict=True):
        torch.testing.assert_close(leaf.grad, 4 * zigzag(full.grad, world.rank, 2))


@on_ranks(3)
def test_backwards_that_do_not_read_keys(world):
    """The exchange of gradients is collective, whatever attention makes of its arguments."""
    local = leaves(world, whole_tensors(1, 4, 2, 2))  # nothing is left for most second slices
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
        *leaves(world, whole), None, world.comm, is_causal=True, scale=0.25, dropout_p=0.0, attn_mask=None
    )
    expected = plain_attention(whole[0] * 0.5, *whole[1:], True)  # 1/4 is half of 1/sqrt(4)
    torch.testing.assert_close(result, zigzag(expected, world.rank, 2))


@on_ranks(2)
def test_autocast(world):
    q, k, v = (tensor.float() for tensor in whole_tensors(1, 4, 4, 4))
    with torch.autocast("cpu", torch.bfloat16):
        result = zigzag_attention(q, k, v, None, world.comm, is_causal=True)
    assert result.dtype == torch.float32


# ---- errors -----------------------------------------------------------------------------------------------


WRONG = {
    "dims": (lambda q, k, v: ((q[0], k, v), {}), ValueError, "equally many dims, at least three"),
    "same": (lambda q, k, v: ((q, k, v), {"heads_dim": 1}), ValueError, "must differ"),
    "last": (lambda q, k, v: ((q, k, v), {"heads_dim": -1}), ValueError, "neither may be the last dim"),
    "range": (lambda q, k, v: ((q, k, v), {"seq_dim": 4}), IndexError, "seq_dim 4 is out of range"),
    "heads": (lambda q, k, v: ((q[:, :, :1], k, v), {}), ValueError, "they must have 1 to 1"),
    "length": (lambda q, k, v: ((q, k[:, :1], v), {}), ValueError, "the same length along dim 1"),
    "odd": (lambda q, k, v: ((q[:, :3], k[:, :3], v[:, :3]), {}), ValueError, "so 3 must be even; give"),
    "gather": (
        lambda q, k, v: ((q, k, v), {"gather_size": 9}),
        ValueError,
        "means a length of 3 along dim 1",
    ),
    "mask": (
        lambda q, k, v: ((q, k, v), {"attn_mask": torch.ones(12, 12)}),
        ValueError,
        "attn_mask may depend on places in the sequence",
    ),
    "window": (lambda q, k, v: ((q, k, v), {"window_size": (2, 0)}), ValueError, "window_size may depend"),
    "causal": (lambda q, k, v: ((q, k, v), {"is_causal": None}), TypeError, "is_causal must be a bool"),
    "no tensor": (lambda q, k, v: ((None, k, v), {}), TypeError, "q must be"),
}


@pytest.mark.parametrize("case", WRONG)
@on_ranks(3)
def test_wrong_arguments_of_one_rank(world, case):
    """It raises there, the others hear why, and the next call works."""
    change, kind, text = WRONG[case]
    tensors = [
        numbers((1, 4, heads, 4), torch.float64, name) for name, heads in zip("qkv", (4, 2, 2), strict=True)
    ]
    changed, keywords = change(*tensors) if world.rank == 1 else (tensors, {})
    keywords.setdefault("is_causal", True)
    with pytest.raises(kind if world.rank == 1 else PipeCommMismatch, match=text):
        zigzag_attention(*changed, None, world.comm, **keywords)
    check_equal(world, 1, 12, 4, 2, True)


@on_ranks(2)
def test_unequal_lengths_without_gather_size(world):
    q = numbers((1, 4 + 2 * world.rank, 4, 4), torch.float64, "q")
    text = "unequal lengths along dim 1, (4 and 6|6 and 4), so give gather_size"
    with pytest.raises(PipeCommMismatch, match=text):
        zigzag_attention(q, q, q, None, world.comm, is_causal=True)
    check_equal(world, 1, 12, 4, 2, True)


@on_ranks(2)
def test_causal_on_one_rank_only(world):
    q = numbers((1, 4, 4, 4), torch.float64, "q")
    with pytest.raises(PipeCommMismatch):
        zigzag_attention(q, q, q, None, world.comm, is_causal=world.rank == 0)
    check_equal(world, 1, 12, 4, 2, True)


@on_ranks(2)
def test_attention_of_a_wrong_shape(world):
    q = numbers((1, 4, 4, 4), torch.float64, "q")
    with pytest.raises(ValueError, match="attention returned .* for queries 0 to 1 of this rank"):
        zigzag_attention(q, q, q, lambda q, k, v, is_causal: q[:, :1], world.comm, is_causal=True)
    check_equal(world, 1, 12, 4, 2, True)
