"""docs/reliability.md against the tables of the suites."""

from __future__ import annotations

from counts import PAGE, with_counts


def test_the_counts_are_those_of_the_suites() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == with_counts(page), "run: python tests/reliability/counts.py --write"
