"""One rank fails in a schedule of Megatron before its first action: the others learn it at once."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch
from pipelines import WIDTH, refused_by_one
from pipelines import MegatronChunk as Chunk
from ranks import on_ranks

from pipecomm_ext import PipeCommAborted
from pipecomm_ext.pipeline_parallel import (
    P2PCommunicator,
    PipelineConfig,
    forward_backward_pipelining_with_interleaving,
    forward_backward_pipelining_without_interleaving,
)

GROUPS = SimpleNamespace(cp=None, tp=None)


def failing(*args):
    raise KeyError("no such parameter")


def run(p2p, config, num_chunks):
    schedule = forward_backward_pipelining_without_interleaving
    if num_chunks > 1:
        schedule = forward_backward_pipelining_with_interleaving
    data = [torch.ones(3, 2, WIDTH) for _ in range(4)]
    schedule(
        forward_step_func=lambda iterator, model: (model(next(iterator)), lambda out: (out.sum(), {})),
        data_iterator=[iter(data) for _ in range(num_chunks)],
        model=[Chunk(p2p.current_stage + 2 * chunk, config) for chunk in range(num_chunks)],
        num_microbatches=4,
        seq_length=3,
        micro_batch_size=2,
        p2p_communicator=p2p,
        pg_collection=GROUPS,
    )


def config_of(**settings):
    return PipelineConfig(hidden_size=WIDTH, pipeline_dtype=torch.float32, **settings)


@on_ranks(2)
@pytest.mark.parametrize(
    ("failing_rank", "settings", "num_chunks", "error", "text"),
    [
        (0, {"no_sync_func": failing}, 1, KeyError, "no such parameter"),
        (1, {"param_sync_func": failing}, 2, KeyError, "no such parameter"),
        (1, {"num_moe_experts": 2}, 1, ValueError, "set_auxiliary_loss_scale"),
        (0, {"param_sync_func": [print]}, 2, ValueError, "param_sync_func"),
    ],
    ids=["a hook", "a hook of chunks", "a check", "a check of hooks"],
)
def test_a_failure_before_the_first_action_reaches_all(
    world, failing_rank, settings, num_chunks, error, text
):
    config = config_of(**settings) if world.rank == failing_rank else config_of()
    begin = time.monotonic()
    expected = error if world.rank == failing_rank else PipeCommAborted
    with world.broken_comm(channels=4) as comm, refused_by_one(), pytest.raises(expected, match=text):
        run(P2PCommunicator(comm, config), config, num_chunks)
    assert time.monotonic() - begin < 10
    run(P2PCommunicator(world.fresh_comm(channels=4), config_of()), config_of(), num_chunks)


@on_ranks(2)
def test_a_config_that_all_ranks_refuse_leaves_the_communicator_usable(world):
    bad, good = config_of(num_moe_experts=2), config_of()
    p2p = P2PCommunicator(world.fresh_comm(channels=4), good)
    with pytest.raises(ValueError, match="set_auxiliary_loss_scale"):
        run(p2p, bad, 1)
    run(p2p, good, 1)
