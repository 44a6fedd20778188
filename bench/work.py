"""What one call of an implementation copies and allocates on this rank, counted, not estimated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipecomm_ext import Communicator

# The operators of torch that write a whole result by reading tensors, without collectives.
COPYING = {"aten::clone", "aten::copy_", "aten::cat", "aten::cat.out", "aten::_to_copy", "aten::contiguous"}


@dataclass(frozen=True)
class Work:
    """The copies and allocations of one call."""

    copy_passes: float  # passes over the local tensor, in addition to the transfer itself
    allocated_bytes: int  # results and temporaries, of torch and of staging


class _Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.copied_bytes = 0
        self.allocated_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        owners = {
            leaf.untyped_storage().data_ptr()
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, torch.Tensor)
        }
        result = func(*args, **(kwargs or {}))
        fresh = 0
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage().data_ptr() not in owners:
                fresh += leaf.nbytes
        self.allocated_bytes += fresh
        if func.name() in COPYING:
            self.copied_bytes += sum(
                leaf.nbytes for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)
            )
        return result


def count_work(call: Callable[[], object], num_bytes: int, comm: Communicator | None) -> Work:
    """Counts one warm call; `num_bytes` of the local tensor; `comm`: our communicator, if it uses one."""
    counters = {"num_passes": 0, "num_staging_allocations": 0}
    before = comm._c.copy_counters() if comm is not None else counters
    with _Counter() as counter:
        call()
    after = comm._c.copy_counters() if comm is not None else counters
    passes = after["num_passes"] - before["num_passes"]
    staged = after["num_staging_allocations"] - before["num_staging_allocations"]
    if staged:
        raise RuntimeError("a warm call allocated staging memory")
    return Work(passes + counter.copied_bytes / num_bytes, counter.allocated_bytes)
