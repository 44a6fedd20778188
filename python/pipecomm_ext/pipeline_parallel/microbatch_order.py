"""The number and the order of micro-batches in Megatron's schedules, which are plans of `schedules`."""

from __future__ import annotations

from typing import Any

from ..schedules import interleaved_1f1b
from ..schedules.actions import actions_in
from .default_pipeline import default_sizes


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
        p2p_communicator: has `total_stages`, `current_stage` and `virtual_pipeline_model_parallel_size`
            (None: no interleaving, if there is one chunk). None: those of the default pipeline.
    """
    if p2p_communicator is None:
        num_ranks, rank, vp_size = default_sizes()
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
    if num_microbatches == 0:
        return []
    plan = interleaved_1f1b(
        1, num_microbatches, num_model_chunks, min(microbatch_group_size_per_vp_stage, num_microbatches)
    )
    actions = (action for item in plan.compute[0] for action in actions_in(item))
    return [(action.micro, action.stage) for action in actions if action.kind == "F"]


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
