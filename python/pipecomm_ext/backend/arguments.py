"""What torch and its users pass to the methods of process groups, which have several forms."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..core.tensor_specs import plain


def single(tensors: Any, name: str) -> Tensor:
    """The tensor of a call that torch gives a list of one."""
    if not isinstance(tensors, Tensor):
        if len(tensors) != 1:
            raise ValueError(f"{name}: one tensor for each rank is supported, not {len(tensors)}")
        tensors = tensors[0]
    return tensors if type(tensors) is Tensor else plain(tensors)


def tensor_list(tensors: Any) -> list[Tensor]:
    """The list of a call that torch gives a list of one list."""
    if len(tensors) == 1 and isinstance(tensors[0], (list, tuple)):
        tensors = tensors[0]
    return [plain(tensor) for tensor in tensors]


def operator_name(op: Any) -> str:
    return getattr(getattr(op, "op", op), "name", str(op))
