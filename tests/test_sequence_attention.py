"""Properties of all attentions over ranks: layouts, gradients, refusals.

Those of one attention are in test_ulysses.py, test_zigzag_attention.py and test_attention_with_cp.py.
"""

from __future__ import annotations

import functools
import itertools
import random

import pytest
import torch
from attention_cases import WAYS, alibi_attention, assert_close, plain_attention, way_of, whole_tensors
from ranks import on_ranks
from sequence_cases import numbers
from torch.utils.checkpoint import checkpoint

from pipecomm_ext import PipeCommMismatch
from pipecomm_ext.sequence_parallel.heads_argument import asks_for_heads

IN_EVERY_WAY = pytest.mark.parametrize("name", WAYS)
IN_CHUNKS = pytest.mark.parametrize("name", ["ulysses", "ring by ulysses"])


def check_usable(way) -> None:
    way.check(whole_tensors(1, 16, 4, 2), True)


@IN_EVERY_WAY
@on_ranks(4)
def test_random_cases(world, name):
    draw = random.Random(7)
    for _ in range(12):
        kv_heads, group = draw.randint(1, 4), draw.randint(1, 4)
        way = way_of(name, world, draw.choice([1, 2, 4, 9, "auto"]))
        batch, length, channels = draw.randint(1, 3), draw.randint(1, 20), draw.choice([None, 1, 6])
        whole = whole_tensors(batch, length, kv_heads * group, kv_heads, value_channels=channels)
        way.check(whole, draw.random() < 0.5, draw.choice([None, plain_attention]))


@pytest.mark.parametrize("layout", ["batch heads seq", "seq heads", "heads seq", "seq batch heads"])
@IN_EVERY_WAY
@on_ranks(4)
def test_layouts(world, layout, name):
    """Any order of dims, with or without batch dims."""
    names, way = layout.split(), way_of(name, world)
    heads_dim, seq_dim = names.index("heads"), names.index("seq") - len(names) - 1
    lengths = {"batch": 2, "heads": 4, "seq": 16}
    whole = [numbers((*(lengths[name] for name in names), 4), torch.float64, name) for name in "qkv"]
    moved = [tensor.movedim((seq_dim, heads_dim), (-3, -2)) for tensor in whole]
    if "batch" not in names:
        moved = [tensor[None] for tensor in moved]
    expected = plain_attention(*moved, True)
    expected = (expected if "batch" in names else expected[0]).movedim((-3, -2), (seq_dim, heads_dim))
    local = [way.piece(tensor, seq_dim) for tensor in whole]
    result = way.function(*local, is_causal=True, heads_dim=heads_dim, seq_dim=seq_dim)
    assert_close(result, way.piece(expected, seq_dim))


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(8, 8), (7, 7), (6, 2)])
@IN_EVERY_WAY
@on_ranks(4)
def test_attention_that_asks_for_its_heads(world, num_heads, num_kv_heads, name):
    whole = whole_tensors(1, 16, num_heads, num_kv_heads)
    for attention in (
        alibi_attention,
        functools.wraps(alibi_attention)(lambda *a, **k: alibi_attention(*a, **k)),
    ):
        way_of(name, world, 2).check(whole, True, attention, alibi_attention)
        for tensor in whole:
            tensor.grad = None


class Attends(torch.nn.Module):
    def forward(self, q, k, v, heads=None):
        return q

    def with_own(self, q, k, v, heads=3):
        return q


@pytest.mark.parametrize(
    ("attention", "asks"),
    [
        (lambda q, k, v: q, False),
        (lambda q, k, v, **others: q, False),
        (lambda q, k, v, heads: q, True),
        (lambda q, k, v, scale=1, heads=None, bias=2: q, True),
        (lambda q, k, v, heads, bias=2: q, True),
        (lambda q, k, v, heads=3, bias=None: q, False),
        (lambda q, k, v, *, heads: q, True),
        (lambda q, k, v, *, heads=None: q, True),
        (lambda q, k, v, *, heads=3: q, False),
        (lambda q, k, v: (heads := q) + heads, False),
        (Attends(), True),
        (Attends().forward, True),
        (Attends().with_own, False),
        (functools.partial(alibi_attention, is_causal=True), True),
        (functools.partial(alibi_attention, heads=range(2)), False),
        (functools.partial(functools.partial(plain_attention), is_causal=True), False),
        (functools.wraps(alibi_attention)(lambda *a, **k: None), True),
        (torch.nn.functional.scaled_dot_product_attention, False),
        (max, False),
    ],
)
def test_which_attention_asks_for_its_heads(attention, asks):
    assert asks_for_heads(attention) == asks


