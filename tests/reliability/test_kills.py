"""Ranks are killed while routes are made: the survivors learn at once of a death, and never of a close.

The suite plays a few kills over each transport; PIPECOMM_TEST_FAULTS=all, or `make faults`, 500.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import GROUP_TIMEOUT_S, JUDGES_TIMES, assert_within

from pipecomm_ext import Communicator, PipeCommPeerLost, PipeCommTimeout
from pipecomm_ext.core.rendezvous import Rendezvous

NUM_KILLS = 500 if JUDGES_TIMES else 6  # over each transport
NUM_VICTIMS = 12  # of one world of processes: each joins the two survivors for one round
SURVIVORS, VICTIM = (0, 1), 2  # ranks of a round
LATEST_KILL_S = 0.012  # after the victim can be found; earlier, it would be a rank that never joins
HEARD_S = 1.0
PATIENT_S = 60.0


def play(world, port_file: str, transport: str):
    """Survivors return for each round how and when they learned of the death."""
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
    comm = join(store, world.rank - len(SURVIVORS), VICTIM, transport)
    world.mark("can be found")
    for peer in SURVIVORS:
        comm.isend(torch.ones(3), peer)
    time.sleep(PATIENT_S)


def join(store: dist.Store, number: int, rank: int, transport: str) -> Communicator:
    """Makes the communicator of this round."""
    store = dist.PrefixStore(f"round {number}", store)
    store.set_timeout(timedelta(seconds=GROUP_TIMEOUT_S))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
    is_connected = False
    while not is_connected:  # torch looks up host names, which may take seconds
        with contextlib.suppress(PipeCommTimeout):
            Rendezvous(dist.group.WORLD, PATIENT_S, "a connection to the store").look_up(rank)
            is_connected = True
    store.set(f"{rank} is connected", "")
    store.wait([f"{other} is connected" for other in (*SURVIVORS, VICTIM)])
    return Communicator(device="cpu", transport=transport, timeout=PATIENT_S)


def survive(store: dist.Store, number: int, rank: int, transport: str) -> tuple:
    comm = join(store, number, rank, transport)
    joined_at = time.monotonic()
    # In every other round the survivors wait only for each other.
    peer = VICTIM if number % 2 else 1 - rank
    with pytest.raises(Exception) as caught:
        while True:  # the victim may have sent once
            comm.recv(torch.zeros(3), peer)
    heard_at = time.monotonic()
    heard = type(caught.value), caught.value.origin_rank, str(caught.value), joined_at, heard_at
    comm.close()
    dist.destroy_process_group()
    return heard


@pytest.mark.timeout(300 if NUM_KILLS < 100 else 3600)
@pytest.mark.parametrize("transport", ["tcp", "shm", "auto"])
def test_a_rank_that_is_killed_has_died(ranks, transport, tmp_path):
    rng, slowest_s = random.Random(transport), 0.0
    for played in range(0, NUM_KILLS, NUM_VICTIMS):
        port_file = str(tmp_path / f"port{played}")
        num_victims = min(NUM_VICTIMS, NUM_KILLS - played)
        struck_at = []
        with ranks.disposable(num_victims + len(SURVIVORS), play, port_file, transport) as world:
            for victim in range(len(SURVIVORS), num_victims + len(SURVIVORS)):
                world.await_mark(victim, "can be found")
                time.sleep(rng.random() * LATEST_KILL_S)
                struck_at.append(world.signal(victim, signal.SIGKILL))
            outcomes = world.collect()
        for outcome in outcomes[: len(SURVIVORS)]:
            assert outcome.status == "returned", "\n".join(map(str, outcomes))
            for number, (kind, origin, text, joined_at, heard_at) in enumerate(outcome.value):
                took_s = heard_at - max(joined_at, struck_at[number])
                what = f"round {number} of the world at {played}, rank {outcome.rank}: {kind} {text}"
                assert issubclass(kind, PipeCommPeerLost) and origin == VICTIM, what
                assert f"rank {VICTIM}, which died" in text and "has closed" not in text, what
                assert_within(HEARD_S, took_s, what)
                slowest_s = max(slowest_s, took_s)
    print(f"{transport}: {NUM_KILLS} kills, the slowest survivor heard after {slowest_s:.3f} s")
