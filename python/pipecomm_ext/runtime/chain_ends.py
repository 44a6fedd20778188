"""What happens at the ends of chains: outputs of last stages, and their losses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from .arguments import one_or_many
from .values import as_tuple, detached


class StepResult(NamedTuple):
    """What a step returns on this rank.

    losses     one per micro-batch, in order, without gradient; None on ranks without a loss
    outputs    of the last stage, one per micro-batch, as the stage returned them, without gradient; None on
               other ranks, and with return_outputs=False

    If two chains end on this rank, each is a dict from the loss stage to that list.
    """

    losses: list[torch.Tensor] | dict[int, list[torch.Tensor]] | None
    outputs: list[Any] | dict[int, list[Any]] | None


class ChainEnds:
    """The outputs and losses of a step, of the loss stages of this rank.

    Args:
        stages: the loss stages of this rank.
        targets: by stage, of each micro-batch; a stage without targets has no loss unless it returns it.
        loss_fn: called as `loss_fn(output, target)`.
        criterion: used instead, called as `criterion(*outputs, *targets)`.
        factor: multiplies losses before backward.
    """

    def __init__(
        self,
        stages: Iterable[int],
        num_micros: int,
        targets: Mapping[int, Sequence[Any]],
        loss_fn: Callable[[Any, Any], torch.Tensor] | None,
        criterion: Callable[..., torch.Tensor] | None,
        factor: float,
        keeps_outputs: bool,
    ):
        self._targets, self._loss_fn, self._criterion = targets, loss_fn, criterion
        self._factor, self._keeps_outputs = factor, keeps_outputs
        self._losses: dict[int, list[Any]] = {stage: [None] * num_micros for stage in stages}
        self._outputs: dict[int, list[Any]] = {stage: [None] * num_micros for stage in stages}

    def finish(self, stage: int, micro: int, output: Any, loss: Any = None) -> torch.Tensor | None:
        """Records the output of a micro-batch and its loss, which is computed unless given. Returns the loss
        to run backward from, or None."""
        if self._keeps_outputs:
            self._outputs[stage][micro] = detached(output)
        if loss is None:
            if not self._has_loss(stage, output):
                return None
            loss = self._loss(stage, micro, output)
        if not isinstance(loss, torch.Tensor) or (torch.is_grad_enabled() and loss.numel() != 1):
            got = f"shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise ValueError(
                f"the loss of a micro-batch must be a tensor of one element, got {got}; "
                "reduce it in loss_fn, or if there is none, in the last stage"
            )
        self._losses[stage][micro] = loss.detach()
        if torch.is_grad_enabled():
            _require_gradient(loss, output)
        if not loss.requires_grad:
            return None
        return loss if self._factor == 1 else loss * self._factor

    def _has_loss(self, stage: int, output: Any) -> bool:
        if self._criterion is None and self._loss_fn is None:
            return torch.is_grad_enabled() or (isinstance(output, torch.Tensor) and output.numel() == 1)
        return stage in self._targets

    def _loss(self, stage: int, micro: int, output: Any) -> Any:
        if self._criterion is not None:
            return self._criterion(*as_tuple(output), *as_tuple(self._targets[stage][micro]))
        if self._loss_fn is not None:
            return self._loss_fn(output, self._targets[stage][micro])
        return output

    def targets_of(self, stage: int, micro: int) -> Any:
        return self._targets[stage][micro] if stage in self._targets else None

    def criterion_of(self, stage: int, micro: int) -> tuple[Callable[..., torch.Tensor] | None, list]:
        """The loss function as an overlapped method calls it, `criterion(*outputs, *labels)`, and the labels;
        (None, []) unless the stage is the last of its chain."""
        if stage not in self._targets:
            return None, []
        target = self._targets[stage][micro]
        if self._criterion is not None:
            return self._criterion, list(as_tuple(target))
        loss_fn = self._loss_fn
        if loss_fn is None:
            return None, []

        def criterion(*outputs_and_target):
            *outputs, target = outputs_and_target
            return loss_fn(outputs[0] if len(outputs) == 1 else tuple(outputs), target)

        return criterion, [target]

    def result(self) -> StepResult:
        has_losses = all(loss is not None for losses in self._losses.values() for loss in losses)
        return StepResult(
            one_or_many(self._losses if has_losses else {}),
            one_or_many(self._outputs if self._keeps_outputs else {}),
        )


def _require_gradient(loss: torch.Tensor, output: Any) -> None:
    """Raises what `loss.backward()` raises for a loss that is complex, or that does not require grad although
    the output does. A model in which nothing requires grad is no error: other stages may be trained."""
    if loss.requires_grad:
        if loss.is_complex():
            raise RuntimeError(
                f"grad can be implicitly created only for real scalar outputs, not {loss.dtype}"
            )
    elif any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in tree_leaves(output)):
        raise RuntimeError(
            f"the loss of a micro-batch ({loss.dtype}) does not require grad, but the output it is made "
            "of does: it was detached, computed under no_grad() or converted to integers; eval() is the step "
            "without a backward"
        )
