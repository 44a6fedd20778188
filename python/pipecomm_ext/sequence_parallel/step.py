"""Steps: what an operation does in one direction, linked to what autograd does with its gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import _C
from .group import communicator_of

Spec = tuple[Sequence[int], torch.dtype]


class Step:
    """An exchange plan, the outputs that it fills, and the step that its gradients take.

    The gradient of the gradient step is this step again: every operation of this package is one of a pair,
    also where the pair is adjoint only up to the scaling that its documentation states. So double backward
    works to any order.
    """

    def __init__(
        self, plan: _C.Plan, op: str, outputs: list[Spec], gradient: Callable[[], Step], scaled: bool = False
    ):
        self.plan = plan
        self._op = op
        self._outputs = outputs
        self._gradient = gradient
        self._as_real = scaled and outputs[0][1].is_complex  # the plan is that of the real views
        # All ranks share dtypes, so that they agree on what a backward exchanges.
        self.is_differentiable = [dtype.is_floating_point or dtype.is_complex for _, dtype in outputs]

    @property
    def gradient(self) -> Step:
        """From the gradients of the differentiable outputs to those of the inputs of these."""
        return self._gradient()

    def run(self, group: Any, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Fresh outputs; collective."""
        outputs = [self._empty(group, inputs[0], shape, dtype) for shape, dtype in self._outputs]
        if self._as_real:
            self._fill(group, [_real(tensor) for tensor in inputs], [_real(tensor) for tensor in outputs])
        else:
            self._fill(group, inputs, outputs)
        return outputs

    def _empty(
        self, group: Any, like: torch.Tensor, shape: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        return communicator_of(group, like).empty(shape, dtype)

    def _fill(self, group: Any, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        communicator_of(group, inputs[0]).exchange(self.plan, inputs, outputs, op=self._op)


class LocalStep(Step):
    """A step whose plan connects this rank with itself alone: a copy that nobody else takes part in."""

    def __init__(
        self, plan: _C.Plan, dim: int, output: Spec, gradient: Callable[[], Step], scale: str | None
    ):
        super().__init__(plan, "", [output], gradient, scaled=scale is not None)
        [(_, boxes)] = plan.sends
        self._dim = dim
        self._pieces = [(start[dim], extent[dim]) for _, start, extent in boxes]
        self._write = {None: _copy, "up": torch.mul, "down": torch.div}[scale]

    def _empty(
        self, group: Any, like: torch.Tensor, shape: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=like.device)

    def _fill(self, group: Any, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        [source], [target] = inputs, outputs
        begin = 0
        for start, length in self._pieces:
            part = target.narrow(self._dim, begin, length)
            self._write(source.narrow(self._dim, start, length), self.plan.size, out=part)
            begin += length


def _copy(source: torch.Tensor, _size: int, *, out: torch.Tensor) -> None:
    out.copy_(source)


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor.resolve_conj())


class _Apply(torch.autograd.Function):
    @staticmethod
    def forward(ctx, group: Any, step: Step, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.group, ctx.step = group, step
        outputs = step.run(group, inputs)
        if not all(step.is_differentiable):
            ctx.mark_non_differentiable(
                *(output for output, keep in zip(outputs, step.is_differentiable, strict=True) if not keep)
            )
        return tuple(outputs)

    @staticmethod
    def backward(ctx, *grads: torch.Tensor):
        is_differentiable = ctx.step.is_differentiable
        kept = [grad for grad, keep in zip(grads, is_differentiable, strict=True) if keep]
        input_grads = iter(apply(ctx.group, ctx.step.gradient, kept))
        return None, None, *(next(input_grads) if keep else None for keep in is_differentiable)


def apply(group: Any, step: Step, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Runs a step, recorded by autograd if anything asks for it."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs):
        return _Apply.apply(group, step, *inputs)
    return step.run(group, inputs)
