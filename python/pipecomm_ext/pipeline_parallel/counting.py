"""Counts, orders and shapes of Megatron's schedules, by its names; the orders are those of `schedules`."""

from __future__ import annotations

from typing import Any

from .. import parallel_state
from ..schedules import interleaved_1f1b
from .config import has_variable_shapes, setting
from .wrapped import size_of


def default_pipeline() -> tuple[int, int, int | None]:
    """(ranks, my rank, chunks per rank or None if one) of the default topology; (1, 0, None) without one."""
    try:
        topology = parallel_state.get_pipeline_topology()
    except RuntimeError:
        return 1, 0, None
    num_chunks = topology.get_virtual_pipeline_model_parallel_world_size()
    return (
        topology.get_pipeline_model_parallel_world_size(),
        topology.get_pipeline_model_parallel_rank(),
        num_chunks if num_chunks > 1 else None,
    )


def get_pp_rank_microbatches(
    num_microbatches: int,
    num_model_chunks: int,
    microbatch_group_size_per_vp_stage: int | None,
    forward_only: bool = False,
    overlap_moe_expert_parallel_comm: bool = False,
    p2p_communicator: Any = None,
) -> tuple[int, bool, int, int]:
    """(forwards of this rank, whether all are warm-up, number of warm-up forwards, the remaining ones).

    Args:
        p2p_communicator: tells `total_stages`, `current_stage` and `virtual_pipeline_model_parallel_size`
            (None: no interleaving, if there is one chunk). None: those of the default topology.
    """
    if p2p_communicator is None:
        num_ranks, rank, vp_size = default_pipeline()
    else:
        num_ranks, rank = p2p_communicator.total_stages, p2p_communicator.current_stage
        vp_size = getattr(p2p_communicator, "virtual_pipeline_model_parallel_size", None)
    total = num_microbatches * num_model_chunks
    if forward_only:
        num_warmup = total
    elif num_ranks == 1:
        num_warmup = 0
    elif vp_size is None and num_model_chunks == 1:
        num_warmup = num_ranks - rank - 1
    else:
        group_size = microbatch_group_size_per_vp_stage or num_ranks
        num_warmup = 2 * (num_ranks - rank - 1) + (num_model_chunks - 1) * group_size
        num_warmup += bool(overlap_moe_expert_parallel_comm)
    is_all_warmup = num_warmup >= total
    num_warmup = min(num_warmup, total)
    return total, is_all_warmup, num_warmup, total - num_warmup


def get_schedule_table(
    num_microbatches: int, num_model_chunks: int, microbatch_group_size_per_vp_stage: int
) -> list[tuple[int, int]]:
    """(micro-batch, chunk) of every forward of a rank, in order.

    Chunks take turns after `microbatch_group_size_per_vp_stage` micro-batches; the last group takes the tail.
    """
    plan = interleaved_1f1b(
        1, num_microbatches, num_model_chunks, min(microbatch_group_size_per_vp_stage, num_microbatches)
    )
    return [(action.micro, action.stage) for action in plan.compute[0] if action.kind == "F"]


def convert_schedule_table_to_order(
    num_warmup_microbatches: int, num_model_chunks: int, schedule_table: list[tuple[int, int]]
) -> list[int]:
    """Forwards and backwards of a rank in order: chunk c is c + 1 where it runs forward, -(c + 1) backward.

    Backwards take the chunks in the opposite order: c of the table is chunk num_model_chunks - 1 - c.
    """
    forwards = [chunk + 1 for _, chunk in schedule_table]
    backwards = [chunk - num_model_chunks for _, chunk in schedule_table]
    order = forwards[:num_warmup_microbatches]
    for forward, backward in zip(forwards[num_warmup_microbatches:], backwards, strict=False):
        order += (forward, backward)
    return order + backwards[len(forwards) - num_warmup_microbatches :]


def get_tensor_shapes(
    *,
    seq_length: int,
    micro_batch_size: int,
    decoder_seq_length: int | None,
    config: Any,
    tp_group: Any,
    cp_group: Any,
) -> list[tuple[int, ...]]:
    """The shapes of a boundary: [(sequence, micro-batch, hidden)] of one rank's part, or [()] if they vary.

    The sequence is divided by the ranks of `cp_group` and, with sequence_parallel, of `tp_group`.
    """
    if has_variable_shapes(config):
        return [()]
    length = (seq_length if decoder_seq_length is None else decoder_seq_length) // size_of(cp_group)
    if setting(config, "sequence_parallel"):
        length //= size_of(tp_group)
    hidden_size = setting(config, "hidden_size")
    if hidden_size is None:
        raise ValueError("config.hidden_size must be set, for the shape of the tensors between stages")
    return [(length, micro_batch_size, hidden_size)]
