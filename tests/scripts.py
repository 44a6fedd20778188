"""Runs the repository's scripts: as a user would, watching what they leave behind, or on the warm rank pool.

A new Python takes seconds to import torch. One run of each script is a command line of its own (run_script);
all others call its main() on ranks that are there already (run_on_ranks).
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import io
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent


def take_interrupts() -> None:
    """Like a shell's foreground: what runs in the background of a script ignores SIGINT, and so would we."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def short_folder() -> Path:
    """An empty folder for temporary files: of a socket's name of 107 bytes, tmp_path would take most."""
    return Path(tempfile.mkdtemp(prefix="pc-"))


def files_in(scratch: Path) -> list[str]:
    """Names of temporary files, apart from torch's caches, and matplotlib's where HOME is read-only."""
    return [path.name for path in scratch.iterdir() if not path.name.startswith(("torch", "matplotlib-"))]


class Script:
    """A running script in a session of its own, so that all its processes can be found and signalled."""

    def __init__(self, path: str, *arguments: object, launcher: tuple[str, ...] = ()):
        self.scratch = short_folder()
        self.process = subprocess.Popen(
            [sys.executable, *launcher, str(REPOSITORY / path), *map(str, arguments)],
            env=os.environ | {"TMPDIR": str(self.scratch)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            preexec_fn=take_interrupts,
        )

    def __enter__(self) -> Script:
        return self

    def __exit__(self, *exc_info) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()
        shutil.rmtree(self.scratch, ignore_errors=True)

    def finish(self, timeout_s: float) -> tuple[int, str]:
        """The exit code and what was printed."""
        output, _ = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, output

    def pids(self) -> list[int]:
        """All live processes of the session, the script's own first."""
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                state, _parent, _group, session = stat.read_text().rsplit(")", 1)[1].split()[:4]
                if int(session) == self.process.pid and state != "Z":
                    found.append(int(stat.parent.name))
        return sorted(found)

    def assert_nothing_left(self, within_s: float = 5.0) -> None:
        """No process and no temporary file of the script is left."""
        until = time.monotonic() + within_s
        while True:
            pids = self.pids()
            files = files_in(self.scratch)
            if not pids and not files:
                return
            assert time.monotonic() < until, f"left: processes {pids}, files {files}"
            time.sleep(0.02)


def run_script(
    path: str, *arguments: object, launcher: tuple[str, ...] = (), timeout_s: float = 100.0
) -> tuple[int, str]:
    """Runs a script to its end; (exit code, output). Fails if it leaves a process or temporary file."""
    with Script(path, *arguments, launcher=launcher) as script:
        result = script.finish(timeout_s)
        script.assert_nothing_left()
    return result


def run_on_ranks(ranks, size: int, module: str, *arguments: object) -> tuple[int, str]:
    """Calls main(arguments) of a script on all ranks of a world; (exit code, output), as run_script."""
    texts = ["--device", "cpu", *map(str, arguments)]
    results = ranks.run(size, main_on_rank, module, texts)
    return max(exit_code for exit_code, _ in results), "".join(output for _, output in results)


def main_on_rank(world, module: str, arguments: list[str]) -> tuple[int, str]:
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        exit_code = importlib.import_module(module).main(arguments)
    return exit_code, output.getvalue()


@contextlib.contextmanager
def locked_build() -> Iterator[None]:
    """The build folders are this test's alone: workers may run two tests at once that build there."""
    with open(REPOSITORY / "build" / ".lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
