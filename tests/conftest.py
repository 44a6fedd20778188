"""Fixtures that all tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ranks import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """The pool of rank processes; see ranks.py."""
    with RankPool() as pool:
        yield pool
