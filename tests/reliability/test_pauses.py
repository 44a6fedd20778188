"""A rank that pauses while others connect to it is not lost: it is stopped, or has no descriptor left.

`make faults` makes it pause for longer than an end of a handshake waits for an answer, five seconds.
"""

from __future__ import annotations

import contextlib
import resource
import signal
import time

import pytest
from failing_connections import exchange_with_all
from faults import limited
from ranks import JUDGES_TIMES

VICTIM, NUM_RANKS = 1, 3
PAUSE_S = 7.0 if JUDGES_TIMES else 0.5
HEAD_START_S = 0.3  # of the pause
PATIENT_S = 60.0


def meet_one_that_stands_still(world, transport: str, strike: str) -> None:
    comm = world.fresh_comm(transport=transport, timeout=PATIENT_S)
    world.meet()
    world.mark("made")
    is_victim = world.rank == VICTIM
    has_none = is_victim and strike == "no descriptor"
    with limited(resource.RLIMIT_NOFILE, 3) if has_none else contextlib.nullcontext():
        time.sleep(PAUSE_S if has_none else HEAD_START_S)
    exchange_with_all(comm)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["tcp", "shm", "auto"])
@pytest.mark.parametrize("strike", ["stopped", "no descriptor"])
def test_a_rank_that_stands_still_is_met(ranks, transport, strike):
    with ranks.disposable(NUM_RANKS, meet_one_that_stands_still, transport, strike) as world:
        world.await_marks("made")
        if strike == "stopped":
            world.signal(VICTIM, signal.SIGSTOP)
            time.sleep(PAUSE_S)
            world.signal(VICTIM, signal.SIGCONT)
        outcomes = world.collect()
    assert all(outcome.status == "returned" for outcome in outcomes), "\n".join(map(str, outcomes))
