"""Runs one rank's row of a plan with Megatron's step functions and hooks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from ..communicator import Communicator
from ..core.timers import timed
from ..runtime.border import Tensors
from ..runtime.mailbox import Mailbox
from ..runtime.plan_loop import PlanLoop, failing_together
from ..schedules.actions import ACT, GRAD, SEND, Action, Compute, Group, actions_in
from ..schedules.plan import Plan
from .config import setting
from .hooks import Hooks
from .p2p_communicator import ACTIVATIONS, GRADIENTS, P2PCommunicator, timer_name
from .shapes import size_of
from .steps import backward_step, check_first_val_step, deallocate_output_tensor, forward_step
from .wrapped_model import attribute_of

Shapes = list[tuple[int, ...]]


@dataclass(kw_only=True)
class StepArguments:
    """The arguments that Megatron's three schedules have in common.

    A schedule first brings them into one form: `model` and `data_iterator` are lists with one entry for each
    chunk of this rank, `p2p_communicator` is set unless nothing crosses ranks, and `groups` are those of
    `pg_collection`, or the default ones if the caller passed none.
    """

    forward_step_func: Callable[..., Any]
    data_iterator: Any
    model: Any
    num_microbatches: int
    seq_length: int
    micro_batch_size: int
    decoder_seq_length: int | None = None
    forward_only: bool = False
    collect_non_loss_data: bool = False
    first_val_step: bool | None = None
    adjust_tensor_shapes_fn: Callable[..., Any] | None = None
    p2p_communicator: P2PCommunicator | None = None
    pg_collection: Any = None
    force_all_reduce: bool = False
    groups: Any = field(init=False, default=None)  # has `cp` and `tp`, or lacks them

    @cached_property
    def config(self) -> Any:
        """The config of the first chunk."""
        first = self.model[0] if isinstance(self.model, (list, tuple)) else self.model
        return attribute_of(first, "config")

    @property
    def communicator(self) -> Communicator | None:
        """That of the messages; None without any, or if the caller has passed something else."""
        p2p = self.p2p_communicator
        return p2p.communicator if isinstance(p2p, P2PCommunicator) else None

    def abort(self, reason: str) -> None:
        """Fails the communication, if there is any, on all ranks, with the reason."""
        if isinstance(self.p2p_communicator, P2PCommunicator):
            self.p2p_communicator.abort(reason)


class P2PMailbox(Mailbox):
    """The messages of one step over a `P2PCommunicator`.

    `shapes` are those of received tensors: ACT inputs of a stage, GRAD gradients of its outputs. The timers
    of sends measure their posts; those of receives measure how long the next compute waits.
    """

    def __init__(self, plan: Plan, rank: int, step: StepArguments, shapes: dict[str, Shapes]):
        super().__init__(plan, rank)
        self.is_training = not step.forward_only
        self._p2p, self._shapes = step.p2p_communicator, shapes
        self._timers = setting(step.config, "timers")
        self._frees_outputs = self.is_training and setting(step.config, "deallocate_pipeline_outputs")

    def put(self, what: str, stage: int, micro: int, tensors: Tensors) -> None:
        """Passes what a stage made to the stage that needs it, if there is one."""
        consumers = self.plan.next_of if what == ACT else self.plan.prev_of
        if consumers[stage] is not None:
            self.outbox[what, stage, micro] = tensors
            if what == ACT:
                self.note_sent(stage, micro, [tensor for tensor in tensors if tensor is not None])

    def post(self, group: Group) -> None:
        ops = [op for op in group.ops if self.is_wanted(op.what)]
        if not ops:
            return
        sends = [op for op in ops if op.kind == SEND]
        recvs = [op for op in ops if op.kind != SEND]
        messages = [(op.channel, self.outbox.pop(op[1:4])) for op in sends]
        with timed(self._timers if sends else None, timer_name([op.channel for op in sends], [])):
            assert self._p2p is not None
            works, receipts = self._p2p.post(messages, [(op.channel, self._shapes[op.what]) for op in recvs])
        self.receipts.update(zip((op[1:4] for op in recvs), receipts, strict=True))
        self.works = [work for work in (*self.works, *works) if not work.is_completed()]
        if self._frees_outputs:
            for op, (_, tensors) in zip(sends, messages, strict=True):
                if op.what == ACT:
                    _free(tensors)  # the message keeps the storage until it is sent

    def take_inputs(self, stage: int, micro: int) -> list:
        with timed(self._timers, timer_name([], [ACTIVATIONS])):
            return super().take_inputs(stage, micro)

    def take_gradients(self, stage: int, micro: int) -> list:
        with timed(self._timers, timer_name([], [GRADIENTS])):
            return super().take_gradients(stage, micro)


class PlanRunner:
    """One step of one rank with Megatron's step functions.

    `shapes`: see `P2PMailbox`; a plan of one rank needs none.
    """

    def __init__(
        self, plan: Plan, rank: int, step: StepArguments, hooks: Hooks, shapes: dict[str, Shapes] | None
    ):
        self._plan, self._rank = plan, rank
        self._step, self._hooks = step, hooks
        shapes = shapes or {ACT: [()]}
        self._num_inputs = len(shapes[ACT])
        self._mailbox = P2PMailbox(plan, rank, step, shapes)
        self._cp_size = size_of(getattr(step.groups, "cp", None))
        self._checkpoint_limit = setting(step.config, "num_microbatches_with_partial_activation_checkpoints")
        kinds = [action.kind for item in plan.compute[rank] for action in actions_in(item)]
        self._max_outstanding = kinds.index("B")
        self._num_forwards = self._num_backwards = 0
        self._in_flight: dict[tuple[int, int], tuple[Tensors, list]] = {}  # inputs and outputs
        self.forward_data_store: list = []
        # On the device of the messages: finalize_model_grads_func broadcasts the count over the pipeline.
        device = "cpu" if step.p2p_communicator is None else step.p2p_communicator.communicator.device
        self.total_num_tokens: Any = torch.tensor(0, dtype=torch.int, device=device)

    def run(self) -> None:
        """Runs the row. If anything raises, the communicator fails on all ranks, with the reason."""
        loop = PlanLoop(self._plan, self._mailbox, self._chain_input, self._compute)

        def abort(reason: str) -> None:
            self._step.abort(f"{self._plan.name}, rank {self._rank}, {loop.item}: {reason}")

        with failing_together(abort):
            loop.run(self._plan.program[self._rank], is_training=not self._step.forward_only)
            if not self._step.forward_only:
                self._hooks.finish()

    def _chain_input(self, stage: int, micro: int) -> list[None]:
        return [None] * self._num_inputs

    def _compute(
        self, item: Compute, position: int, actions: Sequence[Action], operands: Sequence[Any]
    ) -> None:
        (kind, stage, micro), operand = actions[0], operands[0]
        if kind == "F":
            self._forward(stage, micro, operand)
        else:
            self._backward(stage, micro, operand)

    def _forward(self, stage: int, micro: int, inputs: list[torch.Tensor | None]) -> None:
        step = self._step
        chunk, is_last = stage // self._plan.P, self._plan.next_of[stage] is None
        self._hooks.before_forward(self._num_forwards)
        outputs, num_tokens = forward_step(
            step.forward_step_func,
            step.data_iterator[chunk],
            step.model[chunk],
            step.num_microbatches,
            inputs,
            self.forward_data_store,
            step.config,
            self._cp_size,
            collect_non_loss_data=step.collect_non_loss_data,
            checkpoint_activations_microbatch=self._is_checkpointed(self._num_forwards),
            is_first_microbatch=check_first_val_step(step.first_val_step, step.forward_only, micro == 0),
            current_microbatch=micro,
            vp_stage=chunk if self._plan.num_stages > self._plan.P else None,
            is_last_stage=is_last,
        )
        self._num_forwards += 1
        self.total_num_tokens = self.total_num_tokens + num_tokens
        self._mailbox.put(ACT, stage, micro, outputs)
        if not step.forward_only:
            self._in_flight[stage, micro] = inputs, outputs

    def _backward(self, stage: int, micro: int, grads: list[torch.Tensor | None] | None) -> None:
        inputs, outputs = self._in_flight.pop((stage, micro))
        self._hooks.before_backward(self._num_backwards)
        if grads is None:
            outputs = outputs[:1]  # the loss; other outputs are the user's
            grads = [None]
        else:
            # Here None means that there is no gradient, not the gradient of a loss.
            kept = [pair for pair in zip(outputs, grads, strict=True) if pair[1] is not None]
            outputs, grads = [pair[0] for pair in kept], [pair[1] for pair in kept]
        if outputs:
            backward_step(inputs, outputs, grads, self._step.config)
        self._hooks.after_backward(self._num_backwards)
        self._num_backwards += 1
        self._mailbox.put(GRAD, stage, micro, [None if x is None else x.grad for x in inputs])

    def _is_checkpointed(self, forward_idx: int) -> bool | None:
        """Whether this forward recomputes all its activations: all but the first few of those that are in
        flight together.
        """
        if self._checkpoint_limit is None or self._plan.P == 1:
            return None
        return forward_idx % self._max_outstanding >= self._checkpoint_limit


def _free(outputs: Tensors) -> None:
    """Frees the outputs that own their memory and have no other user: no views, no inputs passed on."""
    for output in outputs:
        if output is not None and output._base is None and not output.is_leaf:
            deallocate_output_tensor(output, deallocate_pipeline_outputs=True)
