"""Megatron-core's schedules: plans of `pipecomm_ext.schedules`, run with its step functions and hooks.

Signatures and semantics: megatron.core.pipeline_parallel.schedules (Megatron Core 0.20). Different on
purpose:

* One loop runs all three, over a plan that can be printed, checked and drawn; without pipelining it is 1F1B
  of one rank.
* One chunk per rank works with interleaving.
* In every mode a message is posted when its producer is expected to be done and waited for at its consumer,
  also with variable shapes: the header is read there.
* A stage whose output needs no gradient does not block its neighbours: its gradients are None, or zeros with
  fixed shapes.
* The config is only read. An exception on one rank aborts the communicator, so that the others fail at once
  with the cause; after P2PCommunicator.close() a new one can be made.
* Wrong arguments are ValueError, TypeError or RuntimeError, not assertions.

Without `p2p_communicator` and `pg_collection`, groups are those of the default pipeline: of an initialised
`megatron.core.parallel_state`, else of `parallel_state.initialize_pipeline`, with no context parallelism.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ParamSpec

from ..core.timers import timed
from ..runtime.plan_loop import failing_together, refused_together
from ..schedules import ACT, GRAD, Plan, interleaved_1f1b, one_f_one_b
from ..schedules.actions import actions_in
from .config import check_supported, setting
from .default_pipeline import default_groups, default_sizes, megatron_cp_group
from .embedding import clear_embedding_activation_buffer, finish_embedding_wgrad_compute
from .hooks import Hooks, InterleavedHooks, UnpipelinedHooks
from .loss_scaling import auxiliary_loss_setters
from .p2p_communicator import P2PCommunicator
from .plan_runner import PlanRunner, Shapes, StepArguments
from .shapes import get_tensor_shapes, shape_list

_one_f_one_b = functools.lru_cache(maxsize=16)(one_f_one_b)
_interleaved_1f1b = functools.lru_cache(maxsize=16)(interleaved_1f1b)


def get_forward_backward_func(
    pp_size: int | None = None, vp_size: int | None = None, schedule_pg_collection: Any = None
) -> Callable[..., list[Any]]:
    """The schedule for a pipeline of `pp_size` ranks and `vp_size` chunks per rank (None: no interleaving).

    Without `pp_size` it is that of an initialised `megatron.core.parallel_state`, else of
    `parallel_state.initialize_pipeline`, else, in a world of one rank, 1: no pipelining. So is `vp_size` if
    both are None.
    `schedule_pg_collection` has no effect.

    Raises:
        ValueError: no `pp_size` is given, none can be found, and there are several ranks; or
            `schedule_pg_collection` is Megatron's for pipelines of several modules, which are not supported.
    """
    if type(schedule_pg_collection).__name__ == "MultiModuleProcessGroupCollection":
        raise ValueError("pipelines of several modules are not supported; use Megatron's own schedules")
    if pp_size is None:
        pp_size, _, default_vp_size = default_sizes()
        vp_size = default_vp_size if vp_size is None else vp_size
    if pp_size <= 1:
        return forward_backward_no_pipelining
    if vp_size is None:
        return forward_backward_pipelining_without_interleaving
    return forward_backward_pipelining_with_interleaving


Parameters = ParamSpec("Parameters")
Prepared = tuple[Plan, type[Hooks], dict[str, Shapes] | None]  # shapes: see `P2PMailbox`


def _with_arguments_of(
    make_step: Callable[Parameters, StepArguments],
) -> Callable[[Callable[[StepArguments], Prepared]], Callable[Parameters, list[Any]]]:
    """Decorator: a function that checks StepArguments and prepares the step becomes a schedule, with their
    fields as keywords."""

    def decorate(prepare: Callable[[StepArguments], Prepared]) -> Callable[Parameters, list[Any]]:
        def schedule(*args: Parameters.args, **kwargs: Parameters.kwargs) -> list[Any]:
            try:
                step = make_step(*args, **kwargs)
            except TypeError as error:  # a missing or unknown argument
                raise TypeError(str(error).replace("StepArguments.__init__", prepare.__name__)) from None
            with refused_together(lambda: step.communicator, step.abort):
                plan, make_hooks, shapes = prepare(step)
                check_supported(step.config)
                auxiliary_loss_setters(step.config)
            barrier = {"barrier": True} if setting(step.config, "barrier_with_L1_time") else {}
            with timed(setting(step.config, "timers"), "forward-backward", 1, **barrier):
                return _run(plan, make_hooks, step, shapes)

        functools.update_wrapper(schedule, prepare)
        signature = inspect.signature(make_step).replace(return_annotation="list")
        schedule.__signature__ = signature  # type: ignore[attr-defined]  # any function may have one
        return schedule

    return decorate


@_with_arguments_of(StepArguments)
def forward_backward_no_pipelining(step: StepArguments) -> Prepared:
    """Forward and backward of each micro-batch in turn; no messages.

    Args:
        forward_step_func: see `forward_step`.
        data_iterator, model: passed to it; each may be a list of one. `model.config` is the `PipelineConfig`.
        num_microbatches: forwards, and backwards unless `forward_only`.
        seq_length, micro_batch_size, decoder_seq_length, p2p_communicator: not used here.
        collect_non_loss_data, first_val_step: see `forward_step_calc_loss` and `check_first_val_step`.
        adjust_tensor_shapes_fn: must be None.
        pg_collection: its `cp` and `tp` are read if it has them; passed on unchanged to
            config.finalize_model_grads_func, even if it is None.
        force_all_reduce: also passed to that function if it is true or the function takes it.

    Returns:
        What the loss function returned besides the loss, one entry per micro-batch.
    """
    step.p2p_communicator = None
    if step.adjust_tensor_shapes_fn is not None:
        raise ValueError("adjust_tensor_shapes_fn has nothing to adjust without pipelining")
    _as_one_chunk(step)
    step.groups = step.pg_collection or SimpleNamespace(cp=megatron_cp_group())
    return _one_f_one_b(1, step.num_microbatches), UnpipelinedHooks, None


@_with_arguments_of(StepArguments)
def forward_backward_pipelining_without_interleaving(step: StepArguments) -> Prepared:
    """1F1B: the plan `schedules.one_f_one_b`. Collective over the pipeline.

    Args:
        forward_step_func: as in `forward_backward_no_pipelining`. With
            config.num_microbatches_with_partial_activation_checkpoints, it gets a third argument: whether to
            recompute all activations of this micro-batch.
        data_iterator, model, num_microbatches, forward_only: as in `forward_backward_no_pipelining`.
        collect_non_loss_data, first_val_step, force_all_reduce: the same.
        seq_length, micro_batch_size, decoder_seq_length: of a micro-batch; see `get_tensor_shapes`.
        adjust_tensor_shapes_fn: (shapes received by a stage, shapes sent) -> the same two lists, changed.
        p2p_communicator, pg_collection: both or neither; the latter has `tp`, `cp`, and what
            config.finalize_model_grads_func reads.

    Returns:
        On the last stage what the loss function returned besides the loss, one per micro-batch; else [].

    Raises:
        ValueError, TypeError: wrong arguments.
        PipeCommError: another rank failed.
    """
    _connect(step)
    _as_one_chunk(step)
    p2p, shapes = _pipeline(step)
    recv_shapes, send_shapes = shapes, shapes
    if step.adjust_tensor_shapes_fn is not None:
        recv_shapes, send_shapes = map(shape_list, step.adjust_tensor_shapes_fn(shapes, shapes))
    plan = _one_f_one_b(p2p.total_stages, step.num_microbatches)
    return plan, Hooks, {ACT: recv_shapes, GRAD: send_shapes}


@_with_arguments_of(StepArguments)
def forward_backward_pipelining_with_interleaving(step: StepArguments) -> Prepared:
    """Interleaved 1F1B: the plan `schedules.interleaved_1f1b`. Collective over the pipeline.

    Arguments and results are those of `forward_backward_pipelining_without_interleaving`, except:

    Args:
        model, data_iterator: lists with one entry per chunk of this rank; chunk c of rank r is stage c * PP
            + r.
        num_microbatches: cut into groups of config.microbatch_group_size_per_vp_stage (None: PP).
        decoder_seq_length: not used.
        adjust_tensor_shapes_fn: must be None.

    Raises:
        ValueError: one rank; or not PP <= group size <= number of micro-batches.
        RuntimeError: the last group is smaller than PP.
    """
    _connect(step)
    for name in ("model", "data_iterator"):
        value = getattr(step, name)
        if not isinstance(value, (list, tuple)) or not value:
            raise TypeError(f"{name} must be a list with one entry per chunk, not {type(value).__name__}")
    num_chunks, num_microbatches = len(step.model), step.num_microbatches
    if num_chunks != len(step.data_iterator):
        raise ValueError(f"there are {num_chunks} model chunks and {len(step.data_iterator)} data iterators")
    if step.adjust_tensor_shapes_fn is not None:
        raise ValueError("adjust_tensor_shapes_fn is not supported with interleaving")
    step.decoder_seq_length = None  # Megatron's interleaved schedule ignores it
    p2p, shapes = _pipeline(step)
    num_ranks = p2p.total_stages
    if num_ranks == 1:
        raise ValueError("interleaving needs at least two pipeline ranks")
    group_size = setting(step.config, "microbatch_group_size_per_vp_stage") or num_ranks
    if not num_ranks <= group_size <= num_microbatches:
        raise ValueError(
            f"microbatch_group_size_per_vp_stage is {group_size}; it must be at least the number of pipeline "
            f"ranks, {num_ranks}, and at most that of micro-batches, {num_microbatches}"
        )
    if 0 < num_microbatches % group_size < num_ranks:
        raise RuntimeError(
            f"of {num_microbatches} micro-batches in groups of {group_size} the last group has "
            f"{num_microbatches % group_size}; it must have at least {num_ranks}, as many as pipeline ranks"
        )
    plan = _interleaved_1f1b(num_ranks, num_microbatches, num_chunks, group_size)
    return plan, InterleavedHooks, {ACT: shapes, GRAD: shapes}


def _run(
    plan: Plan, make_hooks: type[Hooks], step: StepArguments, shapes: dict[str, Shapes] | None
) -> list[Any]:
    """Runs the plan, and the hooks that follow it."""
    config, p2p, is_training = step.config, step.p2p_communicator, not step.forward_only
    rank = 0 if p2p is None else p2p.current_stage
    is_last_rank, embedding = rank == plan.P - 1, None
    actions = [action for item in plan.compute[rank] for action in actions_in(item)]
    forward_chunks, backward_chunks = (
        [action.stage // plan.P for action in actions if action.kind == kind] for kind in "FB"
    )
    with failing_together(step.abort):  # hooks are the user's code, and the other ranks wait
        if is_training:
            embedding = clear_embedding_activation_buffer(config, step.model, is_last_rank)
        hooks = make_hooks(config, step.model, rank, forward_chunks, backward_chunks, step.forward_only)
        with hooks:
            runner = PlanRunner(plan, rank, step, hooks, shapes)
            runner.run()
        if embedding is not None:
            tp_group = getattr(step.groups, "tp", None)
            finish_embedding_wgrad_compute(config, embedding, is_last_rank, tp_group)
        finalize = setting(config, "finalize_model_grads_func")
        if is_training and finalize is not None:
            num_tokens = runner.total_num_tokens if setting(config, "calculate_per_token_loss") else None
            finalize(list(step.model), num_tokens, **_finalize_options(finalize, step))
    return runner.forward_data_store


def _finalize_options(finalize: Callable[..., Any], step: StepArguments) -> dict[str, Any]:
    """The keywords that the hook takes; its signature differs between versions of Megatron. If
    force_all_reduce is on, it is always passed."""
    options = {"pg_collection": step.pg_collection, "force_all_reduce": step.force_all_reduce}
    try:
        parameters = inspect.signature(finalize).parameters
    except ValueError:  # some C callables have no signature
        return options
    if any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters.values()):
        return options
    taken = {name: value for name, value in options.items() if name in parameters}
    return {**taken, "force_all_reduce": True} if step.force_all_reduce else taken


def _as_one_chunk(step: StepArguments) -> None:
    """Makes lists of model and data iterator, unless they are lists of one already."""
    for name in ("model", "data_iterator"):
        value = getattr(step, name)
        if not isinstance(value, (list, tuple)):
            setattr(step, name, [value])
        elif len(value) != 1:
            raise ValueError(f"{name} must be one, or a list of one, not of {len(value)}")


def _connect(step: StepArguments) -> None:
    """Finds the communicator of the default pipeline, if none was passed: the first thing a schedule does,
    since a refusal of its other arguments reaches the other ranks over it."""
    if step.p2p_communicator is None and step.pg_collection is None and step.model not in ([], ()):
        step.groups = default_groups()
        step.p2p_communicator = P2PCommunicator(step.groups.pp, step.config)


def _pipeline(step: StepArguments) -> tuple[P2PCommunicator, Shapes]:
    """The step's communicator and the shapes of a border, after checks of the arguments about them."""
    config, p2p, groups = step.config, step.p2p_communicator, step.groups or step.pg_collection
    if setting(config, "overlap_p2p_comm"):
        if setting(config, "batch_p2p_comm"):
            raise ValueError("config.overlap_p2p_comm needs config.batch_p2p_comm=False")
    elif setting(config, "overlap_p2p_comm_warmup_flush"):
        raise ValueError("config.overlap_p2p_comm_warmup_flush needs config.overlap_p2p_comm")
    if (p2p is None) != (groups is None):
        raise ValueError("give both p2p_communicator and pg_collection, or neither")
    if not isinstance(p2p, P2PCommunicator):
        raise TypeError(
            "p2p_communicator must be a pipecomm_ext.pipeline_parallel.P2PCommunicator, not "
            f"{type(p2p).__module__}.{type(p2p).__qualname__}"
        )
    step.groups = groups
    return p2p, get_tensor_shapes(
        seq_length=step.seq_length,
        micro_batch_size=step.micro_batch_size,
        decoder_seq_length=step.decoder_seq_length,
        config=config,
        tp_group=getattr(groups, "tp", None),
        cp_group=getattr(groups, "cp", None),
    )