@IN_EVERY_WAY
@on_ranks(4)
def test_gradients_of_some_inputs_only(world, name):
    whole, way = whole_tensors(1, 9, 4, 2), way_of(name, world)
    for needs in itertools.product((False, True), repeat=3):
        for tensor, need in zip(whole, needs, strict=True):
            tensor.grad = None
            tensor.requires_grad_(need)
        local = way.leaves(whole)
        result = way.function(*local, is_causal=True, gather_size=9)
        assert result.requires_grad == any(needs)
        if any(needs):
            plain_attention(*whole, True).sum().backward()
            result.sum().backward()
        for leaf, full in zip(local, whole, strict=True):
            assert (leaf.grad is None) == (full.grad is None)
            if leaf.grad is not None:
                assert_close(leaf.grad, way.piece(full.grad))


@IN_EVERY_WAY
@on_ranks(4)
def test_second_derivatives(world, name):
    """create_graph sends gradients through the graph; then backward through them."""

    def second(tensors, call):
        first = torch.autograd.grad(call(*tensors).sin().sum(), tensors, create_graph=True)
        return torch.autograd.grad(sum((grad * grad).sum() for grad in first), tensors)

    whole, way = whole_tensors(1, 9, 6, 2), way_of(name, world)
    expected = second(whole, functools.partial(plain_attention, is_causal=True))
    call = functools.partial(way.function, attention=plain_attention, is_causal=True, gather_size=9)
    for mine, full in zip(second(way.leaves(whole), call), expected, strict=True):
        assert_close(mine, way.piece(full))


@IN_EVERY_WAY
@on_ranks(4)
def test_backward_twice_and_by_recomputation(world, name):
    whole, way = whole_tensors(1, 16, 4, 4), way_of(name, world)
    (plain_attention(*whole, True) ** 2).sum().backward()
    local, call = way.leaves(whole), functools.partial(way.function, is_causal=True)
    loss = (call(*local) ** 2).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    for use_reentrant in (False, True):
        (checkpoint(call, *local, use_reentrant=use_reentrant) ** 2).sum().backward()
    for leaf, full in zip(local, whole, strict=True):
        assert_close(leaf.grad, 4 * way.piece(full.grad))


@pytest.mark.parametrize(("length", "heads"), [(16, 2), (3, 4)])  # fewer heads, fewer tokens than ranks
@IN_EVERY_WAY
@on_ranks(4)
def test_recomputation_where_ranks_have_nothing_to_attend_to(world, length, heads, name):
    """They recompute their part when the others do; else the collectives of the ranks would not match."""
    whole, way = whole_tensors(1, length, heads, heads), way_of(name, world)
    (plain_attention(*whole, True) ** 2).sum().backward()
    local = way.leaves(whole)
    for use_reentrant in (False, True):
        call = functools.partial(way.function, is_causal=True, gather_size=length)
        (checkpoint(call, *local, use_reentrant=use_reentrant) ** 2).sum().backward()
    for leaf, full in zip(local, whole, strict=True):
        assert_close(leaf.grad, 2 * way.piece(full.grad))


@pytest.mark.parametrize("attention", [None, plain_attention], ids=["torch", "own"])
@IN_EVERY_WAY
@on_ranks(4)
def test_autocast(world, attention, name):
    way = way_of(name, world)
    q, k, v = way.leaves(whole_tensors(1, 16, 4, 4, dtype=torch.float32))
    with torch.autocast("cpu", torch.bfloat16):
        result = way.function(q, k, v, attention, is_causal=True)
    assert result.dtype == torch.float32
    result.sum().backward()
    assert all(tensor.grad.dtype == torch.float32 and tensor.grad.any() for tensor in (q, k, v))


# ---- errors -----------------------------------------------------------------------------------------------

# How to make wrong arguments from good ones, the error, its text, and the attentions that are called so. What
# all refuse alike, one is; single arguments: reliability/bad_input_targets_parallel.py.
WRONG = {
    "dims": (lambda q, k, v: ((q[0], k, v), {}), ValueError, "the same number of dims", WAYS[:1]),
    "last": (lambda q, k, v: ((q, k, v), {"heads_dim": -1}), ValueError, "neither may be the la", WAYS[1:2]),
    "heads": (lambda q, k, v: ((q[:, :, :1], k, v), {}), ValueError, "they must have 1 to 1", WAYS[2:]),
    "values": (lambda q, k, v: ((q, k, v[:, :, :1]), {}), ValueError, "must have the same num", WAYS[1:2]),
    "length": (lambda q, k, v: ((q, k[:, :1], v), {}), ValueError, "the same length along dim 1", WAYS[:1]),
    "gather": (lambda q, k, v: ((q, k, v), {"gather_size": 40}), ValueError, "gather_size", WAYS[2:]),
    "odd": (lambda q, k, v: ((q[:, :3], k[:, :3], v[:, :3]), {}), ValueError, "so 3 must be even", WAYS[1:2]),
    "mask": (
        lambda q, k, v: ((q, k, v), {"attn_mask": torch.ones(16, 16)}),
        ValueError,
        "attn_mask may depend on places in the sequence",
        WAYS[1:],
    ),
    "window": (lambda q, k, v: ((q, k, v), {"window_size": (2, 0)}), ValueError, "size may depend", WAYS[1:]),
    "causal": (lambda q, k, v: ((q, k, v), {"is_causal": 1}), TypeError, "must be a bool", WAYS[1:]),
    "chunks": (lambda q, k, v: ((q, k, v), {"chunks": 0}), ValueError, "must be positive or", WAYS[::2]),
}


