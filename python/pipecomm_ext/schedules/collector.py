"""Large plans are millions of small tuples without cycles; letting the cyclic collector walk them takes as
long as making them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Context manager and decorator: no collection within, and what was made within counts as old
    afterwards."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            if gc.get_freeze_count() == 0:
                # Moves all objects to the oldest generation, without the walk that a young collection would
                # be.
                gc.freeze()
                gc.unfreeze()
            gc.enable()
