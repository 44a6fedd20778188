"""Runs the repository's scripts: as a user would, checking what they leave behind, or on the warm rank pool.

A new Python takes seconds to import torch. One script of each kind is a command line of its own (`is_fresh`);
others are processes forked from the pool's server (Script, run_script, run_under_torchrun), or only call
main() on ranks that are there already (run_on_ranks). Where the end of Python matters: run_program.
"""

from __future__ import annotations

import atexit
import codecs
import contextlib
import fcntl
import gc
import importlib
import io
import multiprocessing
import multiprocessing.forkserver
import os
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import NoReturn
from unittest import mock

import pytest
import torch.distributed as dist
from ranks import fork_context

TESTS = Path(__file__).resolve().parent
REPOSITORY = TESTS.parent


def take_interrupts() -> None:
    """Takes SIGINT like a shell's foreground process: background processes of a script ignore it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def short_folder() -> Path:
    """An empty folder for temporary files: tmp_path would use most of the 107 bytes of a socket's name."""
    return Path(tempfile.mkdtemp(prefix="pc-"))


def files_in(scratch: Path) -> list[str]:
    """Names of temporary files, except torch's caches, and matplotlib's where HOME is read-only."""
    return [path.name for path in scratch.iterdir() if not path.name.startswith(("torch", "matplotlib-"))]


def _run_forked(
    path: str, arguments: list[str], folder: Path, environment: dict[str, str], output: Connection
) -> None:
    """Runs a script as a new Python would, in a process that has imported torch already."""
    os.setsid()
    gc.freeze()  # see ranks.py
    take_interrupts()
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    output.close()
    sys.stdout.reconfigure(line_buffering=True)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
    fork = multiprocessing.get_context("fork")  # a server of its own would import torch anew
    multiprocessing.get_context = lambda method=None: fork
    if path == "-c":
        code, *arguments = arguments
        sys.argv, sys.path[0:0] = [path, *arguments], [str(folder)]
        _run_to_the_end(code)
    sys.argv, sys.path[0:0] = [path, *arguments], [os.path.dirname(path)]
    try:
        runpy.run_path(path, run_name="__main__")
    finally:
        atexit._run_exitfuncs()


def _run_to_the_end(code: str) -> NoReturn:
    """Runs a program, after which all that Python does at its end is done, in half a second."""
    multiprocessing.forkserver.os = _OsThatEnds()
    try:
        exec(code, sys.modules["__main__"].__dict__)
    except Exception as error:  # what it refers to lives until the end
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)
    finally:
        gc.unfreeze()  # triton's objects, too, must go: what is left of them is told on stderr
    sys.exit(0)


class _OsThatEnds:
    """`os` for the server's code, which would end a forked process by _exit()."""

    _exit = staticmethod(sys.exit)

    def __getattr__(self, name: str) -> object:
        return getattr(os, name)


class Script:
    """A running script in a session of its own, so that all its processes can be found and signalled.

    With the path "-c", the first argument is the program; see run_program.
    """

    def __init__(
        self,
        path: str | Path,
        *arguments: object,
        is_fresh: bool = False,
        folder: Path = REPOSITORY,
        **environment: str,
    ):
        self.scratch = short_folder()
        path, texts = "-c" if path == "-c" else str(folder / path), [*map(str, arguments)]
        environment = os.environ | {"TMPDIR": str(self.scratch)} | environment
        context = fork_context()
        self._output, output = context.Pipe(duplex=False)
        if is_fresh:
            self.process = subprocess.Popen(
                [sys.executable, path, *texts],
                cwd=folder,
                env=environment,
                stdout=output.fileno(),
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=take_interrupts,
            )
        else:
            arguments = path, texts, folder, environment, output
            self.process = context.Process(target=_run_forked, args=arguments)
            self.process.start()
        output.close()
        self.text = ""  # what was printed so far
        self._decoder = codecs.getincrementaldecoder("utf-8")()

    def __enter__(self) -> Script:
        return self

    def __exit__(self, *exc_info) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()  # if it has no session of its own yet
        self._exit_code(10.0)
        self._output.close()
        shutil.rmtree(self.scratch, ignore_errors=True)

    def read(self, until: float) -> bool:
        """Reads the next output; returns whether the script has ended."""
        if not wait([self._output], max(until - time.monotonic(), 0.0)):
            raise TimeoutError(self.text)
        some = os.read(self._output.fileno(), 1 << 16)
        self.text += self._decoder.decode(some)
        return not some

    def finish(self, timeout_s: float) -> tuple[int, str]:
        """Waits for the end; returns the exit code and the output."""
        until = time.monotonic() + timeout_s
        while not self.read(until):
            pass
        return self._exit_code(max(until - time.monotonic(), 0.1)), self.text

    def _exit_code(self, timeout_s: float) -> int:
        if isinstance(self.process, subprocess.Popen):
            return self.process.wait(timeout_s)
        self.process.join(timeout_s)
        assert self.process.exitcode is not None, "the script has closed its output, and goes on"
        return self.process.exitcode

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
        """Asserts that no process and no temporary file of the script is left."""
        until = time.monotonic() + within_s
        while True:
            pids = self.pids()
            files = files_in(self.scratch)
            if not pids and not files:
                return
            assert time.monotonic() < until, f"left: processes {pids}, files {files}"
            time.sleep(0.02)


