"""Plants each mutation of mutation_table.py in a copy of the repository, and tells which test notices it.

`make mutations` runs it (ARGS='--only NAME'). A mutation is killed if one of its tests fails, does not end
within its deadline, or crashes; one that survives names a test that is missing. Nothing outside of
build/mutations is written, where NAME.log has what the tests printed. C++ is built there as setup.py builds
it, without CUDA.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from mutation_table import MUTATIONS, Mutation
from tools import find_tool

REPOSITORY = Path(__file__).resolve().parent.parent
TREE = REPOSITORY / "build" / "mutations" / "tree"
BUILD_LIMIT_S, PROGRAM_LIMIT_S, TEST_LIMIT_S, FILES_LIMIT_S, SUITE_LIMIT_S = 1800, 150, 150, 600, 3600
LOG = TREE.parent / "last.log"  # what the latest command printed; of each mutation a copy is kept
MARK = f"PIPECOMM_TEST_MUTATIONS={os.getpid()}"  # in the environment of all processes that are started here
BUILT = re.compile(r"(^build/|^out/|\.so$|(^|/)(__pycache__|\.git)/)")  # not copied


class Outcome(NamedTuple):
    """The outcome of some tests: which failed first (None: none), and whether any ran."""

    failed: str | None
    has_run: bool = True


# ---- the table --------------------------------------------------------------------------------------------


def problems_of(mutation: Mutation) -> list[str]:
    """Why the mutation cannot be planted in the repository as it is, or its tests cannot run."""
    problems = [f"{test} is gone" for test in mutation.tests if not (REPOSITORY / test).exists()]
    if not (REPOSITORY / mutation.file).is_file():
        return [f"{mutation.file} is gone", *problems]
    count = (REPOSITORY / mutation.file).read_text().count(mutation.old)
    if count != 1:
        problems.append(f"{mutation.file} has its text {count} times, not once: {mutation.old.strip()!r}")
    return problems


def require_true_table() -> None:
    names = [mutation.name for mutation in MUTATIONS]
    texts = [f"{name} is there twice" for name in sorted(set(names)) if names.count(name) > 1]
    texts += [f"{mutation.name}: {text}" for mutation in MUTATIONS for text in problems_of(mutation)]
    if texts:
        raise SystemExit("tests/mutation_table.py does not fit the code any more:\n  " + "\n  ".join(texts))


def chosen(names: Sequence[str]) -> list[Mutation]:
    unknown = sorted(set(names) - {mutation.name for mutation in MUTATIONS})
    if unknown:
        raise SystemExit(f"there is no mutation {', '.join(unknown)}; --list names them")
    return [mutation for mutation in MUTATIONS if not names or mutation.name in names]


# ---- processes --------------------------------------------------------------------------------------------


def run(command: Sequence[object], limit_s: float) -> tuple[int | None, str]:
    """Returns the exit code (None after the deadline) and the output. Leaves no process behind."""
    name, value = MARK.split("=")
    environment = os.environ | {
        name: value,
        "PYTHONPATH": str(TREE / "python"),
        "PIPECOMM_CUDA": "OFF",
        "CCACHE_BASEDIR": str(TREE),
        "CCACHE_NOHASHDIR": "1",
    }
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        process = subprocess.Popen(
            list(map(str, command)),
            cwd=TREE,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end_marked_processes()
            process.wait()
        output.seek(0)
        text = output.read()
    LOG.write_text(text)
    return code, text


def end_marked_processes() -> None:
    """Ends what a killed test would leave behind, in whatever session it is."""
    found = True
    while found:
        found = False
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if MARK.encode() in (folder / "environ").read_bytes().split(b"\0"):
                    os.kill(int(folder.name), signal.SIGKILL)
                    found = True
        if found:
            time.sleep(0.05)


# ---- the copy ---------------------------------------------------------------------------------------------


class Copy:
    """The copy of the repository, uncommitted changes included. Only files that differ are written, so that
    builds are incremental."""

    def __init__(self) -> None:
        listed = git(REPOSITORY, "ls-files", "-coz", "--exclude-standard").split("\0")
        wanted = {name for name in listed if name and (REPOSITORY / name).is_file()}
        for path in [path for path in TREE.rglob("*") if path.is_file()]:
            name = str(path.relative_to(TREE))
            if name not in wanted and not BUILT.search(name):
                path.unlink()
        for name in wanted:
            source, target = REPOSITORY / name, TREE / name
            if not target.is_file() or target.read_bytes() != source.read_bytes():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, target)
                shutil.copymode(source, target)
        git(TREE, "init", "-q")  # some tests ask git for the files
        git(TREE, "add", "-A")
        identity = ("-c", "user.name=mutations", "-c", "user.email=")
        git(TREE, *identity, "commit", "-q", "--allow-empty", "--no-verify", "-m", "A copy")
        self._is_module_stale = True

    def write(self, file: str, text: str) -> None:
        path = TREE / file
        path.write_text(text)
        # Bytecode counts as valid if the size and the time, in seconds, of the source agree.
        Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)
        self._is_module_stale |= file.startswith("csrc/")

    def build_module(self) -> None:
        if self._is_module_stale:
            build(sys.executable, "setup.py", "-q", "build_ext", "--inplace")
        self._is_module_stale = False

    def program(self, test: str) -> Path:
        """A C++ test, built."""
        folders = list((TREE / "build").glob("*-c[pu]*"))
        if not folders:
            self.build_module()  # which configures the build
            folders = list((TREE / "build").glob("*-c[pu]*"))
        folder = max(folders, key=lambda folder: (folder / "build.ninja").stat().st_mtime)
        if (cmake := find_tool("cmake")) is None:
            raise SystemExit("cmake is missing: pip install cmake ninja")
        build(cmake, "--build", folder, "--target", Path(test).stem)
        return folder / "tests" / "cpp" / Path(test).stem

    def outcome(self, tests: Sequence[str]) -> Outcome:
        """Runs C++ tests one by one and first, since they need no module."""
        has_run = False
        for test in tests:
            if test.endswith(".cpp"):
                code, output = run([self.program(test)], PROGRAM_LIMIT_S)
                if code != 0:
                    return Outcome(program_failure(test, code, output))
                has_run = True
        files = [test for test in tests if not test.endswith(".cpp")]
        if not files:
            return Outcome(None, has_run)
        outcome = self.pytest([*files, "--timeout", TEST_LIMIT_S], FILES_LIMIT_S)
        return Outcome(outcome.failed, outcome.has_run or has_run)

    def pytest(self, arguments: Sequence[object], limit_s: float) -> Outcome:
        self.build_module()
        options = ["-x", "-v", "-p", "no:cacheprovider"]
        code, output = run([sys.executable, "-m", "pytest", *options, *arguments], limit_s)
        if code == 0:
            return Outcome(None, re.search(r"\b[1-9]\d* passed", output) is not None)
        if code == 5:
            return Outcome(None, has_run=False)
        return Outcome(pytest_failure(code, output))


def git(folder: Path, *arguments: str) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    command = ["git", "-C", str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed: {done.stderr.strip()}")
    return done.stdout


def build(*command: object) -> None:
    code, output = run(command, BUILD_LIMIT_S)
    if code != 0:
        raise SystemExit(f"the build failed: {' '.join(map(str, command))}\n{output[-4000:]}")


def how_it_ended(code: int | None, limit_s: float) -> str:
    if code is None:
        return f"a hang, ended after {limit_s} s"
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def program_failure(test: str, code: int | None, output: str) -> str:
    place = re.search(r"\w+\.(?:cpp|h):\d+", output)
    where = test if place is None else f"{test} ({place[0]})"
    return where if place and code == 1 else f"{where} ({how_it_ended(code, PROGRAM_LIMIT_S)})"


def pytest_failure(code: int | None, output: str) -> str:
    failed = re.search(r"^(?:FAILED|ERROR) (\S+(?:\[.*?\])?)(?: - (.*))?$", output, re.MULTILINE)
    if failed:
        return failed[1] + (" (a hang)" if (failed[2] or "").startswith("Failed: Timeout") else "")
    if code in (3, 4):  # pytest's own error, or wrong arguments
        raise SystemExit(f"pytest could not run:\n{output[-4000:]}")
    started = re.findall(r"^(tests/\S+::\S+(?:\[.*?\])?)", output, re.MULTILINE)
    return f"{started[-1] if started else 'pytest'} ({how_it_ended(code, FILES_LIMIT_S)})"


# ---- the command ------------------------------------------------------------------------------------------


def check_base(copy: Copy, mutations: Sequence[Mutation]) -> None:
    """Checks that each test that must kill passes without a mutation, and is not skipped."""
    for test in sorted({test for mutation in mutations for test in mutation.tests}):
        begin = time.monotonic()
        outcome = copy.outcome([test])
        seconds = time.monotonic() - begin
        print(f"{test:50} {seconds:6.0f} s  {outcome.failed or 'passes'}", flush=True)
        if outcome.failed or not outcome.has_run:
            raise SystemExit(f"{test} must pass without a mutation: {outcome.failed or 'nothing ran'}")


def whole_suite(copy: Copy) -> Outcome:
    is_parallel = importlib.util.find_spec("xdist") is not None
    workers = ["--numprocesses", "auto", "--maxprocesses", 4, "--dist", "worksteal"] if is_parallel else []
    return copy.pytest(["tests", *workers], SUITE_LIMIT_S)


def judge(copy: Copy, mutation: Mutation, tries_whole_suite: bool) -> Outcome:
    text = (REPOSITORY / mutation.file).read_text()
    copy.write(mutation.file, text.replace(mutation.old, mutation.new))
    try:
        outcome = copy.outcome(mutation.tests)
        if outcome.failed is None and tries_whole_suite:
            outcome = whole_suite(copy)
        return outcome
    finally:
        shutil.copyfile(LOG, LOG.with_name(f"{mutation.name}.log"))
        copy.write(mutation.file, text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--list", action="store_true", help="name the mutations and their tests")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these mutations")
    parser.add_argument("--base", action="store_true", help="first see that their tests pass without them")
    parser.add_argument("--whole", action="store_true", help="try the whole suite on those that survive")
    arguments = parser.parse_args()
    require_true_table()
    mutations = chosen(arguments.only)
    if arguments.list:
        for mutation in mutations:
            print(f"{mutation.name:34} {mutation.file:50} {' '.join(mutation.tests)}")
        return 0
    copy = Copy()
    copy.build_module()
    if arguments.base:
        check_base(copy, mutations)
    num_killed = 0
    for mutation in mutations:
        begin = time.monotonic()
        outcome = judge(copy, mutation, arguments.whole)
        num_killed += outcome.failed is not None
        verdict = outcome.failed or ("SURVIVED" if outcome.has_run else "SURVIVED: its tests were skipped")
        print(f"{mutation.name:34} {time.monotonic() - begin:5.0f} s  {verdict}", flush=True)
    print(f"{num_killed} of {len(mutations)} killed")
    return 0 if num_killed == len(mutations) else 1


if __name__ == "__main__":
    sys.exit(main())
