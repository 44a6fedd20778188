"""All-to-all: every rank gives up one dim and gets another one whole (Ulysses attention)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from .. import _C
from .group import communicator_of, group_name, named_group, rank_and_size
from .sizes import Sizes, cal_split_sizes, checked_tensor, dim_index, size_list, whole_number
from .step import Step, apply


def all_to_all(
    input_: torch.Tensor,
    process_group: Any,
    scatter_dim: int = 2,
    gather_dim: int = 1,
    gather_size: int | None = None,
    *,
    scatter_sizes: Sequence[int] | None = None,
    gather_sizes: Sequence[int] | None = None,
) -> torch.Tensor:
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

    Returns:
        a fresh contiguous tensor of length sum(gather_sizes) along `gather_dim`, scatter_sizes[r] along
        `scatter_dim`.

    Raises:
        ValueError, IndexError, TypeError: bad arguments on this rank; nothing was sent.
        PipeCommMismatch: another rank refused, or the ranks' arguments do not fit; the next call works.
    """
    if torch.compiler.is_compiling():
        return _compiled(
            input_,
            group_name(process_group),
            scatter_dim,
            gather_dim,
            gather_size,
            scatter_sizes,
            gather_sizes,
        )
    comm = communicator_of(process_group, input_)
    with comm.collective("all_to_all"):
        request = _request(input_, "input_", gather_size, scatter_sizes, gather_sizes)
        step = _user_step(comm.rank, comm.size, (request,), _dims(scatter_dim, gather_dim))
    return apply(comm, step, [input_])[0]


def all_to_all_many(
    inputs: Sequence[torch.Tensor],
    process_group: Any,
    scatter_dim: int = 2,
    gather_dim: int = 1,
    gather_size: int | None = None,
    *,
    scatter_sizes: Sequence[Sequence[int] | None] | None = None,
    gather_sizes: Sequence[Sequence[int] | None] | None = None,
) -> list[torch.Tensor]:
    """`all_to_all` of several tensors (say q, k and v) in one exchange: one message per peer, forward and
    backward.

    The tensors may differ in shape and dtype; integer ones have no gradient. Arguments are those of
    `all_to_all`, for all tensors alike; `scatter_sizes` and `gather_sizes` may also be one list (or None) per
    tensor.

    Returns:
        a list of fresh contiguous tensors, in the order of `inputs`.
    """
    comm = communicator_of(process_group, inputs[0] if isinstance(inputs, (list, tuple)) and inputs else None)
    with comm.collective("all_to_all"):
        if not isinstance(inputs, (list, tuple)):
            raise TypeError(f"inputs must be a list of tensors, not {type(inputs).__name__}")
        scatter_lists = _per_tensor(scatter_sizes, len(inputs), "scatter_sizes")
        gather_lists = _per_tensor(gather_sizes, len(inputs), "gather_sizes")
        requests = tuple(
            _request(tensor, f"inputs[{idx}]", gather_size, scatter_lists[idx], gather_lists[idx])
            for idx, tensor in enumerate(inputs)
        )
        step = _user_step(comm.rank, comm.size, requests, _dims(scatter_dim, gather_dim))
    return list(apply(comm, step, inputs))


# One tensor as the caller describes it: shape, dtype, gather_size, scatter_sizes, gather_sizes.
Request = tuple[torch.Size, torch.dtype, int | None, Sizes | None, Sizes | None]
# One tensor as the plan knows it: shape, dtype, scatter_sizes, gather_sizes.
Exchanged = tuple[Sequence[int], torch.dtype, Sizes, Sizes]


