"""ulysses_attention against attention of the whole sequence in one process: values, gradients, errors."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from ranks import on_ranks
from sequence_cases import cut, num_posted, numbers, remainder_first
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from pipecomm_ext import PipeCommMismatch, gather_forward_split_backward, ulysses_attention
from pipecomm_ext.sequence_parallel import ulysses
from pipecomm_ext.sequence_parallel.head_chunks import best_num_chunks, head_chunks, kv_head_of

SEQ, HEADS = 1, 2


def whole_tensors(batch, length, heads, kv_heads, channels, value_channels=None, dtype=torch.float64):
    shapes = [(heads, channels), (kv_heads, channels), (kv_heads, value_channels or channels)]
    names = zip("qkv", shapes, strict=True)
    return [numbers((batch, length, *shape), dtype, name).requires_grad_() for name, shape in names]


def whole_attention(q, k, v, **kwargs):
    """With one key/value head for each query head."""
    read = torch.arange(q.size(HEADS)) * k.size(HEADS) // q.size(HEADS)
    k, v = (tensor.index_select(HEADS, read) for tensor in (k, v))
    q, k, v = (tensor.transpose(SEQ, HEADS) for tensor in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v, **kwargs).transpose(SEQ, HEADS)


def weights_of(result):
    return numbers(tuple(result.shape), torch.float64, "w").to(result.dtype)


def check_equal(world, batch, length, heads, kv_heads, chunks, value_channels=None, **kwargs):
    whole = whole_tensors(batch, length, heads, kv_heads, 4, value_channels)
    expected = whole_attention(*whole, **kwargs)
    (expected * weights_of(expected)).sum().backward()

    sizes = remainder_first(length, world.size)
    q, k, v = (cut(tensor.detach(), SEQ, sizes, world.rank).requires_grad_() for tensor in whole)
    result = ulysses_attention(q, k, v, None, world.comm, chunks=chunks, gather_size=length, **kwargs)
    torch.testing.assert_close(result, cut(expected, SEQ, sizes, world.rank), rtol=1e-10, atol=1e-10)
    (result * cut(weights_of(expected), SEQ, sizes, world.rank)).sum().backward()
    for mine, full in zip((q, k, v), whole, strict=True):
        torch.testing.assert_close(mine.grad, cut(full.grad, SEQ, sizes, world.rank), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (8, 2), (5, 5), (6, 1), (1, 1), (7, 3)])
@on_ranks(2, 4)
def test_equal_to_attention_of_the_whole(world, heads, kv_heads, chunks):
    for length, is_causal in ((11, True), (2, False)):
        check_equal(world, 2, length, heads, kv_heads, chunks, is_causal=is_causal)


@on_ranks(1, 3)
def test_random_cases(world):
    draw = random.Random(7)
    for _ in range(12):
        kv_heads, group = draw.randint(1, 5), draw.randint(1, 4)
        batch, length, channels = draw.randint(1, 3), draw.randint(1, 9), draw.choice([None, 1, 6])
        chunks = draw.choice([1, 2, 4, 9, "auto"])
        check_equal(world, batch, length, kv_heads * group, kv_heads, chunks, channels)


@pytest.mark.parametrize("layout", ["batch heads seq", "seq heads", "heads seq", "seq batch heads"])
@on_ranks(2)
def test_layouts(world, layout):
    """Any order of dims, with batch dims or without."""
    names = layout.split()
    heads_dim, seq_dim = names.index("heads"), names.index("seq") - len(names) - 1
    lengths = {"batch": 2, "heads": 4, "seq": 6}
    whole = [numbers((*(lengths[name] for name in names), 4), torch.float64, name) for name in "qkv"]
    moved = [tensor.movedim((heads_dim, seq_dim), (-3, -2)) for tensor in whole]
    expected = functional.scaled_dot_product_attention(*moved).movedim((-3, -2), (heads_dim, seq_dim))
    q, k, v = (cut(tensor, seq_dim, [3, 3], world.rank) for tensor in whole)
    result = ulysses_attention(q, k, v, None, world.comm, chunks=2, heads_dim=heads_dim, seq_dim=seq_dim)
    torch.testing.assert_close(result, cut(expected, seq_dim, [3, 3], world.rank))
    assert result.is_contiguous()


@on_ranks(2)
def test_gradients_of_some_inputs_only(world):
    whole = whole_tensors(1, 6, 4, 2, 4)
    for needs in itertools.product((False, True), repeat=3):
        for tensor, need in zip(whole, needs, strict=True):
            tensor.grad = None
            tensor.requires_grad_(need)
        expected = whole_attention(*whole)
        local = [
            cut(tensor.detach(), SEQ, [3, 3], world.rank).requires_grad_(tensor.requires_grad)
            for tensor in whole
        ]
        result = ulysses_attention(*local, None, world.comm, chunks=2)
        assert result.requires_grad == any(needs)
        if any(needs):
            expected.sum().backward()
            result.sum().backward()
        for mine, full in zip(local, whole, strict=True):
            assert (mine.grad is None) == (full.grad is None)
            if mine.grad is not None:
                torch.testing.assert_close(mine.grad, cut(full.grad, SEQ, [3, 3], world.rank))


@on_ranks(2, 3)
def test_second_derivatives(world):
    """create_graph sends gradients through the graph; then backward through them, twice."""
    length, sizes = 5, remainder_first(5, world.size)

    def plain(q, k, v):  # torch's fused attention has no second derivative
        scores = torch.einsum(
            "bqhc,bkhc->bhqk", q, k.repeat_interleave(q.size(HEADS) // k.size(HEADS), HEADS)
        )
        return torch.einsum(
            "bhqk,bkhc->bqhc", scores.softmax(-1), v.repeat_interleave(q.size(HEADS) // v.size(HEADS), HEADS)
        )

    def second(tensors, call):
        first = torch.autograd.grad(call(*tensors).sin().sum(), tensors, create_graph=True)
        return torch.autograd.grad(sum((grad * grad).sum() for grad in first), tensors)

    whole = whole_tensors(1, length, 6, 2, 3)
    expected = second(whole, plain)
    local = [cut(tensor.detach(), SEQ, sizes, world.rank).requires_grad_() for tensor in whole]
    got = second(
        local, lambda q, k, v: ulysses_attention(q, k, v, plain, world.comm, chunks=2, gather_size=length)
    )
    for mine, full in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, cut(full, SEQ, sizes, world.rank), rtol=1e-9, atol=1e-9)


@on_ranks(2)
def test_backward_twice_and_by_recomputation(world):
    whole = whole_tensors(1, 6, 4, 4, 4)
    (whole_attention(*whole) ** 2).sum().backward()
    local = [cut(tensor.detach(), SEQ, [3, 3], world.rank).requires_grad_() for tensor in whole]

    def call(q, k, v):
        return ulysses_attention(q, k, v, None, world.comm, chunks=2)

    loss = (call(*local) ** 2).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    (checkpoint(call, *local, use_reentrant=False) ** 2).sum().backward()
    (checkpoint(call, *local, use_reentrant=True) ** 2).sum().backward()
    for mine, full in zip(local, whole, strict=True):
        torch.testing.assert_close(mine.grad, 4 * cut(full.grad, SEQ, [3, 3], world.rank))


class _Seen(torch.autograd.Function):
    """Calls `note` in forward and in backward."""

    @staticmethod
    def forward(ctx, note, tensor):
        ctx.note = note
        note("forward")
        return tensor.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.note("backward")
        return None, grad


@on_ranks(2)
def test_communication_runs_beside_attention(world):
    """While a chunk is computed, the next ones' heads have been asked for and the last result is on its way;
    in the backward likewise.
    """
    world.comm.barrier()
    comm, seen, start = world.comm, [], num_posted(world.comm)

    def note(what):
        seen.append((what, num_posted(comm) - start))

    def attention(q, k, v):
        return whole_attention(_Seen.apply(note, q), k, v)

    local = [numbers((1, 3, 8, 4), torch.float64, name, world.rank).requires_grad_() for name in "qkv"]
    ulysses_attention(*local, attention, comm, chunks=4).sum().backward()
    # Forward: three exchanges in, then one out behind each chunk, and in for the last chunk. Backward: eight
    # before, three back, then those of attention's first chunk, and the last one back.
    assert seen == [("forward", 3), ("forward", 5), ("forward", 6), ("forward", 7)] + [
        ("backward", 11),
        ("backward", 13),
        ("backward", 14),
        ("backward", 15),
    ]


@on_ranks(2)
def test_own_attention(world):
    """It gets whole sequences, some heads, as few key/value heads as there are, and the keywords."""
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
        return whole_attention(q, k, v)

    q, k, v = (numbers((1, 2, heads, 4), torch.float64, "x", world.rank) for heads in (8, 2, 2))
    ulysses_attention(q, k, v, attention, world.comm, chunks=1)
    assert seen == [(3, 1), (3, 3), (2, 1)][world.rank : world.rank + 1]  # heads 3, 4, 5 read 0, 1, 1


@on_ranks(2)
def test_autocast(world):
    q, k, v = (numbers((1, 3, 4, 4), torch.float32, name).requires_grad_() for name in "qkv")
    with torch.autocast("cpu", torch.bfloat16):
        result = ulysses_attention(
            q,
            k,
            v,
            lambda q, k, v: torch.einsum("bshc,bshc->bshc", q, k).matmul(torch.eye(4)),
            world.comm,
            chunks=2,
        )
    assert result.dtype == torch.float32
    result.sum().backward()
    assert q.grad.any() and not v.grad.any()


# ---- errors -----------------------------------------------------------------------------------------------


WRONG = {
    "dims": (lambda q, k, v: ((q[0], k, v), {}), ValueError, "equally many dims, at least three"),
    "same": (lambda q, k, v: ((q, k, v), {"heads_dim": 1}), ValueError, "must differ"),
    "last": (lambda q, k, v: ((q, k, v), {"heads_dim": -1}), ValueError, "neither may be the last dim"),
    "range": (lambda q, k, v: ((q, k, v), {"seq_dim": 4}), IndexError, "seq_dim 4 is out of range"),
    "heads": (lambda q, k, v: ((q[:, :, :1], k, v), {}), ValueError, "they must have 1 to 1"),
    "values": (lambda q, k, v: ((q, k, v[:, :, :1]), {}), ValueError, "must have equally many"),
    "length": (lambda q, k, v: ((q, k[:, :1], v), {}), ValueError, "the same length along dim 1"),
    "gather": (lambda q, k, v: ((q, k, v), {"gather_size": 12}), ValueError, "gather_sizes"),
    "chunks": (lambda q, k, v: ((q, k, v), {"chunks": 0}), ValueError, "must be positive or"),
    "chunk type": (
        lambda q, k, v: ((q, k, v), {"chunks": 1.5}),
        TypeError,
        "chunks, if it is not .auto., must be an int",
    ),
    "no tensor": (lambda q, k, v: ((None, k, v), {}), TypeError, "q must be"),
}


@pytest.mark.parametrize("case", WRONG)
@on_ranks(3)
def test_wrong_arguments_of_one_rank(world, case):
    """It raises there, the others hear why, and the next call works."""
    change, kind, text = WRONG[case]
    tensors = [
        numbers((1, 3, heads, 4), torch.float64, name) for name, heads in zip("qkv", (4, 2, 2), strict=True)
    ]
    changed, keywords = change(*tensors) if world.rank == 1 else (tensors, {})
    keywords.setdefault("chunks", 2)
    with pytest.raises(kind if world.rank == 1 else PipeCommMismatch, match=text):
        ulysses_attention(*changed, None, world.comm, **keywords)
    check_equal(world, 1, 6, 4, 2, 2)


@on_ranks(2)
def test_gradients_where_a_rank_has_no_heads(world):
    """Of k and v alone: a rank that attends to nothing takes part in the backward."""
    whole = whole_tensors(1, 4, 1, 1, 4)
    whole[0].requires_grad_(False)
    whole_attention(*whole).sum().backward()
    q, k, v = (cut(tensor.detach(), SEQ, [2, 2], world.rank) for tensor in whole)
    ulysses_attention(q, k.requires_grad_(), v.requires_grad_(), None, world.comm).sum().backward()
    for mine, full in zip((k, v), whole[1:], strict=True):
        torch.testing.assert_close(mine.grad, cut(full.grad, SEQ, [2, 2], world.rank))


@pytest.mark.parametrize("at", [1, 2, 4])
@on_ranks(3)
def test_attention_that_raises_on_one_rank(world, at):
    """Whether or not the others still have chunks to ask for."""
    calls = []

    def attention(q, k, v):
        calls.append(0)
        if world.rank == 1 and len(calls) == at:
            raise RuntimeError("out of luck")
        return q

    tensors = [numbers((1, 3, 12, 4), torch.float64, name).requires_grad_() for name in "qkv"]
    with pytest.raises(RuntimeError if world.rank == 1 else PipeCommMismatch, match="out of luck"):
        ulysses_attention(*tensors, attention, world.comm, chunks=4)
    check_equal(world, 1, 6, 4, 2, 2)


@on_ranks(2)
def test_attention_of_a_wrong_shape(world):
    q = numbers((1, 3, 4, 4), torch.float64, "q")
    with pytest.raises((ValueError, PipeCommMismatch), match="attention returned"):
        ulysses_attention(q, q, q, lambda q, k, v: q[:, :1], world.comm, chunks=2)
    check_equal(world, 1, 6, 4, 2, 2)


@on_ranks(2)
def test_unequal_lengths_without_gather_size(world):
    q = numbers((1, 3 + world.rank, 4, 4), torch.float64, "q")
    with pytest.raises(PipeCommMismatch, match="give gather_size"):
        ulysses_attention(q, q, q, None, world.comm, chunks=2)
    check_equal(world, 1, 6, 4, 2, 2)


@on_ranks(2)
def test_other_numbers_of_chunks(world):
    q = numbers((1, 3, 8, 4), torch.float64, "q")
    with pytest.raises(PipeCommMismatch):
        ulysses_attention(q, q, q, None, world.comm, chunks=2 + world.rank)
    check_equal(world, 1, 6, 4, 2, 2)


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
    """The model is asked with numbers that are the same on all ranks, also on one without tokens."""
    asked = []

    def note(transport, device, *numbers):
        asked.append(numbers)
        return 1

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ulysses, "best_num_chunks", note)
        for length in (world.size - 1, 5):
            check_equal(world, 2, length, 4, 2, "auto")
    told = torch.tensor(asked, dtype=torch.float64)
    everywhere = gather_forward_split_backward(told[None], world.comm, 0)
    assert torch.equal(everywhere, told.expand_as(everywhere)) and told.all()


def test_number_of_chunks():
    assert best_num_chunks("shm", "cpu", 1 << 30, 1e12, 8) == 1
    assert best_num_chunks("c10d", "cpu", 1 << 10, 1e3, 8) == 1  # a message costs more than it hides
    assert best_num_chunks("c10d", "cpu", 1 << 30, 1e11, 8) == 8
    assert best_num_chunks("c10d", "cpu", 1 << 30, 1e11, 1) == 1
    assert 1 < best_num_chunks("nccl", "cuda", 1 << 28, 1e12, 16) <= 16
