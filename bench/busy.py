"""Other work on every core while ranks are measured, like that of a data loader or of another user."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

SPIN = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    for _ in range(1_000_000): pass"


@contextlib.contextmanager
def busy_cores() -> Iterator[None]:
    """Runs a spinning process on each core that this process may use."""
    spinning = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in os.sched_getaffinity(0)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()