def _request(tensor: Any, name: str, gather_size, scatter_sizes, gather_sizes) -> Request:
    tensor = checked_tensor(tensor, name)
    return (
        tensor.shape,
        tensor.dtype,
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


def _sizes_of(
    shape: Sequence[int],
    size: int,
    scatter_dim: int,
    gather_dim: int,
    gather_size: int | None,
    scatter_sizes: Sequence[int] | None,
    gather_sizes: Sequence[int] | None,
) -> tuple[Sequence[int], Sequence[int]]:
    """Scatter and gather sizes with the defaults filled in; dims count from the front."""
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
def _user_step(rank: int, size: int, requests: tuple[Request, ...], dims: tuple[int, int]) -> Step:
    exchanged = []
    for shape, dtype, gather_size, scatter_sizes, gather_sizes in requests:
        scatter_dim = dim_index(dims[0], len(shape), "scatter_dim")
        gather_dim = dim_index(dims[1], len(shape), "gather_dim")
        if exchanged and len(shape) != len(exchanged[0][0]):
            raise ValueError(
                f"inputs must have the same number of dims, got {len(exchanged[0][0])} and {len(shape)}"
            )
        sizes = _sizes_of(shape, size, scatter_dim, gather_dim, gather_size, scatter_sizes, gather_sizes)
        exchanged.append((tuple(shape), dtype, *map(tuple, sizes)))
    if not exchanged:
        raise ValueError("inputs must hold at least one tensor")
    return _step(rank, size, tuple(exchanged), scatter_dim, gather_dim)


@lru_cache(maxsize=256)
def _step(rank: int, size: int, exchanged: tuple[Exchanged, ...], scatter_dim: int, gather_dim: int) -> Step:
    plan = _C.plan_all_to_all(rank, size, list(exchanged), scatter_dim, gather_dim)
    dtypes = [dtype for _, dtype, _, _ in exchanged]
    outputs = list(zip(plan.output_shapes, dtypes, strict=True))

    def gradient() -> Step:
        back = tuple(
            (shape, dtype, gather_sizes, scatter_sizes)
            for (shape, dtype), (_, _, scatter_sizes, gather_sizes) in zip(outputs, exchanged, strict=True)
            if dtype.is_floating_point or dtype.is_complex
        )
        return _step(rank, size, back, gather_dim, scatter_dim)

    return Step(plan, "all_to_all", outputs, gradient)


# ---- in a compiled graph: one custom operator
# ---------------------------------------------------------------


@torch.library.custom_op("pipecomm_ext::all_to_all", mutates_args=())
def _compiled(
    input_: torch.Tensor,
    group: str,
    scatter_dim: int,
    gather_dim: int,
    gather_size: int | None,
    scatter_sizes: Sequence[int] | None,
    gather_sizes: Sequence[int] | None,
) -> torch.Tensor:
    return all_to_all(
        input_,
        named_group(group),
        scatter_dim,
        gather_dim,
        gather_size,
        scatter_sizes=scatter_sizes,
        gather_sizes=gather_sizes,
    )


def _resolved(input_, group, scatter_dim, gather_dim, gather_size, scatter_sizes, gather_sizes):
    """This rank, dims that count from the front, and both size lists."""
    rank, size = rank_and_size(named_group(group))
    scatter_dim = dim_index(scatter_dim, input_.dim(), "scatter_dim")
    gather_dim = dim_index(gather_dim, input_.dim(), "gather_dim")
    sizes = _sizes_of(input_.shape, size, scatter_dim, gather_dim, gather_size, scatter_sizes, gather_sizes)
    return rank, scatter_dim, gather_dim, *sizes


@_compiled.register_fake
def _(input_, *arguments) -> torch.Tensor:
    rank, scatter_dim, gather_dim, scatter_sizes, gather_sizes = _resolved(input_, *arguments)
    shape = list(input_.shape)
    shape[scatter_dim] = scatter_sizes[rank]
    shape[gather_dim] = sum(gather_sizes)
    return input_.new_empty(shape)


def _save_for_backward(ctx, inputs, output) -> None:
    _, *ctx.dims_and_sizes = _resolved(*inputs)
    ctx.group = inputs[1]


def _backward(ctx, grad):
    scatter_dim, gather_dim, scatter_sizes, gather_sizes = ctx.dims_and_sizes
    grad = _compiled(grad, ctx.group, gather_dim, scatter_dim, None, gather_sizes, scatter_sizes)
    return grad, *[None] * 6


_compiled.register_autograd(_backward, setup_context=_save_for_backward)
