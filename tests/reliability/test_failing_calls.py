"""Calls that fail, see failing_calls.py and failing_connections.py. PIPECOMM_TEST_FAULTS=all, or `make
faults`, plays every program over both transports, and every error of a connection; the suite the quick ones.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest
from failing_calls import (
    BEGIN,
    END,
    NUM_RANKS,
    PAGE,
    PROGRAMS,
    SOURCE,
    TRANSPORTS,
    count,
    documented,
    load,
    table,
)
from failing_connections import ERRORS, MAX_CALLS, SIDES, play_meetings
from failing_connections import TRANSPORTS as WAYS
from ranks import JUDGES_TIMES
from tools import compile_library, needs

ALL = [(name, transport) for name in PROGRAMS for transport in TRANSPORTS]
QUICK = [
    *((name, t) for name in ("construction", "close", "exchange after another") for t in TRANSPORTS),
    ("point to point", "tcp"),
    ("broadcast, barrier", "shm"),
    ("relay between stages", "shm"),
    ("pipeline messages", "shm"),
]
PLAYED = ALL if JUDGES_TIMES else QUICK
# Calls of a function, and errors, by transport: "auto" makes the calls of both others.
MEETINGS = (
    dict.fromkeys(WAYS, (MAX_CALLS, None)) if JUDGES_TIMES else {"tcp": (1, 1), "shm": (1, 1), "auto": (2, 1)}
)
# In the suite, "shm" adds only its refusal to the others.
MET = [(side, way) for side in SIDES for way in WAYS if JUDGES_TIMES or way != "shm" or side == "guest"]
# Functions of the C library that cannot fail, or whose failure could not be handled: memory and texts,
# clocks, limits, those that end something, those on what threads share, and bells (read, write).
CANNOT_FAIL = set(
    "__cxa_atexit __cxa_finalize __errno_location __libc_single_threaded __memcpy_chk __sched_cpucount "
    "__snprintf_chk __stack_chk_fail __tls_get_addr clock_gettime close free freeaddrinfo freeifaddrs frexp "
    "frexpf gai_strerror geteuid getpid getrlimit in6addr_any memchr memcmp memcpy memmove memset munmap "
    "nanosleep pause pthread_cond_clockwait pthread_mutex_lock pthread_mutex_trylock pthread_mutex_unlock "
    "pthread_once read sched_yield sem_init sem_post sem_trywait sem_wait sigemptyset snprintf strchr strcmp "
    "strerror strlen strncmp strstr strtol vsnprintf write".split()
)
ALWAYS_CALLED = {
    "tcp": "socket bind send sendmsg recv recvmsg setsockopt epoll_ctl ppoll getrandom".split(),
    "shm": "memfd_create mmap open pidfd_open fstat ftruncate".split(),
    "auto": "socket bind epoll_ctl memfd_create mmap open pidfd_open".split(),
}
# They fail only in failing_calls.py, with one error each.
OF_ONE_ERROR = {"poll", "syscall", "posix_memalign", "aligned_alloc", "_Znwm"}
# The first two look up NCCL (test_device_choice.py); a signal that cannot be caught raises ValueError.
TESTED_ELSEWHERE = {"dlopen", "dlsym", "sigaction"}
# Called at import: pybind11's texts, handlers for forks, and the library of a function.
AT_IMPORT = {"strdup", "__register_atfork", "dladdr"}


def in_libc(name: str) -> bool:
    return hasattr(ctypes.CDLL("libc.so.6"), name)


def imported_by_our_objects() -> set[str]:
    """The symbols of our object files: the module itself also contains the CUDA runtime."""
    [nm] = needs("nm")
    built = Path(__file__).parents[2] / "build"
    folders = [path.parent for path in built.glob(f"{sys.implementation.cache_tag}-*/CMakeCache.txt")]
    objects = [path for folder in folders for path in folder.glob("CMakeFiles/*.dir/Unity/*.o")]
    if not objects:
        pytest.skip("the module was not built here")
    command = [nm, "--undefined-only", "--format=just-symbols", *map(str, objects)]
    return set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())


@pytest.fixture(scope="session")
def library() -> Path:
    return compile_library(SOURCE)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "transport"), PLAYED)
def test_every_call_fails_once(ranks, library, name, transport):
    """The page states the number of calls."""
    counts, expected = count(ranks, library, name, transport), dict(documented()[name, transport])
    for counted in (counts, expected):  # routes made in the background take memory and descriptors
        counted.pop("memory"), counted.pop("system call")
    assert counts == expected, "run: python tests/reliability/failing_calls.py"


@pytest.mark.slow
@pytest.mark.parametrize(("side", "transport"), MET)
def test_every_call_of_a_connection_fails_with_each_error(ranks, library, side, transport):
    [counts, *_] = ranks.run(
        NUM_RANKS, play_meetings, library, side, transport, *MEETINGS[transport], deadline=400
    )
    print(f"{side}, {transport}: {sum(counts.values())} failing calls, {counts}")
    assert all(counts[function] for function in ALWAYS_CALLED[transport]), counts


@pytest.mark.slow
def test_every_function_that_may_fail_is_made_to(library):
    """A new system call enters failing_calls.cpp, or the list of those that cannot fail."""
    calls = load(library)
    watched = set(calls.watched().decode().split())
    imported = imported_by_our_objects()
    assert {"mmap", "memfd_create", "_Znwm"} <= imported
    libc = {name for name in imported if not name.startswith(("_Z", "Py", "_Py", "cuda")) and in_libc(name)}
    assert sorted(libc - watched - CANNOT_FAIL - TESTED_ELSEWHERE - AT_IMPORT) == []
    assert {name for name in watched if in_libc(name)} - OF_ONE_ERROR <= set(ERRORS)


def test_the_table_is_whole():
    page = PAGE.read_text(encoding="utf-8")
    assert list(documented()) == ALL
    assert page.split(BEGIN)[1].split(END)[0] == table(documented())
