"""Ranges of torch's profiler for the calls of the backend."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch._C._profiler import _RecordFunctionFast

from .names import NAME

Method = TypeVar("Method", bound=Callable[..., Any])
_NAMES = {
    "allgather": "all_gather",
    "allreduce": "all_reduce",
    "alltoall": "all_to_all",
    "all_gather_single": "_allgather_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "all_to_all_single": "all_to_all",
}


def profiled(method: Method) -> Method:
    """While torch's profiler runs, the call is a range with the shapes of its tensors."""
    name = f"{NAME}:{_NAMES.get(method.__name__, method.__name__)}"

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.autograd._profiler_enabled():
            return method(self, *args, **kwargs)
        with _RecordFunctionFast(name, tensors_in(args)):
            return method(self, *args, **kwargs)

    return cast(Method, call)


def tensors_in(args: Any) -> list[Tensor]:
    found = []
    for arg in args:
        if isinstance(arg, Tensor):
            found.append(arg)
        elif isinstance(arg, (list, tuple)):
            found += tensors_in(arg)
    return found
