"""Tensors as arguments: shapes and dtypes, all that a plan needs to know of them."""

from __future__ import annotations

from typing import Any

import torch

TensorSpec = tuple[tuple[int, ...], torch.dtype]


def spec_of(tensor: Any, name: str) -> TensorSpec:
    """Shape and dtype of a dense tensor. Errors call the argument `name`."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, not {type(tensor).__name__}")
    if tensor.is_nested or tensor.layout != torch.strided:
        layout = "nested" if tensor.is_nested else f"of layout {tensor.layout}"
        raise ValueError(f"{name} must be a dense tensor, not {layout}")
    return tuple(tensor.shape), tensor.dtype


def specs_of(tensors: Any, name: str) -> tuple[TensorSpec, ...]:
    """Shapes and dtypes of a list or tuple of dense tensors."""
    if not isinstance(tensors, (list, tuple)):
        raise TypeError(f"{name} must be a list of tensors, not {type(tensors).__name__}")
    return tuple(spec_of(tensor, f"{name}[{idx}]") for idx, tensor in enumerate(tensors))


def can_have_gradient(dtype: torch.dtype) -> bool:
    """Whether torch can differentiate with respect to tensors of this dtype."""
    return dtype.is_floating_point or dtype.is_complex


def plain(tensor: Any) -> Any:
    """The tensor itself of a result of a functional collective, after a wait for it."""
    if type(tensor) is torch.Tensor or not hasattr(tensor, "trigger_wait"):
        return tensor
    return tensor.trigger_wait()


def version_of(tensor: torch.Tensor) -> int:
    """A number that grows with each write through torch; a tensor made in inference mode has none."""
    try:
        return tensor._version
    except RuntimeError:
        return 0
