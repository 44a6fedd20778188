"""`make flaky`: the suite again and again in random order, to find the tests that fail now and then.

    python tests/flaky.py --runs 12 -- tests/test_faults.py   # what follows -- is for pytest
    python tests/flaky.py --seed 4711 -- tests/test_faults.py # one run once more

A run is known by its seed, which gives the order of the tests; with an odd seed one process per core spins
beside the tests. At the end, also after Ctrl-C, there is a table of the runs, and each test that failed even
once with its seeds, and the first and last lines of its failures. Logs lie in out/flaky.

Which worker runs a test depends on time, so a seed makes a failure likely again, not certain (`-n 0` after
the -- takes one process). The module is also the pytest plugin that shuffles the tests and lists failures.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

FOLDER = Path("out/flaky")
SEED, FAILURES = "FLAKY_SEED", "FLAKY_FAILURES"  # variables from a run to the plugin
NUM_FIRST_LINES, NUM_LAST_LINES = 8, 16  # of a failure in the summary
NUM_LOG_LINES = 30  # of a run that failed outside of its tests
SPIN = "import os, sys\nwhile os.getppid() == int(sys.argv[1]):\n    for _ in range(10**6): pass"


# ---- the plugin --------------------------------------------------------------------------------------------


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Shuffles the tests. All workers of pytest-xdist need the same order, and have the same seed."""
    items.sort(key=lambda item: item.nodeid)
    random.Random(int(os.environ[SEED])).shuffle(items)


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # workers of pytest-xdist report to this process
        config.pluginmanager.register(_FailureList())


class _FailureList:
    """Writes each failure at once, so that a run that ends badly loses none."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._write(
                report, f"{report.nodeid} ({report.when})" if report.when != "call" else report.nodeid
            )

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write(report, f"{report.nodeid} (collection)")

    @staticmethod
    def _write(report, name: str) -> None:
        with open(os.environ[FAILURES], "a", encoding="utf-8") as file:
            file.write(json.dumps({"test": name, "text": _essence(report.longreprtext)}) + "\n")


def _essence(text: str) -> str:
    """The first and the last lines of the error, which pytest marks with an E, else of the text."""
    lines = text.splitlines()
    lines = [line for line in lines if line.startswith("E ")] or lines
    if len(lines) > NUM_FIRST_LINES + NUM_LAST_LINES:
        lines[NUM_FIRST_LINES:-NUM_LAST_LINES] = ["..."]
    return "\n".join(lines)


# ---- the runs ----------------------------------------------------------------------------------------------


@dataclass
class Run:
    seed: int
    started_at: float
    took_s: float = 0.0
    status: int | None = None  # of pytest; None if it was interrupted

    @property
    def is_busy(self) -> bool:
        return self.seed % 2 == 1

    @property
    def load(self) -> str:
        return "busy" if self.is_busy else "quiet"

    @property
    def log(self) -> Path:
        return FOLDER / f"{self.seed}.log"

    def failures(self) -> list[tuple[str, str]]:
        """Pairs of a test and the beginning of its failure."""
        file = self.log.with_suffix(".failures")
        entries = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        found = [(entry["test"], entry["text"]) for entry in entries]
        if not found and self.status not in (None, pytest.ExitCode.OK):
            tail = self.log.read_text(errors="replace").splitlines()[-NUM_LOG_LINES:]
            found.append((f"the run itself: exit status {self.status}", "\n".join(tail)))
        return found


@contextlib.contextmanager
def spinning(is_busy: bool) -> Iterator[None]:
    """Runs one spinning process on each core while this process lives."""
    num = len(os.sched_getaffinity(0)) if is_busy else 0
    spinners = [subprocess.Popen([sys.executable, "-c", SPIN, str(os.getpid())]) for _ in range(num)]
    try:
        yield
    finally:
        for spinner in spinners:
            spinner.kill()
            spinner.wait()


def play(run: Run, pytest_args: list[str]) -> None:
    """Runs pytest once, with its output in a file; records in `run` how it ended, also after Ctrl-C."""
    failures = run.log.with_suffix(".failures")
    failures.unlink(missing_ok=True)
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    told = {SEED: str(run.seed), FAILURES: str(failures.resolve()), "PYTHONPATH": os.pathsep.join(paths)}
    parallel = ["--numprocesses", "auto", "--maxprocesses", "4", "--dist", "worksteal"]
    if not importlib.util.find_spec("xdist"):
        parallel = []
    command = [sys.executable, "-m", "pytest", "-p", Path(__file__).stem, "-q", *parallel, *pytest_args]
    with open(run.log, "wb") as log, spinning(run.is_busy):
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=os.environ | told)
        try:
            run.status = process.wait()
        except KeyboardInterrupt:  # pytest has got it, too, and ends its ranks
            process.wait()
            raise
        finally:
            run.took_s = time.monotonic() - run.started_at


def summary(runs: list[Run]) -> str:
    """The table of the runs, and each test that failed with its seeds."""
    lines = [f"{'seed':>10}  machine  seconds  failures"]
    by_test: dict[str, list[tuple[Run, str]]] = {}
    for run in runs:
        failures = run.failures()
        ended = "" if run.status is not None else "  (interrupted)"
        lines.append(f"{run.seed:>10}  {run.load:<7}  {run.took_s:7.0f}  {len(failures):8}{ended}")
        for test, text in failures:
            by_test.setdefault(test, []).append((run, text))
    for test, found in sorted(by_test.items(), key=lambda entry: (-len(entry[1]), entry[0])):
        lines.append(f"\n{test}\n  {len(found)} of {len(runs)} runs failed:")
        for run, text in found:
            lines += [f"  seed {run.seed} ({run.load})", *(f"    {line}" for line in text.splitlines())]
    if not by_test:
        lines.append(f"\nno test failed in {len(runs)} runs")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=12)
    parser.add_argument("--seed", type=int, help="play this one run")
    parser.add_argument("pytest_args", nargs="*", help="for pytest, after --; default: the whole suite")
    args = parser.parse_args(argv)
    # The first run is a quiet one: its seed is even.
    first = 2 * random.SystemRandom().randrange(10**6) if args.seed is None else args.seed
    FOLDER.mkdir(parents=True, exist_ok=True)
    runs: list[Run] = []
    try:
        for seed in range(first, first + (args.runs if args.seed is None else 1)):
            runs.append(Run(seed, time.monotonic()))
            print(f"run {len(runs)}: seed {seed}, {runs[-1].load}, {runs[-1].log}", flush=True)
            play(runs[-1], args.pytest_args)
            print(f"  {runs[-1].took_s:.0f} s, {len(runs[-1].failures())} failures", flush=True)
    except KeyboardInterrupt:
        print("interrupted")
    print("\n" + summary(runs))
    return int(any(run.failures() or run.status is None for run in runs))


if __name__ == "__main__":
    sys.exit(main())
