"""`make check` knows a test for every folder of the library, and finds what has changed.

The mutations of `make mutations` fit the code."""

from __future__ import annotations

import mutations
import pytest
from check_changes import CPP_PROGRAM, CXX_SUFFIXES, ROOT, chosen_tests, table


def test_every_row_names_what_is_there() -> None:
    for place, tests in table().items():
        assert (ROOT / place).exists(), place
        assert tests, place
        for test in tests:
            program = CPP_PROGRAM.fullmatch(test)
            path = f"tests/cpp/test_{program[1]}.cpp" if program else test
            assert (ROOT / path).exists(), f"{place}: {path}"


def test_every_mutation_fits_the_code() -> None:
    mutations.require_true_table()


def test_every_file_of_the_library_has_tests() -> None:
    files = [path for folder in ("csrc", "python") for path in (ROOT / folder).rglob("*")]
    sources = [str(path.relative_to(ROOT)) for path in files if path.suffix in (*CXX_SUFFIXES, ".py")]
    assert sources and [file for file in sources if not chosen_tests([file], table())] == []


def test_every_folder_of_the_library_has_a_row_of_its_own() -> None:
    """The row of the package itself does not count: it tests what the package offers."""
    sources = {path.parent for path in (ROOT / "python/pipecomm_ext").glob("*/*.py")}
    places = {ROOT / place for place in table()} - {ROOT / "python/pipecomm_ext"}
    assert len(sources) > 10 and sorted(sources - places) == []


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (["csrc/a/x.cpp"], ["tests/test_x.py"]),
        (["csrc/b.cpp"], ["tests/some"]),
        (["csrc/b.cpp", "tests/some/test_y.py", "csrc/a/x.h"], ["tests/some", "tests/test_x.py"]),
        (["tests/test_core.py", "docs/nothing.md"], ["tests/test_core.py"]),
        (["tests/test_that_is_gone.py", "tests/ranks.py"], []),
        (["tests/cpp/test_plan.cpp"], ["tests/test_cpp[plan]"]),
    ],
)
def test_the_longest_path_counts(files, expected) -> None:
    assert chosen_tests(files, {"csrc/": ["tests/some"], "csrc/a/": ["tests/test_x.py"]}) == expected
