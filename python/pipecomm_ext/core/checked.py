"""Checks of arguments that several modules share."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Mapping
from typing import Any, cast

import torch


def whole_number(value: Any, name: str) -> int:
    """Returns an int, a numpy integer or a 0-dim integer tensor as an int; leaves symbolic ints unchanged.

    Raises a TypeError that calls the value `name` for everything else, including bools.
    """
    if isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool):
        return cast(int, value)
    is_bool = isinstance(value, bool) or (isinstance(value, torch.Tensor) and value.dtype == torch.bool)
    if not is_bool:
        with contextlib.suppress(TypeError):
            return operator.index(value)
    raise TypeError(f"{name} must be an int, not {type(value).__name__}")


def require_attributes(config: Any) -> None:
    """Raises TypeError for a dict instead of Megatron's config, which is read by attribute."""
    if isinstance(config, Mapping):
        raise TypeError(
            "config must be an object with attributes, such as PipelineConfig(**config), not a "
            f"{type(config).__name__}"
        )
