"""A GradScaler on every rank of a pipeline: an overflow in any stage counts on all ranks.

torch has no public way to tell a GradScaler of an overflow elsewhere; its own ShardedGradScaler writes to the
same place as `unscale` does.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch

from ..communicator import Communicator
from ..errors import PipeCommMismatch
from .data_parallel import held_objects, loaded


def unscale(scaler: Any, optimizer: Any, communicator: Communicator) -> None:
    """See `Executor.unscale_`."""
    device = communicator.device
    found: dict[torch.device, torch.Tensor] = {}
    mine = torch.zeros(2, dtype=torch.float64, device=device)  # the scale, and whether something overflowed
    with communicator.collective("all_to_all"):
        if not isinstance(scaler, torch.amp.GradScaler):
            raise TypeError(f"scaler must be a torch.amp.GradScaler, not {type(scaler).__name__}")
        if scaler.is_enabled():
            if scaler._scale is None:  # no loss on this rank: it has never scaled anything
                scaler.scale(torch.zeros((), device=device))
            if optimizer is not None:
                scaler.unscale_(optimizer)
            found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
            mine[0] = scaler.get_scale()
            for overflow in found.values():
                mine[1] += overflow.to(device)
    everybody = [torch.empty_like(mine) for _ in range(communicator.size)]
    communicator.all_to_all([mine] * communicator.size, everybody)
    scales, overflows = torch.stack(everybody).unbind(1)
    for rank, scale in enumerate(scales.tolist()):
        if scale != scales[0]:
            raise PipeCommMismatch(
                f"rank {communicator.rank}: unscale_: the GradScaler of rank {rank} has the scale {scale}, "
                f"that of rank 0 has {scales[0].item()} (0 if it is disabled); make them with equal "
                "arguments on all ranks, and call unscale_ on all of them before each update()",
                op="unscale_",
                rank=communicator.rank,
                peer=rank,
            )
    for key in [*found] or [device]:
        found[key] = overflows.max().to(key, torch.float32)


class ScalerWatch:
    """Warns if a GradScaler that a loss function uses is updated without `unscale_`."""

    def __init__(self, functions: Iterable[Any]):
        sharded = loaded("torch.distributed.fsdp.sharded_grad_scaler", "ShardedGradScaler")
        scalers = held_objects(functions, torch.amp.GradScaler)
        self._scalers = [scaler for scaler in scalers if not isinstance(scaler, sharded)]
        self._versions = self._now()
        self.has_agreed = False

    def _now(self) -> list[int]:
        """Numbers that `scaler.update()` changes."""
        scales = [scaler._scale for scaler in self._scalers]
        return [0 if scale is None else scale._version for scale in scales]

    def begin_step(self) -> None:
        if not self._scalers:
            return
        versions = self._now()
        if versions != self._versions and not self.has_agreed:
            warnings.warn(
                "loss_fn scales with a GradScaler that was updated without Executor.unscale_: if a gradient "
                "of one stage overflows, the other ranks do not hear of it, and scales differ from then on; "
                "call executor.unscale_(scaler, optimizer) on all ranks in the place of scaler.unscale_",
                stacklevel=4,
            )
            self._scalers = []
        self._versions, self.has_agreed = versions, False
