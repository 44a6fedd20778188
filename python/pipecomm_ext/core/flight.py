"""Flight records as files: JSON lines in a folder, one file for each rank and dump.

The extension always records. If PIPECOMM_FLIGHT_DIR is set, the record of a communicator is written when one
of its operations fails, again when the communicator itself fails, and on SIGUSR1 unless that signal has a
handler. A separate thread, which C++ wakes, writes it: the main thread may be stuck anywhere, unless it holds
the GIL. Files are always new (O_EXCL, mode 0600), and nothing in them is ever executed or unpickled.
"""

from __future__ import annotations

import atexit
import itertools
import json
import os
import platform
import signal
import stat
import sys
import threading
import time
import traceback
import warnings
import weakref
from pathlib import Path
from typing import Any

from .extension import _C

FORMAT_VERSION = 1
SIGNAL = signal.SIGUSR1
_PACKAGE_DIR = Path(__file__).resolve().parents[1]
_MAX_FRAMES = 32  # of a thread's stack
Recorded = Any  # a Communicator, which core does not know

_folder: str | None = None  # of records that no call asks for
_writer: threading.Thread | None = None
_stopping = False
_watched: weakref.WeakSet[Recorded] = weakref.WeakSet()
_dumped_failures: weakref.WeakKeyDictionary[Recorded, set[str]] = weakref.WeakKeyDictionary()
_dump_lock = threading.Lock()
_dump_numbers = itertools.count()


def start(folder: str | None) -> None:
    """From now on, failures and SIGUSR1 write records to `folder`; with None, neither does.

    Raises ValueError if records cannot be written to `folder`.
    """
    global _folder, _writer
    _folder = folder
    if folder is None:
        return
    try:
        os.close(_open_folder(folder))
    except OSError as error:
        raise ValueError(f"PIPECOMM_FLIGHT_DIR cannot be written to: {error}") from error
    if _writer is not None and _writer.is_alive():  # a forked child has no such thread
        return
    _C.flight_record_call_sites(f"{_PACKAGE_DIR}{os.sep}")
    if not _C.flight_catch_signal(SIGNAL):
        warnings.warn(
            f"{SIGNAL.name} has a handler, which is left alone: flight records are written on errors, but "
            "not on the signal",
            RuntimeWarning,
            stacklevel=4,
        )
    _writer = threading.Thread(target=_write_when_woken, name="pipecomm-flight", daemon=True)
    _writer.start()


def watch(communicator: Recorded) -> None:
    """From now on, failures and the signal also write the record of this communicator."""
    _watched.add(communicator)


def dump(communicator: Recorded, folder: str | os.PathLike[str], reason: str) -> str:
    """Writes the record of one communicator to a new file in `folder` and returns its path."""
    folder = os.fspath(folder)
    folder_fd = _open_folder(folder)
    try:
        name = f"flight-{communicator.id}-rank{communicator.rank}-{os.getpid()}-{next(_dump_numbers)}.jsonl"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        file_fd = os.open(name, flags, 0o600, dir_fd=folder_fd)
        try:
            with os.fdopen(file_fd, "w", encoding="utf-8") as file:
                for line in _lines(communicator, reason):
                    file.write(json.dumps(line) + "\n")
        except BaseException:
            os.unlink(name, dir_fd=folder_fd)  # leave no partial record, e.g. on a full disk
            raise
    finally:
        os.close(folder_fd)
    return os.path.join(folder, name)


def dump_if_failed(communicator: Recorded) -> None:
    """Writes the record if a folder is set and something has failed since the last time. Never raises."""
    if _folder is None:
        return
    with _dump_lock:
        failure = communicator.failure
        dumped = _dumped_failures.setdefault(communicator, set())
        what = "operation" if failure is None else "communicator"
        if what in dumped:
            return
        if failure is None and not any(operation["failure"] for operation in communicator.flight_record()):
            return
        dumped.add(what)
        _try_dump(communicator, f"failure of the {what}")


def _lines(communicator: Recorded, reason: str) -> list[dict[str, Any]]:
    operations = communicator.flight_record()
    head = {
        "kind": "communicator",
        "version": FORMAT_VERSION,
        "id": communicator.id,
        "group": communicator.group.group_name,
        "rank": communicator.rank,
        "size": communicator.size,
        "device": communicator.device.type,
        "transport": communicator.known_transport,
        "host": platform.node(),
        "pid": os.getpid(),
        "time": time.time(),
        "reason": reason,
        "closed": communicator.closed,
        "failure": communicator.failure,
        "threads": _stacks(),
        "connections": communicator.connection_events(),
    }
    return [head, *({"kind": "operation", **operation} for operation in operations)]


def _stacks() -> dict[str, list[str]]:
    """The stack of each Python thread, innermost frame first, as "file.py:42 in name"."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    mine = threading.get_ident()
    stacks = {}
    for ident, frame in sys._current_frames().items():
        if ident == mine and names.get(ident) == "pipecomm-flight":
            continue
        summary = traceback.StackSummary.extract(
            traceback.walk_stack(frame), limit=_MAX_FRAMES, lookup_lines=False
        )
        stacks[f"{names.get(ident, '?')} ({ident})"] = [
            f"{entry.filename}:{entry.lineno} in {entry.name}" for entry in summary
        ]
    return stacks


def _open_folder(folder: str) -> int:
    """Returns a descriptor of the folder, which is made if it does not exist."""
    os.makedirs(folder, mode=0o700, exist_ok=True)
    folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    mode = os.fstat(folder_fd).st_mode
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        os.close(folder_fd)
        raise ValueError(
            f"other users can write to {folder} and could replace the files in it; use a folder of your own"
        )
    return folder_fd


def _write_when_woken() -> None:
    num_signals = 0
    while True:
        num_signals_now = _C.flight_wait()
        if _stopping:
            return
        for communicator in list(_watched):
            if num_signals_now != num_signals and not communicator.closed:
                with _dump_lock:
                    _try_dump(communicator, f"signal {SIGNAL.name}")
            dump_if_failed(communicator)
        num_signals = num_signals_now


def _try_dump(communicator: Recorded, reason: str) -> None:
    if _folder is None:
        return
    try:
        dump(communicator, _folder, reason)
    except (OSError, ValueError) as error:
        print(f"pipecomm_ext: the flight record could not be written: {error}", file=sys.stderr)


@atexit.register  # earlier than the function that closes all communicators, so this one runs after it
def _stop() -> None:
    """Ends the writer: a thread that waits in C++ must not return to an interpreter that has ended."""
    global _stopping
    _stopping = True
    if _writer is not None and _writer.is_alive():
        _C.flight_wake()
        _writer.join(timeout=5.0)