def run_script(
    path: str | Path, *arguments: object, timeout_s: float = 250.0, **options: object
) -> tuple[int, str]:
    """Runs a script; returns (exit code, output). Fails if it leaves a process or temporary file."""
    with Script(path, *arguments, **options) as script:
        result = script.finish(timeout_s)
        script.assert_nothing_left()
    return result


def run_program(code: str, *arguments: object, timeout_s: float = 100.0, **environment: str) -> str:
    """Runs a program in the folder of the tests as `python -c` would; returns its output after its good end.

    Unlike a script, which is left as soon as it is done, it ends with its interpreter.
    """
    exit_code, output = run_script("-c", code, *arguments, folder=TESTS, timeout_s=timeout_s, **environment)
    assert exit_code == 0, output
    return output


def run_under_torchrun(command: str, folder: Path, timeout_s: float = 250.0) -> str:
    """Returns the output of `torchrun --standalone --nproc-per-node N script arguments`, without torchrun.

    Each rank is a script with the environment that torchrun gives it; all must end well.
    """
    launcher, standalone, option, size, script, *arguments = shlex.split(command)
    assert [launcher, standalone, option] == ["torchrun", "--standalone", "--nproc-per-node"], command
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "OMP_NUM_THREADS": "1"}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    shared |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    with contextlib.ExitStack() as stack:
        ranks = [
            Script(script, *arguments, folder=folder, RANK=str(rank), LOCAL_RANK=str(rank), **shared)
            for rank in range(int(size))
        ]
        for rank in ranks:
            stack.enter_context(rank)
        ends = [rank.finish(timeout_s) for rank in ranks]
        for rank in ranks:
            rank.assert_nothing_left()
    assert [exit_code for exit_code, _ in ends] == [0] * len(ranks), ends
    return "".join(output for _, output in ends)


def run_on_ranks(ranks, size: int, module: str, *arguments: object) -> str:
    """Calls main(arguments) of a script on all ranks of a world; returns the output. All must succeed."""
    texts = ["--device", "cpu", *map(str, arguments)]
    results = ranks.run(size, bench_on_rank if module == "run" else main_on_rank, module, texts)
    output = "".join(output for _, output in results)
    assert [exit_code for exit_code, _ in results] == [0] * size, output
    return output


def main_on_rank(world, module: str, arguments: list[str]) -> tuple[int, str]:
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        exit_code = importlib.import_module(module).main(arguments)
    return exit_code, output.getvalue()


def bench_on_rank(world, module: str, arguments: list[str]) -> tuple[int, str]:
    """The benchmark's command line, with few blocks of each measurement."""
    importlib.import_module(module)
    with mock.patch.object(importlib.import_module("measure"), "NUM_BLOCKS", 2):
        return main_on_rank(world, module, arguments)


def assert_refused(capsys, parse, arguments: str, message: str) -> None:
    """Asserts that a script explains what is wrong with its arguments."""
    with pytest.raises(SystemExit) as ended:
        parse(arguments.split())
    assert ended.value.code == 2 and message in capsys.readouterr().err


@contextlib.contextmanager
def locked_build() -> Iterator[None]:
    """Locks the build folders: workers may run two tests at once that build there."""
    with open(REPOSITORY / "build" / ".lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
