"""Runs one rank's row of a plan with Megatron's step functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..communicator import Work
from ..schedules import ACT, GRAD, SEND, Action, Group, Plan
from .boundary import Tensors
from .config import setting, timed
from .exchange import Receipt
from .hooks import Hooks
from .p2p_communicator import P2PCommunicator, timer_name
from .steps import backward_step, check_first_val_step, deallocate_output_tensor, forward_step

Key = tuple[str, int, int]  # ACT or GRAD, the stage that makes it, micro-batch
Shapes = list[tuple[int, ...]]


@dataclass
class StepArguments:
    """What a schedule was called with. Models and iterators are by chunk of this rank."""

    forward_step_func: Callable[..., Any]
    data_iterators: Sequence[Any]
    models: Sequence[Any]
    config: Any
    num_microbatches: int
    cp_size: int
    forward_only: bool
    collect_non_loss_data: bool
    first_val_step: bool | None


class PlanRunner:
    """One step of one rank.

    `p2p` moves what crosses ranks, `shapes` says what its receives get: ACT inputs of a stage, GRAD gradients
    of its outputs; neither is needed for a plan of one rank. State is keyed by (stage, micro-batch); nothing
    is "the next one in a queue".
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        step: StepArguments,
        hooks: Hooks,
        p2p: P2PCommunicator | None = None,
        shapes: dict[str, Shapes] | None = None,
    ):
        self._plan, self._rank, self._step, self._hooks, self._p2p = plan, rank, step, hooks, p2p
        self._shapes = shapes or {ACT: [()]}
        config = step.config
        self._overlaps = bool(setting(config, "overlap_p2p_comm"))
        self._frees_outputs = bool(setting(config, "deallocate_pipeline_outputs")) and not step.forward_only
        self._checkpoint_limit = setting(config, "num_microbatches_with_partial_activation_checkpoints")
        kinds = [action.kind for action in plan.compute[rank]]
        self._max_outstanding = kinds.index("B")
        self._num_forwards = self._num_backwards = 0
        self._in_flight: dict[tuple[int, int], tuple[Tensors, list]] = {}  # inputs and outputs
        self._to_send: dict[Key, Tensors] = {}
        self._receipts: dict[Key, Receipt] = {}
        self._sends: list[Work] = []
        self.forward_data_store: list = []
        self.total_num_tokens: Any = torch.tensor(0, dtype=torch.int)

    def run(self) -> None:
        """Runs the row. If anything fails, so does the communicator, on all ranks, with the reason."""
        item = None
        try:
            for item in self._plan.program[self._rank]:
                if type(item) is Group:
                    self._exchange(item)
                elif item.kind == "F":
                    self._forward(item)
                elif not self._step.forward_only:
                    self._backward(item)
            for work in self._sends:
                work.wait()
            if not self._step.forward_only:
                self._hooks.finish()
        except BaseException as error:
            if self._p2p is not None:
                self._p2p.abort(
                    f"{self._plan.name}, rank {self._rank}, {item}: {type(error).__name__}: {error}"
                )
            raise

    def _exchange(self, group: Group) -> None:
        ops = [op for op in group.ops if op.what == ACT or not self._step.forward_only]
        sends = [op for op in ops if op.kind == SEND]
        recvs = [op for op in ops if op.kind != SEND]
        if not ops:
            return
        messages = [(op.channel, self._to_send.pop(op[1:4])) for op in sends]
        with timed(self._step.config, timer_name([op.channel for op in sends], [op.channel for op in recvs])):
            works, receipts = self._p2p.post(messages, [(op.channel, self._shapes[op.what]) for op in recvs])
            if not self._overlaps:
                for pending in [*receipts, *works]:
                    pending.wait()
        self._receipts.update(zip((op[1:4] for op in recvs), receipts, strict=True))
        self._sends = [work for work in (*self._sends, *works) if not work.is_completed()]
        if self._frees_outputs:
            for op, (_, tensors) in zip(sends, messages, strict=True):
                if op.what == ACT:
                    _free(tensors)

    def _forward(self, action: Action) -> None:
        stage, micro, step = action.stage, action.micro, self._step
        chunk, is_last = stage // self._plan.P, self._plan.next_of[stage] is None
        inputs = self._received(ACT, self._plan.prev_of[stage], micro)
        self._hooks.before_forward(self._num_forwards)
        outputs, num_tokens = forward_step(
            step.forward_step_func,
            step.data_iterators[chunk],
            step.models[chunk],
            step.num_microbatches,
            [None] * len(self._shapes[ACT]) if inputs is None else inputs,
            self.forward_data_store,
            step.config,
            step.cp_size,
            collect_non_loss_data=step.collect_non_loss_data,
            checkpoint_activations_microbatch=self._is_checkpointed(self._num_forwards),
            is_first_microbatch=check_first_val_step(step.first_val_step, step.forward_only, micro == 0),
            current_microbatch=micro,
            vp_stage=chunk if self._plan.num_stages > self._plan.P else None,
            is_last_stage=is_last,
        )
        self._num_forwards += 1
        self.total_num_tokens = self.total_num_tokens + num_tokens
        if not is_last:
            self._to_send[ACT, stage, micro] = outputs
        if not step.forward_only:
            self._in_flight[stage, micro] = inputs or [], outputs

    def _backward(self, action: Action) -> None:
        stage, micro = action.stage, action.micro
        is_last = self._plan.next_of[stage] is None
        inputs, outputs = self._in_flight.pop((stage, micro))
        grads = [None] * len(outputs) if is_last else self._received(GRAD, self._plan.next_of[stage], micro)
        self._hooks.before_backward(self._num_backwards)
        if is_last:
            outputs, grads = outputs[:1], grads[:1]  # the loss; whatever is beside it is the user's
        else:
            # None is no gradient here, not the gradient of a loss.
            kept = [pair for pair in zip(outputs, grads, strict=True) if pair[1] is not None]
            outputs, grads = [pair[0] for pair in kept], [pair[1] for pair in kept]
        if outputs:
            backward_step(inputs, outputs, grads, self._step.config)
        self._hooks.after_backward(self._num_backwards)
        self._num_backwards += 1
        if self._plan.prev_of[stage] is not None:
            self._to_send[GRAD, stage, micro] = [None if x is None else x.grad for x in inputs]

    def _received(self, what: str, producer: int | None, micro: int) -> Tensors | None:
        """What another stage has made; None if there is no such stage."""
        return None if producer is None else self._receipts.pop((what, producer, micro)).wait()

    def _is_checkpointed(self, forward_idx: int) -> bool | None:
        """Whether this forward recomputes all its activations: all but the first few of those that are in
        flight together.
        """
        if self._checkpoint_limit is None or self._plan.P == 1:
            return None
        return forward_idx % self._max_outstanding >= self._checkpoint_limit


def _free(outputs: Tensors) -> None:
    """Of the outputs that own their memory and that nobody else has: not views, not inputs passed on."""
    for output in outputs:
        if output is not None and output._base is None and not output.is_leaf:
            deallocate_output_tensor(output, deallocate_pipeline_outputs=True)
