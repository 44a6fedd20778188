"""Finds the line outside this package that a warning belongs to."""

from __future__ import annotations

import os
import sys

_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")


def stacklevel_of_user() -> int:
    """The `stacklevel` for a `warnings.warn` in the function that calls this."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        level, frame = level + 1, frame.f_back
    return level
