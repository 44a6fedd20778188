"""The two operations behind all splits and gathers: a local copy of my pieces, an exchange of all pieces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from ..communicator.registry import communicator_of, group_name, named_group, rank_and_size
from ..core.copyable import copyable
from ..core.extension import _C
from ..core.operators import communicates
from ..core.tensor_specs import TensorSpec
from .asynchronous import Result, apply_to_one
from .differentiable import ExchangeStep, Step, real_views
from .layouts import ZIGZAG, Layout, gather_segments, is_packed, split_segments
from .sizes import cal_split_sizes, checked_spec, dim_index, taken_as_equal

OP = "all_gather"  # the name of a gather in errors and records
Scale = str | None  # "up": times the number of ranks, "down": divided by it


def split(
    input_: Tensor, process_group: Any, dim: int, layout: Layout, grad_scale: Scale, async_op: bool = False
) -> Result:
    """Copies my pieces of a tensor that every rank holds. Not collective."""
    if torch.compiler.is_compiling() and not async_op:
        return _compiled_split(input_, group_name(process_group), dim, *_flat(layout), None, grad_scale)
    return _run_split(input_, process_group, dim, layout, None, grad_scale, async_op)


def gather(
    input_: Tensor,
    process_group: Any,
    dim: int,
    layout: Callable[[], Layout],
    grad_scale: Scale,
    async_op: bool = False,
) -> Result:
    """Puts all ranks' pieces in their places. Collective: bad arguments of one rank raise on all ranks."""
    if torch.compiler.is_compiling() and not async_op:
        # What the fake kernel would raise on this rank alone. If this raises, torch.compile runs the call
        # itself, which refuses it on all ranks.
        _check_scale(grad_scale)
        dim = dim_index(dim, input_.dim(), "dim")
        return _compiled_gather(input_, group_name(process_group), dim, *_flat(layout()), None, grad_scale)
    return _run_gather(input_, process_group, dim, layout, None, grad_scale, async_op)


def _run_split(
    input_: Any,
    process_group: Any,
    dim: int,
    layout: Layout,
    scale: Scale,
    grad_scale: Scale,
    async_op: bool = False,
) -> Result:
    spec = checked_spec(input_, "input_")
    _check_gradient(input_, grad_scale)
    dim = dim_index(dim, input_.dim(), "dim")
    step = _split_step(*rank_and_size(process_group), spec, dim, layout, scale, grad_scale)
    return apply_to_one(process_group, step, input_, async_op)


def _run_gather(
    input_: Any,
    process_group: Any,
    dim: int,
    layout: Callable[[], Layout],
    scale: Scale,
    grad_scale: Scale,
    async_op: bool = False,
) -> Result:
    comm = communicator_of(process_group, input_)
    with comm.collective(OP):
        spec = checked_spec(input_, "input_")
        _check_gradient(input_, grad_scale)
        dim = dim_index(dim, input_.dim(), "dim")
        layout_ = layout()
        step = _gather_step(comm.rank, comm.size, spec, dim, layout_, scale, grad_scale)
    told = partial(taken_as_equal, dim, "gather_sizes" if layout_ is None else None)
    return apply_to_one(comm, step, input_, async_op, told)


# ---- steps ------------------------------------------------------------------------------------------------


class _SplitStep(Step):
    """Copies this rank's segments of a dim, scaled or not. No other rank takes part."""

    def __init__(
        self,
        dim: int,
        segments: Sequence[tuple[int, int]],
        size: int,
        output: TensorSpec,
        gradient: Callable[[], Step],
        scale: Scale,
    ):
        super().__init__([output], gradient)
        self._dim, self._segments, self._size = dim, segments, size
        self._by_real_views = scale is not None and output[1].is_complex
        writers: dict[Scale, Callable[..., object]] = {None: _copy, "up": torch.mul, "down": torch.div}
        self._write = writers[scale]

    def run(self, group: Any, inputs: Sequence[Tensor], gradient_of: int = 0) -> tuple[list[Tensor], int]:
        [source], [(shape, dtype)] = inputs, self.outputs
        result = torch.empty(shape, dtype=dtype, device=source.device)
        target = result
        if self._by_real_views:
            source, target = real_views([source, target])
        begin = 0
        for start, length in self._segments:
            part = target.narrow(self._dim, begin, length)
            self._write(source.narrow(self._dim, start, length), self._size, out=part)
            begin += length
        return [result], 0


def _copy(source: Tensor, _size: int, *, out: Tensor) -> None:
    copyable(out).copy_(copyable(source))


@lru_cache(maxsize=256)
def _split_step(
    rank: int, size: int, spec: TensorSpec, dim: int, layout: Layout, scale: Scale, grad_scale: Scale
) -> Step:
    _check_scale(grad_scale)
    shape, dtype = spec
    if layout is None:
        layout = tuple(cal_split_sizes(shape[dim], size))
    segments = split_segments(layout, rank, size, shape[dim])
    local = (*shape[:dim], sum(length for _, length in segments), *shape[dim + 1 :]), dtype
    gradient = partial(_gather_step, rank, size, local, dim, layout, grad_scale, scale)
    return _SplitStep(dim, segments, size, local, gradient, scale)


