"""docs/reliability.md against the tables of the suites, and against the tests that it names."""

from __future__ import annotations

import re
from pathlib import Path

from counts import PAGE, with_counts

TESTS = Path(__file__).resolve().parents[1]


def test_the_counts_are_those_of_the_suites() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == with_counts(page), "run: python tests/reliability/counts.py --write"


def test_each_promise_names_tests_that_exist() -> None:
    page = PAGE.read_text(encoding="utf-8").split("## How this is tested")[0]
    promises = re.findall(r"^(\d+)\. \*\*", page, re.MULTILINE)
    held = dict(re.findall(r"^\| (\d+) \| (.*) \|$", page, re.MULTILINE))
    assert list(held) == promises
    for tests in held.values():
        named = re.findall(r"`([\w/]+\.(?:py|cpp))(?:::(\w+))?`", tests)
        assert named
        for file, function in named:
            assert f"def {function}(" in (TESTS / file).read_text(encoding="utf-8") if function else True
            assert (TESTS / file).exists(), file
