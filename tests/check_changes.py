"""`make check`: lint of what has changed since a commit, and the tests that CONTRIBUTING.md names for it.

    python tests/check_changes.py [--base COMMIT] [--list] [pytest's arguments]

Changed files are those of the work tree, or of the last commit if nothing has changed since. The table "Where
to change what" of CONTRIBUTING.md maps folders to tests; the row with the longest path that a file is in
counts. A test file stands for itself.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from tools import find_tool

ROOT = Path(__file__).resolve().parent.parent
CXX_SUFFIXES = (".h", ".cuh", ".cpp", ".cu")
QUOTED = re.compile(r"`([^`]+)`")
CPP_PROGRAM = re.compile(r"tests/test_cpp\[(\w+)\]")


def git(*arguments: str) -> list[str]:
    program = find_tool("git") or sys.exit("git is not installed: nothing tells what has changed")
    done = subprocess.run([program, *arguments], cwd=ROOT, capture_output=True, text=True, encoding="utf-8")
    if done.returncode != 0:
        raise SystemExit(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout.splitlines()


def changed_files(base: str | None) -> list[str]:
    def since(commit: str) -> set[str]:
        return {*git("diff", "--name-only", commit), *git("ls-files", "--others", "--exclude-standard")}

    return sorted(since(base) if base else since("HEAD") or since("HEAD~1"))


def table() -> dict[str, list[str]]:
    """Paths that are named in the second column, and the tests in the third."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = text.split("## Where to change what")[1].split("\n## ")[0]
    rows = [row.strip("|").split("|") for row in section.splitlines() if row.startswith("| ")][1:]
    tests_of: dict[str, list[str]] = {}
    for _, places, tests in rows:
        for place in QUOTED.findall(places):
            tests_of[place] = [f"tests/{name}" for name in QUOTED.findall(tests)]
    return tests_of


def chosen_tests(files: Iterable[str], tests_of: dict[str, list[str]]) -> list[str]:
    """The tests for these files, each once; files of a folder that is chosen as a whole are left out."""
    chosen: dict[str, None] = {}
    for file in files:
        places = [place for place in tests_of if file == place or file.startswith(place.rstrip("/") + "/")]
        if places:
            chosen |= dict.fromkeys(tests_of[max(places, key=len)])
        elif re.fullmatch(r"tests/(\w+/)*test_\w+\.py", file) and (ROOT / file).exists():
            chosen[file] = None
        elif program := re.fullmatch(r"tests/cpp/test_(\w+)\.cpp", file):
            chosen[f"tests/test_cpp[{program[1]}]"] = None
    return [test for test in chosen if not any(test.startswith(f"{folder}/") for folder in chosen)]


def lint(files: list[str]) -> list[list[str]]:
    """The commands that check these files without changing them."""
    there = [file for file in files if (ROOT / file).exists()]
    python = [file for file in there if file.endswith(".py")]
    cxx = [file for file in there if file.endswith(CXX_SUFFIXES)]
    typed = [file for file in python if file.startswith("python/")]
    return [
        *([["ruff", "check", *python], ["ruff", "format", "--check", *python]] if python else []),
        *([["clang-format", "--dry-run", "-Werror", *cxx]] if cxx else []),
        *([["pyright", *typed], ["mypy"]] if typed else []),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", help="the commit to compare with (default: the last one)")
    parser.add_argument("--list", action="store_true", help="show the commands, and run none")
    options, for_pytest = parser.parse_known_args()
    files = changed_files(options.base)
    commands = lint(files)
    tests = chosen_tests(files, table())
    if programs := [match[1] for match in map(CPP_PROGRAM.fullmatch, tests) if match]:
        commands.append([sys.executable, "tests/test_cpp.py", *programs])
    if tests := [test for test in tests if not CPP_PROGRAM.fullmatch(test)]:
        workers = ["-n", "auto", "--maxprocesses", "4", "--dist", "worksteal"]
        commands.append([sys.executable, "-m", "pytest", "-q", *workers, *for_pytest, *tests])
    print(f"{len(files)} files have changed")
    for command in commands:
        print("+", " ".join(command), flush=True)
        if not options.list and (status := subprocess.run(command, cwd=ROOT).returncode) != 0:
            return status
    return 0


if __name__ == "__main__":
    sys.exit(main())