@lru_cache(maxsize=256)
def _gather_step(
    rank: int, size: int, spec: TensorSpec, dim: int, layout: Layout, scale: Scale, grad_scale: Scale
) -> Step:
    _check_scale(grad_scale)
    shape, dtype = spec
    if layout is None:
        layout = (shape[dim],) * size
    by_real_views = scale is not None and dtype.is_complex
    if by_real_views:
        spec = (*shape, 2), dtype.to_real()
    segments = gather_segments(layout, rank, size, shape[dim])
    plan = _C.plan_gather(rank, size, spec, dim, segments, scale)
    [full_shape] = plan.output_shapes
    full = full_shape[: len(shape)], dtype
    gradient = partial(_split_step, rank, size, full, dim, layout, grad_scale, scale)
    return ExchangeStep(OP, plan, [full], gradient, by_real_views)


def _check_scale(grad_scale: Any) -> None:
    if grad_scale not in ("up", "down", None):
        raise ValueError(f'grad_scale must be "up", "down" or None, not {grad_scale!r}')


def _check_gradient(tensor: Tensor, grad_scale: Scale) -> None:
    is_float8 = tensor.is_floating_point() and tensor.itemsize == 1
    if is_float8 and grad_scale is not None and tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"a gradient of {tensor.dtype} cannot be scaled: pass grad_scale=None, or convert the tensor"
        )


# ---- in a compiled graph: two custom operators ------------------------------------------------------------
# A layout is passed as a flat list of lengths, rank by rank, and their number on each rank: 0 is zigzag.


def _flat(layout: Layout) -> tuple[list[int] | None, int]:
    if layout is None or isinstance(layout, str):
        return None, 1 if layout is None else 0
    if is_packed(layout):
        return [length for row in layout for length in row], len(layout[0])
    return list(layout), 1


def _unflat(lengths: Sequence[int] | None, num_each: int) -> Layout:
    if lengths is None:
        return None if num_each else ZIGZAG
    if num_each < 2:
        return tuple(lengths)
    return tuple(tuple(lengths[idx : idx + num_each]) for idx in range(0, len(lengths), num_each))


_SCHEMA = """(Tensor input_, str group, SymInt dim, SymInt[]? lengths, int num_each,
              str? scale, str? grad_scale) -> Tensor"""


@torch.library.custom_op("pipecomm_ext::split", mutates_args=(), schema=_SCHEMA)
def _compiled_split(input_, group, dim, lengths, num_each, scale, grad_scale):
    return _run_split(input_, named_group(group), dim, _unflat(lengths, num_each), scale, grad_scale)


@torch.library.custom_op("pipecomm_ext::gather", mutates_args=(), schema=_SCHEMA)
def _compiled_gather(input_, group, dim, lengths, num_each, scale, grad_scale):
    layout = _unflat(lengths, num_each)
    return _run_gather(input_, named_group(group), dim, lambda: layout, scale, grad_scale)


@_compiled_split.register_fake
def _(input_, group, dim, lengths, num_each, scale, grad_scale) -> Tensor:
    rank, size = rank_and_size(named_group(group))
    _check_scale(grad_scale)
    dim = dim_index(dim, input_.dim(), "dim")
    length = input_.size(dim)
    if num_each == 0:
        mine = length // size
    else:
        lengths = cal_split_sizes(length, size) if lengths is None else lengths
        mine = sum(lengths[rank * num_each : (rank + 1) * num_each])
    return input_.new_empty([*input_.shape[:dim], mine, *input_.shape[dim + 1 :]])


@communicates(_compiled_gather)
def _(input_, group, dim, lengths, num_each, scale, grad_scale) -> Tensor:
    _, size = rank_and_size(named_group(group))
    _check_scale(grad_scale)
    dim = dim_index(dim, input_.dim(), "dim")
    full = input_.size(dim) * size if lengths is None else sum(lengths)
    return input_.new_empty([*input_.shape[:dim], full, *input_.shape[dim + 1 :]])


def _save_for_backward(ctx, inputs, output) -> None:
    input_, ctx.group, dim, ctx.lengths, ctx.num_each, ctx.scale, ctx.grad_scale = inputs
    ctx.dim = dim_index(dim, input_.dim(), "dim")


def _save_for_split_backward(ctx, inputs, output) -> None:
    _save_for_backward(ctx, inputs, output)
    if ctx.lengths is None and ctx.num_each:  # a gather's default would be equal pieces
        _, size = rank_and_size(named_group(ctx.group))
        ctx.lengths = cal_split_sizes(inputs[0].size(ctx.dim), size)


def _backward_by(operator: Any) -> Any:
    def backward(ctx, grad):
        grad = operator(grad, ctx.group, ctx.dim, ctx.lengths, ctx.num_each, ctx.grad_scale, ctx.scale)
        return grad, *[None] * 6  # group, dim, lengths, num_each, scale, grad_scale

    return backward


_compiled_split.register_autograd(_backward_by(_compiled_gather), setup_context=_save_for_split_backward)
_compiled_gather.register_autograd(_backward_by(_compiled_split), setup_context=_save_for_backward)
