"""Attributes of the user's model, which may be wrapped, for example in DDP."""

from __future__ import annotations

from typing import Any


def owner_of(model: Any, attribute: str) -> Any:
    """The object that has the attribute: the model, or what it wraps as `.module`, at any depth; or None."""
    while not hasattr(model, attribute):
        model = getattr(model, "module", None)
        if model is None:
            return None
    return model


def attribute_of(model: Any, attribute: str) -> Any:
    """The attribute of the model, or of what it wraps. Raises ValueError if neither has it."""
    owner = owner_of(model, attribute)
    if owner is None:
        raise ValueError(f"the model, a {type(model).__name__}, has no {attribute}, nor has what it wraps")
    return getattr(owner, attribute)
