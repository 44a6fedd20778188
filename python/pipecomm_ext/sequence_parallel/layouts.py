"""How the ranks of a group hold a dim together, and which segments of it a rank keeps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .sizes import Sizes

if TYPE_CHECKING:
    from typing_extensions import TypeIs

ZIGZAG = "zigzag"

# The lengths of contiguous pieces; lengths[rank][sequence] of packed sequences; ZIGZAG; or None, the default:
# remainder-first pieces for a split, equal ones for a gather.
GivenLayout = Sizes | tuple[Sizes, ...] | str
Layout = GivenLayout | None


def is_packed(layout: Layout) -> TypeIs[tuple[Sizes, ...]]:
    return isinstance(layout, tuple) and len(layout) > 0 and isinstance(layout[0], tuple)


def segments_of(layout: GivenLayout, rank: int, size: int, length: int) -> list[tuple[int, int]]:
    """(start, length) of the segments that `rank` keeps of a dim of `length`, in the order it holds them.

    Raises:
        ValueError: the layout does not fit `size` ranks or `length`.
    """
    if isinstance(layout, str):  # ZIGZAG
        if length % (2 * size):
            raise ValueError(
                f"zigzag order needs a length divisible by 2 * group size = {2 * size}, got length {length}"
            )
        chunk = length // (2 * size)
        return [(rank * chunk, chunk), ((2 * size - 1 - rank) * chunk, chunk)]
    rows: Sequence[Sizes]
    if is_packed(layout):
        rows, whole = layout, "all sequence lengths"
    else:
        rows, whole = [(piece,) for piece in layout], f"split_sizes {list(layout)}"
        if len(layout) != size:
            raise ValueError(
                f"split_sizes needs one entry for each of the {size} ranks, got {len(layout)}: {list(layout)}"
            )
        if any(length < 0 for length in layout):
            raise ValueError(f"split_sizes must not be negative, got {list(layout)}")
    segments, start = [], 0
    for pieces in zip(*rows, strict=True):  # of one sequence
        segments.append((start + sum(pieces[:rank]), pieces[rank]))
        start += sum(pieces)
    if start != length:
        raise ValueError(f"sum of {whole} is {start}, but the tensor has length {length}")
    return segments
