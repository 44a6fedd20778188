"""The messages between the stages of one rank and their neighbours: outputs and gradients."""

from __future__ import annotations

import abc
import weakref
from collections.abc import Iterable
from typing import Any

import torch

from ..communicator import Work
from ..core.tensor_specs import version_of
from ..schedules.actions import ACT, GRAD
from ..schedules.plan import Plan
from .border_channels import Arrival, Receipt

Key = tuple[str, int, int]  # what, producing stage, micro-batch


class Mailbox(abc.ABC):
    """The messages of a step. The compute that needs a message waits for it.

    A subclass puts what leaves this rank into the outbox; its `post` sends that, and keeps a receipt of each
    message to come.
    """

    def __init__(self, plan: Plan, rank: int):
        self.plan, self.rank = plan, rank
        self.is_training = False
        self.forget_step()

    def forget_step(self) -> None:
        self.outbox: dict[Key, Any] = {}
        self.receipts: dict[Key, Arrival | Receipt] = {}
        self.works: list[Work] = []  # of the sends
        self._sent: list[tuple[weakref.ref[torch.Tensor], int, int, int]] = []  # version, stage, micro-batch

    @abc.abstractmethod
    def post(self, group: Any) -> None:
        """Starts the sends and receives of a group of the program."""

    def take_inputs(self, stage: int, micro: int) -> Any:
        """Waits for the outputs of the stage before: leaves, which require grad if differentiable. A subclass
        may return them as the call of the stage."""
        return self.receipts.pop((ACT, self.plan.stage_before(stage), micro)).wait()

    def take_gradients(self, stage: int, micro: int) -> list:
        """Waits for the gradients of a stage's outputs."""
        return self.receipts.pop((GRAD, self.plan.stage_after(stage), micro)).wait()

    def is_wanted(self, what: str) -> bool:
        return self.is_training or what == ACT

    def note_sent(self, stage: int, micro: int, outputs: Iterable[torch.Tensor]) -> None:
        """Records outputs that must not be written from here on."""
        for output in outputs:  # a view may be freed before its base
            base = output if output._base is None else output._base
            self._sent.append((weakref.ref(base), version_of(base), stage, micro))

    def finish_step(self) -> None:
        """Waits for everything that is under way, and refuses outputs that were written meanwhile."""
        for work in self.works:
            work.wait()
        for sent, version, stage, micro in self._sent:
            output = sent()
            if output is not None and version_of(output) != version:
                raise ValueError(
                    f"stage {stage} has written into its output of micro-batch {micro} after it returned it, "
                    "when it may not have been sent yet: return a clone of a buffer that is used again "
                    "(all views of one tensor count as one)"
                )
        self.forget_step()
