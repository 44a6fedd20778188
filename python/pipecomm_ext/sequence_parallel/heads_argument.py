"""Attention functions that need to know which heads they get, such as those with a bias per head (ALiBi)."""

from __future__ import annotations

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
    code = getattr(function, "__code__", None)
    if code is not None and not hasattr(function, "__wrapped__"):  # a quick no for most
        if NAME not in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
            return False
    try:
        parameter = inspect.signature(function).parameters.get(NAME)
    except (TypeError, ValueError):  # it has no signature
        return False
    return parameter is not None and (parameter.default is parameter.empty or parameter.default is None)
