"""The benchmark's relay: every implementation gives the right result, the reference scheme included."""

from __future__ import annotations

import sys

import torch
from ranks import on_ranks
from scripts import REPOSITORY, run_on_ranks

sys.path.insert(0, str(REPOSITORY / "bench"))
import relay  # noqa: E402
from measure import NUM_BLOCKS, measure  # noqa: E402
from ops import BASELINE, MEMCPY, Bench  # noqa: E402


@on_ranks(2, 3, 4)
def test_all_implementations_give_the_same(world):
    comms = {"pipecomm shm": world.shared_comm(transport="shm")}
    bench = Bench(world.rank, world.size, torch.device("cpu"), torch.bfloat16, comms)
    labels = []
    for case in relay.build(bench, 100_000):
        labels.append(case.label)
        results = measure("relay", case, torch.bfloat16, torch.device("cpu"), iters=NUM_BLOCKS, warmup=1)
        assert {BASELINE, "pipecomm shm", MEMCPY} <= {result.impl for result in results}
        for result in results:
            assert result.num_wrong == 0, (case.label, result.impl)
    num_splits = {2: 1, 3: 2, 4: 3}[world.size]
    assert len(set(labels)) == len(labels) == (1 if world.size == 2 else num_splits * len(relay.LAYOUTS))


def test_table(ranks):
    exit_code, output = run_on_ranks(ranks, 3, "run", "relay", "--ranks", 3, "--sizes", "64K", "--iters", 10)
    assert exit_code == 0, output
    assert "1 to 2, R to R" in output and "shm sharded" in output and "2 to 1, S0 to S1" in output
