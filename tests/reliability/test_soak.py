"""A few seconds of the soak; `make soak MINUTES=10` is the long form."""

from __future__ import annotations

from soak import Soak

SECONDS = 2.5


def test_soak(ranks) -> None:
    said: list[str] = []
    soak = Soak(num_ranks=4, seed=20, say=said.append, judges_times=False)
    soak.run(ranks, SECONDS)
    assert min(soak.counts[transport] for transport in ("shm", "c10d")) > 5, soak.summary()
    assert soak.counts["SIGKILL"] + soak.counts["SIGSTOP"] >= 1
    assert len(said) == 4
