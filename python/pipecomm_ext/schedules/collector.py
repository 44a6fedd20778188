"""Large plans are millions of small tuples without cycles; letting the cyclic collector walk them doubles the
time. `collector_paused()` is a context manager and a decorator."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
