"""What schedules ask of the user's objects: attributes of wrapped models, sizes of groups."""

from __future__ import annotations

from typing import Any

from ..communicator import Communicator


def owner_of(model: Any, attribute: str) -> Any:
    """The object that has the attribute: the model, or what it wraps as `.module`, at any depth; or None."""
    while not hasattr(model, attribute):
        model = getattr(model, "module", None)
        if model is None:
            return None
    return model


def attribute_of(model: Any, attribute: str) -> Any:
    """That attribute. Raises ValueError if neither the model nor what it wraps has it."""
    owner = owner_of(model, attribute)
    if owner is None:
        raise ValueError(f"the model, a {type(model).__name__}, has no {attribute}, nor has what it wraps")
    return getattr(owner, attribute)


def size_of(group: Any) -> int:
    """Number of ranks of a torch group or Communicator; None is 1."""
    if group is None:
        return 1
    return group.size if isinstance(group, Communicator) else group.size()
