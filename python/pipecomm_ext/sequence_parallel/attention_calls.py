"""Calls of the attention function that the caller of this package passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..core.tensor_specs import version_of
from .heads_argument import NAME, asks_for_heads


def call_attention(
    attention: Callable[..., Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kwargs: Mapping[str, Any],
    first_head: int,
    num_heads: int,
) -> Tensor:
    """Returns the result for these query heads, whose numbers `attention` gets if it asks for them.

    Raises:
        ValueError: `attention` wrote to k or v, of which its other calls read the same memory. In inference
            mode tensors do not count writes, and a compiled graph holds one program for all values.
    """
    asks = NAME not in kwargs and asks_for_heads(attention)
    heads = {NAME: range(first_head, first_head + num_heads)} if asks else {}
    if torch.compiler.is_compiling():
        return attention(q, k, v, **kwargs, **heads)
    versions = version_of(k), version_of(v)
    result = attention(q, k, v, **kwargs, **heads)
    if (version_of(k), version_of(v)) != versions:
        raise ValueError(
            "attention wrote to its k or v, or to a tensor that shares their memory, which its other calls "
            "read: write to a copy"
        )
    return result
