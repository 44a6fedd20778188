"""The C++ tests of tests/cpp as part of the suite; `make sanitize` runs them under sanitizers.

They are a target of the module's own build folder and link its objects: only the tests are compiled here.

    python tests/test_cpp.py plan exchange    # builds all, runs these: `make check`
"""

from __future__ import annotations

import functools
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from scripts import REPOSITORY, locked_build
from tools import needs

BUILD_LIMIT_S, TEST_LIMIT_S = 900, 200  # minutes and seconds on free cores, much more on busy ones
AT_ONCE = 8  # programs: many mostly wait for deadlines


def run(*command: object, limit_s: float) -> None:
    with subprocess.Popen(
        list(map(str, command)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=limit_s)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)  # compilers would outlive the build tool
            raise
    assert process.returncode == 0, f"{' '.join(map(str, command))} ended with {process.returncode}\n{output}"


def build_folder() -> Path:
    """Where setup.py has built the module for this Python; the latest, if built with and without CUDA."""
    folders = (REPOSITORY / "build").glob(f"{sys.implementation.cache_tag}-c*")
    return max(folders, key=lambda folder: (folder / "build.ninja").stat().st_mtime)


@functools.cache
def programs() -> Path:
    """The folder of the built programs. Other workers wait meanwhile, and find nothing left to build."""
    [cmake], folder = needs("cmake"), build_folder()
    cache = (folder / "CMakeCache.txt").read_text(encoding="utf-8")
    [ninja] = re.findall(r"^CMAKE_MAKE_PROGRAM:\w+=(.*)", cache, re.MULTILINE)
    if not Path(ninja).exists():
        pytest.skip(f"{folder} was built with tools that are gone, as those that pip installs for a build")
    with locked_build():
        cores = len(os.sched_getaffinity(0))
        run(cmake, "--build", folder, "--target", "cpp_tests", "--parallel", cores, limit_s=BUILD_LIMIT_S)
    return folder / "tests" / "cpp"


@pytest.mark.slow
@pytest.mark.timeout(2 * BUILD_LIMIT_S)
@pytest.mark.parametrize("part", ["values 5", "many", "mean", "large 10", "bandwidth 1"])
def test_the_program_of_kernels_can_fail(part) -> None:
    """For a wrong byte in a result and for one outside it."""
    for planted in ("result", "guard"):
        command = [str(programs() / "copy_kernels_on_host"), *part.split(), "--plant", planted]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TEST_LIMIT_S, check=False)
        assert done.returncode == 1 and "case: " in done.stdout, (command, done.returncode, done.stdout)


@pytest.mark.slow
@pytest.mark.timeout(2 * BUILD_LIMIT_S)
def test_the_programs_pass() -> None:
    run_programs(".*")


def run_programs(names: str) -> None:
    [ctest] = needs("ctest")
    options = ["--output-on-failure", "--no-tests=error", "--timeout", TEST_LIMIT_S, "--parallel", AT_ONCE]
    run(ctest, "--test-dir", programs(), "--tests-regex", f"^({names})$", *options, limit_s=BUILD_LIMIT_S)


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["", "/dev/null/x"], ids=["works", "fails"])
def test_a_ccache_that_cannot_write_is_not_used(tmp_path: Path, cache: str) -> None:
    """As in a home that is read-only."""
    cmake, *_ = needs("cmake", "ccache", "make")
    lines = [
        "cmake_minimum_required(VERSION 3.22)",
        "project(x LANGUAGES CXX)",
        f'include("{REPOSITORY}/cmake/ccache.cmake")',
        'message(STATUS "launcher=${CMAKE_CXX_COMPILER_LAUNCHER}.")',
    ]
    (tmp_path / "CMakeLists.txt").write_text("\n".join(lines))
    command = [cmake, "-S", str(tmp_path), "-B", str(tmp_path / "build")]
    folder = {"CCACHE_DIR": cache or str(tmp_path / "cache")}
    done = subprocess.run(command, env=os.environ | folder, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert ("launcher=." in done.stdout) == bool(cache), done.stdout


if __name__ == "__main__":
    run_programs("|".join(sys.argv[1:]))
