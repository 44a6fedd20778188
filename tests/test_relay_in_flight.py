"""Large relays in flight at once: operations that are waited for before they are posted."""

from __future__ import annotations

import pytest
import torch
from ranks import on_ranks
from relay_cases import topology_of

from pipecomm_ext import StageRelay

ROWS = [40_000] * 5 + [30_001]


@on_ranks(4)
@pytest.mark.parametrize("transport", ["c10d", "shm"])
def test_many_large_tensors_in_flight_both_ways(world, transport):
    topology = topology_of(world, [2, 2])
    comm = world.shared_comm(channels=6, transport=transport)
    relay = StageRelay(topology, algorithm="sharded", communicator=comm)
    for _ in range(3):
        if topology.get_vtp_my_stage_idx() == 0:
            for idx, rows in enumerate(ROWS):
                relay.send_forward(torch.full((rows, 6), float(idx), dtype=torch.float64), async_op=True)
            received = [relay.recv_backward([rows, 6], torch.float64, async_op=True) for rows in ROWS]
        else:
            received = [relay.recv_forward([rows, 6], torch.float64, async_op=True) for rows in ROWS]
        for idx, (tensor, work) in enumerate(received):
            work.wait()
            assert tensor.eq(idx).all()
            if topology.get_vtp_my_stage_idx() == 1:
                relay.send_backward(tensor.clone(), async_op=True)
        relay.drain()
