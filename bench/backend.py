"""The host time of small calls of torch's process groups, and of the same calls of a Communicator.

The methods of the groups are called, not torch.distributed's functions, whose own time is the same for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from ops import BASELINE, Bench, Case, Op
from torch.distributed import distributed_c10d as c10d

from pipecomm_ext.backend import NAME

ROOT = 0


def build(bench: Bench, num_bytes: int) -> Iterator[Case]:
    """Calls of a group of torch's, with gloo and with the backend pipecomm, and of a Communicator."""
    groups = {BASELINE: dist.group.WORLD, f"group {NAME}": dist.new_group(backend=NAME)}
    numel = bench.numel(num_bytes)
    mine = bench.data(numel, bench.rank)
    zeros = torch.zeros(numel * bench.size, dtype=bench.dtype, device=bench.device)
    whole, piece = torch.empty_like(zeros), torch.empty_like(mine)
    everybody = torch.cat([bench.data(numel, rank) for rank in range(bench.size)])
    shared = bench.data(numel, ROOT) if bench.rank == ROOT else torch.empty_like(mine)

    def case(
        label: str,
        result: torch.Tensor,
        expected: torch.Tensor,
        of_group: Callable[[Any], Any],
        of_comm: Callable[[Any], Any],
    ) -> Case:
        def call_of_group(group: Any) -> torch.Tensor:
            of_group(group).wait()
            return result

        def call_of_comm(comm: Any) -> torch.Tensor:
            of_comm(comm)
            return result

        calls = {name: lambda group=group: call_of_group(group) for name, group in groups.items()}
        calls |= bench.for_each_transport(call_of_comm)
        return Case(mine.nbytes, [], calls, label=label, returns=expected, moves_size=False)

    def ring(group: Any) -> Any:
        sent = group.send([mine], bench.next, 0)
        group.recv([piece], bench.previous, 0).wait()
        return sent

    def ring_of_comm(comm: Any) -> None:
        sent = comm.isend(mine, bench.next)
        comm.recv(piece, bench.previous)
        sent.wait()

    names = ("Allreduce", "ReduceScatter", "Allgather", "Broadcast", "Barrier")
    options = {name: _waited(name) for name in names}
    yield case(
        "all_reduce",
        zeros,
        torch.zeros_like(zeros),
        lambda group: group.allreduce([zeros], options["Allreduce"]),
        lambda comm: comm.all_reduce(zeros),
    )
    yield case(
        "reduce_scatter",
        piece,
        torch.zeros_like(piece),
        lambda group: group._reduce_scatter_base(piece, zeros, options["ReduceScatter"]),
        lambda comm: comm.reduce_scatter(piece, zeros),
    )
    yield case(
        "all_gather",
        whole,
        everybody,
        lambda group: group._allgather_base(whole, mine, options["Allgather"]),
        lambda comm: comm.all_gather(whole, mine),
    )
    yield case(
        "broadcast",
        shared,
        bench.data(numel, ROOT),
        lambda group: group.broadcast([shared], options["Broadcast"]),
        lambda comm: comm.broadcast(shared, ROOT),
    )
    yield case(
        "barrier",
        zeros,
        torch.zeros_like(zeros),
        lambda group: group.barrier(options["Barrier"]),
        lambda comm: comm.barrier(),
    )
    yield case("send and recv", piece, bench.data(numel, bench.previous), ring, ring_of_comm)


def _waited(name: str) -> Any:
    """The options of a call that waits at once, as torch.distributed's functions pass them."""
    options = getattr(c10d, f"{name}Options")()
    options.asyncOp = False
    return options


BACKEND_OPS = {"backend": Op(build, (8,))}
