"""The client of a group's store, whose system calls fail once with each error that the kernel may give.

They are torch's own calls: its library is watched like the extension, see failing_calls.py. On one of two
ranks a call fails while it makes a communicator, connects to the other rank and closes. Both end within their
timeout, with the right result or an error of this package.
"""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from failing_calls import SOURCE, VICTIM, Injector, Report, load
from failing_connections import ERRORS, number_of
from ranks import JUDGES_TIMES, assert_within
from test_store import stores
from tools import compile_library

from pipecomm_ext import Communicator, PipeCommError

LIBRARY = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
FUNCTIONS = ("send", "recv", "poll")
ERRORS_OF_POLL = "EINTR ENOMEM"
TIMEOUT_S = 1.0 if JUDGES_TIMES else 4.0  # a rank without failures must not reach it
CLOSE_S, SPARE_S = 3.0, 1.0
MAX_CALLS, MAX_ERRORS = (25, None) if JUDGES_TIMES else (4, 1)


def meet_by_a_store(rank: int, store: dist.Store, injector: Injector) -> Report:
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  (registers the backend)

    dist.init_process_group("fake", store=store, rank=rank, world_size=2)
    error = None
    began_at = time.monotonic()
    try:
        with injector, Communicator(device="cpu", transport="shm", timeout=TIMEOUT_S) as comm:
            received = torch.zeros(3)
            send = comm.isend(torch.full((3,), rank + 1.0), 1 - rank)
            comm.recv(received, 1 - rank)
            send.wait()
            assert received.tolist() == [2.0 - rank] * 3
    except AssertionError:
        raise
    except Exception as caught:
        error = caught
    took_s = time.monotonic() - began_at
    dist.destroy_process_group()
    text = None if error is None else f"{type(error).__name__}: {error}"
    return Report(took_s, text, isinstance(error, PipeCommError), *injector.end())


def play(world, port: int, library: Path) -> int:
    """Plays the rounds; returns the number of calls that have failed."""
    dist.destroy_process_group()
    calls = load(library)
    assert all(calls.watch(str(LIBRARY).encode(), function.encode()) for function in FUNCTIONS)
    judge = dist.TCPStore("127.0.0.1", port, is_master=False)
    num_plays = num_failures = 0
    for function in FUNCTIONS:
        for error in ERRORS.get(function, ERRORS_OF_POLL).split()[:MAX_ERRORS]:
            for nth in range(1, MAX_CALLS + 1):
                num_plays += 1
                store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=100))
                injector = Injector(
                    library if world.rank == VICTIM else None, function, nth, number_of(error)
                )
                report = meet_by_a_store(world.rank, dist.PrefixStore(f"{num_plays}", store), injector)
                what = f"call {nth} of {function} fails with {error}: {report}"
                assert report.error is None or report.is_ours, what
                assert_within(TIMEOUT_S + CLOSE_S + SPARE_S, report.took_s, what)
                judge.set(f"{num_plays} of {world.rank}", str(report.num_failures))
                both = [int(judge.get(f"{num_plays} of {rank}")) for rank in range(2)]  # they begin together
                if not both[VICTIM]:
                    assert report.error is None, what
                    break
                num_failures += 1
    return num_failures


@pytest.mark.slow
def test_every_call_of_the_stores_client_fails_with_each_error(ranks):
    library = compile_library(SOURCE)
    with stores(1) as [(_, port)], ranks.disposable(2, play, port, library) as world:
        outcomes = world.collect(deadline=250, give_up_on=("raised", "died"))
    assert all(outcome.status == "returned" for outcome in outcomes), "\n".join(map(str, outcomes))
    print(f"{outcomes[VICTIM].value} failing calls")
    assert outcomes[VICTIM].value >= len(FUNCTIONS) - 1
