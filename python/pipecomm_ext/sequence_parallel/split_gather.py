"""Split and gather along one dim: contiguous pieces, zigzag pieces, pieces of packed sequences.

A split is a local copy of what every rank holds, its backward a gather; a gather is one exchange, its
backward a local split. Gradients are scaled by the number of ranks as the reference (MindSpeed-MM) does: "up"
multiplies, "down" divides, on the small side and in the dtype of the gradient ("up" can overflow float16).
There is no sum over ranks. With async_op=True each returns (tensor, work), as `all_to_all` does. Backwards of
splits must run in one order on all ranks. This is not checked: a split is local, so some ranks may make more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor

from ..communicator.registry import rank_and_size
from ..core.checked import whole_number
from ..core.copyable import copyable
from .asynchronous import Result, StepWork
from .layouts import ZIGZAG
from .sizes import checked_spec, dim_index, packed_rows, packed_split_rows, size_list
from .split_gather_pair import gather, split


@overload
def split_forward_gather_backward(
    input_: Tensor,
    process_group: Any,
    dim: int,
    split_sizes: Sequence[int] | None = None,
    grad_scale: str | None = "down",
    *,
    async_op: Literal[False] = False,
) -> Tensor: ...
@overload
def split_forward_gather_backward(
    input_: Tensor,
    process_group: Any,
    dim: int,
    split_sizes: Sequence[int] | None = None,
    grad_scale: str | None = "down",
    *,
    async_op: Literal[True],
) -> tuple[Tensor, StepWork]: ...
def split_forward_gather_backward(
    input_: Tensor,
    process_group: Any,
    dim: int,
    split_sizes: Sequence[int] | None = None,
    grad_scale: str | None = "down",
    *,
    async_op: bool = False,
) -> Result:
    """Keeps this rank's piece of a tensor that every rank holds; the backward gathers the pieces' gradients.

    Args:
        input_: any shape of at least one dim, any dtype and strides; equal on all P ranks.
        process_group: a torch group, a Communicator, or None for the default group.
        dim: the dim to split, negative ones count from the end.
        split_sizes: length of each rank's piece, zeros allowed; default remainder-first (`cal_split_sizes`).
        grad_scale: "down" divides the gradient by P, "up" multiplies by P, None leaves it unchanged.
        async_op: return (tensor, work). The backward posts the gather of gradients when it reaches
            `work.wait()`, and waits for it when it reaches the call.

    Returns:
        a fresh contiguous tensor of length split_sizes[r] along `dim`. Nothing is communicated.

    Raises:
        ValueError: `split_sizes` is not a list of P lengths >= 0 with the right sum; `grad_scale` is unknown,
            or not None for a float8 tensor that requires a gradient.
        IndexError: `dim` is out of range.

    Example:
        ```python
        whole = torch.arange(10.0).view(5, 2)  # on every rank
        piece = split_forward_gather_backward(whole, comm, dim=0)  # 3 rows on rank 0, 2 on rank 1
        ```
    """
    layout = None if split_sizes is None else size_list(split_sizes, "split_sizes")
    return split(input_, process_group, dim, layout, grad_scale, async_op)


@overload
def gather_forward_split_backward(
    input_: Tensor,
    process_group: Any,
    dim: int,
    gather_sizes: Sequence[int] | None = None,
    grad_scale: str | None = "up",
    *,
    async_op: Literal[False] = False,
) -> Tensor: ...
@overload
def gather_forward_split_backward(
    input_: Tensor,
    process_group: Any,
    dim: int,
    gather_sizes: Sequence[int] | None = None,
    grad_scale: str | None = "up",
    *,
    async_op: Literal[True],
) -> tuple[Tensor, StepWork]: ...
def gather_forward_split_backward(
    input_: Tensor,
    process_group: Any,
    dim: int,
    gather_sizes: Sequence[int] | None = None,
    grad_scale: str | None = "up",
    *,
    async_op: bool = False,
) -> Result:
    """Concatenates the ranks' tensors in rank order; the backward keeps my piece of my own gradient.

    Args:
        input_: any shape of at least one dim, any dtype and strides; the ranks' may differ in length along
            `dim` only.
        process_group: a torch group, a Communicator, or None for the default group.
        dim: the dim to gather, negative ones count from the end.
        gather_sizes: length of each rank's tensor, zeros allowed; without it all must be equal, which is
            checked.
        grad_scale: "up" multiplies the gradient by P, "down" divides by P, None leaves it unchanged.
        async_op: return (tensor, work) at once; the tensor may be used after `work.wait()`.

    Returns:
        a fresh contiguous tensor of length sum(gather_sizes) along `dim`, equal on all ranks.

    Raises:
        ValueError, IndexError, TypeError: bad arguments on this rank; nothing was sent.
        PipeCommMismatch: another rank refused, or the ranks' arguments do not fit; the next call works.

    Example:
        ```python
        piece = torch.full((3 - comm.rank, 2), float(comm.rank))
        whole = gather_forward_split_backward(piece, comm, dim=0, gather_sizes=[3, 2])  # [5, 2] on every rank
        ```
    """

    def layout():
        return None if gather_sizes is None else size_list(gather_sizes, "gather_sizes")

    return gather(input_, process_group, dim, layout, grad_scale, async_op)


@overload
def load_balanced_split_forward_gather_backward(
    input_: Tensor, process_group: Any, dim: int = 0, *, async_op: Literal[False] = False
) -> Tensor: ...
@overload
def load_balanced_split_forward_gather_backward(
    input_: Tensor, process_group: Any, dim: int = 0, *, async_op: Literal[True]
) -> tuple[Tensor, StepWork]: ...
def load_balanced_split_forward_gather_backward(
    input_: Tensor, process_group: Any, dim: int = 0, *, async_op: bool = False
) -> Result:
    """Splits `dim` in zigzag order, which balances causal attention.

    Of 2P equal chunks, rank r keeps the chunks r and 2P - 1 - r, in this order. The backward divides by P
    and gathers in natural order. Otherwise like `split_forward_gather_backward`.

    Raises:
        ValueError: the length of `dim` is not divisible by 2P.
    """
    return split(input_, process_group, dim, ZIGZAG, "down", async_op)


@overload
def load_balanced_gather_forward_split_backward(
    input_: Tensor, process_group: Any, dim: int = 0, *, async_op: Literal[False] = False
) -> Tensor: ...
@overload
def load_balanced_gather_forward_split_backward(
    input_: Tensor, process_group: Any, dim: int = 0, *, async_op: Literal[True]
) -> tuple[Tensor, StepWork]: ...
def load_balanced_gather_forward_split_backward(
    input_: Tensor, process_group: Any, dim: int = 0, *, async_op: bool = False
) -> Result:
    """Gathers zigzag pieces in natural order: the inverse of `load_balanced_split_forward_gather_backward`.

    All ranks hold the same even length along `dim`. The backward keeps this rank's chunks of its own gradient
    times P.
    """
    return gather(input_, process_group, dim, lambda: ZIGZAG, "up", async_op)


@overload
def packed_data_split_forward_gather_backward(
    hidden_states: Tensor,
    process_group: Any,
    sequence_lengths: Sequence[int] | Tensor,
    dim: int = 0,
    *,
    async_op: Literal[False] = False,
) -> Tensor: ...
@overload
def packed_data_split_forward_gather_backward(
    hidden_states: Tensor,
    process_group: Any,
    sequence_lengths: Sequence[int] | Tensor,
    dim: int = 0,
    *,
    async_op: Literal[True],
) -> tuple[Tensor, StepWork]: ...
def packed_data_split_forward_gather_backward(
    hidden_states: Tensor,
    process_group: Any,
    sequence_lengths: Sequence[int] | Tensor,
    dim: int = 0,
    *,
    async_op: bool = False,
) -> Result:
    """Splits each of several sequences that are packed along `dim`; a rank packs its pieces in their order.

    Each sequence is cut by `cal_split_sizes`: ([5, 3], P = 2) gives rank 0 a0 a1 a2 b0 b1, rank 1 a3 a4 b2.
    The backward is one gather whatever the number of sequences, and divides by P.

    Raises:
        ValueError: no lengths, a negative one, or their sum is not the length of `dim`.
    """
    _, size = rank_and_size(process_group)
    return split(
        hidden_states, process_group, dim, packed_split_rows(sequence_lengths, size), "down", async_op
    )


@overload
def packed_data_gather_forward_split_backward(
    local_hidden_states: Tensor,
    all_split_sizes: Tensor | Sequence[Sequence[int]],
    process_group: Any,
    dim: int = 0,
    *,
    async_op: Literal[False] = False,
) -> Tensor: ...
@overload
def packed_data_gather_forward_split_backward(
    local_hidden_states: Tensor,
    all_split_sizes: Tensor | Sequence[Sequence[int]],
    process_group: Any,
    dim: int = 0,
    *,
    async_op: Literal[True],
) -> tuple[Tensor, StepWork]: ...
def packed_data_gather_forward_split_backward(
    local_hidden_states: Tensor,
    all_split_sizes: Tensor | Sequence[Sequence[int]],
    process_group: Any,
    dim: int = 0,
    *,
    async_op: bool = False,
) -> Result:
    """Gathers what `packed_data_split_forward_gather_backward` split: whole sequences, one after the other.

    Args:
        local_hidden_states: this rank's pieces of all sequences, packed along `dim`.
        all_split_sizes: integers >= 0 on the CPU, [P, sequences], as from `cal_split_sizes_multi`.
        process_group: a torch group, a Communicator, or None for the default group.
        dim: the packed dim.

    The backward keeps this rank's pieces of its own gradient times P.
    """
    return gather(
        local_hidden_states, process_group, dim, lambda: packed_rows(all_split_sizes), "up", async_op
    )


def reorder_output(attn_output: Tensor, cp_rank: int, cp_size: int, cp_group: Any, dim: int = 0) -> Tensor:
    """Puts all ranks' zigzag pieces, given in rank order, in natural order. Nothing is communicated.

    The 2 * cp_size equal chunks of `dim` come as 0, 2cp - 1, 1, 2cp - 2, ... and leave as 0, 1, 2, ...
    `cp_rank` and `cp_group` are not used.

    Raises:
        ValueError: the length of `dim` is not divisible by 2 * cp_size.
    """
    checked_spec(attn_output, "attn_output")
    dim = dim_index(dim, attn_output.dim(), "dim")
    num_chunks = 2 * whole_number(cp_size, "cp_size")
    length = attn_output.size(dim)
    if num_chunks < 2 or length % num_chunks:
        raise ValueError(f"length {length} of dim {dim} must be divisible by 2 * cp_size = {num_chunks}")
    copied = copyable(attn_output)
    chunks = copied.split(length // num_chunks, dim) if length else [copied]
    ordered = torch.cat([*chunks[0::2], *chunks[-1::-2]], dim)
    # A view of a dtype has no gradient, not even one of the same dtype.
    return ordered if copied is attn_output else ordered.view(attn_output.dtype)
