"""What a plan needs to know of a tensor: shape and dtype."""

from __future__ import annotations

from typing import Any

import torch

Spec = tuple[tuple[int, ...], torch.dtype]


def spec_of(tensor: Any, name: str) -> Spec:
    """Shape and dtype; `name` is the argument's, for the error if it is no dense tensor."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, not {type(tensor).__name__}")
    if tensor.is_nested or tensor.layout != torch.strided:
        layout = "nested" if tensor.is_nested else f"of layout {tensor.layout}"
        raise ValueError(f"{name} must be a dense tensor, not {layout}")
    return tuple(tensor.shape), tensor.dtype


def specs_of(tensors: Any, name: str) -> tuple[Spec, ...]:
    """The same of a list or tuple of tensors."""
    if not isinstance(tensors, (list, tuple)):
        raise TypeError(f"{name} must be a list of tensors, not {type(tensors).__name__}")
    return tuple(spec_of(tensor, f"{name}[{idx}]") for idx, tensor in enumerate(tensors))
