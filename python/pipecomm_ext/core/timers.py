"""Megatron's timers, which users of its configs may have set."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

_UNTIMED = contextlib.nullcontext()


def timed(
    timers: Callable[..., Any] | None, name: str, log_level: int = 2, **start: Any
) -> contextlib.AbstractContextManager:
    """A context in which the timer `name` runs, started with `start`; without `timers` it does nothing."""
    return _UNTIMED if timers is None else _timed(timers, name, log_level, start)


@contextlib.contextmanager
def _timed(timers: Callable[..., Any], name: str, log_level: int, start: dict[str, Any]) -> Iterator[None]:
    timers(name, log_level=log_level).start(**start)
    try:
        yield
    finally:
        timers(name).stop()
