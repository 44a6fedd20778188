"""The exchanges of reductions among all ranks, and what is computed between them. All tensors are contiguous
and have one dim.

Every rank computes an element from the same numbers in the same order, or receives it from the one rank that
has computed it, so all ranks hold the same bits, in every run. Nothing here depends on when messages arrive.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.extension import _C
from ..errors import PipeCommError
from .continuation import Line
from .plans import Shape, all_reduce_plans, scatter_plan, whole_plan
from .reduce_operators import Operator
from .refusal import was_posted


class Exchanges:
    """The exchanges of one operation on a Communicator. Those after the first one follow others, so their
    order must be certain: they have the channel of a `line`, or the caller `waits` for each one at once.

    While operations before it in the line have exchanges to post, its own wait for them: then it is like an
    asynchronous one, also for a caller that waits."""

    def __init__(
        self, comm: Any, engine: _C.Communicator, op: str, waits: bool, line: Line | None = None
    ) -> None:
        self.comm, self.rank, self.size = comm, comm.rank, comm.size
        self._engine, self._op = engine, op
        self.waits = waits and (line is None or line.has_posted_all())
        self.has_order = waits or line is not None
        self._channel = None if line is None else line.channel
        self._num_posted = 0

    def run(self, plan: Any, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> _C.Work:
        """Posts the next exchange. `refusing` informs the other ranks if that raises."""
        try:
            work = self._engine.exchange(
                self._op,
                plan,
                inputs,
                outputs,
                not self.waits,
                (),  # members: all
                (),  # within
                self._next_channel,
                None,  # after
                0,  # gradient_of
                True,  # returns_work
            )
        except BaseException as error:
            self._num_posted += was_posted(error)
            raise
        self._num_posted += 1
        return work

    @property
    def _next_channel(self) -> int | None:
        return self._channel if self._num_posted else None

    def refusing(self, steps: Iterator[_C.Work], num_exchanges: int) -> Iterator[_C.Work]:
        """Runs `steps`, which post so many exchanges. If a step raises on this rank, or a signal handler
        while it waits, the rank refuses the next one that is not posted, which then fails on all ranks, so
        that none posts those that follow."""
        try:
            yield from steps
        except (PipeCommError, GeneratorExit):  # all ranks know of the first; the other ends a generator
            raise
        except BaseException as error:
            if self._num_posted < num_exchanges:
                with contextlib.suppress(PipeCommError):
                    self.comm.refuse(self._op, error, channel=self._next_channel)
            raise

    def rows(self, num_rows: int, length: int, dtype: torch.dtype) -> list[Tensor]:
        return list(self.comm.empty((num_rows * length,), dtype).view(num_rows, length).unbind(0))


def all_reduce(
    exchanges: Exchanges, shape: Shape, brought: Tensor, tensor: Tensor, op: Operator
) -> Iterator[_C.Work]:
    """Reduces `brought` of all ranks into `tensor`, which may be the same. Large tensors take two exchanges
    if the order of the second one is certain; else every rank gets whole tensors."""
    rank, size, length, dtype = exchanges.rank, exchanges.size, tensor.numel(), tensor.dtype
    if size == 1:
        if length:
            op.reduce([brought], tensor)
        return
    plans = all_reduce_plans(rank, size, shape, dtype, op.name, exchanges.has_order)
    if len(plans) == 1:
        whole = exchanges.comm.empty((size * length,), dtype)
        yield exchanges.run(plans[0], [brought], [whole])
        op.reduce(_with_own(whole.view(size, length), rank, brought), tensor)
        return
    lengths = tuple(_C.remainder_first(length, size))
    own = tensor.split(lengths)[rank]
    rows = exchanges.rows(size - 1, lengths[rank], dtype)
    yield exchanges.run(plans[0], [brought], rows)
    rows.insert(rank, brought.split(lengths)[rank])
    op.reduce(rows, own)
    yield exchanges.run(plans[1], [own], [tensor])


def reduce(
    exchanges: Exchanges, brought: Tensor, tensor: Tensor, op: Operator, root: int
) -> Iterator[_C.Work]:
    """Reduces `brought` of all ranks into `tensor` of rank `root`, which may be the same."""
    rank, size, length, dtype = exchanges.rank, exchanges.size, tensor.numel(), tensor.dtype
    plan = whole_plan(rank, size, (length,), dtype, root, f"reduce {op.name} {dtype} {root}")
    wholes = [exchanges.comm.empty((size * length,), dtype)] if rank == root else []
    yield exchanges.run(plan, [brought], wholes)
    for whole in wholes:
        op.reduce(_with_own(whole.view(size, length), rank, brought), tensor)


def reduce_scatter(
    exchanges: Exchanges, shapes: tuple[Shape, ...], brought: Tensor, op: Operator, output: Tensor
) -> Iterator[_C.Work]:
    """Reduces piece r of `brought`, of shapes[r], into `output` of rank r."""
    rank, size, dtype = exchanges.rank, exchanges.size, brought.dtype
    lengths = tuple(map(math.prod, shapes))
    rows = exchanges.rows(size - 1, lengths[rank], dtype)
    plan = scatter_plan(rank, size, shapes, dtype, tag_of_reduce_scatter(op))
    yield exchanges.run(plan, [brought], rows)
    rows.insert(rank, brought.split(lengths)[rank])
    op.reduce(rows, output)


def tag_of_reduce_scatter(op: Operator) -> str:
    return f"reduce_scatter {op.name} {op.dtype}"


def _with_own(whole: Tensor, rank: int, own: Tensor) -> Sequence[Tensor]:
    return [own if idx == rank else row for idx, row in enumerate(whole.unbind(0))]
