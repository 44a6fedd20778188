"""`Executor`: runs a plan on real ranks. One loop over the program, one handler for each kind of action."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ...communicator import Communicator
from ...errors import PipeCommError
from ...parallel_state import PipelineTopology
from ..actions import Action, Compute, actions_in
from ..check import check
from ..plan import Plan, row_text
from ..timeline import Timeline
from .arguments import (
    MicroBatches,
    Stage,
    as_tuple,
    by_stage,
    device_of,
    loss_factor,
    one_or_many,
    ranks_by_pipeline_rank,
    require_equal_settings,
    stages_by_id,
)
from .backward import Work, run_backward, split_backward
from .errors import StageError
from .mailbox import NUM_DATA_CHANNELS, Mailbox, PreparedGroup, Tensors, Transport, connect
from .recorder import Recorder, gather_timeline
from .relayed import RelayedBorders, make_relay
from .replicas import sum_replicas


class StepResult(NamedTuple):
    """What a step gives on this rank.

    losses     one scalar per micro-batch, in order, without gradient; None on ranks without a loss
    outputs    of the last stage, one per micro-batch, without gradient, as the stage returned them (a tensor
               or a tuple); None on other ranks, and with return_outputs=False

    If two chains end on this rank, each is a dict from the loss stage to that list.
    """

    losses: list[torch.Tensor] | dict[int, list[torch.Tensor]] | None
    outputs: list[Any] | dict[int, list[Any]] | None


class _Alive(NamedTuple):
    """What a forward leaves for its backward: no outputs, so that they are freed when they have been sent."""

    inputs: Tensors
    edges: tuple[GradientEdge, ...]  # of the outputs that are differentiable
    loss: torch.Tensor | None  # scaled, of a loss stage


class Executor:
    """Runs a plan with this rank's stages. Construction is collective over the ranks of the communicator.

    Args:
        plan: who computes what; the same on all ranks, checked here (`check`).
        stages: the modules (or callables) of the stages that `plan.stages_of(rank)` names: a mapping from
            stage id, or a list by increasing id. A stage is called `stage(*inputs)` and returns a tensor or a
            tuple of tensors of any shapes and dtypes. Views and inputs may be returned as they are.
        communicator: a Communicator or a torch group with plan.P ranks; None or a group: one of its own is
            made, and made anew after a failed step. Give different executors that may run at the same time
            different ones.
        loss_fn: `loss_fn(output, target)` gives the scalar loss of a micro-batch from what the last stage
            returned. None: a last stage returns its loss itself; forward only, it may return anything else,
            and then there are no losses.
        loss_scale: what losses are multiplied by before backward: "sum" (1), "mean" (1 / plan.M), or a
            number. Reported losses are not scaled.
        rank_mapping: pipeline rank of each rank of the communicator; None: the same.
        topology: its stages, plan.P of them and maybe several ranks each, are the pipeline ranks; every rank
            of a stage runs that row of the plan. The communicator joins the same ranks as the topology.
        layout, grad_reduce: with a topology, how the ranks of a stage hold the tensors of borders, and which
            gradient they send back, see `StageRelay`. Not used between two single ranks.
        return_outputs: keep the outputs of the last stage for the StepResult.
        dynamic_shapes: shapes of outputs may depend on data, not only on the shapes of the inputs: one more
            small message per output.
        record_timeline: keep the times of every action for `timeline()`.
        check_border: called with (stage, specs of its tensors) before an output is passed on; may raise.

    Gradients accumulate in `.grad`, over micro-batches and over steps. I and W of a split backward work for
    any module (see `backward.py`); hooks on tensors within the stage then run in both halves. A fused slot
    calls `overlapped_forward_backward` if both stages are of one class that has it (DualPipe's contract),
    else forward, then backward.

    If anything raises on a rank, the communicator is aborted, so every rank raises at once (one that has done
    its part of the step, in its next): StageError here (the user's exception is its cause), PipeCommAborted
    with the reason there, ValueError and TypeError for wrong arguments. Gradients are then those of a part of
    the step: zero them. The executor can be used again if the communicator is its own; a given one has failed
    for good.

    A context manager; `close()` releases the communicator if it is the executor's own.
    """

    def __init__(
        self,
        plan: Plan,
        stages: Mapping[int, Stage] | Sequence[Stage],
        *,
        communicator: Communicator | dist.ProcessGroup | None = None,
        loss_fn: Callable[[Any, Any], torch.Tensor] | None = None,
        loss_scale: str | float = "sum",
        rank_mapping: Sequence[int] | None = None,
        topology: PipelineTopology | None = None,
        layout: str | tuple[str, int] | list[str | tuple[str, int]] = "replicated",
        grad_reduce: str = "leader",
        return_outputs: bool = True,
        dynamic_shapes: bool = False,
        record_timeline: bool = False,
        check_border: Callable[[int, tuple], None] | None = None,
    ) -> None:
        self.plan = plan
        self._owns_communicator = not isinstance(communicator, Communicator)
        self._group = communicator.group if isinstance(communicator, Communicator) else communicator
        if communicator is None and isinstance(topology, PipelineTopology):
            self._group = topology.group
        self._relay_arguments = None if topology is None else (topology, layout, grad_reduce)
        self._communicator = (
            self._new_communicator(device_of(stages)) if self._owns_communicator else communicator
        )
        comm = self._communicator
        with self._closed_on_failure(), comm.collective("all_to_all"):
            if not isinstance(plan, Plan):
                raise TypeError(f"plan must be a Plan, not {type(plan).__name__}; see get_plan")
            if comm.channels < NUM_DATA_CHANNELS:
                raise ValueError(
                    f"the communicator has {comm.channels} channel; an Executor needs "
                    f"{NUM_DATA_CHANNELS}, for activations and for gradients"
                )
            self._ranks_of = ranks_by_pipeline_rank(plan, comm, topology, rank_mapping)
            if self._relay_arguments:
                make_relay(comm, *self._relay_arguments)
            self.rank = next(rank for rank, ranks in enumerate(self._ranks_of) if comm.rank in ranks)
            self.stages = stages_by_id(plan, self.rank, stages)
            self._loss_factor = loss_factor(loss_scale, plan)
            check(plan)
        own_program = [row_text(row) for row in plan.program] if plan.has_own_program else None
        borders = (dynamic_shapes, repr(layout), grad_reduce)
        with self._closed_on_failure():
            require_equal_settings(comm, (plan.digest, own_program, self._ranks_of, *borders))
        if plan.micros_per_chain < max(map(len, plan.chains)):
            warnings.warn(
                f"{plan.name}: {plan.micros_per_chain} micro-batches are fewer than the stages of a chain: "
                "ranks will be idle most of the time",
                stacklevel=2,
            )
        self._loss_fn = loss_fn
        self._return_outputs = return_outputs
        self._options = {"dynamic_shapes": dynamic_shapes, "check_border": check_border}
        self._record_timeline = record_timeline
        self._first_stages = [chain[0] for chain in plan.chains if plan.owner[chain[0]] == self.rank]
        self._loss_stages = [chain[-1] for chain in plan.chains if plan.owner[chain[-1]] == self.rank]
        self._kind_of: dict[Any, int] = {}
        self._is_closed = False
        self._forget_step()
        self._connect()

    @contextlib.contextmanager
    def _closed_on_failure(self) -> Iterator[None]:
        """Around the constructor's checks: what they refuse must have reached the other ranks before a
        communicator of the executor's own goes."""
        try:
            yield
        except BaseException:
            if self._owns_communicator:
                with contextlib.suppress(PipeCommError):
                    self._communicator.close()
            raise

    def _new_communicator(self, device: torch.device | None) -> Communicator:
        return connect(self._group, device, has_relays=self._relay_arguments is not None)

    def _connect(self) -> None:
        """What belongs to a communicator."""
        self._is_usable = True
        self._transport = Transport(self._communicator, len(self.plan.chains))
        relayed = None
        if self._relay_arguments:
            relay = make_relay(self._communicator, *self._relay_arguments)
            relayed = RelayedBorders(self.plan, relay, self._transport.num_channels)
        self._mailbox = Mailbox(
            self.plan, self.rank, self._transport, self._ranks_of, relayed, **self._options
        )
        self._recorder = Recorder(self._communicator.device) if self._record_timeline else None
        self._program = self._mailbox.prepare(self.plan.program[self.rank])

    # ---------------------------------------------------------------- facts

    @property
    def communicator(self) -> Communicator:
        """What moves the tensors of the borders."""
        return self._communicator

    def __repr__(self) -> str:
        stages = ", ".join(map(str, self.stages))
        return f"<Executor of {self.plan.name}, rank {self.rank} of {self.plan.P}, stages {stages}>"

    # ---------------------------------------------------------------- step

    def step(
        self,
        inputs: MicroBatches | Mapping[int, MicroBatches | None] | None = None,
        targets: MicroBatches | Mapping[int, MicroBatches | None] | None = None,
    ) -> StepResult:
        """Forward and backward of all micro-batches; only forward where grad mode is off. Collective.

        Args:
            inputs: on ranks with a chain's first stage, one entry per micro-batch: a tensor, or a tuple.
                Micro-batches may differ in shape. Or a mapping from first stage to such a list, needed if two
                chains start on this rank.
            targets: on ranks with a loss stage, what `loss_fn` gets as its second argument, likewise.

        A list is ignored on other ranks, and so is what a mapping has for stages of other ranks: all ranks
        may make the same call.
        """
        is_training = torch.is_grad_enabled()
        if self._is_closed:
            raise ValueError("this Executor is closed; make a new one")
        try:
            if not self._is_usable:
                self._reconnect()
            self._begin_step(inputs, targets, is_training)
            is_profiling = torch.autograd._profiler_enabled()
            for position, item in enumerate(self._program):
                if type(item) is PreparedGroup:
                    self._mailbox.post(item)
                elif is_profiling:
                    with torch.profiler.record_function(str(item)):
                        self._run(item, position, is_training)
                else:
                    self._run(item, position, is_training)
            self._mailbox.finish_step()
            return self._result()
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            self._forget_step()

    def eval(
        self,
        inputs: MicroBatches | Mapping[int, MicroBatches] | None = None,
        targets: MicroBatches | Mapping[int, MicroBatches] | None = None,
    ) -> StepResult:
        """`step` without gradients: the forwards, in the plan's order. With a `loss_fn`, losses only if there
        are targets."""
        with torch.no_grad():
            return self.step(inputs, targets)

    def _fail(self, error: BaseException) -> None:
        """Tells the other ranks."""
        self._is_usable = False
        is_told = isinstance(error, StageError)
        self._transport.abort(str(error) if is_told else f"{type(error).__name__}: {error}")

    def _begin_step(self, inputs: Any, targets: Any, is_training: bool) -> None:
        num_micros = self.plan.micros_per_chain
        needs_targets = targets is not None or (is_training and self._loss_fn is not None)
        first_stages, loss_stages = ([chain[end] for chain in self.plan.chains] for end in (0, -1))
        self._inputs = by_stage("inputs", inputs, self._first_stages, first_stages, num_micros)
        self._targets = by_stage(
            "targets", targets, self._loss_stages if needs_targets else [], loss_stages, num_micros
        )
        self._losses = {stage: [None] * num_micros for stage in self._loss_stages}
        self._outputs = {stage: [None] * num_micros for stage in self._loss_stages}
        if self._recorder is not None:
            self._recorder.begin_step(is_training)
        kinds_of = {
            stage: [self._kind(is_training, as_tuple(micro_batch)) for micro_batch in micro_batches]
            for stage, micro_batches in self._inputs.items()
        }
        self._mailbox.begin_step(kinds_of, is_training)

    def _kind(self, is_training: bool, micro_batch: tuple) -> int:
        """A number for everything that the shapes of the stages' outputs may depend on."""
        signature = tuple(
            (value.shape, value.dtype, value.requires_grad)
            if isinstance(value, torch.Tensor)
            else type(value)
            for value in micro_batch
        )
        return self._kind_of.setdefault((is_training, signature), len(self._kind_of))

    def _forget_step(self) -> None:
        self._inputs: dict[int, MicroBatches] = {}
        self._targets: dict[int, MicroBatches] = {}
        self._losses: dict[int, list[Any]] = {}
        self._outputs: dict[int, list[Any]] = {}
        self._alive: dict[tuple[int, int], _Alive] = {}
        self._weight_work: dict[tuple[int, int], list[Work]] = {}

    def _result(self) -> StepResult:
        has_losses = all(loss is not None for losses in self._losses.values() for loss in losses)
        return StepResult(
            one_or_many(self._losses if has_losses else {}),
            one_or_many(self._outputs if self._return_outputs else {}),
        )

    # ---------------------------------------------------------------- actions

    def _run(self, item: Compute, position: int, is_training: bool) -> None:
        """Waits for what a slot needs, then computes it."""
        actions = actions_in(item)
        if not is_training:
            actions = [action for action in actions if action.kind == "F"]
        operands = [self._operand(*action) for action in actions]
        start = self._recorder.mark() if self._recorder is not None else None
        try:
            if len(actions) == 2:
                self._fused(*actions, *operands)
            elif actions:
                (kind, stage, micro), *_ = actions
                self._HANDLERS[kind](self, stage, micro, operands[0])
        except PipeCommError:
            raise
        except Exception as error:
            rank = self._communicator.rank
            failure = StageError(
                f"rank {rank}: {item} at position {position} of {self.plan.name}: "
                f"{type(error).__name__}: {error}",
                op=str(item),
                rank=rank,
                origin_rank=rank,
            )
            failure.position, failure.action = position, item
            raise failure from error
        if self._recorder is not None and actions:
            self._recorder.add(start, self._recorder.mark())

    def _operand(self, kind: str, stage: int, micro: int) -> Any:
        """What an action needs from outside its stage: inputs (F) or gradients of the outputs (B, I)."""
        if kind == "F":
            if self.plan.prev_of[stage] is None:
                return as_tuple(self._inputs[stage][micro])
            return self._mailbox.take_inputs(stage, micro)
        if kind == "W" or self.plan.next_of[stage] is None:
            return None
        return self._mailbox.take_gradients(stage, micro)

    def _forward(self, stage: int, micro: int, inputs: tuple) -> None:
        self._keep(stage, micro, inputs, self.stages[stage](*inputs))

    def _keep(self, stage: int, micro: int, inputs: tuple, output: Any, loss: Any = None) -> None:
        """Hands a stage's output over, and keeps what the backward needs of it."""
        edges: tuple[GradientEdge, ...] = ()
        if self.plan.next_of[stage] is None:
            loss = self._finish_chain(stage, micro, output, loss)
        else:
            outputs = as_tuple(output)
            if not all(isinstance(value, torch.Tensor) for value in outputs):
                types = ", ".join(type(value).__name__ for value in outputs)
                raise TypeError(f"stage {stage} must return a tensor or a tuple of tensors, not ({types})")
            edges = tuple(get_gradient_edge(value) for value in outputs if value.requires_grad)
            self._mailbox.put_output(stage, micro, outputs)
        if torch.is_grad_enabled():
            from_border = () if self.plan.prev_of[stage] is None else inputs
            leaves = tuple(tensor for tensor in from_border if tensor.requires_grad)
            self._alive[stage, micro] = _Alive(leaves, edges, loss)

    def _finish_chain(self, stage: int, micro: int, output: Any, loss: Any) -> torch.Tensor | None:
        """Records output and loss of a micro-batch; the loss to run backward from, if there is one."""
        if self._return_outputs:
            detached = tuple(v.detach() if isinstance(v, torch.Tensor) else v for v in as_tuple(output))
            self._outputs[stage][micro] = detached if isinstance(output, (tuple, list)) else detached[0]
        if loss is None:
            if self._loss_fn is None:
                is_loss = isinstance(output, torch.Tensor) and output.numel() == 1
                if not torch.is_grad_enabled() and not is_loss:
                    return None
                loss = output
            elif stage in self._targets:
                loss = self._loss_fn(output, self._targets[stage][micro])
            else:
                return None
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            got = f"shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise ValueError(
                f"the loss of a micro-batch must be a tensor of one element, got {got}; "
                "reduce it in loss_fn, or if there is none, in the last stage"
            )
        self._losses[stage][micro] = loss.detach().reshape(())
        if not loss.requires_grad:
            return None
        return loss if self._loss_factor == 1 else loss * self._loss_factor

    def _backward(self, stage: int, micro: int, gradients: list[torch.Tensor] | None) -> None:
        alive = self._alive.pop((stage, micro))
        run_backward(*_roots(alive, gradients))
        self._hand_back(stage, micro, alive)

    def _input_backward(self, stage: int, micro: int, gradients: list[torch.Tensor] | None) -> None:
        alive = self._alive.pop((stage, micro))
        self._weight_work[stage, micro] = split_backward(*_roots(alive, gradients), alive.inputs)
        self._hand_back(stage, micro, alive)

    def _weight_backward(self, stage: int, micro: int, _operand: None) -> None:
        for work in self._weight_work.pop((stage, micro)):
            work()

    def _hand_back(self, stage: int, micro: int, alive: _Alive) -> None:
        if self.plan.prev_of[stage] is not None:
            self._mailbox.put_gradient(stage, micro, alive.inputs)

    def _fused(self, forward: Action, backward: Action, inputs: tuple, gradients: Any) -> None:
        """By the stages' own overlapped method if they have one, else one after the other."""
        _, stage0, micro0 = forward
        _, stage1, micro1 = backward
        module0, module1 = self.stages[stage0], self.stages[stage1]
        overlapped = getattr(type(module0), "overlapped_forward_backward", None)
        roots, root_gradients = _roots(self._alive[stage1, micro1], gradients)
        if overlapped is None or type(module0) is not type(module1) or not roots:
            self._forward(stage0, micro0, inputs)
            self._backward(stage1, micro1, gradients)
            return
        alive = self._alive.pop((stage1, micro1))
        outputs1, gradients1 = ([], []) if gradients is None else (roots, root_gradients)
        criterion, labels = self._criterion_of(stage0, micro0)
        outputs, loss = overlapped(
            module0,
            inputs,
            criterion,
            labels,
            module1,
            alive.loss,
            list(outputs1),
            list(gradients1),
        )
        self._keep(stage0, micro0, inputs, outputs[0] if len(outputs) == 1 else tuple(outputs), loss)
        self._hand_back(stage1, micro1, alive)

    def _criterion_of(self, stage: int, micro: int) -> tuple[Callable[..., torch.Tensor] | None, list]:
        """The loss function as an overlapped method calls it, `criterion(*outputs, *labels)`, and the labels;
        None and none unless the stage is the last of its chain."""
        if self._loss_fn is None or stage not in self._targets:
            return None, []

        def criterion(*outputs_and_target):
            *outputs, target = outputs_and_target
            return self._loss_fn(outputs[0] if len(outputs) == 1 else tuple(outputs), target)

        return criterion, [self._targets[stage][micro]]

    _HANDLERS = {"F": _forward, "B": _backward, "I": _input_backward, "W": _weight_backward}

    # ---------------------------------------------------------------- after a step

    def sum_replica_gradients(self) -> None:
        """Adds up the gradients of stages with the same weights (`plan.replicas`).

        Collective, for use after step() and before the optimizer. The sums are the same bits on all ranks. A
        gradient that is None counts as zeros; parameters that need no gradient are left out. The stages must
        be modules with parameters of the same shapes and dtypes. If anything raises, the communicator is
        aborted, as in a step. Replicas that are several ranks each are refused (ValueError).
        """
        try:
            sum_replicas(self.plan, self.rank, self.stages, self._communicator, self._ranks_of)
        except BaseException as error:
            self._fail(error)
            raise

    def timeline(self) -> Timeline:
        """When the actions of the last step ran on all ranks, in seconds. Collective; the Executor must have
        been made with record_timeline=True on all ranks."""
        with self._communicator.collective("all_to_all"):
            if self._recorder is None:
                raise ValueError("make the Executor with record_timeline=True to get a timeline")
        return gather_timeline(self.plan, self.rank, self._communicator, self._ranks_of, self._recorder)

    def _reconnect(self) -> None:
        """After a failed step, which failed on all ranks: a new communicator in place of the failed one."""
        if self._owns_communicator:
            self._release()
            self._communicator = self._new_communicator(self._communicator.device)
            self._connect()

    def close(self) -> None:
        """Ends the communicator if it is the executor's own; no step can follow. Idempotent."""
        self._is_closed = True
        self._release()

    def _release(self) -> None:
        self._transport.close_control()
        if self._owns_communicator:
            self._communicator.close()

    def __enter__(self) -> Executor:
        return self

    def __exit__(self, exc_type, exc, traceback) -> None:
        if exc_type is not None:
            self._transport.abort(f"{exc_type.__name__}: {exc}")
        self.close()


def _roots(alive: _Alive, gradients: list[torch.Tensor] | None) -> tuple[Sequence[Any], Sequence[Any]]:
    """What to run backward from: the loss, or the outputs with their gradients."""
    if gradients is not None:
        return alive.edges, gradients
    if alive.loss is None:
        return (), ()
    return (alive.loss,), (torch.ones_like(alive.loss),)
