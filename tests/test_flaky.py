"""`make flaky` finds a test that fails sometimes, over a small suite in a folder of its own."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SUITE = """
import os, time
from pathlib import Path

ORDER = Path("order")

def note(name):
    with ORDER.open("a") as file:
        file.write(name)

def test_a(): note("a")
def test_b(): note("b")
def test_c(): note("c")

def test_each_third_call():
    note("d")
    assert ORDER.read_text().count("d") % 3, "the third call"
"""
# Without conftest.py and its pools of ranks, without further processes, and (see start()) without the plugins
# of other packages, which take most of the time of such a run.
ARGS = ["--", "-p", "xdist", "-n", "0", "-p", "no:cacheprovider"]

pytestmark = pytest.mark.slow


def start(folder: Path, *args: str) -> subprocess.Popen:
    command = [sys.executable, str(Path(__file__).parent / "flaky.py"), *args, *ARGS]
    return subprocess.Popen(
        command,
        cwd=folder,
        env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def test_a_test_that_fails_each_third_time_is_named_with_a_seed_that_repeats_its_run(tmp_path):
    (tmp_path / "test_it.py").write_text(SUITE)
    process = start(tmp_path, "--runs", "3")
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 1, output
    seeds = [int(seed) for seed in re.findall(r"^run \d: seed (\d+)", output, re.MULTILINE)]
    rows = re.findall(r"^ +(\d+)  (quiet|busy) +\d+ +(\d+)$", output, re.MULTILINE)
    assert rows == [
        (str(seeds[0]), "quiet", "0"), (str(seeds[1]), "busy", "0"), (str(seeds[2]), "quiet", "1")
    ], output  # fmt: skip
    assert f"test_it.py::test_each_third_call\n  1 of 3 runs failed:\n  seed {seeds[2]} (quiet)" in output
    assert "AssertionError: the third call" in output and "test_it.py::test_a" not in output
    assert "1 failed, 3 passed" in (tmp_path / "out" / "flaky" / f"{seeds[2]}.log").read_text()

    process = start(tmp_path, "--seed", str(seeds[2]))
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0 and "no test failed in 1 runs" in output, output
    expected = []
    for seed in [*seeds, seeds[2]]:
        order = list("abcd")
        random.Random(seed).shuffle(order)
        expected += order
    assert (tmp_path / "order").read_text() == "".join(expected)


def test_ctrl_c_ends_with_the_table(tmp_path):
    (tmp_path / "test_it.py").write_text(
        "import pathlib, time\n\ndef test_long():\n    pathlib.Path('began').touch()\n    time.sleep(100)\n"
    )
    process = start(tmp_path, "--runs", "9")
    until = time.monotonic() + 100
    while not (tmp_path / "began").exists():
        assert time.monotonic() < until
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=100)
    assert process.returncode == 1 and output.count("run ") == 1, output
    assert re.search(r"interrupted\n\n +seed  machine .*\n +\d+  quiet .* \(interrupted\)", output), output


def test_what_fails_outside_of_tests_is_a_failure(tmp_path):
    (tmp_path / "test_it.py").write_text("import no_such_module\n")
    process = start(tmp_path, "--seed", "2")
    output, _ = process.communicate(timeout=100)
    assert process.returncode == 1 and "test_it.py (collection)" in output, output
    assert "No module named 'no_such_module'" in output
