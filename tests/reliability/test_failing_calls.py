"""Calls that fail, see failing_calls.py. PIPECOMM_TEST_FAULTS=all, or `make faults`, plays every program over
both transports, the suite the quick ones.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest
from failing_calls import BEGIN, END, PAGE, PROGRAMS, TRANSPORTS, build, count, documented, load, table
from tools import needs

ALL = [(name, transport) for name in PROGRAMS for transport in TRANSPORTS]
QUICK = [
    *((name, t) for name in ("construction", "close", "exchange after another") for t in TRANSPORTS),
    ("point to point", "tcp"),
    ("broadcast, barrier", "shm"),
    ("relay between stages", "tcp"),
    ("pipeline messages", "shm"),
]
PLAYED = ALL if os.environ.get("PIPECOMM_TEST_FAULTS") == "all" else QUICK
# Functions of the C library that cannot fail, or not so that anything could be done about it: memory and
# texts, clocks, what ends something, and what threads of the same process share.
CANNOT_FAIL = set(
    "__cxa_atexit __cxa_finalize __errno_location __libc_single_threaded __memcpy_chk __sched_cpucount "
    "__snprintf_chk __stack_chk_fail __tls_get_addr clock_gettime close free frexp frexpf geteuid getpid "
    "memchr memcmp memcpy memmove memset munmap nanosleep pause pthread_cond_clockwait pthread_mutex_lock "
    "pthread_mutex_trylock pthread_mutex_unlock pthread_once sched_yield sem_init sem_post sem_trywait "
    "sem_wait sigemptyset snprintf strchr strcmp strerror strlen strncmp strstr strtol vsnprintf".split()
)
# Of connections, made and served in the background: what fails is tried again, or ends the connection
# (tests/cpp/test_tcp.cpp, tests/test_hosts.py). How often they are made is a matter of time.
OF_CONNECTIONS = set(
    "accept4 connect epoll_ctl epoll_wait freeaddrinfo freeifaddrs gai_strerror getaddrinfo getnameinfo "
    "getrandom getrlimit getsockopt in6addr_any ppoll read recv recvmsg send sendmsg setsockopt shutdown "
    "socket write".split()
)
# NCCL is looked for with these (test_device_choice.py); a signal that cannot be caught raises ValueError.
TESTED_ELSEWHERE = {"dlopen", "dlsym", "sigaction"}
# While the module is imported: pybind11's texts, what a forked child does, and whose a function is.
AT_IMPORT = {"strdup", "__register_atfork", "dladdr"}


def in_libc(name: str) -> bool:
    return hasattr(ctypes.CDLL("libc.so.6"), name)


def imported_by_our_objects() -> set[str]:
    """The module itself has the CUDA runtime in it, too."""
    [nm] = needs("nm")
    built = Path(__file__).parents[2] / "build"
    folders = [path.parent for path in built.glob(f"{sys.implementation.cache_tag}-*/CMakeCache.txt")]
    objects = [path for folder in folders for path in folder.glob("CMakeFiles/*.dir/Unity/*.o")]
    if not objects:
        pytest.skip("the module was not built here")
    command = [nm, "--undefined-only", "--format=just-symbols", *map(str, objects)]
    return set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())


@pytest.fixture(scope="session")
def library(tmp_path_factory) -> Path:
    return build(tmp_path_factory.mktemp("failing_calls"))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "transport"), PLAYED)
def test_every_call_fails_once(ranks, library, name, transport):
    """The page says how many there are."""
    counts, expected = count(ranks, library, name, transport), dict(documented()[name, transport])
    for counted in (counts, expected):  # routes, made in the background, take memory and descriptors
        counted.pop("memory"), counted.pop("system call")
    assert counts == expected, "run: python tests/reliability/failing_calls.py"


@pytest.mark.slow
def test_every_function_that_may_fail_is_made_to(library):
    """A new system call enters failing_calls.cpp, or the list of those that cannot fail."""
    calls = load(library)
    watched = set(calls.watched().decode().split())
    imported = imported_by_our_objects()
    assert {"mmap", "memfd_create", "_Znwm"} <= imported
    libc = {name for name in imported if not name.startswith(("_Z", "Py", "_Py", "cuda")) and in_libc(name)}
    assert sorted(libc - watched - CANNOT_FAIL - OF_CONNECTIONS - TESTED_ELSEWHERE - AT_IMPORT) == []


def test_the_table_is_whole():
    page = PAGE.read_text(encoding="utf-8")
    assert list(documented()) == ALL
    assert page.split(BEGIN)[1].split(END)[0] == table(documented())
