"""`Executor`: runs a plan on real ranks, with one handler for each kind of action."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ..communicator import Communicator
from ..errors import PipeCommError, StageError, summary_of
from ..parallel_state import PipelineTopology
from ..relay.stage_relay import GradReduce
from ..schedules.actions import Action, Compute
from ..schedules.check import check
from ..schedules.plan import Plan
from ..schedules.plan_error import row_text
from ..schedules.timeline import Timeline
from .after_step import AfterStep
from .arguments import (
    MicroBatches,
    Stage,
    by_stage,
    device_of,
    keywords_by_stage,
    loss_factor,
    pre_split,
    ranks_by_pipeline_rank,
    require_equal_settings,
    stages_by_id,
    warn_of_idle,
    warn_of_unequal,
)
from .backward import run_backward, split_backward
from .border_channels import NUM_DATA_CHANNELS, BorderChannels, connect
from .chain_ends import ChainEnds, StepResult
from .data_parallel import ReducedOnce
from .executor_mailbox import ExecutorMailbox
from .grad_scaler import ScalerWatch
from .gradients import StepGradients
from .graph_parameters import GraphParameters
from .plan_loop import PlanLoop, failing_together, refused_together
from .recorder import Recorder, gather_timeline
from .relayed import RelayedBorders, make_relay
from .step_count import StepCount
from .values import Call, flattened, signature
from .weight_grad_store import Closure


class _Alive(NamedTuple):
    """What a forward keeps for its backward: no outputs, so that they are freed when they have been sent."""

    inputs: tuple[torch.Tensor, ...]  # whose gradients the stage before waits for
    edges: tuple[GradientEdge, ...]  # of the outputs that are differentiable
    loss: torch.Tensor | None  # scaled, of a loss stage


class Executor(AfterStep):
    """Runs a plan with this rank's stages. Construction is collective over the ranks of the communicator.

    Args:
        plan: who computes what; the same on all ranks, checked here (`check`).
        stages: the modules (or callables) of the stages that `plan.stages_of(rank)` names: a mapping from
            stage id, or a list by increasing id. A stage returns a tensor of any shape and dtype, None, or
            tuples, lists and dicts of them; the last one may return anything. A tuple or a list calls the
            next stage with positional arguments, a dict (a `ModelOutput` is one) with keywords; within them,
            subclasses arrive as plain tuples and dicts. Views and inputs may be returned as they are.
        communicator: a Communicator or a torch group with plan.P ranks; None or a group: the executor makes
            its own, and a new one after a failed step. Executors that may run at the same time need different
            ones.
        loss_fn: `loss_fn(output, target)` returns the loss of a micro-batch from the output of the last
            stage: one element; forward only, any shape. None: a last stage returns its loss itself; forward
            only, it may return anything else, and then there are no losses.
        loss_scale: the factor of losses before backward: "sum" (1), "mean" (1 / plan.M, with a UserWarning if
            targets on this rank differ in rows), or a number. Reported losses are not scaled.
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
    any module (see `backward.py`); hooks on tensors within the stage run in both halves, the second time with
    zeros, and must not write into the gradient: let them return another one. A stage must not write into what
    it has returned (ValueError; all views of one tensor count as one). A fused slot calls
    `overlapped_forward_backward` if both stages are of one class that has it (DualPipe's contract), else
    forward, then backward.

    If anything raises on a rank, the communicator is aborted, so every rank raises at once (a rank that has
    done its part of the step, in its next one): StageError on that rank (the user's exception is its cause),
    PipeCommAborted with the reason on the others, ValueError and TypeError for wrong arguments. A step that
    one rank gives up in this way raises PipeCommAborted on all. Gradients are then those of a part of the
    step: zero them. The executor can be used again if the communicator is its
    own, or if arguments of a step were wrong on all ranks; else the given communicator remains failed.

    A context manager; `close()` releases the communicator if it is the executor's own.

    Attributes:
        plan: as given.
        rank: my pipeline rank.
        stages: the stages of this rank, by id.
        communicator: moves the tensors of the borders.
        is_usable: False once this rank has raised in a step or in a call after it, until it reconnects.

    Example:
        ```python
        stage = torch.nn.Linear(4, 4)  # this rank's part of the model
        plan = get_plan("1f1b", P=2, M=4)
        with Executor(plan, [stage], loss_fn=torch.nn.functional.mse_loss, loss_scale="mean") as executor:
            losses, outputs = executor.step(torch.ones(8, 4), torch.zeros(8, 4))
        ```
    """

    def __init__(
        self,
        plan: Plan,
        stages: Mapping[int, Stage] | Sequence[Stage] | torch.nn.ModuleList,
        *,
        communicator: Communicator | dist.ProcessGroup | None = None,
        loss_fn: Callable[[Any, Any], torch.Tensor] | None = None,
        loss_scale: str | float = "sum",
        rank_mapping: Sequence[int] | None = None,
        topology: PipelineTopology | None = None,
        layout: str | tuple[str, int] | list[str | tuple[str, int]] = "replicated",
        grad_reduce: GradReduce = "leader",
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
        if not isinstance(communicator, Communicator):
            communicator = self._new_communicator(device_of(stages))
        self.communicator = comm = communicator
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
            self._loss_factor, self._is_mean = loss_factor(loss_scale, plan), loss_scale == "mean"
            ReducedOnce(self.stages, (loss_fn,), is_training=True)  # refuses unsupported modules
            check(plan)
        own_program = [row_text(row) for row in plan.program] if plan.has_own_program else None
        settings = {
            "plan": (f"{plan.name} for P={plan.P}, M={plan.M}", plan.digest, own_program),
            "topology or rank_mapping": (self._ranks_of,),
            "dynamic_shapes": (dynamic_shapes,),
            "layout": (layout,),
            "grad_reduce": (grad_reduce,),
        }
        with self._closed_on_failure():
            require_equal_settings(comm, settings)
        warn_of_idle(plan)
        self._loss_fn = loss_fn
        self._return_outputs = return_outputs
        self._options: dict[str, Any] = {"dynamic_shapes": dynamic_shapes, "check_border": check_border}
        self._record_timeline = record_timeline
        self._first_stages = [chain[0] for chain in plan.chains if plan.owner[chain[0]] == self.rank]
        self._loss_stages = [chain[-1] for chain in plan.chains if plan.owner[chain[-1]] == self.rank]
        self._kind_of: dict[Any, int] = {}
        self._is_closed = False
        self._step_count = StepCount()
        self._graph_parameters = GraphParameters(self.stages)
        self._scaler_watch = ScalerWatch([loss_fn] if comm.size > 1 else [])
        self._forget_step()
        self._connect()

    @contextlib.contextmanager
    def _closed_on_failure(self) -> Iterator[None]:
        """Closes a communicator of the executor's own if the constructor's checks fail, after informing the
        other ranks."""
        try:
            yield
        except BaseException:
            if self._owns_communicator:
                with contextlib.suppress(PipeCommError):
                    self.communicator.close()
            raise

    def _new_communicator(self, device: torch.device | None) -> Communicator:
        return connect(self._group, device, has_relays=self._relay_arguments is not None)

    def _connect(self) -> None:
        """Makes everything that belongs to one communicator."""
        self.is_usable = True
        self._channels = BorderChannels.for_chains(self.communicator, len(self.plan.chains))
        relayed = None
        if self._relay_arguments:
            relay = make_relay(self.communicator, *self._relay_arguments)
            relayed = RelayedBorders(self.plan, relay, self._channels.num_channels)
        self._mailbox = ExecutorMailbox(
            self.plan, self.rank, self._channels, self._ranks_of, relayed, **self._options
        )
        self._recorder = Recorder(self.communicator.device) if self._record_timeline else None
        self._program = self._mailbox.prepare(self.plan.program[self.rank])
        self._mailbox.connect(self._program)
        self._begin_gradients()

    def _begin_gradients(self) -> None:
        self._gradients = StepGradients(
            self.plan,
            self.rank,
            self.stages,
            self._loss_fn,
            self.communicator,
            self._ranks_of,
            self._graph_parameters,
            before=getattr(self, "_gradients", None),
        )

    def __repr__(self) -> str:
        stages = ", ".join(map(str, self.stages))
        return f"<Executor of {self.plan.name}, rank {self.rank} of {self.plan.P}, stages {stages}>"

    # ---------------------------------------------------------------- step

    def step(
        self,
        inputs: MicroBatches | Mapping[int, MicroBatches | None] | None = None,
        targets: MicroBatches | Mapping[int, MicroBatches | None] | None = None,
        *,
        kwargs: Mapping[Any, Any] | Sequence[Mapping[str, Any]] | None = None,
        arg_mbs: list[Any] | None = None,
        kwarg_mbs: list[Mapping[str, Any]] | None = None,
        target_mbs: list[Any] | None = None,
        criterion: Callable[..., torch.Tensor] | None = None,
        return_outputs: bool | None = None,
    ) -> StepResult:
        """Forward and backward of all micro-batches; only forward where grad mode is off. Collective.

        Args:
            inputs: on ranks with a chain's first stage, a list with one entry per micro-batch: a tensor, a
                tuple of positional arguments, or a dict of keywords. They may differ in shape. Or a whole
                batch: a tensor, or a tuple or dict of tensors and None, which is cut along dim 0 as by
                `torch.tensor_split`, the first micro-batches longer by one if necessary. (A tuple of
                as many parts as there are micro-batches could be either and is refused.) Or a mapping from
                first stage to either, needed if two chains start on this rank.
            targets: on ranks with a loss stage, the second argument of `loss_fn`, in the same forms.
            kwargs: further keywords of this rank's stages, which may be any objects: one dict for all
                micro-batches, or a list of one dict for each; or a mapping from stage to either, if not all
                stages get the same. A tensor in it is not cut, and gets no gradient from the executor.
            arg_mbs, kwarg_mbs, target_mbs: `inputs`, `kwargs` and `targets` as lists with one entry per
                micro-batch, under the names of torch.distributed.pipelining (torch >= 2.14).
            criterion: instead of `loss_fn` in this step, called as `criterion(*outputs, *targets)`.
            return_outputs: instead of the constructor's in this step; None: the same.

        Arguments for stages of other ranks are ignored, so all ranks may make the same call.
        """
        is_training = torch.is_grad_enabled()
        if self._is_closed:
            raise ValueError("this Executor is closed; make a new one")
        self._step_count.begin()
        try:
            with failing_together(self._abort):
                is_new = not self.is_usable and self._owns_communicator
                if is_new:
                    self._reconnect()
            given = None if self._owns_communicator else self.communicator
            with refused_together(lambda: given, self._abort):
                inputs = pre_split("inputs", inputs, "arg_mbs", arg_mbs)
                targets = pre_split("targets", targets, "target_mbs", target_mbs)
                kwargs = pre_split("kwargs", kwargs, "kwarg_mbs", kwarg_mbs)
                self._take_arguments(inputs, targets, kwargs, is_training, criterion, return_outputs)
            # Only now: a rank with wrong arguments reports those, not the abort by another such rank.
            with failing_together(self._abort):
                if is_new:
                    self._step_count.compare(self.communicator)
            self._step_count.require_joint()
            with refused_together(lambda: given, self._abort):
                kinds_of = self._begin_step(is_training)
            with failing_together(self._abort):
                self._mailbox.begin_step(kinds_of, is_training)
                loop = PlanLoop(self.plan, self._mailbox, lambda s, m: self._inputs[s][m], self._compute)
                self._reduced = ReducedOnce(self.stages, (self._loss_fn, criterion), is_training)
                with self._reduced:
                    loop.run(self._program, is_training)
                return self._running.result()
        finally:
            self._forget_step()

    def eval(
        self,
        inputs: MicroBatches | Mapping[int, MicroBatches] | None = None,
        targets: MicroBatches | Mapping[int, MicroBatches] | None = None,
        *,
        kwargs: Mapping[Any, Any] | Sequence[Mapping[str, Any]] | None = None,
        **named_mbs: Any,
    ) -> StepResult:
        """`step` without gradients: the forwards, in the plan's order. With a `loss_fn`, losses only if there
        are targets. `arg_mbs`, `kwarg_mbs` and `target_mbs` as for `step`."""
        with torch.no_grad():
            return self.step(inputs, targets, kwargs=kwargs, **named_mbs)

    def _abort(self, reason: str) -> None:
        self.is_usable = False
        self._channels.abort(reason)

    def _forget_step(self) -> None:
        self._inputs: dict[int, list[Call]] = {}
        self._keywords: dict[int, Sequence[Mapping[str, Any]]] = {}
        self._alive: dict[tuple[int, int], _Alive] = {}
        self._weight_work: dict[tuple[int, int], list[Closure]] = {}
        self._ends: ChainEnds | None = None

    def _take_arguments(
        self, inputs: Any, targets: Any, kwargs: Any, is_training: bool, criterion: Any, keeps_outputs: Any
    ) -> None:
        num_micros = self.plan.micros_per_chain
        has_loss = criterion is not None or self._loss_fn is not None
        needing = self._loss_stages if targets is not None or (is_training and has_loss) else []
        first_stages, loss_stages = ([chain[end] for chain in self.plan.chains] for end in (0, -1))
        inputs = by_stage("inputs", inputs, self._first_stages, first_stages, num_micros)
        self._inputs = {stage: [Call.of(micro) for micro in micros] for stage, micros in inputs.items()}
        self._keywords = keywords_by_stage(kwargs, self.plan, self.stages)
        targets = by_stage("targets", targets, needing, loss_stages, num_micros)
        if self._is_mean and is_training:
            warn_of_unequal(targets)
        losses = (targets, self._loss_fn, criterion, self._loss_factor)
        keeps = self._return_outputs if keeps_outputs is None else keeps_outputs
        self._ends = ChainEnds(self._loss_stages, num_micros, *losses, keeps)

    def _begin_step(self, is_training: bool) -> dict[int, list[int]]:
        """The kinds of the micro-batches of the chains that start here, by first stage."""
        if is_training:
            self._begin_gradients()
            self._scaler_watch.begin_step()
        if self._recorder is not None:
            self._recorder.begin_step(is_training)
        micros = range(self.plan.micros_per_chain)
        return {stage: [self._kind(is_training, stage, micro) for micro in micros] for stage in self._inputs}

    def _kind(self, is_training: bool, stage: int, micro: int) -> int:
        """A number that stands for all that the shapes of the stages' outputs on this rank may depend on."""
        args, kwargs, _ = self._inputs[stage][micro]
        named = (kwargs, self._keywords_of(stage, micro)) if kwargs or self._keywords else ()
        key = is_training, signature(args), signature(named)
        return self._kind_of.setdefault(key, len(self._kind_of))

    def _keywords_of(self, stage: int, micro: int) -> Mapping[str, Any]:
        return self._keywords[stage][micro] if stage in self._keywords else {}

    @property
    def _running(self) -> ChainEnds:
        """The chain ends of the running step."""
        assert self._ends is not None
        return self._ends

    # ---------------------------------------------------------------- actions

    def _compute(
        self, item: Compute, position: int, actions: Sequence[Action], operands: Sequence[Any]
    ) -> None:
        start = self._recorder.mark() if self._recorder is not None else None
        try:
            if len(actions) == 2:
                (forward, backward), (call, gradients) = actions, operands
                self._fused(forward, backward, call, gradients)
            else:
                kind, stage, micro = actions[0]
                self._HANDLERS[kind](self, stage, micro, operands[0])
        except PipeCommError:
            raise
        except Exception as error:
            rank = self.communicator.rank
            failure = StageError(
                f"rank {rank}: {item} at position {position} of {self.plan.name}: {summary_of(error)}",
                op=str(item),
                rank=rank,
                origin_rank=rank,
            )
            failure.position, failure.action = position, item
            raise failure from error
        if self._recorder is not None:
            self._recorder.add(start, self._recorder.mark())

    def _forward(self, stage: int, micro: int, call: Call) -> None:
        output = call.run(stage, self.stages[stage], self._keywords_of(stage, micro))
        self._keep(stage, micro, call, output)

    def _keep(self, stage: int, micro: int, call: Call, output: Any, loss: Any = None) -> None:
        """Passes a stage's output on, and keeps what the backward needs of it."""
        edges: tuple[GradientEdge, ...] = ()
        if self.plan.next_of[stage] is None:
            loss = self._running.finish(stage, micro, output, loss)
        else:
            outputs, structure = flattened(output, f"the outputs of stage {stage}")
            edges = tuple([get_gradient_edge(value) for value in outputs if value.requires_grad])
            self._mailbox.put_output(stage, micro, outputs, structure)
        if torch.is_grad_enabled():
            if self._graph_parameters.is_to_see(stage):
                roots = edges if loss is None else (loss,)
                given = call, self._keywords_of(stage, micro), self._running.targets_of(stage, micro)
                self._graph_parameters.see(stage, roots, given)
            self._alive[stage, micro] = _Alive(tuple(call.received), edges, loss)

    def _backward(self, stage: int, micro: int, gradients: list[torch.Tensor] | None) -> None:
        alive = self._alive.pop((stage, micro))
        run_backward(*_roots(alive, gradients))
        self._hand_back(stage, micro, alive)

    def _input_backward(self, stage: int, micro: int, gradients: list[torch.Tensor] | None) -> None:
        alive = self._alive.pop((stage, micro))
        works = split_backward(*_roots(alive, gradients), alive.inputs)
        self._weight_work[stage, micro] = self._reduced.weight_work(stage, works)
        self._hand_back(stage, micro, alive)

    def _weight_backward(self, stage: int, micro: int, _operand: None) -> None:
        for work in self._weight_work.pop((stage, micro)):
            work()

    def _hand_back(self, stage: int, micro: int, alive: _Alive) -> None:
        if self.plan.prev_of[stage] is not None:
            self._mailbox.put_gradient(stage, micro, alive.inputs)

    def _fused(self, forward: Action, backward: Action, call: Call, gradients: Any) -> None:
        """Calls the stages' own overlapped method if they have one, else runs forward, then backward."""
        _, stage0, micro0 = forward
        _, stage1, micro1 = backward
        module0, module1 = self.stages[stage0], self.stages[stage1]
        overlapped = getattr(type(module0), "overlapped_forward_backward", None)
        roots, root_gradients = _roots(self._alive[stage1, micro1], gradients)
        has_keywords = call.kwargs or self._keywords_of(stage0, micro0)  # which the method cannot take
        if overlapped is None or type(module0) is not type(module1) or not roots or has_keywords:
            self._forward(stage0, micro0, call)
            self._backward(stage1, micro1, gradients)
            return
        alive = self._alive.pop((stage1, micro1))
        outputs1, gradients1 = ([], []) if gradients is None else (roots, root_gradients)
        criterion, labels = self._running.criterion_of(stage0, micro0)
        first = (module0, call.args, criterion, labels)
        second = (module1, alive.loss, list(outputs1), list(gradients1))
        outputs, loss = overlapped(*first, *second)
        self._keep(stage0, micro0, call, outputs[0] if len(outputs) == 1 else tuple(outputs), loss)
        self._hand_back(stage1, micro1, alive)

    _HANDLERS: ClassVar[dict[str, Callable[..., None]]] = {
        "F": _forward,
        "B": _backward,
        "I": _input_backward,
        "W": _weight_backward,
    }

    # ---------------------------------------------------------------- after steps

    def timeline(self) -> Timeline:
        """When the actions of the last step ran on all ranks, in seconds. Collective; the Executor must have
        been made with record_timeline=True on all ranks."""
        with self.communicator.collective("all_to_all"):
            if self._recorder is None:
                raise ValueError("make the Executor with record_timeline=True to get a timeline")
        return gather_timeline(self.plan, self.rank, self.communicator, self._ranks_of, self._recorder)

    def _reconnect(self) -> None:
        """Replaces the failed communicator after a failed step, which failed on all ranks."""
        self._release()
        self.communicator = self._new_communicator(self.communicator.device)
        self._connect()

    def close(self) -> None:
        """Ends the communicator if it is the executor's own; no step can follow. Idempotent."""
        self._is_closed = True
        self._release()

    def _release(self) -> None:
        self._channels.close_headers()
        if self._owns_communicator:
            self.communicator.close()

    def __enter__(self) -> Executor:
        return self

    def __exit__(self, exc_type, exc, traceback) -> None:
        if exc_type is None:
            return self.close()
        self._channels.abort(summary_of(exc))
        with contextlib.suppress(Exception):  # the block's own exception is more helpful
            self.close()


def _roots(alive: _Alive, gradients: list[torch.Tensor] | None) -> tuple[Sequence[Any], Sequence[Any]]:
    """The roots of a backward: the loss, or the outputs with their gradients."""
    if gradients is not None:
        return alive.edges, gradients
    if alive.loss is None:
        return (), ()
    return (alive.loss,), (torch.ones_like(alive.loss),)
