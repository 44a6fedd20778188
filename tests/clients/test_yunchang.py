"""yunchang's attention modules: as they are, and with their all-to-all replaced."""

from __future__ import annotations

import contextlib
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from pinned import needs
from torch.nn import functional

needs("yunchang")

import yunchang.hybrid.attn_layer  # noqa: E402
import yunchang.ulysses.attn_layer  # noqa: E402
from page import code_of  # noqa: E402
from side_by_side import assert_same_bits, ratio_of_times  # noqa: E402

import pipecomm_ext  # noqa: E402

HEADS, HEAD_DIM = 8, 32


@contextlib.contextmanager
def replaced():
    """As docs/migrating.md replaces it; undone afterwards."""
    with mock.patch.object(yunchang.ulysses.attn_layer, "SeqAllToAll4D"):
        yield code_of("class SeqAllToAll")["SeqAllToAll"]


def attend(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, **_):
    """flash_attn's interface on a CPU: [batch, seq, heads, head_dim]."""
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    out = functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=softmax_scale)
    return out.transpose(1, 2)


def whole_sequence(seq_len: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seq_len)
    shape = (2, seq_len, HEADS, HEAD_DIM)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(4)]


def my_part(world, x: torch.Tensor) -> torch.Tensor:
    return x.split(pipecomm_ext.cal_split_sizes(x.size(1), world.size), 1)[world.rank].clone()


def ulysses_attention() -> torch.nn.Module:
    module = yunchang.ulysses.attn_layer.UlyssesAttention(
        dist.group.WORLD, attn_type=yunchang.kernels.AttnType.TORCH_MATH
    )
    module.attn_fn = attend  # theirs that runs on a CPU is a ring attention without a backward
    return module


def output_and_gradients(module, q, k, v, grad) -> list[torch.Tensor]:
    leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
    out = module(*leaves, causal=True)
    out.backward(grad)
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def ulysses_both(world):
    module, mine = ulysses_attention(), [my_part(world, x) for x in whole_sequence(64 * world.size)]

    def theirs():
        return output_and_gradients(module, *mine)

    def ours():
        with replaced():
            return output_and_gradients(module, *mine)

    assert_same_bits(ours(), theirs(), "output or gradient")
    return ratio_of_times(theirs, ours)


@pytest.mark.parametrize("size", [2, 4])
def test_ulysses_attention(ranks, report, size):
    report(f"UlyssesAttention, {size} ranks", ranks.run(size, ulysses_both)[0])


def ulysses_of_uneven_lengths(world, seq_len):
    """yunchang over gloo ends the process here; ours must equal one process."""
    whole = whole_sequence(seq_len)

    def exchange(group, x, scatter_idx, gather_idx, use_sync=False):
        size = {1: seq_len, 2: HEADS}[gather_idx]
        return pipecomm_ext.all_to_all(x, group, scatter_idx, gather_idx, gather_size=size)

    with replaced() as function, mock.patch.object(function, "apply", exchange):
        results = output_and_gradients(ulysses_attention(), *(my_part(world, x) for x in whole))
    for result, truth in zip(results, output_and_gradients(attend, *whole), strict=True):
        torch.testing.assert_close(result, my_part(world, truth), rtol=0, atol=1e-12)


@pytest.mark.parametrize("seq_len", [67, 101])
def test_uneven_lengths(ranks, seq_len):
    ranks.run(3, ulysses_of_uneven_lengths, seq_len)
