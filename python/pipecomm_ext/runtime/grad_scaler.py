"""A GradScaler on every rank of a pipeline: an overflow in any stage counts on all ranks.

torch has no public way to inform a GradScaler of an overflow elsewhere; its own ShardedGradScaler writes to
the same field as `unscale` does.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from ..communicator import Communicator
from ..core.user_code import stacklevel_of_user
from ..errors import PipeCommMismatch
from .arguments import of_all_ranks
from .data_parallel import held_objects, loaded


def unscale(scaler: Any, optimizer: Any, communicator: Communicator) -> None:
    """See `Executor.unscale_`."""
    device = communicator.device
    found: dict[torch.device, torch.Tensor] = {}  # as the scaler keeps it: whether the optimizer is skipped
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
            # Without an optimizer, `found` holds overflows of other ranks, from earlier calls.
            for overflow in found.values() if optimizer is not None else ():
                mine[1] += overflow.to(device)
    scales, overflows = torch.stack(of_all_ranks(communicator, mine)).unbind(1)
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
        overflow = overflows.max().to(key, torch.float32)
        found[key] = overflow if optimizer is not None or key not in found else found[key].max(overflow)
    if scaler in _uses:
        _uses[scaler].has_agreed = True


@dataclass
class _Use:
    """How a GradScaler is used, by all executors together."""

    states: dict  # of its optimizers; update() begins a new one, loading a state does not
    has_agreed: bool = False  # since the last update()


_uses: weakref.WeakKeyDictionary[torch.amp.GradScaler, _Use] = weakref.WeakKeyDictionary()


class ScalerWatch:
    """Warns if a GradScaler that a loss function uses is updated without `unscale_`."""

    def __init__(self, functions: Iterable[Any]):
        sharded = loaded("torch.distributed.fsdp.sharded_grad_scaler", "ShardedGradScaler")
        self._watched: list[tuple[Any, _Use]] = []
        for scaler in held_objects(functions, torch.amp.GradScaler):
            if not isinstance(scaler, sharded):
                use = _uses.setdefault(scaler, _Use(scaler._per_optimizer_states))
                use.states = scaler._per_optimizer_states  # earlier uses do not concern this watch
                self._watched.append((scaler, use))

    def begin_step(self) -> None:
        for scaler, use in self._watched:
            states = scaler._per_optimizer_states
            if states is use.states:
                continue
            if not use.has_agreed:
                warnings.warn(
                    "loss_fn scales with a GradScaler that was updated without Executor.unscale_: if a "
                    "gradient of one stage overflows, the other ranks are not informed, and scales differ "
                    "from then on; call executor.unscale_(scaler, optimizer) on all ranks instead of "
                    "scaler.unscale_",
                    stacklevel=stacklevel_of_user(),
                )
                self._watched = []  # one warning is enough
            use.states, use.has_agreed = states, False
