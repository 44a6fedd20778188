"""The border of two stages: the specs of its tensors, and the header that sends them to the other end.

    header = number of words, number of tensors, then for each tensor
             dtype, is_differentiable, number of dims, dim, dim, ...
             then, if they are no plain tuple, their structure (`values`): number of characters, characters

in 64-bit words, eight characters in each; a tensor that is None is the word ABSENT alone. The first
HEADER_WORDS words are a message of their own, whose receive can be posted in advance; the rest, if there is
any, is a second one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple, cast

import torch

from ..core.extension import _C
from ..errors import PipeCommError
from .values import PLAIN

HEADER_WORDS = 32
MAX_HEADER_WORDS = 1 << 20
WORD_BYTES = 8
ABSENT = -1

DTYPE_NAMES = _C.DTYPE_NAMES  # a dtype's place in this list is its number on the wire
_NUMBER_OF = {getattr(torch, name): number for number, name in enumerate(DTYPE_NAMES) if hasattr(torch, name)}

Tensors = Sequence[torch.Tensor | None]


class BorderSpec(NamedTuple):
    """A tensor of a border: differentiable ones have a gradient that goes back."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_differentiable: bool

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        return f"{name}{list(self.shape)}" + (" with gradient" if self.is_differentiable else "")


Specs = Sequence[BorderSpec | None]  # None where the tensor is None
FullSpecs = tuple[BorderSpec, ...]  # no tensor is None


class OutputSpecs(NamedTuple):
    """The specs and the structure of what a stage of the Executor passes on."""

    tensors: FullSpecs
    structure: str = PLAIN

    def __str__(self) -> str:
        return text_of(self.tensors) + (self.structure and f" as {self.structure}")


def specs_of(tensors: Iterable[torch.Tensor], structure: str = PLAIN) -> OutputSpecs:
    """The specs of a stage's outputs."""
    return OutputSpecs(
        tuple(BorderSpec(tuple(t.shape), t.dtype, t.requires_grad) for t in tensors), structure
    )


@lru_cache(maxsize=512)
def gradient_specs(specs: FullSpecs) -> FullSpecs:
    """The specs of the gradients of these tensors."""
    return tuple(spec._replace(is_differentiable=False) for spec in specs if spec.is_differentiable)


def text_of(specs: Specs) -> str:
    """The specs as error messages show them."""
    return "(" + ", ".join(map(str, specs)) + ")"


@lru_cache(maxsize=512)
def header_of(specs: tuple[BorderSpec | None, ...], structure: str = PLAIN) -> tuple[torch.Tensor, ...]:
    """The header as one or two int64 CPU tensors, which must not be changed.

    Raises:
        TypeError: a dtype has no number.
    """
    words = [0, len(specs)]
    for spec in specs:
        if spec is None:
            words.append(ABSENT)
            continue
        shape, dtype, is_differentiable = spec
        if dtype not in _NUMBER_OF:
            raise TypeError(f"tensors of {dtype} cannot cross a border: that dtype has no number")
        words += (_NUMBER_OF[dtype], is_differentiable, len(shape), *shape)
    if structure != PLAIN:
        text = structure.encode("ascii")
        words.append(len(text))
        padded = text.ljust(-(-len(text) // WORD_BYTES) * WORD_BYTES)
        words += (
            int.from_bytes(padded[i : i + WORD_BYTES], "little") for i in range(0, len(padded), WORD_BYTES)
        )
    words[0] = len(words)
    words += [0] * (HEADER_WORDS - len(words))
    head, rest = words[:HEADER_WORDS], words[HEADER_WORDS:]
    return tuple(torch.tensor(part, dtype=torch.int64, device="cpu") for part in (head, rest) if part)


def num_words_after(head: Sequence[int]) -> int:
    """Length of the second message of a header that begins with these words, 0 if there is none."""
    if not 2 <= head[0] <= MAX_HEADER_WORDS:
        raise PipeCommError(f"a header of {head[0]} words: the peer runs another version of pipecomm_ext")
    return max(0, head[0] - HEADER_WORDS)


def specs_in(words: Sequence[int]) -> tuple[BorderSpec | None, ...]:
    """The specs that the words of a header of a plain list announce."""
    specs, structure = _specs_and_structure(words)
    if structure != PLAIN:
        raise PipeCommError(f"the peer sends tensors as {structure[:100]}, where a plain list was expected")
    return specs


def output_specs_in(words: Sequence[int]) -> OutputSpecs:
    """The specs that the words of a header announce; None values are only in the structure."""
    specs, structure = _specs_and_structure(words)
    return OutputSpecs(cast(FullSpecs, specs), structure)


def _specs_and_structure(words: Sequence[int]) -> tuple[tuple[BorderSpec | None, ...], str]:
    specs: list[BorderSpec | None] = []
    position = 2
    for _ in range(words[1]):
        number = words[position]
        if number == ABSENT:
            specs.append(None)
            position += 1
            continue
        is_differentiable, num_dims = words[position + 1 : position + 3]
        position += 3 + num_dims
        shape = tuple(words[position - num_dims : position])
        specs.append(BorderSpec(shape, _dtype_of(number), bool(is_differentiable)))
    return tuple(specs), _structure_in(words[position : words[0]])


def _structure_in(words: Sequence[int]) -> str:
    """The structure that these last words of a header hold."""
    if not words:
        return PLAIN
    num_chars, *parts = words
    text = b"".join((part % (1 << 64)).to_bytes(WORD_BYTES, "little") for part in parts)
    if not 0 < num_chars <= len(text) or not text.isascii():
        raise PipeCommError("a header with a broken structure: the peer runs another version of pipecomm_ext")
    return text[:num_chars].decode()


def _dtype_of(number: int) -> torch.dtype:
    if not 0 <= number < len(DTYPE_NAMES):
        raise PipeCommError(f"a header with dtype {number}: the peer runs another version of pipecomm_ext")
    dtype = getattr(torch, DTYPE_NAMES[number], None)
    if dtype is None:
        raise PipeCommError(
            f"the peer sends tensors of {DTYPE_NAMES[number]}, which this torch does not have"
        )
    return dtype
