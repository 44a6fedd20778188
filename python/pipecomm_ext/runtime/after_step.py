"""What an Executor does between a step and the optimizer: sums, unscaling, clipping, buffers of copies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

import torch

from .grad_scaler import unscale
from .gradients import Names, StepGradients, require_finite, require_norm
from .plan_loop import failing_together

if TYPE_CHECKING:
    from ..communicator import Communicator


class _Run(Protocol):
    """The attributes of an Executor that these calls use."""

    communicator: Communicator
    _gradients: StepGradients

    def _abort(self, reason: str) -> None: ...


class AfterStep:
    """The calls that follow a step, all of them collective."""

    def sum_replica_gradients(self: _Run) -> None:
        """Adds up the gradients of stages with the same weights (`plan.replicas`).

        Collective, once after the last step() before the optimizer. The sums are the same bits on all ranks.
        A gradient that is None counts as zeros; parameters that need no gradient are left out. The stages
        must be modules with parameters of the same shapes and dtypes. If anything raises, the communicator is
        aborted, as in a step. Replicas that are several ranks each are refused (ValueError), and so are
        gradients that were added up before and have not been zeroed since.
        """
        self._gradients.require_replicas_unsummed()
        with failing_together(self._abort):
            self._gradients.sum_replicas()

    def sum_shared_gradients(self: _Run, weights: Mapping[str | torch.nn.Parameter, Names]) -> None:
        """Replaces the gradients of weights that several stages share, as tied embeddings, by their sum.

        Collective, once after the last step() before the optimizer. The sums are the same bits on all ranks.
        A gradient that is None counts as zeros; that of a Parameter in several stages of a rank is their sum
        already. Copies have equal shapes and dtypes. Wrong arguments are refused on all ranks, and so
        are gradients that were added up before and have not been zeroed since, and a weight with two names.

        Args:
            weights: for each shared weight, by its name in these stages (without the prefixes of wrappers) or
                by the Parameter of this rank, the stages that hold it; or, if names differ, a mapping from
                each such stage to its name. The same weights in the same order on all ranks that hold any;
                others may pass an empty mapping. One stage of `plan.replicas` stands for all its replicas.

        Call it before `sum_replica_gradients`, which leaves these weights alone, and `clip_grad_norm_`, which
        counts them once. Pipeline ranks of several ranks, which must be of one size, add up rank by rank.
        """
        held = self._gradients.holders(weights)
        with failing_together(self._abort):
            self._gradients.sum_shared(held)

    def average_replica_buffers(self: _Run) -> None:
        """Replaces floating-point buffers of stages with the same weights (`plan.replicas`) by their mean.

        Each copy sees only some of the micro-batches, so the running statistics of its BatchNorm differ.
        Collective, before the copies are saved or evaluated, or after each step. Integers, such as the number
        of batches, stay unchanged. The stages must be modules with buffers of the same shapes.
        """
        with failing_together(self._abort):
            self._gradients.average_buffers()

    def unscale_(
        self: _Run, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer | None = None
    ) -> None:
        """`scaler.unscale_(optimizer)` for the whole pipeline: if a gradient of any stage is inf or nan, the
        scalers of all ranks skip the optimizer's step and lower their scale.

        Collective, after the sums of gradients and before `clip_grad_norm_`, `scaler.step(optimizer)` and
        `scaler.update()`. Every rank has a GradScaler of its own, made with equal arguments; `loss_fn` scales
        the loss with that of its rank. A disabled scaler does nothing. A step warns if a scaler in `loss_fn`
        was updated without this; it does not detect one in a step's `criterion`.

        Args:
            optimizer: this rank's; None if none of its stages is trained. With several optimizers, call it
                for each one, the same number of times on all ranks.

        Raises:
            PipeCommMismatch: the scalers of two ranks have different scales, or one is disabled.
        """
        unscale(scaler, optimizer, self.communicator)

    def clip_grad_norm_(
        self: _Run, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scales all gradients of the pipeline so that their total norm is at most `max_norm`. Collective.

        The same as `torch.nn.utils.clip_grad_norm_` of the whole model: weights count once if they are in
        replicated stages (`plan.replicas`), were in `sum_shared_gradients` since the last step, or are copies
        on the ranks of one stage of a topology; there, a parameter with Megatron's attribute
        `tensor_model_parallel` is a piece and counts on each rank. DTensors (FSDP2, tensor parallelism) count
        as a whole. The parameters of a stage that is a function are those of the modules that it holds and
        those that its graph has shown, with a UserWarning if reentrant checkpoints may hide some. Other
        pipelines of the same model (data parallelism) do not take part.

        Args:
            norm_type: a positive number, or inf.
            error_if_nonfinite: if the norm is nan or inf, raise RuntimeError on all ranks and leave gradients
                unchanged. The check makes the host wait for the device.

        Returns the norm before clipping, float64[], the same bits on all ranks.
        """
        max_norm, norm_type = require_norm(max_norm, norm_type)
        with failing_together(self._abort):
            total = self._gradients.total_norm(norm_type)
        if error_if_nonfinite:
            require_finite(total, norm_type)
        self._gradients.scale(max_norm, total)
        return total
