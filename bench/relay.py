"""A tensor from one pipeline stage to another of different size, against leader + broadcast over torch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from ops import BASELINE, Bench, Case
from work import count_work

from pipecomm_ext import Communicator, StageRelay, cal_split_sizes
from pipecomm_ext.parallel_state import PipelineTopology

COLUMNS = 1024  # of the tensor [rows, 1024, 2]
ALGORITHMS = ("sharded", "direct")
# The layouts of alpa's cross-mesh resharding cases, one mesh dim: replicated or sharded on either side.
LAYOUTS = {
    "R to R": ("replicated", "replicated"),
    "S0 to S0": (("sharded", 0), ("sharded", 0)),
    "S0 to S1": (("sharded", 0), ("sharded", 1)),
    "R to S0": ("replicated", ("sharded", 0)),
    "S0 to R": (("sharded", 0), "replicated"),
}


def build(bench: Bench, num_bytes: int) -> Iterator[Case]:
    """[S, 1024, 2] between two stages that share the ranks; size: of the whole. torch: leader + broadcast."""
    shape = (max(1, bench.numel(num_bytes) // (2 * COLUMNS)), COLUMNS, 2)
    for num_senders in sorted({1, bench.size // 2, bench.size - 1}):
        sizes = [num_senders, bench.size - num_senders]
        with contextlib.ExitStack() as stack:
            topology = PipelineTopology(sizes)
            stack.callback(topology.close)
            comms = {
                name: stack.enter_context(
                    Communicator(
                        device=bench.device, transport=comm.transport, channels=topology.communicator.channels
                    )
                )
                for name, comm in bench.comms.items()
            }
            for label, layouts in LAYOUTS.items():
                if max(sizes) > 1:
                    yield _case(bench, topology, comms, f"{sizes[0]} to {sizes[1]}, {label}", layouts, shape)
                elif label == "R to R":
                    yield _case(bench, topology, comms, "1 to 1", layouts, shape)


def _case(
    bench: Bench,
    topology: PipelineTopology,
    comms: dict[str, Communicator],
    label: str,
    layouts: tuple,
    shape: tuple[int, ...],
) -> Case:
    whole = bench.data(shape[0] * shape[1] * shape[2], sender=0).view(shape)
    stage_idx = topology.get_vtp_my_stage_idx()
    mine = _held(whole, layouts[stage_idx], topology).clone()
    sends = stage_idx == 0

    def relay_call(relay: StageRelay):
        if sends:
            return relay.send_forward(mine, shape=shape)
        return relay.recv_forward(shape, bench.dtype)

    calls = {BASELINE: lambda: _by_torch(topology, mine, layouts, whole)}
    used = {}
    for name, comm in comms.items():
        for algorithm in ("auto", *(ALGORITHMS if layouts == LAYOUTS["R to R"] else ())):
            relay = StageRelay(topology, algorithm=algorithm, layout=list(layouts), communicator=comm)
            impl = name if algorithm == "auto" else f"{name.split()[-1]} {algorithm}"
            calls[impl] = lambda relay=relay: relay_call(relay)
            used[impl] = comm
    # The minimum over memory: every receiver writes it once, all at the same time.
    calls, bound_of = bench.with_bounds(calls, copied=mine[:0] if sends else mine)
    return Case(
        num_bytes=whole.nbytes,
        received=[],
        calls=calls,
        label=label,
        returns=None if sends else mine,
        bound_of=bound_of,
        work=lambda impl: count_work(calls[impl], whole.nbytes, used.get(impl)),
    )


def _held(whole: torch.Tensor, layout, topology: PipelineTopology) -> torch.Tensor:
    if layout == "replicated":
        return whole
    sizes = cal_split_sizes(whole.size(layout[1]), topology.get_tensor_model_parallel_world_size())
    return whole.split(sizes, layout[1])[topology.get_tensor_model_parallel_rank()]


def _by_torch(
    topology: PipelineTopology, mine: torch.Tensor, layouts: tuple, whole: torch.Tensor
) -> torch.Tensor | None:
    """The reference scheme: first rank to first rank, then a broadcast.

    Pieces are gathered before and cut after it.
    """
    (leader, *_), (receiver, *others) = topology.get_vtp_stage_ranks()
    group = topology.get_tensor_model_parallel_group()
    if topology.is_pipeline_first_stage():
        if layouts[0] != "replicated" and topology.get_tensor_model_parallel_world_size() > 1:
            mine = _gathered(mine, whole, layouts[0][1], topology)
        if topology.is_vtp_stage_rank0():
            dist.send(mine.contiguous(), receiver)
        return None
    received = torch.empty_like(whole)
    if topology.is_vtp_stage_rank0():
        dist.recv(received, leader)
    if others:
        dist.broadcast(received, receiver, group=group)
    if layouts[1] == "replicated":
        return received
    return _held(received, layouts[1], topology).contiguous()


def _gathered(mine: torch.Tensor, whole: torch.Tensor, dim: int, topology: PipelineTopology) -> torch.Tensor:
    """torch's all-gather takes equal shapes only: pad to the longest, cut afterwards."""
    sizes = cal_split_sizes(whole.size(dim), topology.get_tensor_model_parallel_world_size())
    padded = mine.new_empty([*mine.shape[:dim], max(sizes), *mine.shape[dim + 1 :]])
    padded.narrow(dim, 0, mine.size(dim)).copy_(mine)
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=topology.get_tensor_model_parallel_group())
    return torch.cat([part.narrow(dim, 0, size) for part, size in zip(parts, sizes, strict=True)], dim)
