"""Shapes of the tensors between stages: from the config, and in the forms that callers may pass."""

from __future__ import annotations

from typing import Any

import torch

from ..communicator import Communicator
from .config import has_variable_shapes, setting


def is_single_shape(shapes: Any) -> bool:
    """Whether this is the shape of one tensor, not a list of shapes: a Size, or a non-empty list or tuple of
    ints. () is an empty list of shapes."""
    if isinstance(shapes, torch.Size):
        return True
    return isinstance(shapes, (list, tuple)) and len(shapes) > 0 and all(map(_is_length, shapes))


def _is_length(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def shape_list(shapes: Any) -> list[tuple[int, ...]]:
    """A single shape or a list of shapes as a list of tuples."""
    if is_single_shape(shapes):
        shapes = [shapes]
    if not isinstance(shapes, (list, tuple)):
        raise TypeError(f"a shape must be a torch.Size, a list or a tuple, not {type(shapes).__name__}")
    for shape in shapes:
        if not isinstance(shape, (list, tuple)) or not all(_is_length(length) for length in shape):
            raise TypeError(f"{shape!r} is not a shape; expected ints in a torch.Size, a list or a tuple")
        if any(length < 0 for length in shape):
            raise ValueError(f"the shape {list(shape)} has a negative length")
    return [tuple(shape) for shape in shapes]


def tensor_list(tensors: Any, name: str) -> list[torch.Tensor | None]:
    """A tensor, None, or a list or tuple of them, as a list."""
    tensors = list(tensors) if isinstance(tensors, (list, tuple)) else [tensors]
    for tensor in tensors:
        if tensor is not None and not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} must be a tensor, None, or a list of them, not {type(tensor).__name__}")
    return tensors


def get_tensor_shapes(
    *,
    seq_length: int,
    micro_batch_size: int,
    decoder_seq_length: int | None,
    config: Any,
    tp_group: Any,
    cp_group: Any,
) -> list[tuple[int, ...]]:
    """The shapes of a boundary: [(sequence, micro-batch, hidden)] of one rank's part, or [()] if they vary.

    The sequence is divided by the ranks of `cp_group` and, with sequence_parallel, of `tp_group`.
    """
    if has_variable_shapes(config):
        return [()]
    length = (seq_length if decoder_seq_length is None else decoder_seq_length) // size_of(cp_group)
    if setting(config, "sequence_parallel"):
        length //= size_of(tp_group)
    hidden_size = setting(config, "hidden_size")
    if hidden_size is None:
        raise ValueError("config.hidden_size must be set, for the shape of the tensors between stages")
    return [(length, micro_batch_size, hidden_size)]


def size_of(group: Any) -> int:
    """Number of ranks of a torch group or Communicator; None is 1."""
    if group is None:
        return 1
    return group.size if isinstance(group, Communicator) else group.size()
