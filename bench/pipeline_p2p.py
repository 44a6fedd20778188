"""Messages between pipeline stages, of fixed and of variable shape, against torch with a shape exchange."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from ops import BASELINE, KIB, MIB, Bench, Case, Op

from pipecomm_ext.pipeline_parallel import P2PCommunicator, PipelineConfig

HIDDEN = 1024
VARIABLE = "variable"  # added to the names of those that send the shape with every message


def build(bench: Bench, num_bytes: int) -> Case:
    """[S, 1, 1024] to the next stage, one from the previous. torch, variable: shapes are exchanged before."""
    shape = (max(1, bench.numel(num_bytes) // HIDDEN), 1, HIDDEN)
    numel = shape[0] * HIDDEN
    sent = bench.data(numel, bench.rank).view(shape)

    def by_torch(is_variable: bool) -> torch.Tensor:
        received_shape = shape
        if is_variable:
            mine = torch.tensor(sent.shape, dtype=torch.int64, device=bench.device)
            received_shape = _shift(bench, mine, torch.empty_like(mine)).tolist()
        return _shift(bench, sent, torch.empty(received_shape, dtype=bench.dtype, device=bench.device))

    def by_ours(p2p: P2PCommunicator) -> torch.Tensor:
        return p2p.send_forward_recv_forward(sent, True, shape).detach()

    calls = {BASELINE: partial(by_torch, False), f"{BASELINE} {VARIABLE}": partial(by_torch, True)}
    for name, comm in bench.comms.items():
        for is_variable in (False, True):
            config = PipelineConfig(pipeline_dtype=bench.dtype, variable_seq_lengths=is_variable)
            p2p = P2PCommunicator(comm, config)
            calls[f"{name} {VARIABLE}" if is_variable else name] = partial(by_ours, p2p)
    return Case(
        num_bytes=sent.nbytes,
        received=[],
        calls=calls,
        returns=bench.data(numel, bench.previous).view(shape),
    )


def _shift(bench: Bench, sent: torch.Tensor, received: torch.Tensor) -> torch.Tensor:
    ops = [
        dist.P2POp(dist.isend, sent, bench.next),
        dist.P2POp(dist.irecv, received, bench.previous),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return received


PIPELINE_OPS = {"pipeline_p2p": Op(build, (4 * KIB, 64 * KIB, MIB, 16 * MIB))}
