"""The pair of operations behind all splits and gathers: a local copy of my pieces, one exchange of all
pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch

from .. import _C
from .group import communicator_of, group_name, named_group, rank_and_size
from .sizes import Sizes, cal_split_sizes, checked_tensor, dim_index
from .step import LocalStep, Step, apply

ZIGZAG = "zigzag"

# How the ranks hold a dim: the lengths of contiguous pieces; lengths[rank][sequence] of packed sequences;
# ZIGZAG; or None, the default: remainder-first pieces for a split, equal ones for a gather.
Layout = Sizes | tuple[Sizes, ...] | str | None


def split(
    input_: torch.Tensor, process_group: Any, dim: int, layout: Layout, grad_scale: str | None
) -> torch.Tensor:
    """My pieces of a tensor that every rank holds. Not collective."""
    if torch.compiler.is_compiling():
        return _compiled_split(input_, group_name(process_group), dim, *_flat(layout), None, grad_scale)
    return _run_split(input_, process_group, dim, layout, None, grad_scale)


def gather(
    input_: torch.Tensor, process_group: Any, dim: int, layout: Callable[[], Layout], grad_scale: str | None
) -> torch.Tensor:
    """All ranks' pieces, each at its place. Collective: what is wrong with the arguments is refused on all
    ranks.
    """
    if torch.compiler.is_compiling():
        return _compiled_gather(input_, group_name(process_group), dim, *_flat(layout()), None, grad_scale)
    return _run_gather(input_, process_group, dim, layout, None, grad_scale)


def _run_split(input_: Any, process_group: Any, dim: int, layout: Layout, scale, grad_scale) -> torch.Tensor:
    checked_tensor(input_, "input_")
    step = _split_step(
        *rank_and_size(process_group),
        input_.shape,
        input_.dtype,
        dim_index(dim, input_.dim(), "dim"),
        layout,
        scale,
        grad_scale,
    )
    return apply(process_group, step, [input_])[0]


def _run_gather(
    input_: Any, process_group: Any, dim: int, layout: Callable[[], Layout], scale, grad_scale
) -> torch.Tensor:
    comm = communicator_of(process_group, input_)
    with comm.collective("all_gather"):
        checked_tensor(input_, "input_")
        step = _gather_step(
            comm.rank,
            comm.size,
            input_.shape,
            input_.dtype,
            dim_index(dim, input_.dim(), "dim"),
            layout(),
            scale,
            grad_scale,
        )
    return apply(comm, step, [input_])[0]


# ---- steps ------------------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def _split_step(
    rank: int,
    size: int,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    dim: int,
    layout: Layout,
    scale: str | None,
    grad_scale: str | None,
) -> Step:
    _check_scale(grad_scale)
    if layout is None:
        layout = tuple(cal_split_sizes(shape[dim], size))
    build = _by_layout(layout, _C.plan_split, _C.plan_packed_split, _C.plan_zigzag_split)
    plan = build(rank, size, (shape, dtype), dim, *_arguments(layout))
    [local_shape] = plan.output_shapes

    def gradient() -> Step:
        return _gather_step(rank, size, local_shape, dtype, dim, layout, grad_scale, scale)

    return LocalStep(plan, dim, (local_shape, dtype), gradient, scale)


@lru_cache(maxsize=256)
def _gather_step(
    rank: int,
    size: int,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    dim: int,
    layout: Layout,
    scale: str | None,
    grad_scale: str | None,
) -> Step:
    _check_scale(grad_scale)
    if layout is None:
        layout = (shape[dim],) * size
    build = _by_layout(layout, _C.plan_gather, _C.plan_packed_gather, _C.plan_zigzag_gather)
    spec = (shape, dtype)
    if scale is not None and dtype.is_complex:  # scaled as pairs of real numbers
        spec = (*shape, 2), dtype.to_real()
    plan = build(rank, size, spec, dim, *_arguments(layout), scale)
    [full_shape] = plan.output_shapes
    full_shape = full_shape[: len(shape)]

    def gradient() -> Step:
        return _split_step(rank, size, full_shape, dtype, dim, layout, grad_scale, scale)

    return Step(plan, "all_gather", [(full_shape, dtype)], gradient, scaled=scale is not None)


def _check_scale(grad_scale: Any) -> None:
    if grad_scale not in ("up", "down", None):
        raise ValueError(f'grad_scale must be "up", "down" or None, not {grad_scale!r}')


def _by_layout(layout: Layout, contiguous: Any, packed: Any, zigzag: Any) -> Any:
    if layout == ZIGZAG:
        return zigzag
    return packed if layout and isinstance(layout[0], tuple) else contiguous


def _arguments(layout: Layout) -> tuple:
    return () if layout == ZIGZAG else (layout,)


# ---- in a compiled graph: two custom operators ------------------------------------------------------------
# A layout travels as a flat list of lengths, rank by rank, and a flag.


def _flat(layout: Layout) -> tuple[list[int] | None, bool]:
    if layout is None or layout == ZIGZAG:
        return None, layout == ZIGZAG
    if layout and isinstance(layout[0], tuple):
        return [length for row in layout for length in row], False
    return list(layout), False


def _unflat(lengths: Sequence[int] | None, zigzag: bool, size: int) -> Layout:
    if lengths is None:
        return ZIGZAG if zigzag else None
    num_sequences = len(lengths) // size
    if num_sequences < 2 or len(lengths) % size:
        return tuple(lengths)
    return tuple(tuple(lengths[rank * num_sequences : (rank + 1) * num_sequences]) for rank in range(size))


@torch.library.custom_op("pipecomm_ext::split", mutates_args=())
def _compiled_split(
    input_: torch.Tensor,
    group: str,
    dim: int,
    lengths: Sequence[int] | None,
    zigzag: bool,
    scale: str | None,
    grad_scale: str | None,
) -> torch.Tensor:
    process_group = named_group(group)
    layout = _unflat(lengths, zigzag, rank_and_size(process_group)[1])
    return _run_split(input_, process_group, dim, layout, scale, grad_scale)


@torch.library.custom_op("pipecomm_ext::gather", mutates_args=())
def _compiled_gather(
    input_: torch.Tensor,
    group: str,
    dim: int,
    lengths: Sequence[int] | None,
    zigzag: bool,
    scale: str | None,
    grad_scale: str | None,
) -> torch.Tensor:
    process_group = named_group(group)
    layout = _unflat(lengths, zigzag, rank_and_size(process_group)[1])
    return _run_gather(input_, process_group, dim, lambda: layout, scale, grad_scale)


@_compiled_split.register_fake
def _(input_, group, dim, lengths, zigzag, scale, grad_scale) -> torch.Tensor:
    rank, size = rank_and_size(named_group(group))
    _check_scale(grad_scale)
    dim = dim_index(dim, input_.dim(), "dim")
    length = input_.size(dim)
    if zigzag:
        mine = length // size
    else:
        lengths = cal_split_sizes(length, size) if lengths is None else lengths
        num_sequences = len(lengths) // size
        mine = sum(lengths[rank * num_sequences : (rank + 1) * num_sequences])
    return input_.new_empty([*input_.shape[:dim], mine, *input_.shape[dim + 1 :]])


@_compiled_gather.register_fake
def _(input_, group, dim, lengths, zigzag, scale, grad_scale) -> torch.Tensor:
    _, size = rank_and_size(named_group(group))
    _check_scale(grad_scale)
    dim = dim_index(dim, input_.dim(), "dim")
    full = input_.size(dim) * size if lengths is None else sum(lengths)
    return input_.new_empty([*input_.shape[:dim], full, *input_.shape[dim + 1 :]])


def _save_for_backward(ctx, inputs, output) -> None:
    input_, ctx.group, dim, lengths, ctx.zigzag, ctx.scale, ctx.grad_scale = inputs
    ctx.dim = dim_index(dim, input_.dim(), "dim")
    ctx.lengths = lengths


def _save_for_split_backward(ctx, inputs, output) -> None:
    _save_for_backward(ctx, inputs, output)
    if ctx.lengths is None and not ctx.zigzag:  # a gather's default would be equal pieces
        _, size = rank_and_size(named_group(ctx.group))
        ctx.lengths = cal_split_sizes(inputs[0].size(ctx.dim), size)


def _backward_by(operator: Any) -> Any:
    def backward(ctx, grad):
        grad = operator(grad, ctx.group, ctx.dim, ctx.lengths, ctx.zigzag, ctx.grad_scale, ctx.scale)
        return grad, *[None] * 6

    return backward


_compiled_split.register_autograd(_backward_by(_compiled_gather), setup_context=_save_for_split_backward)
_compiled_gather.register_autograd(_backward_by(_compiled_split), setup_context=_save_for_backward)
