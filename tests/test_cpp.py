"""The C++ tests of tests/cpp as part of the suite; `make sanitize` runs them under sanitizers.

They are a target of the module's own build folder and link its objects: only the tests are compiled here.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from scripts import REPOSITORY, locked_build
from tools import needs

BUILD_LIMIT_S, TEST_LIMIT_S = 900, 200  # about 40 s if the cores are free, much more if they are not


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
            os.killpg(process.pid, signal.SIGKILL)  # compilers outlive the build tool that is killed alone
            raise
    assert process.returncode == 0, f"{' '.join(map(str, command))} ended with {process.returncode}\n{output}"


def build_folder() -> Path:
    """Where setup.py has built the module for this Python and torch; the latest, if with and without CUDA."""
    version = torch.__version__.split("+")[0]
    folders = (REPOSITORY / "build").glob(f"{sys.implementation.cache_tag}-torch{version}-*")
    return max(folders, key=lambda folder: (folder / "build.ninja").stat().st_mtime)


@pytest.mark.slow
@pytest.mark.timeout(2 * BUILD_LIMIT_S)
def test_the_program_of_kernels_can_fail() -> None:
    """Each of its parts, for a wrong byte in a result and for one beside it."""
    [cmake], folder = needs("cmake"), build_folder()
    with locked_build():
        run(cmake, "--build", folder, "--target", "copy_kernels_on_host", limit_s=BUILD_LIMIT_S)
    program = folder / "tests" / "cpp" / "copy_kernels_on_host"
    for part in (["values", "5"], ["many"], ["mean"], ["large", "10"], ["bandwidth", "1"]):
        for planted in ("result", "guard"):
            command = list(map(str, [program, *part, "--plant", planted]))
            done = subprocess.run(command, capture_output=True, text=True, timeout=TEST_LIMIT_S, check=False)
            assert done.returncode == 1 and "case: " in done.stdout, (command, done.returncode, done.stdout)


@pytest.mark.slow
@pytest.mark.timeout(2 * BUILD_LIMIT_S)
def test_the_cpp_tests_pass() -> None:
    cmake, ctest = needs("cmake", "ctest")
    folder = build_folder()
    num_workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
    parallel = ["--parallel", max(1, len(os.sched_getaffinity(0)) // num_workers)]
    with locked_build():
        run(cmake, "--build", folder, "--target", "cpp_tests", *parallel, limit_s=BUILD_LIMIT_S)
        limits = ["--no-tests=error", "--timeout", TEST_LIMIT_S]
        tests = folder / "tests" / "cpp"
        run(ctest, "--test-dir", tests, "--output-on-failure", *limits, *parallel, limit_s=BUILD_LIMIT_S)


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
