"""Attention functions that need to know which heads they get, such as those with a bias per head (ALiBi)."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

NAME = "heads"


def heads_argument(
    attention: Callable[..., Any], kwargs: Mapping[str, Any], first: int, count: int
) -> dict[str, range]:
    """The keyword `heads`, the numbers of these heads among all heads, if `attention` has a parameter of that
    name that `kwargs` does not set; else no keyword."""
    return {NAME: range(first, first + count)} if NAME not in kwargs and asks_for_heads(attention) else {}


def asks_for_heads(attention: Callable[..., Any]) -> bool:
    function = getattr(attention, "_orig_mod", attention)  # of torch.compile
    function = function.forward if isinstance(function, nn.Module) else function
    innermost = function
    while isinstance(innermost, functools.partial):
        innermost = innermost.func
    code = getattr(innermost, "__code__", None)
    # For most without inspect.signature, which torch.compile cannot trace before torch 2.13.
    if code is not None and not hasattr(innermost, "__wrapped__"):
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        if NAME not in names:
            return False
        if innermost is function:
            return _default(function, names.index(NAME), code.co_argcount) is None
    try:
        parameter = inspect.signature(function).parameters.get(NAME)
    except (TypeError, ValueError):  # it has no signature
        return False
    return parameter is not None and (parameter.default is parameter.empty or parameter.default is None)


def _default(function: Any, idx: int, num_positional: int) -> Any:
    """The default value of a parameter; None if it has none."""
    if idx >= num_positional:
        return (function.__kwdefaults__ or {}).get(NAME)
    defaults = function.__defaults__ or ()
    place = idx - num_positional + len(defaults)
    return defaults[place] if place >= 0 else None
