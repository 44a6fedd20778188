"""Ranks that are killed while routes are made: the survivors hear of a death, at once, and never of a close.

The suite plays a few kills over each transport; PIPECOMM_TEST_FAULTS=all, or `make faults`, 500.
"""

from __future__ import annotations

import os
import random
import select
import signal
import time
from collections import Counter
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import GROUP_TIMEOUT_S, JUDGES_TIMES, assert_within

from pipecomm_ext import Communicator, PipeCommPeerLost, PipeCommTimeout

NUM_KILLS = 500 if JUDGES_TIMES else 12  # over each transport
NUM_VICTIMS = 12  # of one world of processes: each joins the two survivors for one round
SURVIVORS, VICTIM = (0, 1), 2  # ranks of a round
LATEST_KILL_S = 0.012  # after the victim has begun to make its communicator
HEARD_S = 1.0
PATIENT_S = 60.0
UNKNOWN = "killed before it was known"


def play(world, port_file: str, transport: str):
    """Survivors return for each round how and when they heard of the death."""
    dist.destroy_process_group()
    if world.rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        with open(port_file + ".new", "w", encoding="utf-8") as file:
            file.write(str(store.port))
        os.rename(port_file + ".new", port_file)
    else:
        while not os.path.exists(port_file):
            time.sleep(0.01)
        with open(port_file, encoding="utf-8") as file:
            store = dist.TCPStore("127.0.0.1", int(file.read()), is_master=False)
    if world.rank in SURVIVORS:
        return [survive(store, number, world.rank, transport) for number in range(world.size - 2)]
    number = world.rank - len(SURVIVORS)
    store.set(f"pid {number}", str(os.getpid()))
    join(store, number, VICTIM)
    world.mark("begins")
    comm = Communicator(device="cpu", transport=transport, timeout=PATIENT_S)
    works = [comm.isend(torch.ones(3), peer) for peer in SURVIVORS]
    for work in works:
        work.wait()
    time.sleep(PATIENT_S)


def join(store: dist.Store, number: int, rank: int) -> None:
    """The group of this round."""
    store = dist.PrefixStore(f"round {number}", store)
    store.set_timeout(timedelta(seconds=GROUP_TIMEOUT_S))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3)


def survive(store: dist.Store, number: int, rank: int, transport: str) -> tuple:
    victim = os.pidfd_open(int(store.get(f"pid {number}")))
    join(store, number, rank)
    comm = Communicator(device="cpu", transport=transport, timeout=PATIENT_S)
    # In every other round the survivors wait for each other alone.
    peer = VICTIM if number % 2 else 1 - rank
    works = [comm.irecv(torch.zeros(3), peer) for _ in range(2)]
    heard = None
    while heard is None:
        try:
            for work in works:
                work.wait(0.5)
        except PipeCommTimeout as error:
            has_ended = select.select([victim], [], [], 0)[0]
            if comm.failure is not None:
                heard = type(error), error.origin_rank, str(error), time.monotonic()
            elif has_ended and comm._routes._meeting.look_up(VICTIM) is None:
                heard = PipeCommTimeout, None, UNKNOWN, 0.0
        except PipeCommPeerLost as error:
            heard = type(error), error.origin_rank, str(error), time.monotonic()
    store.set(f"{rank} has heard {number}", "")
    store.wait([f"{other} has heard {number}" for other in SURVIVORS])
    comm.abort()
    comm.close()
    os.close(victim)
    dist.destroy_process_group()
    return heard


@pytest.mark.parametrize("transport", ["c10d", "shm", "auto"])
def test_a_rank_that_is_killed_has_died(ranks, transport, tmp_path):
    rng, slowest_s, counts = random.Random(transport), 0.0, Counter()
    for played in range(0, NUM_KILLS, NUM_VICTIMS):
        port_file = str(tmp_path / f"port{played}")
        num_victims = min(NUM_VICTIMS, NUM_KILLS - played)
        struck_at = []
        with ranks.disposable(num_victims + len(SURVIVORS), play, port_file, transport) as world:
            for number in range(num_victims):
                world.await_mark(number + len(SURVIVORS), "begins")
                time.sleep(rng.random() * LATEST_KILL_S)
                struck_at.append(world.signal(number + len(SURVIVORS), signal.SIGKILL))
            outcomes = world.collect()
        for outcome in outcomes[: len(SURVIVORS)]:
            assert outcome.status == "returned", "\n".join(map(str, outcomes))
            for number, (kind, origin, text, heard_at) in enumerate(outcome.value):
                counts[text == UNKNOWN] += 1
                if text == UNKNOWN:
                    continue
                what = f"round {number} of the world at {played}, rank {outcome.rank}: {kind} {text}"
                assert issubclass(kind, PipeCommPeerLost) and origin == VICTIM, what
                assert f"rank {VICTIM}, which died" in text and "has closed" not in text, what
                assert_within(HEARD_S, heard_at - struck_at[number], what)
                slowest_s = max(slowest_s, heard_at - struck_at[number])
    print(f"{transport}: {counts[False]} heard, slowest {slowest_s:.3f} s; {counts[True]} {UNKNOWN}")
    assert counts[False] > counts[True]
