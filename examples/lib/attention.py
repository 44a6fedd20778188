"""Causal attention with grouped queries, of whole sequences."""

from __future__ import annotations

import torch
from torch.nn import functional

SEQ, HEADS = 1, 2  # dims of [batch, seq, heads, head_dim]


def kv_head_of(head: int, num_heads: int, num_kv_heads: int) -> int:
    """The key/value head that a query head reads."""
    return head * num_kv_heads // num_heads


def take_heads(x: torch.Tensor, heads: list[int]) -> torch.Tensor:
    """These heads in this order, without a copy if they are all heads in their order."""
    return x if heads == list(range(x.size(HEADS))) else x[:, :, heads]


def attend_whole(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """All tokens, all heads."""
    kv_heads = [kv_head_of(head, q.size(HEADS), k.size(HEADS)) for head in range(q.size(HEADS))]
    return attend_heads(q, take_heads(k, kv_heads), take_heads(v, kv_heads))


def attend_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention with as many key/value as query heads; also with none, on ranks beyond the heads."""
    if q.size(HEADS) == 0:
        return q
    q, k, v = (tensor.transpose(SEQ, HEADS) for tensor in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(SEQ, HEADS)
