"""A pause of Python's garbage collector while large plans are built.

A large plan is millions of small tuples without cycles; a cyclic collector that walks them takes as long as
building them does.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

MANY_OBJECTS = 100_000  # collecting fewer takes less time than asking what the program has frozen
FEW_FROZEN = 10_000  # Python 3.12 freezes some hundreds itself before a program begins


@contextmanager
def gc_paused() -> Iterator[None]:
    """Context manager and decorator: nothing is collected inside; objects made inside are old afterwards."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            if gc.get_count()[0] > MANY_OBJECTS and gc.get_freeze_count() < FEW_FROZEN:
                # Moves all objects to the oldest generation without the walk of a young collection.
                gc.freeze()
                gc.unfreeze()
            gc.enable()
