"""The settings of a pipeline, by Megatron-core's names. Any object with some of these attributes works."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..core.checked import require_attributes


@dataclass
class PipelineConfig:
    """The settings that `P2PCommunicator` and the schedules read. Names and defaults are those of
    Megatron-core's `ModelParallelConfig`, except where noted as ours.

    Attributes: Messages
        pipeline_dtype: of the tensors between stages; a sequence with one dtype per tensor of a boundary
            (ours). Needed wherever something is received.
        variable_seq_lengths, mtp_standalone: with either, each message is preceded by its shapes and dtypes.
        batch_p2p_comm: all directions of a call as one batch, else one batch per direction.
        overlap_p2p_comm, overlap_p2p_comm_warmup_flush: checked as in Megatron (the first needs
            batch_p2p_comm=False, the second needs the first); no effect on schedules, which always wait for a
            message only where the next compute needs it.
        batch_p2p_sync, use_ring_exchange_p2p: accepted, without effect: there is nothing to synchronise.
        deallocate_pipeline_outputs: the schedules free the data of an output once its send is posted.
        device: "cpu" or "cuda" (ours); None: a device that the group supports, preferably "cuda".

    Attributes: Schedules
        virtual_pipeline_model_parallel_size: chunks per rank, None without interleaving.
        microbatch_group_size_per_vp_stage: micro-batches that a chunk runs in a row; None: number of ranks.
        num_microbatches_with_partial_activation_checkpoints: see `forward_backward_no_pipelining`.
        hidden_size, sequence_parallel: for the shape of a boundary tensor.
        enable_autocast, autocast_dtype: run forward steps under torch.autocast.
        timers: `timers(name, log_level=2)` returns an object with start() and stop().
        barrier_with_L1_time: the timer "forward-backward", of level 1, is started with barrier=True.

    Attributes: Losses and gradients
        grad_scale_func, mtp_grad_scale_func, moe_grad_scale_func: scale a loss for mixed precision.
        calculate_per_token_loss: the loss is a sum over tokens, divided in finalize_model_grads_func.
        num_moe_experts, mtp_num_layers, experimental_attention_variant: which auxiliary losses there are.
        set_auxiliary_loss_scale: `f(kind, scale)` (ours), called after every forward with kind "moe", "mtp"
            or "attention". None: sets the scale of Megatron's scaler classes, as Megatron's schedules do; if
            they cannot be imported, a config with an auxiliary loss is refused.
        no_sync_func, grad_sync_func, param_sync_func, finalize_model_grads_func: hooks of data parallelism.
        defer_embedding_wgrad_compute, wgrad_deferral_limit: see `finish_embedding_wgrad_compute`.
    """

    pipeline_dtype: torch.dtype | Sequence[torch.dtype] | None = None
    variable_seq_lengths: bool = False
    mtp_standalone: bool = False
    batch_p2p_comm: bool = True
    overlap_p2p_comm: bool = False
    overlap_p2p_comm_warmup_flush: bool = False
    batch_p2p_sync: bool = True
    use_ring_exchange_p2p: bool = False
    deallocate_pipeline_outputs: bool = False
    device: str | torch.device | None = None

    virtual_pipeline_model_parallel_size: int | None = None
    microbatch_group_size_per_vp_stage: int | None = None
    num_microbatches_with_partial_activation_checkpoints: int | None = None
    hidden_size: int | None = None
    sequence_parallel: bool = False
    enable_autocast: bool = False
    autocast_dtype: torch.dtype | None = None
    timers: Callable[..., Any] | None = None
    barrier_with_L1_time: bool = False

    grad_scale_func: Callable[[torch.Tensor], torch.Tensor] | None = None
    mtp_grad_scale_func: Callable[[], Any] | None = None
    moe_grad_scale_func: Callable[[], Any] | None = None
    calculate_per_token_loss: bool = False
    num_moe_experts: int | None = None
    mtp_num_layers: int | None = None
    experimental_attention_variant: str | None = None
    set_auxiliary_loss_scale: Callable[[str, torch.Tensor], None] | None = None
    no_sync_func: Callable[[], Any] | Sequence[Callable[[], Any]] | None = None
    grad_sync_func: Callable[..., Any] | Sequence[Callable[..., Any]] | None = None
    param_sync_func: Callable[..., Any] | Sequence[Callable[..., Any]] | None = None
    finalize_model_grads_func: Callable[..., Any] | None = None
    defer_embedding_wgrad_compute: bool = False
    wgrad_deferral_limit: int = 0


_DEFAULTS = PipelineConfig()


def setting(config: Any, name: str) -> Any:
    """An attribute of the user's config, or the default of `PipelineConfig` if it has none of that name."""
    return getattr(config, name, getattr(_DEFAULTS, name))


def has_variable_shapes(config: Any) -> bool:
    """Whether messages carry their shapes and dtypes."""
    return bool(setting(config, "variable_seq_lengths") or setting(config, "mtp_standalone"))


# Settings of Megatron that change what training computes, and that the schedules here do not follow.
_NOT_SUPPORTED = (
    "overlap_moe_expert_parallel_comm",
    "delay_wgrad_compute",
    "hybrid_context_parallel",
    "fine_grained_activation_offloading",
    "moe_paged_stash",
)


def check_supported(config: Any) -> None:
    """Raises ValueError if a setting is on that changes what training computes and would be ignored."""
    require_attributes(config)
    refused = [name for name in _NOT_SUPPORTED if getattr(config, name, False)]
    if getattr(config, "cuda_graph_impl", None) == "local":
        refused.append('cuda_graph_impl="local"')
    if refused:
        raise ValueError(
            f"these schedules do not support config.{', config.'.join(refused)}; training would go wrong"
        )
