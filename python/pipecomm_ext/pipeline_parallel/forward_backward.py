"""Megatron-core's schedules: plans of `pipecomm_ext.schedules`, run with its step functions and hooks.

Signatures and semantics: megatron.core.pipeline_parallel.schedules (Megatron Core 0.20). Different on
purpose:

* One loop runs all three, over a plan that can be printed, checked and drawn; without pipelining it is 1F1B
  of one rank.
* Overlap works in plain 1F1B too, and one chunk per rank works with interleaving.
* With overlap a message is posted when its producer is expected to be done and waited for at its consumer,
  also with variable shapes: the header is read there.
* A stage whose output needs no gradient keeps its neighbours going: its gradients are None, or zeros with
  fixed shapes.
* The config is only read. An exception on one rank aborts the communicator, so that the others fail at once
  with the cause; P2PCommunicator.close() then makes room for a new one.
* Wrong arguments are ValueError, TypeError or RuntimeError, not assertions.

Without `p2p_communicator` and `pg_collection`, groups are those of `parallel_state.initialize_pipeline`,
with no context parallelism.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

from .. import parallel_state
from ..schedules import ACT, GRAD, Plan, interleaved_1f1b, one_f_one_b
from .boundary import shape_list
from .config import setting
from .counting import default_pipeline, get_tensor_shapes
from .embedding import clear_embedding_activation_buffer, finish_embedding_wgrad_compute
from .hooks import Hooks, InterleavedHooks, UnpipelinedHooks
from .p2p_communicator import P2PCommunicator
from .plan_runner import PlanRunner, Shapes, StepArguments
from .wrapped import attribute_of, size_of

_one_f_one_b = lru_cache(maxsize=16)(one_f_one_b)
_interleaved_1f1b = lru_cache(maxsize=16)(interleaved_1f1b)


def get_forward_backward_func(
    pp_size: int | None = None, vp_size: int | None = None, schedule_pg_collection: Any = None
) -> Callable[..., list]:
    """The schedule for a pipeline of `pp_size` ranks and `vp_size` chunks per rank (None: no interleaving).

    Both None: those of the default topology (`parallel_state.initialize_pipeline`); one rank without one.
    `schedule_pg_collection` is accepted and has no effect: pipelines of several modules are not supported.
    """
    if pp_size is None and vp_size is None:
        pp_size, _, vp_size = default_pipeline()
    if pp_size is None or pp_size <= 1:
        return forward_backward_no_pipelining
    if vp_size is None:
        return forward_backward_pipelining_without_interleaving
    return forward_backward_pipelining_with_interleaving


def forward_backward_no_pipelining(
    *,
    forward_step_func: Callable[..., Any],
    data_iterator: Any,
    model: Any,
    num_microbatches: int,
    seq_length: int,
    micro_batch_size: int,
    decoder_seq_length: int | None = None,
    forward_only: bool = False,
    collect_non_loss_data: bool = False,
    first_val_step: bool | None = None,
    adjust_tensor_shapes_fn: Callable[..., Any] | None = None,
    p2p_communicator: P2PCommunicator | None = None,
    pg_collection: Any = None,
    force_all_reduce: bool = False,
) -> list:
    """Forward and backward of each micro-batch in turn; no messages.

    Args:
        forward_step_func: see `forward_step`.
        data_iterator, model: passed to it; each may be a list of one. `model.config` is the `PipelineConfig`.
        num_microbatches: forwards, and backwards unless `forward_only`.
        seq_length, micro_batch_size, decoder_seq_length, p2p_communicator: not used here.
        collect_non_loss_data, first_val_step: see `forward_step_calc_loss` and `check_first_val_step`.
        adjust_tensor_shapes_fn: must be None.
        pg_collection: `cp` and `tp` are read, if there are such; passed on to
            config.finalize_model_grads_func.
        force_all_reduce: passed on to it.

    Returns:
        What the loss function gave beside the loss, one entry per micro-batch.
    """
    if adjust_tensor_shapes_fn is not None:
        raise ValueError("adjust_tensor_shapes_fn has nothing to adjust without pipelining")
    return _run(
        _one_f_one_b(1, num_microbatches),
        UnpipelinedHooks,
        models=[_only(model, "model")],
        data_iterators=[_only(data_iterator, "data_iterator")],
        forward_step_func=forward_step_func,
        num_microbatches=num_microbatches,
        forward_only=forward_only,
        collect_non_loss_data=collect_non_loss_data,
        first_val_step=first_val_step,
        force_all_reduce=force_all_reduce,
        groups=pg_collection or SimpleNamespace(tp=None, cp=None, pp=None),
    )


def forward_backward_pipelining_without_interleaving(
    *,
    forward_step_func: Callable[..., Any],
    data_iterator: Any,
    model: Any,
    num_microbatches: int,
    seq_length: int,
    micro_batch_size: int,
    decoder_seq_length: int | None = None,
    forward_only: bool = False,
    collect_non_loss_data: bool = False,
    first_val_step: bool | None = None,
    adjust_tensor_shapes_fn: Callable[..., Any] | None = None,
    p2p_communicator: P2PCommunicator | None = None,
    pg_collection: Any = None,
    force_all_reduce: bool = False,
) -> list:
    """1F1B: the plan `schedules.one_f_one_b`. Collective over the pipeline.

    Args:
        forward_step_func, data_iterator, model, num_microbatches, forward_only, collect_non_loss_data,
            first_val_step, force_all_reduce: as in `forward_backward_no_pipelining`. With
            config.num_microbatches_with_partial_activation_checkpoints, `forward_step_func` gets a third
            argument: whether to recompute all activations of this micro-batch.
        seq_length, micro_batch_size, decoder_seq_length: of a micro-batch; see `get_tensor_shapes`.
        adjust_tensor_shapes_fn: (shapes received by a stage, shapes sent) -> the same two lists, changed.
        p2p_communicator, pg_collection: both or neither; the latter has `tp`, `cp`, and what
            config.finalize_model_grads_func reads.

    Returns:
        On the last stage what the loss function gave beside the loss, one entry per micro-batch; else [].

    Raises:
        ValueError, TypeError: wrong arguments.
        PipeCommError: another rank failed.
    """
    model = _only(model, "model")
    config = attribute_of(model, "config")
    _require_consistent(config)
    p2p, groups = _pipeline(config, p2p_communicator, pg_collection)
    shapes = _shapes(config, groups, seq_length, micro_batch_size, decoder_seq_length)
    recv_shapes, send_shapes = shapes, shapes
    if adjust_tensor_shapes_fn is not None:
        recv_shapes, send_shapes = map(shape_list, adjust_tensor_shapes_fn(recv_shapes, send_shapes))
    return _run(
        _one_f_one_b(p2p.total_stages, num_microbatches),
        Hooks,
        models=[model],
        data_iterators=[_only(data_iterator, "data_iterator")],
        forward_step_func=forward_step_func,
        num_microbatches=num_microbatches,
        forward_only=forward_only,
        collect_non_loss_data=collect_non_loss_data,
        first_val_step=first_val_step,
        force_all_reduce=force_all_reduce,
        groups=groups,
        p2p=p2p,
        shapes={ACT: recv_shapes, GRAD: send_shapes},
    )


def forward_backward_pipelining_with_interleaving(
    *,
    forward_step_func: Callable[..., Any],
    data_iterator: list,
    model: list,
    num_microbatches: int,
    seq_length: int,
    micro_batch_size: int,
    decoder_seq_length: int | None = None,
    forward_only: bool = False,
    collect_non_loss_data: bool = False,
    first_val_step: bool | None = None,
    adjust_tensor_shapes_fn: Callable[..., Any] | None = None,
    p2p_communicator: P2PCommunicator | None = None,
    pg_collection: Any = None,
    force_all_reduce: bool = False,
) -> list:
    """Interleaved 1F1B: the plan `schedules.interleaved_1f1b`. Collective over the pipeline.

    Arguments and results are those of `forward_backward_pipelining_without_interleaving`, except:

    Args:
        model, data_iterator: lists with one entry per chunk of this rank; chunk c of rank r is stage c * PP
            + r.
        num_microbatches: cut into groups of config.microbatch_group_size_per_vp_stage (None: PP).
        adjust_tensor_shapes_fn: must be None.

    Raises:
        ValueError: one rank; or not PP <= group size <= number of micro-batches.
        RuntimeError: the last group is smaller than PP.
    """
    for name, value in (("model", model), ("data_iterator", data_iterator)):
        if not isinstance(value, (list, tuple)) or not value:
            raise TypeError(f"{name} must be a list with one entry per chunk, not {type(value).__name__}")
    if len(model) != len(data_iterator):
        raise ValueError(f"there are {len(model)} model chunks and {len(data_iterator)} data iterators")
    if adjust_tensor_shapes_fn is not None:
        raise ValueError("adjust_tensor_shapes_fn is not supported with interleaving")
    config = attribute_of(model[0], "config")
    _require_consistent(config)
    p2p, groups = _pipeline(config, p2p_communicator, pg_collection)
    num_ranks = p2p.total_stages
    if num_ranks == 1:
        raise ValueError("interleaving needs at least two pipeline ranks")
    group_size = setting(config, "microbatch_group_size_per_vp_stage") or num_ranks
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
    shapes = _shapes(config, groups, seq_length, micro_batch_size, decoder_seq_length)
    return _run(
        _interleaved_1f1b(num_ranks, num_microbatches, len(model), group_size),
        InterleavedHooks,
        models=model,
        data_iterators=data_iterator,
        forward_step_func=forward_step_func,
        num_microbatches=num_microbatches,
        forward_only=forward_only,
        collect_non_loss_data=collect_non_loss_data,
        first_val_step=first_val_step,
        force_all_reduce=force_all_reduce,
        groups=groups,
        p2p=p2p,
        shapes={ACT: shapes, GRAD: shapes},
    )


def _run(
    plan: Plan,
    make_hooks: type[Hooks],
    *,
    models: list,
    data_iterators: list,
    forward_step_func: Callable[..., Any],
    num_microbatches: int,
    forward_only: bool,
    collect_non_loss_data: bool,
    first_val_step: bool | None,
    force_all_reduce: bool,
    groups: Any,
    p2p: P2PCommunicator | None = None,
    shapes: dict[str, Shapes] | None = None,
) -> list:
    config = attribute_of(models[0], "config")
    rank = 0 if p2p is None else p2p.current_stage
    is_last_rank = rank == plan.P - 1
    embedding = None if forward_only else clear_embedding_activation_buffer(config, models, is_last_rank)
    step = StepArguments(
        forward_step_func=forward_step_func,
        data_iterators=data_iterators,
        models=models,
        config=config,
        num_microbatches=num_microbatches,
        cp_size=size_of(getattr(groups, "cp", None)),
        forward_only=forward_only,
        collect_non_loss_data=collect_non_loss_data,
        first_val_step=first_val_step,
    )
    forward_chunks, backward_chunks = (
        [action.stage // plan.P for action in plan.compute[rank] if action.kind == kind] for kind in "FB"
    )
    with make_hooks(config, models, rank, forward_chunks, backward_chunks, forward_only) as hooks:
        runner = PlanRunner(plan, rank, step, hooks, p2p, shapes)
        runner.run()
    finalize = setting(config, "finalize_model_grads_func")
    if not forward_only:
        if embedding is not None:
            finish_embedding_wgrad_compute(config, embedding, is_last_rank, getattr(groups, "tp", None))
        if finalize is not None:
            is_per_token = setting(config, "calculate_per_token_loss")
            finalize(
                list(models),
                runner.total_num_tokens if is_per_token else None,
                pg_collection=groups,
                force_all_reduce=force_all_reduce,
            )
    return runner.forward_data_store


def _only(value: Any, name: str) -> Any:
    """What is given as it is, or as a list of one."""
    if not isinstance(value, (list, tuple)):
        return value
    if len(value) != 1:
        raise ValueError(f"{name} must be one, or a list of one, not of {len(value)}")
    return value[0]


def _require_consistent(config: Any) -> None:
    if setting(config, "overlap_p2p_comm"):
        if setting(config, "batch_p2p_comm"):
            raise ValueError("config.overlap_p2p_comm needs config.batch_p2p_comm=False")
    elif setting(config, "overlap_p2p_comm_warmup_flush"):
        raise ValueError("config.overlap_p2p_comm_warmup_flush needs config.overlap_p2p_comm")


def _pipeline(config: Any, p2p: P2PCommunicator | None, groups: Any) -> tuple[P2PCommunicator, Any]:
    """The two arguments, or what stands for them."""
    if (p2p is None) != (groups is None):
        raise ValueError("give both p2p_communicator and pg_collection, or neither")
    if p2p is None:
        topology = parallel_state.get_pipeline_topology()
        pp_group = topology.get_pipeline_model_parallel_group()
        tp_group = topology.get_tensor_model_parallel_group()
        return P2PCommunicator(pp_group, config), SimpleNamespace(pp=pp_group, tp=tp_group, cp=None)
    if not isinstance(p2p, P2PCommunicator):
        raise TypeError(
            f"p2p_communicator must be a P2PCommunicator of this package, not {type(p2p).__name__}"
        )
    return p2p, groups


def _shapes(
    config: Any, groups: Any, seq_length: int, micro_batch_size: int, decoder_seq_length: int | None
) -> Shapes:
    return get_tensor_shapes(
        seq_length=seq_length,
        micro_batch_size=micro_batch_size,
        decoder_seq_length=decoder_seq_length,
        config=config,
        tp_group=getattr(groups, "tp", None),
        cp_group=getattr(groups, "cp", None),
    )
