"""Copies of tensors of dtypes that torch stores, one element in a byte, but does not copy."""

from __future__ import annotations

import torch

_BITS = range(1, 8)
_DTYPES = {getattr(torch, f"{kind}{bits}") for kind in ("int", "uint") for bits in _BITS}


def copyable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, viewed as bytes if torch does not copy its dtype."""
    return tensor.view(torch.uint8) if tensor.dtype in _DTYPES else tensor


def cloned(tensor: torch.Tensor) -> torch.Tensor:
    """A copy, of any dtype that torch stores."""
    return copyable(tensor).clone().view(tensor.dtype)
