"""Operations that do not wait: autograd posts their gradient exchange early and waits for it late.

Each has two nodes in the graph: `_Post`, made by the call, and `_Join`, made by `wait()`. Autograd runs them
in reverse: `_Join` posts the exchange of the gradients, and `_Post` waits for it. What was computed between
call and `wait()` is between them in the backward, too, and overlaps with the exchange of gradients.
"""

from __future__ import annotations

import contextlib
import datetime
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..communicator import Work
from ..communicator.registry import communicator_of
from ..core.tensor_specs import version_of
from .differentiable import Step, apply, told_of_backwards


class StepWork(Work):
    """The handle of an operation in flight.

    The results may be used after `wait()`. If the handle is dropped without it, the operation completes all
    the same. The inputs must not be written before it is done. A write is noticed, unless the input is a view
    of a part of a tensor: torch counts the writes of the whole, of which other parts may be written.
    """

    def __init__(
        self,
        work: Work | None,
        told: Callable[[], AbstractContextManager],
        inputs: Sequence[Tensor] = (),
    ):
        super().__init__()
        self._work, self._told = work, told
        self._inputs = [(tensor, version_of(tensor)) for tensor in inputs if not _is_part(tensor)]
        self._was_written = False
        self._to_join: Callable[[], Any] | None = None
        self._lock = threading.Lock()

    def wait(self, timeout: float | datetime.timedelta | None = None) -> None:
        """Blocks until the results have arrived; for CUDA tensors, makes the current stream wait.

        Raises:
            PipeCommTimeout: `timeout`, in seconds, has passed; `wait` may be called again.
            PipeCommMismatch: another rank refused, or the ranks' arguments do not fit.
            RuntimeError: an input was written meanwhile; other ranks may have received wrong data.
        """
        if self._work is not None:
            with self._told():
                self._work.wait(timeout)
        self._check_inputs()
        with self._lock:
            join, self._to_join = self._to_join, None
        if join is not None:
            join()

    def synchronize(self) -> None:
        """Blocks the host until the results have arrived."""
        if self._work is not None:
            with self._told():
                self._work.synchronize()
        self.wait()

    def is_completed(self) -> bool:
        """Whether `wait` would return at once. Raises RuntimeError as `wait` does."""
        if self._work is not None and not self._work.is_completed():
            return False
        self._check_inputs()  # from here on they may be written
        return True

    @property
    def number(self) -> int:
        return 0 if self._work is None else self._work.number

    def _check_inputs(self) -> None:
        inputs, self._inputs = self._inputs, []
        self._was_written |= any(version_of(tensor) != version for tensor, version in inputs)
        if self._was_written:
            raise RuntimeError(
                "an input of this operation was written between the call and wait(), when it may not have "
                "been sent yet: write into it after wait(), or pass a clone"
            )


def _is_part(tensor: Tensor) -> bool:
    return tensor.numel() * tensor.element_size() < tensor.untyped_storage().nbytes()


class _Sent:
    """State that the two nodes of an operation share."""

    def __init__(self, group: Any, step: Step, told: Callable[[], AbstractContextManager]):
        self.group, self.step, self.told = group, step, told
        self.work: Work | None = None
        # Of the backward under way: the gradients that were posted, their results, and the handle.
        self.back: tuple[Sequence[Tensor], Sequence[Tensor], StepWork] | None = None

    @property
    def number(self) -> int:
        return self.work.number if self.work is not None else 0


class _Post(torch.autograd.Function):
    @staticmethod
    def forward(ctx, sent: _Sent, gradient_of: int, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.sent = sent
        outputs, sent.work = sent.step.start(sent.group, inputs, gradient_of)
        keeps = sent.step.is_differentiable
        ctx.mark_non_differentiable(*(out for out, keep in zip(outputs, keeps, strict=True) if not keep))
        return tuple(outputs)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        sent: _Sent = ctx.sent
        keeps = sent.step.is_differentiable
        kept = [grad for grad, keep in zip(grads, keeps, strict=True) if keep]
        back, sent.back = sent.back, None
        results: Sequence[Tensor] | None = None
        with told_of_backwards():
            if back is not None:
                posted, results, work = back
                work.wait()
                if any(mine is not its for mine, its in zip(kept, posted, strict=True)):
                    results = None
            if results is None:  # results were used without wait(): their gradients are not posted
                results = apply(communicator_of(sent.group, kept[0]), sent.step.gradient(), kept, sent.number)
        input_grads = iter(results)
        return None, None, *(next(input_grads) if keep else None for keep in keeps)


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx, sent: _Sent, *outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.sent = sent
        ctx.mark_dirty(*outputs)  # written by now: autograd refuses what was saved of them earlier
        return outputs

    @staticmethod
    def backward(ctx, *grads: Tensor):
        sent: _Sent = ctx.sent
        comm = communicator_of(sent.group, grads[0])
        with told_of_backwards():
            results, work = apply_async(comm, sent.step.gradient(), grads, sent.number)
        sent.back = grads, results, work
        return None, *grads


def apply_async(
    group: Any,
    step: Step,
    inputs: Sequence[Tensor],
    gradient_of: int = 0,
    told: Callable[[], AbstractContextManager] = contextlib.nullcontext,
) -> tuple[Sequence[Tensor], StepWork]:
    """`apply` that does not wait: returns results that have yet to arrive, and their handle."""
    if forward_ad._current_level >= 0:
        return apply(group, step, inputs, gradient_of), StepWork(None, told)
    if not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)):
        outputs, work = step.start(group, inputs, gradient_of)
        return outputs, StepWork(work, told, inputs)
    sent = _Sent(group, step, told)
    outputs = _Post.apply(sent, gradient_of, *inputs)
    handle = StepWork(sent.work, told, inputs)
    recorded = [out for out, keep in zip(outputs, step.is_differentiable, strict=True) if keep]
    handle._to_join = lambda: _Join.apply(sent, *recorded)
    return outputs, handle


Result = Tensor | tuple[Tensor, StepWork]  # the pair with async_op


def apply_to_one(
    group: Any,
    step: Step,
    input_: Tensor,
    async_op: bool,
    told: Callable[[], AbstractContextManager] = contextlib.nullcontext,
) -> Result:
    """The result of a step on one tensor; with `async_op` it has yet to arrive, and comes with its handle."""
    if async_op:
        [output], work = apply_async(group, step, [input_], told=told)
        return output, work
    with told():
        return apply(group, step, [input_])[0]
