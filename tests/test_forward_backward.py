"""Megatron's schedules on real ranks against the unsplit model in one process."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from ranks import on_ranks
from torch import nn

from pipecomm_ext.pipeline_parallel import P2PCommunicator, PipelineConfig, get_forward_backward_func

SEQ, BATCH, HIDDEN = 3, 2, 4


class Chunk(nn.Module):
    """One stage: a linear layer and tanh. Input from the stage before it, or the data."""

    def __init__(self, stage: int, config):
        super().__init__()
        generator = torch.Generator().manual_seed(100 + stage)
        self.weight = nn.Parameter(torch.randn(HIDDEN, HIDDEN, generator=generator))
        self.config = config
        self.input_tensor = None

    def set_input_tensor(self, tensors):
        assert isinstance(tensors, list)
        [self.input_tensor] = tensors

    def forward(self, x):
        return torch.tanh((x if self.input_tensor is None else self.input_tensor) @ self.weight)


def micro_batches(num_microbatches: int, variable: bool = False) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(7)
    lengths = [SEQ + (idx % 3 if variable else 0) for idx in range(num_microbatches)]
    return [
        tuple(torch.randn(length, BATCH, HIDDEN, generator=generator) for _ in range(2)) for length in lengths
    ]


def forward_step_func(data_iterator, model):
    x, target = next(data_iterator)

    def loss_func(output):
        loss = ((output - target) ** 2).mean()
        return loss, {"loss": loss.detach()}

    return model(x), loss_func


def unsplit(num_stages: int, data) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Losses by micro-batch, gradients of the mean loss by stage: plain torch, all stages in one process."""
    chunks = [Chunk(stage, None) for stage in range(num_stages)]
    losses = []
    for x, target in data:
        for chunk in chunks:
            x = chunk(x)
        loss = ((x - target) ** 2).mean()
        (loss / len(data)).backward()
        losses.append(loss.detach())
    return losses, [chunk.weight.grad for chunk in chunks]


GROUPS = SimpleNamespace(tp=None, cp=None)


def run(world, num_chunks: int | None, num_microbatches: int, *, forward_only=False, calls=1, **settings):
    """Runs a schedule on this rank; (results of the last call, gradients by chunk, chunks)."""
    config = PipelineConfig(**{"pipeline_dtype": torch.float32, "hidden_size": HIDDEN, **settings})
    p2p = P2PCommunicator(world.group, config)
    chunks = [Chunk(chunk * world.size + world.rank, config) for chunk in range(num_chunks or 1)]
    data = micro_batches(num_microbatches, config.variable_seq_lengths)
    for _ in range(calls):
        results = get_forward_backward_func(world.size, num_chunks)(
            forward_step_func=forward_step_func,
            data_iterator=[iter(data) for _ in chunks] if num_chunks else iter(data),
            model=chunks if num_chunks else chunks[0],
            num_microbatches=num_microbatches,
            seq_length=SEQ,
            micro_batch_size=BATCH,
            forward_only=forward_only,
            p2p_communicator=p2p,
            pg_collection=GROUPS,
        )
    return results, [chunk.weight.grad for chunk in chunks], chunks


def check(world, num_chunks: int | None, num_microbatches: int, **settings) -> None:
    results, gradients, _ = run(world, num_chunks, num_microbatches, **settings)
    data = micro_batches(num_microbatches, settings.get("variable_seq_lengths", False))
    losses, expected = unsplit(world.size * (num_chunks or 1), data)
    if world.rank == world.size - 1:
        torch.testing.assert_close([result["loss"] for result in results], losses)
    else:
        assert results == []
    for chunk_idx, gradient in enumerate(gradients):
        if settings.get("forward_only"):
            assert gradient is None
        else:
            torch.testing.assert_close(gradient, expected[chunk_idx * world.size + world.rank])


MODES = {
    "batched": {},
    "individual": {"batch_p2p_comm": False},
    "overlapped": {"batch_p2p_comm": False, "overlap_p2p_comm": True},
}


@on_ranks(2, 3, 4)
@pytest.mark.parametrize("mode", MODES)
def test_1f1b_equals_the_unsplit_model(world, mode):
    for num_microbatches, variable, frees in itertools.product((1, 2, 5), (False, True), (False, True)):
        check(
            world,
            None,
            num_microbatches,
            variable_seq_lengths=variable,
            deallocate_pipeline_outputs=frees,
            **MODES[mode],
        )
    check(world, None, 5, forward_only=True, **MODES[mode])


@on_ranks(2, 3)
@pytest.mark.parametrize("mode", MODES)
def test_interleaving_equals_the_unsplit_model(world, mode):
    P = world.size
    for num_chunks, num_microbatches, group_size in [
        (1, P, None),
        (2, P, None),
        (2, 2 * P + 1, P + 1),
        (3, 2 * P, P),
    ]:
        for variable in (False, True):
            check(
                world,
                num_chunks,
                num_microbatches,
                microbatch_group_size_per_vp_stage=group_size,
                variable_seq_lengths=variable,
                deallocate_pipeline_outputs=num_chunks == 2,
                **MODES[mode],
            )
    check(world, 2, P, forward_only=True, **MODES[mode])
