"""The exchange of zigzag attention: to each rank the slices that its queries read, and their gradients back.

A sequence is cut in 2R slices, of which rank r of R holds first slice r, then slice 2R - 1 - r. If attention
is causal, rank r reads the slices 0 to 2R - 1 - r, else all: the first slice of every rank, and the second
one of the ranks s >= r. Both directions are all-to-alls over a dim of one element that is appended to the
tensors: the ranks that read a slice have that element.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from ..communicator import Communicator
from ..core.extension import _C
from ..core.tensor_specs import TensorSpec
from .all_to_all import OP
from .differentiable import Step
from .sizes import Sizes


@dataclass(frozen=True)
class ZigzagLayout:
    """Which ranks hold and read which slices of tensors of equal lengths along `seq_dim`."""

    rank: int
    specs: tuple[TensorSpec, ...]  # of this rank's tensors
    seq_dim: int
    slice_sizes: Sizes  # 2R lengths, in the order of the sequence
    is_causal: bool

    @property
    def num_ranks(self) -> int:
        return len(self.slice_sizes) // 2

    @property
    def num_held(self) -> tuple[int, int]:
        """Lengths of this rank's two slices."""
        return self.slice_sizes[self.rank], self.slice_sizes[-1 - self.rank]

    @cached_property
    def starts(self) -> Sizes:
        """Where each slice begins in the sequence, and the length of the sequence."""
        return tuple(itertools.accumulate(self.slice_sizes, initial=0))

    @property
    def num_read(self) -> int:
        """How much of the sequence, from its beginning, this rank reads."""
        return self.starts[-1 - self.rank if self.is_causal else -1]

    @cached_property
    def parts(self) -> list[tuple[Sizes, Sizes]]:
        """What is exchanged of a tensor: all first slices, then the second one of each rank. For each part
        the lengths that the ranks hold of it, and 1 for those that read it.
        """
        ranks = range(self.num_ranks)
        parts = [(self.slice_sizes[: self.num_ranks], (1,) * self.num_ranks)]
        for owner in ranks:
            held = tuple(self.slice_sizes[-1 - owner] if rank == owner else 0 for rank in ranks)
            parts.append((held, tuple(int(rank <= owner or not self.is_causal) for rank in ranks)))
        return parts

    def held_parts(self, tensor: Tensor) -> list[Tensor]:
        """This rank's tensor as the inputs of the exchange."""
        first, _ = self.num_held
        starts = [0, *(first if rank == self.rank else 0 for rank in range(self.num_ranks))]
        return [
            tensor.narrow(self.seq_dim, start, held[self.rank])
            for start, (held, _) in zip(starts, self.parts, strict=True)
        ]

    def read_parts(self, tensor: Tensor) -> list[Tensor]:
        """The beginning of the sequence that this rank reads, as the outputs of the exchange."""
        starts = [0, *self.starts[-2 : -2 - self.num_ranks : -1]]
        return [
            tensor.narrow(self.seq_dim, start, sum(held)).unsqueeze(-1)
            if readers[self.rank]
            else tensor.new_empty(_with_length(tensor.shape, self.seq_dim, sum(held))).unsqueeze(-1)[..., :0]
            for start, (held, readers) in zip(starts, self.parts, strict=True)
        ]


def _with_length(shape: Sequence[int], dim: int, length: int) -> tuple[int, ...]:
    return (*shape[:dim], length, *shape[dim + 1 :])


@lru_cache(maxsize=256)
def read_plan(layout: ZigzagLayout) -> _C.PreparedExchange:
    """From the slices that ranks hold to those that they read."""
    tensors = [
        ((*_with_length(shape, layout.seq_dim, held[layout.rank]), 1), dtype, readers, held)
        for shape, dtype in layout.specs
        for held, readers in layout.parts
    ]
    starts = [(0,) * layout.num_ranks] * len(tensors)  # all ranks share the one element
    last_dim = len(tensors[0][0]) - 1
    return _C.plan_all_to_all(
        layout.rank, layout.num_ranks, tensors, last_dim, layout.seq_dim, scatter_starts=starts, tag="zigzag"
    )


@lru_cache(maxsize=256)
def return_plan(layout: ZigzagLayout) -> _C.PreparedExchange:
    """From the gradients of what ranks read to stacks, along a last dim, of those of what they hold."""
    tensors = [
        ((*_with_length(shape, layout.seq_dim, sum(held)), readers[layout.rank]), dtype, held, readers)
        for shape, dtype in layout.specs
        for held, readers in layout.parts
    ]
    last_dim = len(tensors[0][0]) - 1
    return _C.plan_all_to_all(
        layout.rank, layout.num_ranks, tensors, layout.seq_dim, last_dim, tag="zigzag gradients"
    )


class ReadStep(Step):
    """Brings what this rank reads of each tensor, in the order of the sequence. `needs`: which of them need a
    gradient. Collective.
    """

    def __init__(self, layout: ZigzagLayout, needs: Sequence[bool]):
        outputs = [
            (_with_length(shape, layout.seq_dim, layout.num_read), dtype) for shape, dtype in layout.specs
        ]
        needed = tuple(itertools.compress(layout.specs, needs))
        super().__init__(outputs, lambda: ReturnStep(replace(layout, specs=needed)))
        self.is_differentiable = list(needs)
        self._layout = layout

    def run(
        self, comm: Communicator, /, inputs: Sequence[Tensor], gradient_of: int = 0
    ) -> tuple[list[Tensor], int]:
        layout = self._layout
        outputs = [comm.empty(shape, dtype) for shape, dtype in self.outputs]
        sent = [part.unsqueeze(-1) for tensor in inputs for part in layout.held_parts(tensor)]
        received = [part for tensor in outputs for part in layout.read_parts(tensor)]
        work = comm.exchange(
            read_plan(layout), sent, received, op=OP, gradient_of=gradient_of, returns_work=True
        )
        return outputs, work.number


class ReturnStep(Step):
    """Returns the gradients of what was read to the ranks that hold it, which sum them in rank order."""

    def __init__(self, layout: ZigzagLayout):
        super().__init__(layout.specs, lambda: ReadStep(layout, [True] * len(layout.specs)))
        self._layout = layout

    def run(
        self, comm: Communicator, /, inputs: Sequence[Tensor], gradient_of: int = 0
    ) -> tuple[list[Tensor], int]:
        layout, plan = self._layout, return_plan(self._layout)
        sent = [part for tensor in inputs for part in layout.read_parts(tensor)]
        # Contributions one after the other in memory; the plan has them in the last dim.
        stacks = [
            comm.empty((count, *shape), tensor.dtype)
            for (*shape, count), tensor in zip(plan.output_shapes, sent, strict=True)
        ]
        received = [stack.movedim(0, -1) for stack in stacks]
        work = comm.exchange(plan, sent, received, op=OP, gradient_of=gradient_of, returns_work=True)
        outputs = [torch.empty(shape, dtype=dtype, device=comm.device) for shape, dtype in self.outputs]
        held = [part for tensor in outputs for part in layout.held_parts(tensor)]
        for part, stack in zip(held, stacks, strict=True):
            if part.numel():
                torch.sum(stack, 0, out=part)
        return outputs, work.number
