"""All-to-all: every rank gives up one dim and gets another one whole (Ulysses attention)."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any, Literal, overload

import torch
from torch import Tensor

from ..communicator.registry import communicator_of, group_name, named_group, rank_and_size
from ..core.checked import whole_number
from ..core.extension import _C
from ..core.operators import communicates
from ..core.tensor_specs import can_have_gradient
from .asynchronous import Result, StepWork, apply_async, apply_to_one
from .differentiable import ExchangeStep, Step, apply
from .sizes import Sizes, cal_split_sizes, checked_spec, dim_index, size_list, taken_as_equal

OP = "all_to_all"  # in errors and records
_CURE = "gather_size, their sum, or gather_sizes"


@overload
def all_to_all(
    input_: Tensor,
    process_group: Any,
    scatter_dim: int = 2,
    gather_dim: int = 1,
    gather_size: int | None = None,
    *,
    scatter_sizes: Sequence[int] | None = None,
    gather_sizes: Sequence[int] | None = None,
    async_op: Literal[False] = False,
) -> Tensor: ...
@overload
def all_to_all(
    input_: Tensor,
    process_group: Any,
    scatter_dim: int = 2,
    gather_dim: int = 1,
    gather_size: int | None = None,
    *,
    scatter_sizes: Sequence[int] | None = None,
    gather_sizes: Sequence[int] | None = None,
    async_op: Literal[True],
) -> tuple[Tensor, StepWork]: ...
def all_to_all(
    input_: Tensor,
    process_group: Any,
    scatter_dim: int = 2,
    gather_dim: int = 1,
    gather_size: int | None = None,
    *,
    scatter_sizes: Sequence[int] | None = None,
    gather_sizes: Sequence[int] | None = None,
    async_op: bool = False,
) -> Result:
    """Exchanges pieces so that each rank holds the whole `gather_dim` and only its piece of `scatter_dim`.

    With P ranks and the global tensor X, the rank-order concatenation of all inputs along `gather_dim`: rank
    r returns piece r of X along `scatter_dim`. One exchange forward and one backward; the gradient is the
    exact transpose, not scaled. Semantics: MindSpeed-MM's `all_to_all`, for any number of dims and any sizes.

    Args:
        input_: any shape of at least two dims, any dtype and strides; length gather_sizes[r] along
            `gather_dim`.
        process_group: a torch group, a Communicator, or None for the default group.
        scatter_dim, gather_dim: two different dims, negative ones count from the end.
        gather_size: the length of `gather_dim` in X, of which rank r must hold cal_split_sizes(gather_size,
            P)[r]. With neither this nor `gather_sizes` all ranks must hold the same length, which is checked.
        scatter_sizes: lengths of the pieces of `scatter_dim`, one per rank, zeros allowed; default
            remainder-first.
        gather_sizes: lengths along `gather_dim` that the ranks hold, instead of `gather_size`.
        async_op: return (tensor, work) at once. The tensor may be used after `work.wait()`. In the backward,
            what was computed between the call and `wait()` overlaps with the exchange of gradients. A
            captured graph of torch.compile breaks here.

    Returns:
        a fresh contiguous tensor of length sum(gather_sizes) along `gather_dim`, scatter_sizes[r] along
        `scatter_dim`.

    Raises:
        ValueError, IndexError, TypeError: bad arguments on this rank; nothing was sent.
        PipeCommMismatch: another rank refused, or the ranks' arguments do not fit; the next call works.

    Example:
        ```python
        x = torch.randn(1, 3 - comm.rank, 4, 8)  # [batch, this rank's tokens, heads, head_dim]
        y = all_to_all(x, comm, scatter_dim=2, gather_dim=1, gather_size=5)  # all tokens of half of the heads
        z = all_to_all(y, comm, scatter_dim=1, gather_dim=2, gather_size=4)  # and back
        ```
    """
    if torch.compiler.is_compiling() and not async_op:
        lists = [scatter_sizes], [gather_sizes]
        return _traced([input_], process_group, scatter_dim, gather_dim, gather_size, *lists)[0]
    comm = communicator_of(process_group, input_)
    with comm.collective(OP):
        request = _request(input_, "input_", gather_size, scatter_sizes, gather_sizes)
        step = exchange_step(comm.rank, comm.size, (request,), *_dims(scatter_dim, gather_dim))
    cure = _CURE if gather_size is None and gather_sizes is None else None
    return apply_to_one(comm, step, input_, async_op, partial(taken_as_equal, gather_dim, cure))


# One list of lengths for all tensors, or a list with one (or None) for each.
SizesOfMany = Sequence[int] | Sequence[Sequence[int] | None] | None


@overload
def all_to_all_many(
    inputs: Sequence[Tensor],
    process_group: Any,
    scatter_dim: int = 2,
    gather_dim: int = 1,
    gather_size: int | None = None,
    *,
    scatter_sizes: SizesOfMany = None,
    gather_sizes: SizesOfMany = None,
    async_op: Literal[False] = False,
) -> list[Tensor]: ...
@overload
def all_to_all_many(
    inputs: Sequence[Tensor],
    process_group: Any,
    scatter_dim: int = 2,
    gather_dim: int = 1,
    gather_size: int | None = None,
    *,
    scatter_sizes: SizesOfMany = None,
    gather_sizes: SizesOfMany = None,
    async_op: Literal[True],
) -> tuple[list[Tensor], StepWork]: ...
def all_to_all_many(
    inputs: Sequence[Tensor],
    process_group: Any,
    scatter_dim: int = 2,
    gather_dim: int = 1,
    gather_size: int | None = None,
    *,
    scatter_sizes: SizesOfMany = None,
    gather_sizes: SizesOfMany = None,
    async_op: bool = False,
) -> list[Tensor] | tuple[list[Tensor], StepWork]:
    """`all_to_all` of several tensors (say q, k and v) in one exchange, also in the backward.

    Each peer gets one message. The tensors may differ in shape and dtype. Arguments are those of
    `all_to_all`, and apply to all tensors; `scatter_sizes` and `gather_sizes` may also be one list (or None)
    per tensor. The backward exchanges the gradients of the inputs that require one; if these are not the same
    inputs on all ranks, it raises PipeCommMismatch.

    Warns:
        UserWarning: lengths that differ between the tensors are divided by default, and not all of them
            evenly: if they are heads of q and of k and v, a rank gets heads that do not belong together.

    Returns:
        a list of fresh contiguous tensors, in the order of `inputs`; those require a gradient whose inputs
        do. With async_op: (list, work).

    Example:
        ```python
        q, k, v = (torch.randn(1, 3, 4, 8) for _ in range(3))
        q, k, v = all_to_all_many([q, k, v], comm)  # three tensors in one exchange: [1, 6, 2, 8] each
        ```
    """
    if torch.compiler.is_compiling() and not async_op:
        return _traced(
            inputs, process_group, scatter_dim, gather_dim, gather_size, scatter_sizes, gather_sizes
        )
    comm = communicator_of(process_group, inputs[0] if isinstance(inputs, (list, tuple)) and inputs else None)
    with comm.collective(OP):
        if not isinstance(inputs, (list, tuple)):
            raise TypeError(f"inputs must be a list of tensors, not {type(inputs).__name__}")
        scatter_lists = _per_tensor(scatter_sizes, len(inputs), "scatter_sizes")
        gather_lists = _per_tensor(gather_sizes, len(inputs), "gather_sizes")
        requests = tuple(
            _request(tensor, f"inputs[{idx}]", gather_size, scatter_lists[idx], gather_lists[idx])
            for idx, tensor in enumerate(inputs)
        )
        needs = tuple(tensor.requires_grad for tensor in inputs) if torch.is_grad_enabled() else None
        step = exchange_step(comm.rank, comm.size, requests, *_dims(scatter_dim, gather_dim), needs)
    cure = _CURE if gather_size is None and any(sizes is None for sizes in gather_lists) else None
    told = partial(taken_as_equal, gather_dim, cure)
    if async_op:
        outputs, work = apply_async(comm, step, inputs, told=told)
        return list(outputs), work
    with told():
        return list(apply(comm, step, inputs))


# One tensor as the caller describes it: shape, dtype, gather_size, scatter_sizes, gather_sizes.
Request = tuple[Sequence[int], torch.dtype, int | None, Sizes | None, Sizes | None]


def _request(tensor: Any, name: str, gather_size, scatter_sizes, gather_sizes) -> Request:
    return (
        *checked_spec(tensor, name),
        None if gather_size is None else whole_number(gather_size, "gather_size"),
        None if scatter_sizes is None else size_list(scatter_sizes, "scatter_sizes"),
        None if gather_sizes is None else size_list(gather_sizes, "gather_sizes"),
    )


def _dims(scatter_dim: Any, gather_dim: Any) -> tuple[int, int]:
    return whole_number(scatter_dim, "scatter_dim"), whole_number(gather_dim, "gather_dim")


def _per_tensor(lists: Any, num_tensors: int, name: str) -> Sequence[Any]:
    if lists is None:
        return [None] * num_tensors
    if not isinstance(lists, (list, tuple)):
        raise ValueError(f"{name} must be a list of lengths, or one such list per tensor, not {lists!r}")
    if not any(entry is None or isinstance(entry, (list, tuple)) for entry in lists):
        return [lists] * num_tensors
    if len(lists) != num_tensors:
        raise ValueError(f"{name} needs one list for each of the {num_tensors} tensors, got {len(lists)}")
    return lists


def _sizes_of(shape, size, scatter_dim, gather_dim, gather_size, scatter_sizes, gather_sizes):
    """Both size lists with the defaults filled in; dims count from the front."""
    if scatter_dim == gather_dim:
        raise ValueError(f"scatter_dim and gather_dim must differ, both are {scatter_dim}")
    if scatter_sizes is None:
        scatter_sizes = cal_split_sizes(shape[scatter_dim], size)
    if gather_sizes is None:
        if gather_size is None:
            gather_sizes = [shape[gather_dim]] * size
        else:
            gather_sizes = cal_split_sizes(gather_size, size)
    elif gather_size is not None and sum(gather_sizes) != gather_size:
        raise ValueError(f"gather_sizes {list(gather_sizes)} do not add up to gather_size {gather_size}")
    return scatter_sizes, gather_sizes


@lru_cache(maxsize=256)
def exchange_step(
    rank: int,
    size: int,
    requests: tuple[Request, ...],
    scatter_dim: int,
    gather_dim: int,
    needs: tuple[bool, ...] | None = None,
) -> Step:
    """The step of these tensors. `needs`: which ones need a gradient; None: all whose dtype can have one."""
    if not requests:
        raise ValueError("inputs must hold at least one tensor")
    num_dims = len(requests[0][0])
    tensors = []
    for shape, dtype, *sizes in requests:
        scatter_dim = dim_index(scatter_dim, len(shape), "scatter_dim")
        gather_dim = dim_index(gather_dim, len(shape), "gather_dim")
        if len(shape) != num_dims:
            raise ValueError(f"inputs must have the same number of dims, got {num_dims} and {len(shape)}")
        tensors.append((shape, dtype, *_sizes_of(shape, size, scatter_dim, gather_dim, *sizes)))
    _warn_of_unlike_shares(requests, size, scatter_dim)
    plan = _C.plan_all_to_all(rank, size, tensors, scatter_dim, gather_dim)
    outputs = [(shape, dtype) for shape, (_, dtype, *_) in zip(plan.output_shapes, tensors, strict=True)]
    needs = needs or (True,) * len(outputs)
    keeps = [need and can_have_gradient(dtype) for need, (_, dtype) in zip(needs, outputs, strict=True)]

    def gradient() -> Step:
        back = tuple(
            (shape, dtype, None, tuple(gather_sizes), tuple(scatter_sizes))
            for keep, (shape, dtype), (_, _, scatter_sizes, gather_sizes) in zip(
                keeps, outputs, tensors, strict=True
            )
            if keep
        )
        return exchange_step(rank, size, back, gather_dim, scatter_dim)

    return ExchangeStep(OP, plan, outputs, gradient, is_differentiable=keeps)


def _warn_of_unlike_shares(requests: tuple[Request, ...], size: int, scatter_dim: int) -> None:
    lengths = [shape[scatter_dim] for shape, _, _, scatter_sizes, _ in requests if scatter_sizes is None]
    if len(set(lengths)) > 1 and any(length % size for length in lengths):
        warnings.warn(
            f"lengths {lengths} of dim {scatter_dim} are divided over {size} ranks each by itself: if they "
            "are heads of q, k and v, ranks get key and value heads that their query heads do not read; send "
            "each head to the ranks that read it, with scatter_sizes (docs/sequence_parallel.md)",
            stacklevel=4,
        )


# ---- in a compiled graph: a custom operator ---------------------------------------------------------------
# The tensors' lists of lengths are passed as one flat list. With `are_equal` the ranks' lengths along
# gather_dim were assumed to be equal.

_SCHEMA = """(Tensor[] inputs, str group, SymInt scatter_dim, SymInt gather_dim,
              SymInt[] scatter_sizes, SymInt[] gather_sizes, bool are_equal) -> Tensor[]"""


def _traced(inputs, process_group, scatter_dim, gather_dim, gather_size, scatter_sizes, gather_sizes):
    if not isinstance(inputs, (list, tuple)):
        raise TypeError(f"inputs must be a list of tensors, not {type(inputs).__name__}")
    if not inputs:
        raise ValueError("inputs must hold at least one tensor")
    _, size = rank_and_size(process_group)
    scatter_dim = dim_index(scatter_dim, inputs[0].dim(), "scatter_dim")
    gather_dim = dim_index(gather_dim, inputs[0].dim(), "gather_dim")
    scatter_lists = _per_tensor(scatter_sizes, len(inputs), "scatter_sizes")
    gather_lists = _per_tensor(gather_sizes, len(inputs), "gather_sizes")
    flat: tuple[list[int], list[int]] = [], []
    for input_, *lists in zip(inputs, scatter_lists, gather_lists, strict=True):
        both = _sizes_of(input_.shape, size, scatter_dim, gather_dim, gather_size, *lists)
        for name, sizes, lengths in zip(("scatter_sizes", "gather_sizes"), both, flat, strict=True):
            if len(sizes) != size:
                raise ValueError(f"{name} needs one entry for each rank, got {len(sizes)}")
            lengths += sizes
    are_equal = gather_size is None and any(sizes is None for sizes in gather_lists)
    return _compiled(list(inputs), group_name(process_group), scatter_dim, gather_dim, *flat, are_equal)


def _cut(lengths: Sequence[int], num_tensors: int) -> list[list[int]]:
    """One list for each tensor."""
    size = len(lengths) // num_tensors
    return [list(lengths[idx * size : (idx + 1) * size]) for idx in range(num_tensors)]


@torch.library.custom_op("pipecomm_ext::all_to_all_many", mutates_args=(), schema=_SCHEMA)
def _compiled(inputs, group, scatter_dim, gather_dim, scatter_sizes, gather_sizes, are_equal):
    with taken_as_equal(gather_dim, _CURE if are_equal else None):
        return all_to_all_many(
            inputs,
            named_group(group),
            scatter_dim,
            gather_dim,
            scatter_sizes=_cut(scatter_sizes, len(inputs)),
            gather_sizes=_cut(gather_sizes, len(inputs)),
        )


@communicates(_compiled)
def _(inputs, group, scatter_dim, gather_dim, scatter_sizes, gather_sizes, are_equal) -> list[Tensor]:
    rank, _ = rank_and_size(named_group(group))
    outputs = []
    for input_, scattered, gathered in zip(
        inputs, _cut(scatter_sizes, len(inputs)), _cut(gather_sizes, len(inputs)), strict=True
    ):
        shape = list(input_.shape)
        shape[scatter_dim], shape[gather_dim] = scattered[rank], sum(gathered)
        outputs.append(input_.new_empty(shape))
    return outputs


def _save_for_backward(ctx, inputs, output) -> None:
    tensors, ctx.group, *ctx.dims, scatter_sizes, gather_sizes, _ = inputs
    ctx.needs = [tensor.requires_grad for tensor in tensors]
    ctx.sizes = _cut(scatter_sizes, len(tensors)), _cut(gather_sizes, len(tensors))
    ctx.mark_non_differentiable(*(out for out, need in zip(output, ctx.needs, strict=True) if not need))


def _backward(ctx, grads):
    scatter_dim, gather_dim = ctx.dims
    kept = [grad for grad, need in zip(grads, ctx.needs, strict=True) if need]
    scatter_sizes, gather_sizes = (
        [length for sizes, need in zip(lists, ctx.needs, strict=True) if need for length in sizes]
        for lists in ctx.sizes
    )
    back = _compiled(kept, ctx.group, gather_dim, scatter_dim, gather_sizes, scatter_sizes, False)
    back = iter(back)
    # group, scatter_dim, gather_dim, scatter_sizes, gather_sizes, are_equal
    return [next(back) if need else None for need in ctx.needs], *[None] * 6


_compiled.register_autograd(_backward, setup_context=_save_for_backward)
