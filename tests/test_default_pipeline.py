"""The pipeline that Megatron's schedules take if they get no sizes and groups."""

from __future__ import annotations

import re

import pytest
import torch
from ranks import on_ranks

from pipecomm_ext import parallel_state
from pipecomm_ext.pipeline_parallel import (
    PipelineConfig,
    forward_backward_no_pipelining,
    forward_backward_pipelining_with_interleaving,
    forward_backward_pipelining_without_interleaving,
    get_forward_backward_func,
)
from pipecomm_ext.pipeline_parallel.communication_utils import broadcast_from_last_pipeline_stage


@on_ranks(4)
@pytest.mark.parametrize("stages", [[[3], [2], [1], [0]], [[0, 3], [2, 1]], [[2, 3], [0, 1]]])
def test_stages_in_another_order_than_their_ranks_are_refused(world, stages):
    """Torch sorts the ranks of a group, so the schedules would run the pipeline in another order."""
    model = torch.nn.Linear(1, 1)
    model.config = PipelineConfig(hidden_size=1, pipeline_dtype=torch.float32)
    parallel_state.initialize_pipeline(stages, group=world.group)
    try:
        with pytest.raises(ValueError, match=f"{re.escape(str(stages))}.*by increasing ranks.*Executor"):
            forward_backward_pipelining_without_interleaving(
                forward_step_func=None,
                data_iterator=None,
                model=model,
                num_microbatches=2,
                seq_length=1,
                micro_batch_size=1,
            )
        with pytest.raises(ValueError, match="by increasing ranks"):
            broadcast_from_last_pipeline_stage([2], torch.float32, torch.ones(2))
    finally:
        parallel_state.destroy()


@on_ranks(4)
def test_chains_whose_ranks_increase_are_accepted(world):
    parallel_state.initialize_pipeline([[1, 0], [2, 3]], group=world.group)
    try:
        tensor = torch.full((2,), float(world.rank)) if world.rank > 1 else None
        received = broadcast_from_last_pipeline_stage([2], torch.float32, tensor)
        assert received.tolist() == [2.0 if world.rank in (1, 2) else 3.0] * 2
    finally:
        parallel_state.destroy()


@on_ranks(2)
def test_a_number_of_chunks_alone_takes_the_number_of_ranks_from_the_default(world):
    with pytest.raises(ValueError, match="there are no defaults before"):
        get_forward_backward_func(vp_size=2)
    parallel_state.initialize_pipeline([1, 1], group=world.group)
    try:
        assert get_forward_backward_func(vp_size=2) is forward_backward_pipelining_with_interleaving
        assert get_forward_backward_func() is forward_backward_pipelining_without_interleaving
        assert get_forward_backward_func(1) is forward_backward_no_pipelining
    finally:
        parallel_state.destroy()
