"""Steps: one direction of an operation, linked to the step that its gradients take."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..communicator import Communicator, Work
from ..communicator.registry import communicator_of
from ..core.extension import _C
from ..core.tensor_specs import TensorSpec, can_have_gradient
from ..errors import PipeCommMismatch


class Step(ABC):
    """Makes outputs of known shapes and dtypes, and knows the step that their gradients take.

    `gradient()` is the step from the gradients of the differentiable outputs to those of their inputs. The
    gradient of the gradient step is this step again: every operation of this package is one of a pair, even
    if the pair is adjoint only up to the scaling that its documentation states. So double backward works to
    any order.
    """

    def __init__(self, outputs: Sequence[TensorSpec], gradient: Callable[[], Step]):
        self.outputs = outputs
        self.gradient = gradient
        self.is_differentiable: Sequence[bool] = [can_have_gradient(dtype) for _, dtype in outputs]

    @abstractmethod
    def run(self, group: Any, /, inputs: Sequence[Tensor], gradient_of: int = 0) -> tuple[list[Tensor], int]:
        """Returns fresh outputs, and the number of this run on all ranks, 0 if it does not communicate. For a
        step that does, `group` is a Communicator, and `gradient_of` the number of the run whose gradients
        these are: backwards in another order on another rank do not match.
        """

    def start(
        self, group: Any, /, inputs: Sequence[Tensor], gradient_of: int = 0
    ) -> tuple[list[Tensor], Work | None]:
        """Like `run`, but does not wait: the outputs are valid once the Work, if any, is done."""
        return self.run(group, inputs, gradient_of)[0], None


class ExchangeStep(Step):
    """Runs an exchange plan. Collective.

    With `by_real_views` the plan is for complex tensors viewed as pairs of real numbers, which can be scaled.
    `is_differentiable`: which outputs have a gradient; by default all whose dtype can have one.
    """

    def __init__(
        self,
        op: str,
        plan: _C.PreparedExchange,
        outputs: Sequence[TensorSpec],
        gradient: Callable[[], Step],
        by_real_views: bool = False,
        is_differentiable: Sequence[bool] | None = None,
    ):
        super().__init__(outputs, gradient)
        self.is_differentiable = is_differentiable or self.is_differentiable
        self._op, self._plan, self._by_real_views = op, plan, by_real_views

    def run(
        self, comm: Communicator, /, inputs: Sequence[Tensor], gradient_of: int = 0
    ) -> tuple[list[Tensor], int]:
        outputs, work = self._exchange(comm, inputs, gradient_of, async_op=False)
        return outputs, work.number

    def start(
        self, comm: Communicator, /, inputs: Sequence[Tensor], gradient_of: int = 0
    ) -> tuple[list[Tensor], Work]:
        return self._exchange(comm, inputs, gradient_of, async_op=True)

    def _exchange(
        self, comm: Communicator, inputs: Sequence[Tensor], gradient_of: int, async_op: bool
    ) -> tuple[list[Tensor], Work]:
        outputs = [comm.empty(shape, dtype) for shape, dtype in self.outputs]
        views = (real_views(inputs), real_views(outputs)) if self._by_real_views else (inputs, outputs)
        work = comm.exchange(
            self._plan, *views, async_op=async_op, op=self._op, gradient_of=gradient_of, returns_work=True
        )
        return outputs, work


def real_views(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Complex tensors as pairs of real numbers."""
    return [torch.view_as_real(tensor.resolve_conj()) for tensor in tensors]


@contextlib.contextmanager
def told_of_backwards() -> Iterator[None]:
    """Wraps the exchange of a backward: explains what its PipeCommMismatch usually means."""
    try:
        yield
    except PipeCommMismatch as error:
        cure = "the same inputs must require a gradient on all ranks, and backwards run in the same order"
        error.args = (f"{error}; {cure}",)
        raise


class _Apply(torch.autograd.Function):
    @staticmethod
    def forward(ctx, group: Any, step: Step, gradient_of: int, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.group, ctx.step = group, step
        outputs, ctx.number = step.run(group, inputs, gradient_of)
        if not all(step.is_differentiable):
            ctx.mark_non_differentiable(
                *(output for output, keep in zip(outputs, step.is_differentiable, strict=True) if not keep)
            )
        return tuple(outputs)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        is_differentiable = ctx.step.is_differentiable
        kept = [grad for grad, keep in zip(grads, is_differentiable, strict=True) if keep]
        comm = communicator_of(ctx.group, kept[0])  # the forward of a split needs none
        with told_of_backwards():
            input_grads = iter(apply(comm, ctx.step.gradient(), kept, ctx.number))
        return (
            None,  # group
            None,  # step
            None,  # gradient_of
            *(next(input_grads) if keep else None for keep in is_differentiable),  # None: an integer input
        )


def apply(group: Any, step: Step, inputs: Sequence[Tensor], gradient_of: int = 0) -> Sequence[Tensor]:
    """Runs a step, recorded by autograd if an input requires it.

    Within `torch.autograd.forward_ad.dual_level()`, in which all ranks of a group must be together, a second
    run moves the tangents, since a step is linear.
    """
    if forward_ad._current_level < 0:
        return _recorded(group, step, inputs, gradient_of)
    pairs = [forward_ad.unpack_dual(tensor) for tensor in inputs]
    outputs = _recorded(group, step, [primal for primal, _ in pairs], gradient_of)
    tangents = [torch.zeros_like(primal) if tangent is None else tangent for primal, tangent in pairs]
    return [
        forward_ad.make_dual(output, tangent) if output.is_floating_point() or output.is_complex() else output
        for output, tangent in zip(outputs, _recorded(group, step, tangents, gradient_of), strict=True)
    ]


def _recorded(group: Any, step: Step, inputs: Sequence[Tensor], gradient_of: int) -> Sequence[Tensor]:
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs):
        return _Apply.apply(group, step, gradient_of, *inputs)
    return step.run(group, inputs, gradient_of)[0]
