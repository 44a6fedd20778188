"""A call that follows similar ones makes no allocations and no system calls, apart from its wait.

counting_calls.cpp counts those of the extension itself, on the calling thread. How long a thread waits, and
how often it polls, depends on timing; how much memory a call allocates does not.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch
from ranks import on_ranks
from tools import compile_library

from pipecomm_ext import _C, Recv, Send

NUM_WARM, NUM_COUNTED = 100, 200
# The watchdog sometimes holds an operation, and a call meanwhile allocates memory: the minimum of some counts
# is what the calls allocate themselves.
NUM_COUNTS = 3
SOURCE = Path(__file__).parent / "reliability" / "counting_calls.cpp"
SMALL, LARGE = 2, 1024  # elements: 8 bytes and 4 KiB


@pytest.fixture(scope="session")
def library() -> str:
    return str(compile_library(SOURCE))


def there_and_back(comm, numel):
    sent, received = torch.ones(numel), torch.zeros(numel)
    if comm.rank == 0:
        return lambda: (comm.send(sent, 1), comm.recv(received, 1))
    return lambda: (comm.recv(received, 0), comm.send(sent, 0))


def ring(comm, numel):
    sent, received = torch.ones(numel), torch.zeros(numel)
    ops = [Send(sent, (comm.rank + 1) % comm.size), Recv(received, (comm.rank - 1) % comm.size)]
    return lambda: comm.batch_p2p(ops)


def broadcast(comm, numel):
    tensor = torch.ones(numel)
    return lambda: comm.broadcast(tensor, 0)


def all_gather(comm, numel):
    tensor, gathered = torch.ones(numel), torch.zeros(comm.size * numel)
    return lambda: comm.all_gather(gathered, tensor)


def all_reduce(comm, numel):
    tensor = torch.zeros(numel)
    return lambda: comm.all_reduce(tensor)


def reduce_scatter(comm, numel):
    tensor, reduced = torch.zeros(comm.size * numel), torch.zeros(numel)
    return lambda: comm.reduce_scatter(reduced, tensor)


def all_to_all(comm, numel):
    inputs = [torch.ones(numel) for _ in range(comm.size)]
    outputs = [torch.zeros(numel) for _ in range(comm.size)]
    return lambda: comm.all_to_all(inputs, outputs)


def barrier(comm, numel):
    return comm.barrier


CALLS = (there_and_back, ring, broadcast, all_gather, all_reduce, reduce_scatter, all_to_all, barrier)


@on_ranks(2, 4)
@pytest.mark.slow
def test_a_hot_call_asks_for_no_memory_and_makes_no_system_call(world, library):
    counter = ctypes.CDLL(library)
    assert counter.watch(_C.__file__.encode()) >= 3  # new, and the functions that sleep and yield
    comm = world.fresh_comm(transport="shm")
    asked = {}
    for make in CALLS if world.size == 2 else CALLS[1:]:
        for numel in (SMALL, LARGE):
            call = make(comm, numel)
            for _ in range(NUM_WARM):
                call()
            counts = []
            for _ in range(NUM_COUNTS):
                counter.begin()
                for _ in range(NUM_COUNTED):
                    call()
                counter.end()
                counts.append((counter.allocations(), counter.system_calls()))
            asked[f"{make.__name__} of {4 * numel} bytes"] = tuple(map(min, zip(*counts, strict=True)))
    greedy = {name: counts for name, counts in asked.items() if any(counts)}
    assert not greedy, f"(allocations, system calls) of {NUM_COUNTED} calls: {greedy}"


@on_ranks(2)
@pytest.mark.slow
def test_what_is_asked_for_is_counted(world, library):
    counter = ctypes.CDLL(library)
    counter.watch(_C.__file__.encode())
    comm = world.fresh_comm(transport="shm")
    comm.barrier()
    counter.begin()
    comm.flight_record()
    counter.end()
    assert counter.allocations() > 0
    comm.barrier()
