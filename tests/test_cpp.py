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
