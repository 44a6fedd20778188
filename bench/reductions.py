"""Reductions, gathers and barriers of all ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from mpi import in_place
from ops import BASELINE, DATA_SIZES, Bench, Case, Op


def all_reduce(bench: Bench, num_bytes: int) -> Case:
    """The sum of all ranks, in place."""
    numel = bench.numel(num_bytes)
    tensor = bench.poison(numel)
    ones = torch.ones_like(tensor)

    def summed(reduce) -> torch.Tensor:
        tensor.copy_(ones)  # else numbers would grow from call to call
        reduce()
        return tensor

    calls = {
        BASELINE: lambda: summed(lambda: dist.all_reduce(tensor)),
        **bench.for_each_transport(lambda comm: summed(lambda: comm.all_reduce(tensor))),
        **bench.by_mpi(lambda world, buffer: summed(lambda: world.Allreduce(in_place(), buffer)), tensor),
    }
    return Case(
        num_bytes=tensor.nbytes,
        received=[],
        calls=calls,
        returns=torch.full_like(tensor, bench.size),
        bus_factor=2 * (bench.size - 1) / bench.size,
    )


def reduce_scatter(bench: Bench, num_bytes: int) -> Case:
    """Piece r of the sum of all ranks to rank r; size: of the tensor that each rank brings."""
    numel = -(-bench.numel(num_bytes) // bench.size)
    whole = torch.ones(numel * bench.size, device=bench.device).to(bench.dtype)
    piece = bench.poison(numel)
    calls = {
        BASELINE: lambda: dist.reduce_scatter_tensor(piece, whole),
        **bench.for_each_transport(lambda comm: comm.reduce_scatter(piece, whole)),
        **bench.by_mpi(lambda world, *buffers: world.Reduce_scatter_block(*buffers), whole, piece),
    }
    return Case(
        num_bytes=whole.nbytes,
        received=[(piece, torch.full_like(piece, bench.size))],
        calls=calls,
        bus_factor=(bench.size - 1) / bench.size,
    )


def all_gather(bench: Bench, num_bytes: int) -> Case:
    """The tensors of all ranks to all ranks; size: of what each rank gets."""
    numel = -(-bench.numel(num_bytes) // bench.size)
    mine = bench.data(numel, bench.rank)
    whole = bench.poison(numel * bench.size)
    calls = {
        BASELINE: lambda: dist.all_gather_into_tensor(whole, mine),
        **bench.for_each_transport(lambda comm: comm.all_gather(whole, mine)),
        **bench.by_mpi(lambda world, *buffers: world.Allgather(*buffers), mine, whole),
    }
    return Case(
        num_bytes=whole.nbytes,
        received=[(whole, torch.cat([bench.data(numel, rank) for rank in range(bench.size)]))],
        calls=calls,
        bus_factor=(bench.size - 1) / bench.size,
    )


def barrier(bench: Bench, num_bytes: int) -> Case:
    """All ranks wait for each other."""
    calls = {
        BASELINE: lambda: dist.barrier(),
        **bench.for_each_transport(lambda comm: comm.barrier()),
        **bench.by_mpi(lambda world: world.Barrier()),
    }
    return Case(num_bytes=0, received=[], calls=calls, moves_size=False)


REDUCTION_OPS = {
    "all_reduce": Op(all_reduce, DATA_SIZES),
    "reduce_scatter": Op(reduce_scatter, DATA_SIZES),
    "all_gather": Op(all_gather, DATA_SIZES),
    "barrier": Op(barrier, (1,)),
}
