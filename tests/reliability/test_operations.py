"""The table of operations itself: every call has the right result, on every transport."""

from __future__ import annotations

import random

import operations_parallel  # noqa: F401  (fills the table)
import operations_pipeline  # noqa: F401  (fills the table)
import pytest
from operations import NUM_CHANNELS, OPERATIONS, run_some
from ranks import on_ranks

LENGTHS = [1, 2, 7, 300, 6000]


@on_ranks(2, 3)
@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_every_operation_gives_the_right_answer(world, transport):
    comm = world.shared_comm(transport=transport, channels=NUM_CHANNELS, timeout=20)
    rng = random.Random(world.size)
    for operation in OPERATIONS.values():
        run_some(comm, rng, operation, LENGTHS)
