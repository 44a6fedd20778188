"""What crosses the boundary of two stages: shapes as callers give them, and the header that tells them.

    header = [number of words, number of tensors, (dtype, number of dims, dim, dim, ..) of each tensor]

in 64-bit words; an absent tensor (None) has the dtype -1 and nothing more. Headers have a fixed size, so
that a receive of one can be posted without knowing anything; what does not fit follows as a second message.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from ..errors import PipeCommError
from ..specs import Spec

HEADER_WORDS = 32
MAX_HEADER_WORDS = 1 << 20
ABSENT = -1

_DTYPE_NAMES = (
    "bool uint8 int8 int16 int32 int64 uint16 uint32 uint64 float16 bfloat16 float32 float64 complex32 "
    "complex64 complex128 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu "
    "float4_e2m1fn_x2"
).split()
_DTYPES = [getattr(torch, name, None) for name in _DTYPE_NAMES]
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES) if dtype is not None}

Tensors = list[torch.Tensor | None]


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


def tensor_list(tensors: Any, name: str) -> Tensors:
    """A tensor, None, or a list or tuple of them, as a list."""
    tensors = list(tensors) if isinstance(tensors, (list, tuple)) else [tensors]
    for tensor in tensors:
        if tensor is not None and not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} must be a tensor, None, or a list of them, not {type(tensor).__name__}")
    return tensors


def is_differentiable(dtype: torch.dtype) -> bool:
    """Whether tensors of this dtype have gradients, which then cross the boundary the other way."""
    return dtype.is_floating_point or dtype.is_complex


def header_messages(tensors: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor, ...]:
    """The header of these tensors as one or two int64 CPU tensors, not to be changed; the first is of
    HEADER_WORDS."""
    return _header_of(tuple(None if tensor is None else (tensor.shape, tensor.dtype) for tensor in tensors))


@lru_cache(maxsize=512)
def _header_of(specs: tuple[Spec | None, ...]) -> tuple[torch.Tensor, ...]:
    words = [0, len(specs)]
    for spec in specs:
        if spec is None:
            words.append(ABSENT)
            continue
        shape, dtype = spec
        if dtype not in _CODES:
            raise TypeError(f"tensors of {dtype} cannot be sent with variable shapes")
        words += (_CODES[dtype], len(shape), *shape)
    words[0] = len(words)
    words += [0] * (HEADER_WORDS - len(words))
    head, rest = words[:HEADER_WORDS], words[HEADER_WORDS:]
    return tuple(torch.tensor(part, dtype=torch.int64) for part in (head, rest) if part)


def num_words_after(head: Sequence[int]) -> int:
    """Length of the second message of a header that begins with these words, 0 if there is none."""
    if not 2 <= head[0] <= MAX_HEADER_WORDS:
        raise PipeCommError(f"a header of {head[0]} words: the peer runs another version of pipecomm_ext")
    return max(0, head[0] - HEADER_WORDS)


def specs_of_header(words: Sequence[int]) -> list[Spec | None]:
    """What the header announces: shape and dtype, or None for an absent tensor."""
    specs: list[Spec | None] = []
    position = 2
    for _ in range(words[1]):
        code = words[position]
        if code == ABSENT:
            specs.append(None)
            position += 1
            continue
        shape = tuple(words[position + 2 : position + 2 + words[position + 1]])
        specs.append((shape, _DTYPES[code]))
        position += 2 + len(shape)
    return specs