@pytest.mark.parametrize(
    ("name", "case"), [(name, case) for case, (*_, names) in WRONG.items() for name in names], ids=str
)
@on_ranks(4)
def test_wrong_arguments_of_one_rank(world, name, case):
    """It raises there, all others get the reason (in both groups, if two, where the rank is the first or the
    last), and the next call works."""
    change, kind, text, _ = WRONG[case]
    way = way_of(name, world)
    with_one_head = [] if case in ("heads", "values") else [(1, 1)]
    for num_heads, num_kv_heads in [(4, 2), *with_one_head]:
        heads = zip("qkv", (num_heads, num_kv_heads, num_kv_heads), strict=True)
        tensors = [numbers((1, 4, number, 4), torch.float64, letter) for letter, number in heads]
        for wrong in (0, 3) if name == "ring by ulysses" and num_heads > 1 else [1]:
            changed, keywords = change(*tensors) if world.rank == wrong else (tensors, {})
            with pytest.raises(kind if world.rank == wrong else PipeCommMismatch, match=text):
                way.function(*changed, **{"is_causal": True, **keywords})
            check_usable(way)


@pytest.mark.parametrize("failing_call", [1, 2, 3])
@IN_CHUNKS
@on_ranks(4)
def test_attention_that_raises_on_one_rank(world, failing_call, name):
    """The others do not wait for it, whether or not they still need chunks."""
    way, calls = way_of(name, world, chunks=3), []

    def attention(q, k, v, is_causal):
        calls.append(0)
        if world.rank == 1 and len(calls) == failing_call:
            raise RuntimeError("out of luck")
        return q.clone()

    tensors = [numbers((1, 4, 12, 4), torch.float64, letter).requires_grad_() for letter in "qkv"]
    with pytest.raises(RuntimeError if world.rank == 1 else PipeCommMismatch, match="out of luck"):
        way.function(*tensors, attention, is_causal=True)
    check_usable(way)


@pytest.mark.parametrize(
    ("name", "text"),
    [("ulysses", "attention returned"), ("zigzag", "returned .* for queries 0 to 1 of this rank")],
)
@on_ranks(2)
def test_attention_of_a_wrong_shape(world, name, text):
    q, way = numbers((1, 4, 4, 4), torch.float64, "q"), way_of(name, world)
    with pytest.raises((ValueError, PipeCommMismatch), match=text):
        way.function(q, q, q, lambda q, k, v, is_causal: q[:, :1], is_causal=True)
    check_usable(way)


@pytest.mark.parametrize("needs_grad", [False, True])
@IN_EVERY_WAY
@on_ranks(4)
def test_attention_that_writes_to_its_keys(world, name, needs_grad):
    """Other calls read them; q is its own."""
    way, whole = way_of(name, world), whole_tensors(1, 16, 8, 2)

    def writing(letter):
        def attention(q, k, v, is_causal):
            {"q": q, "k": k, "v": v}[letter].mul_(2)
            return plain_attention(q, k, v, is_causal)

        return attention

    with torch.set_grad_enabled(needs_grad):
        for letter in "kv":
            local = [tensor * 1 for tensor in way.leaves(whole)]
            with pytest.raises((ValueError, PipeCommMismatch), match="attention wrote to its k or v"):
                way.function(*local, writing(letter), is_causal=True)
        local = [tensor * 1 for tensor in way.leaves(whole)]
        result = way.function(*local, writing("q"), is_causal=True)
        assert_close(result, way.piece(plain_attention(2 * whole[0], *whole[1:], True)))
    check_usable(way)


@IN_EVERY_WAY
@on_ranks(4)
def test_unequal_lengths_without_gather_size(world, name):
    q, way = numbers((1, 4 if world.rank < 2 else 6, 4, 4), torch.float64, "q"), way_of(name, world)
    with pytest.raises(
        PipeCommMismatch, match="unequal lengths along dim 1, (4 and 6|6 and 4), so give gath"
    ):
        way.function(q, q, q, is_causal=True)
    check_usable(way)


@IN_EVERY_WAY
@on_ranks(4)
def test_ranks_that_disagree(world, name):
    """They disagree about the number of chunks, or whether attention is causal."""
    q, is_other = numbers((1, 4, 16, 4), torch.float64, "q"), world.rank >= 2
    way = way_of(name, world, chunks=2 + is_other)
    with pytest.raises(PipeCommMismatch):
        way.function(q, q, q, is_causal=name != "zigzag" or is_other)
    check_usable(way_of(name, world))
