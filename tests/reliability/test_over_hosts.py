"""Every operation, and faults in the middle of it, over hosts that share no memory; see ../hosts.py.

The suite plays one case for each fault; PIPECOMM_TEST_FAULTS=all, or `make faults`, plays every combination.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import pytest
from fault_cases import Case, all_cases, run_case
from faults import FAULTS
from hosts import HostPlan, HostPool
from operations import NUM_CHANNELS, OPERATIONS, run_some


def test_every_operation_gives_the_right_answer(host_pool):
    host_pool.run(4, runs_over_hosts)


def runs_over_hosts(world) -> None:
    comm = world.shared_comm(channels=NUM_CHANNELS, timeout=20)
    for name, operation in OPERATIONS.items():
        run_some(comm, random.Random(name), operation, [1, 7, 300, 6000])


def cases_over_hosts() -> list[Case]:
    """Cases over what "auto" chooses: all of them, or one for each fault, with operations in turn."""
    cases = [case._replace(transport="auto") for case in all_cases() if case.transport == "tcp"]
    if os.environ.get("PIPECOMM_TEST_FAULTS") == "all":
        return cases
    by_fault = [[case for case in cases if case.fault == fault] for fault in FAULTS]
    return [mine[7 * idx % len(mine)] for idx, mine in enumerate(by_fault) if mine]


@pytest.fixture(scope="module")
def victim_beside_one() -> Iterator[HostPool]:
    """Three ranks: the victim shares its host with exactly one of the others."""
    with HostPool(HostPlan(1), HostPlan(2)) as pool:
        yield pool


@pytest.mark.parametrize("case", cases_over_hosts(), ids=str)
def test_fault_over_hosts(victim_beside_one, case):
    run_case(victim_beside_one, case)
