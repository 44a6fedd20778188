"""Connections whose calls fail, once, with each error that the kernel may give.

Three ranks make a communicator, connect, exchange messages and close it. One of them, the victim, connects
first, is connected to first, or both. The n-th call of one function fails there with one error, for each n,
function and error: of the sockets, of the memory that others map, and of the directory that finds the others.
All ranks end soon. A failure while two ranks connect is retried; a later failure, or one of something
essential, ends all ranks with an error that names the victim.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from failing_calls import SOON_S, VICTIM, Connect, Injector, Report, gather, play
from patterns import assert_same, pattern, poison
from ranks import assert_within

from pipecomm_ext import Communicator, Recv, Send

# By function, from the manual pages; without errors that would misreport another process, such as ESRCH, and
# those of wrong arguments.
ERRORS = {
    "socket": "EMFILE ENFILE ENOBUFS ENOMEM",
    "connect": "ECONNREFUSED ETIMEDOUT ENETUNREACH EHOSTUNREACH EADDRNOTAVAIL EAGAIN EPERM ENOBUFS",
    "accept4": "EMFILE ENFILE ENOBUFS ENOMEM ECONNABORTED EINTR EAGAIN EPERM EPROTO ETIMEDOUT",
    "send": "ECONNRESET EPIPE EAGAIN EINTR ENOBUFS ENOMEM ETIMEDOUT EHOSTUNREACH",
    "sendmsg": "ECONNRESET EPIPE EAGAIN EINTR ENOBUFS ENOMEM ETIMEDOUT EHOSTUNREACH",
    "recv": "ECONNRESET EAGAIN EINTR ENOMEM ETIMEDOUT EHOSTUNREACH",
    "recvmsg": "ECONNRESET EAGAIN EINTR ENOMEM ETIMEDOUT EHOSTUNREACH",
    "getsockopt": "ENOBUFS ENOMEM",
    "setsockopt": "ENOMEM ENOPROTOOPT EPERM",
    "shutdown": "ENOTCONN",
    "bind": "EADDRINUSE EADDRNOTAVAIL EACCES ENOMEM",
    "listen": "EADDRINUSE",
    "getsockname": "ENOBUFS",
    "getifaddrs": "EMFILE ENOBUFS ENOMEM",
    "getaddrinfo": "EAI_MEMORY EAI_AGAIN EAI_FAIL",
    "getnameinfo": "EAI_MEMORY EAI_AGAIN EAI_FAIL",
    "getrandom": "EINTR ENOSYS",
    "epoll_create1": "EMFILE ENFILE ENOMEM",
    "epoll_ctl": "ENOMEM ENOSPC",
    "epoll_wait": "EINTR",
    "ppoll": "EINTR ENOMEM",
    "eventfd": "EMFILE ENFILE ENODEV ENOMEM",
    "pidfd_open": "EMFILE ENFILE ENODEV ENOMEM EINVAL EPERM ENOSYS",
    "memfd_create": "EMFILE ENFILE ENOMEM",
    "fchmod": "EPERM",
    "ftruncate": "ENOSPC EFBIG EINTR ENOMEM EPERM",
    "fcntl": "EPERM EBUSY",
    "open": "EMFILE ENFILE EACCES EINTR ELOOP ENOMEM EPERM",
    "fstat": "ENOMEM",
    "mmap": "ENOMEM EAGAIN ENFILE EPERM EACCES",
    "mremap": "ENOMEM EAGAIN",
    "madvise": "EAGAIN ENOMEM",
    "fallocate": "EIO EINTR ENOSPC EOPNOTSUPP",
    "lseek": "EINVAL",
    "stat": "EACCES ENOMEM",
    "listdir": "EMFILE ENFILE EACCES ENOMEM",
    "readlink": "EACCES ENOMEM",
    "sched_getaffinity": "EPERM",
    "sched_setaffinity": "EPERM EINVAL",
    "sched_getcpu": "ENOSYS",
    "read_text": "EMFILE ENFILE EACCES",
}
# With transport="shm", a rank without a descriptor does this again, until it has one.
WAITS_FOR_DESCRIPTORS = ("is not possible: pidfd_open", "is not possible: opening the shared memory")
SIDES = ("guest", "listener", "both")  # of the victim
TRANSPORTS = ("tcp", "shm", "auto")
LATER_S = 0.02
MAX_CALLS = 25  # of one function; later ones move messages in the same way


def number_of(error: str) -> int:
    return getattr(socket if error.startswith("EAI_") else errno, error)


def text_of(error: str) -> str:
    if error.startswith("EAI_"):
        strerror = ctypes.CDLL(None).gai_strerror
        strerror.restype = ctypes.c_char_p
        return strerror(number_of(error)).decode()
    return os.strerror(number_of(error))


def exchange_with_all(comm: Communicator) -> None:
    """Exchanges a message with each other rank, then calls a barrier."""
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    received = {rank: poison(5, torch.float32) for rank in others}
    sends = [Send(pattern(5, torch.float32, comm.rank, rank), rank) for rank in others]
    comm.batch_p2p(sends + [Recv(received[rank], rank) for rank in others])
    for rank in others:
        assert_same(received[rank], pattern(5, torch.float32, rank, comm.rank))
    comm.barrier()


def meeting(side: str) -> Callable[[Connect, Injector], None]:
    """A program, see failing_calls.py."""

    def run(connect: Connect, injector: Injector) -> None:
        with injector, injector.functions_of_python(), connect() as comm:
            if side == ("listener" if comm.rank == VICTIM else "guest"):
                time.sleep(LATER_S)  # the others connect
            exchange_with_all(comm)

    return run


def check(reports: list[Report], error: str) -> None:
    """Checks that the victim's error states what has failed, or the peer; the others name the victim."""
    assert_within(SOON_S, max(report.took_s for report in reports))
    for rank, report in enumerate(reports):
        if report.error is None:
            continue
        assert reports[VICTIM].num_failures
        for doing in WAITS_FOR_DESCRIPTORS if error in ("EMFILE", "ENFILE") else ():
            assert doing not in report.error
        assert not report.error.startswith("PipeCommTimeout")
        if rank != VICTIM:
            assert report.is_ours and f"rank {VICTIM}" in report.error
        elif text_of(error) not in report.error:  # a constructor raises it unchanged
            assert report.is_ours and re.search(r"rank \d", report.error)


def play_meetings(
    world, library: Path, side: str, transport: str, max_calls: int, max_errors: int | None
) -> dict[str, int]:
    """Plays the meetings; returns how many calls of each function have failed."""
    counts = dict.fromkeys(ERRORS, 0)
    run = meeting(side)
    play(world, None, run, transport, "socket", 1)  # makes what is made at first use
    for function, errors in ERRORS.items():
        for error in errors.split()[:max_errors]:
            for nth in range(1, max_calls + 1):
                doing = f"{side}, {transport}, call {nth} of {function} fails with {error}"
                print(doing, file=sys.stderr, flush=True)  # for the log of a rank that hangs or dies
                report = play(world, library, run, transport, function, nth, number_of(error))
                reports = gather(world, report)
                try:
                    check(reports, error)
                except AssertionError as caught:
                    raise AssertionError(f"{doing}: {reports}") from caught
                if not reports[VICTIM].num_failures:
                    break
                counts[function] += 1
    return counts
