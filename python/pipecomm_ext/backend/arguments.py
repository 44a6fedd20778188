"""What torch and its users pass to the methods of process groups, which have several forms."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

_SUM = dist.ReduceOp.SUM
_NONE = timedelta(0)


def single(tensors: Any, name: str) -> Tensor:
    """The tensor of a call that torch gives a list of one."""
    if isinstance(tensors, Tensor):
        return tensors
    if len(tensors) != 1:
        raise ValueError(f"{name}: one tensor for each rank is supported, not {len(tensors)}")
    return tensors[0]


def tensor_list(tensors: Any) -> list[Tensor]:
    """The list of a call that torch gives a list of one list."""
    if len(tensors) == 1 and isinstance(tensors[0], (list, tuple)):
        return list(tensors[0])
    return list(tensors)


def waits(opts: Any) -> bool:
    """Whether the caller waits for the call at once, with the group's timeout."""
    return opts is not None and not getattr(opts, "asyncOp", True) and opts.timeout <= _NONE


def timeout_of(opts: Any, timeout: timedelta | None) -> timedelta | None:
    """The timeout of the call itself; torch passes a negative one if there is none."""
    timeout = timeout or getattr(opts, "timeout", None)
    return None if timeout is None or timeout <= _NONE else timeout


def root_of(opts: Any, kwargs: dict[str, Any]) -> int:
    if isinstance(opts, int):
        return opts
    return kwargs["root"] if "root" in kwargs else getattr(opts, "rootRank", 0)


def with_operator(opts: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """The operator of a reduction, and its options; the operator may be passed instead of the options."""
    if "op" in kwargs:
        return kwargs["op"], opts
    op = getattr(opts, "reduceOp", None)
    if op is not None:
        return op, opts
    if isinstance(opts, (dist.ReduceOp, dist.ReduceOp.RedOpType)):
        return opts, None
    return _SUM, opts


def operator_name(op: Any) -> str:
    return getattr(getattr(op, "op", op), "name", str(op))


def splits(spec: Any, lengths: Any, size: int, name: str) -> tuple[int, ...]:
    """The lengths along dim 0; None or an empty list means equal lengths."""
    if lengths:
        return tuple(lengths)
    shape, _ = spec
    if not shape or shape[0] % size:
        raise ValueError(
            f"dim 0 of {name} of shape {list(shape)} must divide by the {size} ranks; give sizes"
        )
    return (shape[0] // size,) * size
