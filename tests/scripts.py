"""Runs the repository's scripts as a user would, and watches what they leave behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent


def _take_interrupts() -> None:
    """Like a shell's foreground: what runs in the background of a script ignores SIGINT, and so would we."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Script:
    """A running script in a session of its own, so that all its processes can be found and signalled."""

    def __init__(self, path: str, *arguments: object, scratch: Path, launcher: tuple[str, ...] = ()):
        scratch.mkdir(exist_ok=True)
        self.scratch = scratch
        self.process = subprocess.Popen(
            [sys.executable, *launcher, str(REPOSITORY / path), *map(str, arguments)],
            env=os.environ | {"TMPDIR": str(scratch)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            preexec_fn=_take_interrupts,
        )

    def __enter__(self) -> Script:
        return self

    def __exit__(self, *exc_info) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()

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
        """No process and no temporary file of the script is left (torch's own caches apart)."""
        until = time.monotonic() + within_s
        while True:
            pids = self.pids()
            files = [path.name for path in self.scratch.iterdir() if not path.name.startswith("torch")]
            if not pids and not files:
                return
            assert time.monotonic() < until, f"left: processes {pids}, files {files}"
            time.sleep(0.02)


def run_script(
    path: str, *arguments: object, scratch: Path, launcher: tuple[str, ...] = (), timeout_s: float = 100.0
) -> tuple[int, str]:
    """Runs a script to its end; (exit code, output). Fails if it leaves a process or temporary file."""
    with Script(path, *arguments, scratch=scratch, launcher=launcher) as script:
        result = script.finish(timeout_s)
        script.assert_nothing_left()
    return result
