"""Collectives of a group that is too large for a message between any two ranks, over sockets."""

from __future__ import annotations

import pytest
import torch
from ranks import on_ranks

from pipecomm_ext import PipeCommMismatch


def pattern(num_bytes: int, seed: int) -> torch.Tensor:
    return ((torch.arange(num_bytes) * 7 + seed * 131) % 251).to(torch.uint8)


@on_ranks(10)
def test_collectives_of_many_ranks(world):
    comm, rank, size = world.shared_comm(transport="c10d"), world.rank, world.size
    for source, num_bytes in enumerate([0, 1, 4096, (2 << 20) + 77]):
        tensor = pattern(num_bytes, source) if rank == source else torch.zeros(num_bytes, dtype=torch.uint8)
        comm.broadcast(tensor, source)
        assert torch.equal(tensor, pattern(num_bytes, source))
    # All pairs, then nothing but a message to the next rank; many under way, with messages between them.
    for sizes in (lambda a, b: 100 + 3 * a + b, lambda a, b: 5000 * (b == (a + 1) % size)):
        inputs = [pattern(sizes(rank, peer), rank * size + peer) for peer in range(size)]
        outputs = [torch.zeros(sizes(peer, rank), dtype=torch.uint8) for peer in range(size)]
        works = [comm.barrier(async_op=True), comm.all_to_all(inputs, outputs, async_op=True)]
        token = torch.zeros(9, dtype=torch.uint8)
        works.append(comm.irecv(token, (rank - 1) % size))
        works.append(comm.isend(pattern(9, rank), (rank + 1) % size))
        works.append(comm.barrier(async_op=True))
        for work in reversed(works):
            work.wait()
        assert torch.equal(token, pattern(9, (rank - 1) % size))
        for peer, output in enumerate(outputs):
            assert torch.equal(output, pattern(sizes(peer, rank), peer * size + rank))
    # One rank cannot take part: all hear of it, and the next calls work.
    tensor = torch.zeros(9, dtype=torch.uint8)
    if rank == 7:
        with pytest.raises(ValueError, match="source rank 99"):
            comm.broadcast(tensor, 99)
    else:
        with pytest.raises(PipeCommMismatch, match="broadcast was refused by rank 7: .*source rank 99"):
            comm.broadcast(tensor, 2)
    with pytest.raises(PipeCommMismatch) as error:
        comm.broadcast(tensor if rank != 4 else tensor[:5], 2)
    assert rank in (2, 4) or error.value.peer == 4
    comm.barrier()
    tensor = pattern(9, 5) if rank == 9 else tensor
    comm.broadcast(tensor, 9)
    assert torch.equal(tensor, pattern(9, 5))
