"""Attention functions that need to know which heads they get, such as those with a bias per head (ALiBi)."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

NAME = "heads"


class AsksForHeads:
    """An attention with a parameter `heads`. The graph of torch.compile cannot contain inspect.signature of a
    nested function before torch 2.14."""

    def __init__(self, attention: Callable[..., Any]) -> None:
        self._attention = attention

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._attention(*args, **kwargs)


def asks_for_heads(attention: Callable[..., Any]) -> bool:
    if isinstance(attention, AsksForHeads):
        return True
    function = getattr(attention, "_orig_mod", attention)  # of torch.compile
    function = function.forward if isinstance(function, nn.Module) else function
    innermost = function
    while isinstance(innermost, functools.partial):
        innermost = innermost.func
    code = getattr(innermost, "__code__", None)
    if code is not None and not hasattr(innermost, "__wrapped__"):  # a quick no for most
        if NAME not in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
            return False
    try:
        parameter = inspect.signature(function).parameters.get(NAME)
    except (TypeError, ValueError):  # it has no signature
        return False
    return parameter is not None and (parameter.default is parameter.empty or parameter.default is None)
