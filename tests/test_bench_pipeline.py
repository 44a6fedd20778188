"""The benchmark of messages between pipeline stages: every implementation delivers the right tensor."""

from __future__ import annotations

import sys

import pytest
import torch
from ranks import on_ranks
from scripts import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "bench"))
from measure import NUM_BLOCKS, measure  # noqa: E402
from ops import BASELINE, Bench  # noqa: E402
from pipeline_p2p import PIPELINE_OPS  # noqa: E402
from run import parse_arguments  # noqa: E402


@on_ranks(2, 3)
@pytest.mark.parametrize("num_bytes", [1000, 300_000])
def test_pipeline_p2p(world, num_bytes):
    comms = {f"pipecomm {name}": world.shared_comm(transport=name, channels=4) for name in ("c10d", "shm")}
    bench = Bench(world.rank, world.size, torch.device("cpu"), torch.bfloat16, comms)
    case = PIPELINE_OPS["pipeline_p2p"].build(bench, num_bytes)
    results = measure("pipeline_p2p", case, torch.bfloat16, torch.device("cpu"), iters=NUM_BLOCKS, warmup=1)
    assert [result.impl for result in results] == [
        f"{name}{kind}" for name in (BASELINE, *comms) for kind in ("", " variable")
    ]
    assert all(result.num_wrong == 0 for result in results)
    assert results[0].num_bytes == max(2048, num_bytes // 2048 * 2048)


def test_its_sizes():
    assert parse_arguments(["pipeline_p2p"]).sizes == [4 << 10, 64 << 10, 1 << 20, 16 << 20]
