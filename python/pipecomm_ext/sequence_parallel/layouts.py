"""How the ranks of a group hold a dim together, and which segments of it a rank keeps."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
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


Segments = list[tuple[int, int]]  # (start, length) of the parts of a dim that a rank holds, in its order


def split_segments(layout: GivenLayout, rank: int, size: int, length: int) -> Segments:
    """What `rank` of `size` keeps of a dim of `length`.

    Raises:
        ValueError: the layout does not fit `size` ranks or `length`.
    """
    segments = _segments_of_all(layout, size, length, "split_sizes")
    if not isinstance(layout, str) and (end := sum(segments[-1][-1])) != length:
        whole = "all sequence lengths" if is_packed(layout) else f"split_sizes {list(layout)}"
        raise ValueError(f"sum of {whole} is {end}, but the tensor has length {length}")
    return segments[rank]


def gather_segments(layout: GivenLayout, rank: int, size: int, length: int) -> list[Segments]:
    """What each rank holds of a dim of which `rank` holds `length`.

    Raises:
        ValueError: the layout does not fit `size` ranks or `length`.
    """
    segments = _segments_of_all(layout, size, length * size, "gather_sizes")
    held = sum([piece for _, piece in segments[rank]])
    if held != length:
        mine = f"entry {rank} of gather_sizes {list(layout)}"
        if is_packed(layout):
            mine = f"sum of row {rank} of the split sizes {list(layout[rank])}"
        raise ValueError(f"{mine} is {held}, but the tensor has length {length}")
    return segments


def _segments_of_all(layout: GivenLayout, size: int, length: int, name: str) -> list[Segments]:
    if isinstance(layout, str):  # ZIGZAG
        if length % (2 * size):
            raise ValueError(
                f"zigzag order needs a length divisible by 2 * group size = {2 * size}, got length {length}"
            )
        chunk = length // (2 * size)
        return [[(rank * chunk, chunk), ((2 * size - 1 - rank) * chunk, chunk)] for rank in range(size)]
    if len(layout) != size:
        raise ValueError(
            f"{name} needs one entry for each of the {size} ranks, got {len(layout)}: {list(layout)}"
        )
    lengths: Sequence[int]
    if is_packed(layout):
        counts = {len(row) for row in layout}
        if len(counts) > 1 or 0 in counts:
            raise ValueError(
                f"all ranks must have lengths of the same sequences, at least one, got {list(layout)}"
            )
        lengths = [piece for pieces in zip(*layout, strict=True) for piece in pieces]
    else:
        lengths = layout
    if min(lengths) < 0:
        raise ValueError(f"{name} must not be negative, got {list(layout)}")
    segments = list(zip(accumulate(lengths, initial=0), lengths, strict=False))
    return [segments[rank::size] for rank in range(size)]
