"""How a dim is divided over ranks, and the checks of dims and size lists that all operations share."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack

from ..core.checked import whole_number
from ..core.tensor_specs import TensorSpec, spec_of
from ..errors import PipeCommMismatch

Sizes = tuple[int, ...]


def cal_split_sizes(dim_size: int, world_size: int) -> list[int]:
    """Divides a dim over `world_size` ranks: equal lengths, but the first ones may be longer by one.

    (10, 4) -> [3, 3, 2, 2]; (2, 4) -> [1, 1, 0, 0]. 0-dim integer tensors are accepted. Semantics:
    MindSpeed-MM.

    Raises:
        ValueError: `dim_size` < 0 or `world_size` < 1.

    Example:
        ```python
        cal_split_sizes(10, 4)  # [3, 3, 2, 2]
        ```
    """
    dim_size, world_size = whole_number(dim_size, "dim_size"), whole_number(world_size, "world_size")
    if dim_size < 0 or world_size < 1:
        raise ValueError(f"cannot divide a length of {dim_size} over {world_size} ranks")
    # Without a branch or a count that depends on the length: one compiled graph serves all lengths.
    return [(dim_size + world_size - 1 - rank) // world_size for rank in range(world_size)]


def cal_split_sizes_multi(sizes: Sequence[int] | Tensor, world_size: int) -> Tensor:
    """Divides each of several packed sequences: CPU int64 [world_size, len(sizes)], one row for each rank.

    ([5, 3], 2) -> [[3, 2], [2, 1]]: every remainder goes to low ranks. Semantics: MindSpeed-MM.
    """
    columns = [cal_split_sizes(whole_number(size, "dim_size"), world_size) for size in sizes]
    rows = list(zip(*columns, strict=True)) if columns else [()] * whole_number(world_size, "world_size")
    return torch.tensor(rows, dtype=torch.int64, device="cpu")


def dim_index(dim: Any, num_dims: int, name: str) -> int:
    """`dim` counted from the front."""
    dim = whole_number(dim, name)
    if not -num_dims <= dim < num_dims:
        raise IndexError(f"{name} {dim} is out of range for a tensor of {num_dims} dims")
    return dim % num_dims


def size_list(sizes: Any, name: str) -> Sizes:
    """A list or tuple of ints as a tuple."""
    if not isinstance(sizes, (list, tuple)):
        raise ValueError(f"{name} must be a list of one length per rank, not {type(sizes).__name__}")
    return tuple(whole_number(size, f"{name}[{rank}]") for rank, size in enumerate(sizes))


def checked_spec(tensor: Any, name: str) -> TensorSpec:
    """Shape and dtype of a dense tensor that holds data, as local copies and plans need it."""
    spec = spec_of(tensor, name)
    if peek_interpreter_stack() is not None:
        raise TypeError(
            f"{name} is inside a transform (vmap, torch.func), which communication cannot follow; pass a "
            "plain torch.Tensor, outside of it"
        )
    if tensor.is_quantized or tensor.device.type == "meta":
        kind = f"quantized, {tensor.dtype}" if tensor.is_quantized else "on the meta device"
        raise ValueError(f"{name} must be a tensor of plain elements, not {kind}")
    return spec


class taken_as_equal:
    """Wraps an exchange that assumes equal lengths of the ranks along `dim`, unless `cure` is None. If they
    differ, its PipeCommMismatch says so and names the argument, `cure`, that the call needs. The plan's
    tensors have one of the `parts` in which these lengths are cut.
    """

    __slots__ = ("_cure", "_dim", "_parts")

    def __init__(self, dim: int, cure: str | None, parts: int = 1):
        self._dim, self._cure, self._parts = dim, cure, parts

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if not isinstance(error, PipeCommMismatch):
            return
        shapes = [side.shape for side in (error.ours, error.theirs) if side and self._dim < len(side.shape)]
        lengths = [self._parts * shape[self._dim] for shape in shapes]
        if self._cure and len(set(map(len, shapes))) == 1 and len(set(lengths)) == 2:
            mine, theirs = lengths
            told = (
                f"ranks hold unequal lengths along dim {self._dim}, {mine} and {theirs}, so give {self._cure}"
            )
            who, found = f"rank {error.rank}: ", str(error)
            error.args = (f"{who}{told}; {found.removeprefix(who)}",)


def packed_split_rows(sequence_lengths: Sequence[int] | Tensor, world_size: int) -> tuple[Sizes, ...]:
    """`cal_split_sizes_multi` as one tuple per rank."""
    if isinstance(sequence_lengths, Tensor):
        sequence_lengths = sequence_lengths.tolist()
    if not isinstance(sequence_lengths, (list, tuple)):
        raise ValueError(
            f"sequence lengths must be a list or a 1-d tensor, not {type(sequence_lengths).__name__}"
        )
    if not sequence_lengths:
        raise ValueError("there must be at least one sequence length")
    lengths = tuple(whole_number(length, "a sequence length") for length in sequence_lengths)
    return _split_rows(lengths, world_size)


@lru_cache(maxsize=256)
def _split_rows(lengths: Sizes, world_size: int) -> tuple[Sizes, ...]:
    return tuple(zip(*(cal_split_sizes(length, world_size) for length in lengths), strict=True))


def packed_rows(all_split_sizes: Tensor | Sequence[Sequence[int]]) -> tuple[Sizes, ...]:
    """lengths[rank][sequence] as tuples."""
    if isinstance(all_split_sizes, Tensor):
        all_split_sizes = all_split_sizes.tolist()
    if not isinstance(all_split_sizes, (list, tuple)):
        raise ValueError(
            f"all_split_sizes must be a tensor [ranks, sequences], not {type(all_split_sizes).__name__}"
        )
    return tuple(size_list(row, f"all_split_sizes[{rank}]") for rank, row in enumerate(all_split_sizes))
