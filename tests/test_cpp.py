"""The C++ tests of tests/cpp as part of the suite; `make sanitize` runs them under sanitizers.

They are built in build/cpp-tests, which is kept: only the first run compiles everything.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "cpp-tests"
FLAGS = "-O1"  # compiles in two thirds of the time of -O3
BUILD_LIMIT_S, TEST_LIMIT_S = 900, 60  # about 40 s if the cores are free, much more if they are not


def tool(name: str) -> str | None:
    """The one of this Python's environment first, as setup.py has it."""
    return shutil.which(name, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))


def run(command: list[str], limit_s: float) -> None:
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        try:
            output, _ = process.communicate(timeout=limit_s)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)  # compilers outlive the build tool that is killed alone
            raise
    assert process.returncode == 0, f"{' '.join(command)} ended with {process.returncode}\n{output}"


@pytest.fixture
def built_tests() -> Iterator[Path]:
    """The build folder, ours alone while the test runs."""
    cmake, ninja = tool("cmake"), tool("ninja")
    if cmake is None or ninja is None:
        pytest.skip("cmake or ninja is missing: pip install cmake ninja")
    BUILD.mkdir(parents=True, exist_ok=True)
    with open(BUILD / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        configure = [cmake, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}", "-S", str(ROOT / "tests" / "cpp")]
        run([*configure, "-B", str(BUILD), "-DSANITIZE=", f"-DCMAKE_CXX_FLAGS_RELEASE={FLAGS}"], limit_s=60)
        run([cmake, "--build", str(BUILD), "--parallel", "2"], limit_s=BUILD_LIMIT_S)
        yield BUILD


@pytest.mark.timeout(BUILD_LIMIT_S + 100)
def test_the_cpp_tests_pass(built_tests: Path) -> None:
    ctest = shutil.which("ctest", path=str(Path(tool("cmake")).parent))
    limits = ["--no-tests=error", "--timeout", str(TEST_LIMIT_S)]
    run([ctest, "--test-dir", str(built_tests), "--output-on-failure", *limits], limit_s=BUILD_LIMIT_S)
