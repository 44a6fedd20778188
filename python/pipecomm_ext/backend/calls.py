"""Collectives as methods of a process group: the forms of their arguments, and ranges of torch's profiler."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch._C._profiler import _RecordFunctionFast

from .names import NAME

Result = TypeVar("Result")
# What torch calls an argument that may be passed instead of the options, and its name among these.
_FIELDS = {"root": "rootRank", "op": "reduceOp", "timeout": "timeout"}
_RANGES = {
    "allgather": "all_gather",
    "allreduce": "all_reduce",
    "alltoall": "all_to_all",
    "all_gather_single": "_allgather_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "all_to_all_single": "all_to_all",
}


def collective(
    options: Callable[[], Any], *names: str, instead: tuple[str, ...] = ()
) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """A method that torch calls with arguments of these names ("a|b": it uses both names) and with options.
    Instead of these, a caller may pass nothing, or some of what they hold: `instead` and a timeout. The
    method itself always gets options. While torch's profiler runs, the call is a range with its tensors.
    """
    others, num_args = (*instead, "timeout"), len(names) + 1
    spellings = [name.split("|") for name in names]

    def decorate(method: Callable[..., Result]) -> Callable[..., Result]:
        name = f"{NAME}:{_RANGES.get(method.__name__, method.__name__)}"

        def as_options(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
            """The arguments in the form that the method takes."""
            given = list(args[: len(names)])
            for spelling in spellings[len(given) :]:
                found = [kwargs.pop(each) for each in spelling if each in kwargs]
                if not found:
                    raise TypeError(f"{method.__name__}() needs {' or '.join(spelling)}")
                given.append(found[0])
            rest = args[len(names) :]
            if "opts" in kwargs:
                rest = (*rest, kwargs.pop("opts"))
            if rest and hasattr(rest[0], "asyncOp"):
                chosen, rest = rest[0], rest[1:]
            else:
                chosen = options()
            kwargs = dict(zip(others, rest, strict=False)) | kwargs
            if len(rest) > len(others) or not kwargs.keys() <= set(others):
                raise TypeError(f"{method.__name__}() got arguments that it does not take: {rest}, {kwargs}")
            for key, value in kwargs.items():
                if value is not None:
                    setattr(chosen, _FIELDS[key], value)
            return (*given, chosen)

        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Result:
            if kwargs or len(args) != num_args or type(args[-1]) is not options:
                args = as_options(args, kwargs)
            if not torch.autograd._profiler_enabled():
                return method(self, *args)
            with _RecordFunctionFast(name, tensors_in(args)):
                return method(self, *args)

        cast(Any, call).as_options = as_options
        return call

    return decorate


def tensors_in(args: Any) -> list[Tensor]:
    found = []
    for arg in args:
        if isinstance(arg, Tensor):
            found.append(arg)
        elif isinstance(arg, (list, tuple)):
            found += tensors_in(arg)
    return found
