"""A few seconds of the soak; `make soak MINUTES=10` is the long form."""

from __future__ import annotations

import pytest
from ranks import JUDGES_TIMES
from soak import MANY, TRANSPORTS, Soak, check_many

SECONDS = 2.5


def test_soak(ranks) -> None:
    said: list[str] = []
    soak = Soak(num_ranks=4, seed=20, say=said.append, judges_times=False)
    soak.run(ranks, SECONDS)
    assert min(soak.counts[transport] for transport in ("shm", "tcp")) > 5, soak.summary()
    assert soak.counts["SIGKILL"] + soak.counts["SIGSTOP"] >= 1
    assert len(said) == 4


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_many_communicators_and_messages_take_nothing(ranks, transport) -> None:
    """Only a few here; `make faults` plays all."""
    print(check_many(ranks, transport, *(MANY if JUDGES_TIMES else (40, 4000, 2))))
