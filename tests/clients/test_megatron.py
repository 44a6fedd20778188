"""Megatron-core's own GPTModel: its pipeline against ours, in the call form of its training loop."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from pinned import needs

needs("megatron-core")

from megatron.core.pipeline_parallel import schedules  # noqa: E402
from megatron_client import (  # noqa: E402
    MICRO_BATCH_SIZE,
    NUM_MICROBATCHES,
    SEQ_LENGTH,
    Setup,
    Trainer,
    model_parallel,
    on_cpu,
    reported,
)
from page import code_of  # noqa: E402
from side_by_side import assert_same_bits, gradients, ratio_of_times  # noqa: E402

from pipecomm_ext import pipeline_parallel  # noqa: E402

OVERLAP = {"overlap_p2p_comm": True, "batch_p2p_comm": False}
UNBATCHED = {"batch_p2p_comm": False}
MOE = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_aux_loss_coeff": 0.1,
    "moe_z_loss_coeff": 0.01,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_token_dispatcher_type": "allgather",
    "add_bias_linear": False,
}
SETUPS = {
    "two stages": (2, Setup()),
    "four stages": (4, Setup(pp=4)),
    "interleaved": (2, Setup(vp=2, config=UNBATCHED)),
    "interleaved, overlap": (2, Setup(vp=2, config=OVERLAP)),
    "interleaved, four ranks": (4, Setup(pp=4, vp=2, config={"num_layers": 8})),
    "data parallel": (4, Setup()),
    "data parallel, overlap": (4, Setup(ddp={"overlap_grad_reduce": True, "bucket_size": 10000})),
    "data parallel, interleaved": (
        4,
        Setup(vp=2, config=OVERLAP, ddp={"overlap_grad_reduce": True, "bucket_size": 10000}),
    ),
    "tensor parallel": (4, Setup(tp=2)),
    "tied embeddings": (2, Setup(ties_embeddings=True)),
    "tied embeddings, interleaved": (4, Setup(pp=4, vp=2, ties_embeddings=True, config={"num_layers": 8})),
    "tokens counted": (2, Setup(counts_tokens=True)),
    "per token": (2, Setup(counts_tokens=True, config={"calculate_per_token_loss": True})),
    "uneven lengths": (4, Setup(pp=4, has_uneven_lengths=True)),
    "scaled": (2, Setup(config={"grad_scale_func": lambda loss: loss * 64})),
    "timers": (2, Setup(has_timers=True)),
    "experts": (2, Setup(config=MOE)),
    "experts, scaled per token": (
        4,
        Setup(
            counts_tokens=True,
            config={**MOE, "calculate_per_token_loss": True, "grad_scale_func": lambda loss: loss * 64},
        ),
    ),
    "distributed optimizer": (4, Setup(ddp={"use_distributed_optimizer": True})),
    "half precision": (
        2,
        Setup(config={"bf16": True, "params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16}),
    ),
    "multi-token prediction": (2, Setup(config={"mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.3})),
    "outputs kept": (2, Setup(config={"deallocate_pipeline_outputs": False})),
    "no pipeline": (2, Setup(pp=1)),
}

TIMED = ["two stages", "four stages", "interleaved", "interleaved, overlap", "interleaved, four ranks"]
MODES = [
    {},
    {"forward_only": True},
    {"forward_only": True, "collect_non_loss_data": True},
]


def with_our_communicator():
    """The other variant: of Megatron's schedules only the communicator is replaced."""
    return mock.patch.object(schedules, "P2PCommunicator", pipeline_parallel.P2PCommunicator)


def train_both(world, name):
    """Compares bits; returns the ratios of step times with our schedules, and with our communicator alone."""
    setup = SETUPS[name][1]
    with on_cpu(), model_parallel(setup):
        theirs, ours, mixed = (Trainer(setup) for _ in range(3))

        def their_step(**options):
            return theirs.step(schedules.get_forward_backward_func, **options)

        def our_step(**options):
            return ours.step(pipeline_parallel.get_forward_backward_func, **options)

        def mixed_step(**options):
            with with_our_communicator():
                return mixed.step(schedules.get_forward_backward_func, **options)

        for options in MODES:
            expected = reported(their_step(**options))
            for trainer, step in ((ours, our_step), (mixed, mixed_step)):
                assert_same_bits(reported(step(**options)), expected, f"losses {options}")
                assert_same_bits(gradients(trainer.chunks), gradients(theirs.chunks), f"gradients {options}")
        return [ratio_of_times(their_step, step) for step in (our_step, mixed_step)] if name in TIMED else []


@pytest.mark.parametrize("name", SETUPS)
def test_equal_bits(ranks, report, name):
    ratios, *_ = ranks.run(SETUPS[name][0], train_both, name, deadline=90)
    for variant, of_variant in zip(("schedules", "communicator"), ratios, strict=False):
        report(f"{name}: {variant}", of_variant)


def train_two_stages_batched(world):
    """Two stages of two chunks, batched: Megatron's own messages swap activations and gradients there."""
    setup = Setup(vp=2)
    with on_cpu(), model_parallel(setup):
        right, wrong, ours = (Trainer(setup, batch_p2p_comm=is_batched) for is_batched in (False, True, True))
        expected = reported(right.step(schedules.get_forward_backward_func))
        got = reported(ours.step(pipeline_parallel.get_forward_backward_func))
        assert_same_bits(got, expected, "losses")
        assert_same_bits(gradients(ours.chunks), gradients(right.chunks), "gradients")
        swapped = reported(wrong.step(schedules.get_forward_backward_func))
    return [loss.item() for loss in expected], [loss.item() for loss in swapped]


def test_two_stages_batched(ranks):
    expected, swapped = ranks.run(2, train_two_stages_batched)[1]
    print(f"losses {expected}, Megatron's own with batched messages {swapped}")
    assert expected and swapped != expected  # or docs/migrating.md has to be changed


def run_the_page(world):
    """The blocks of the page, with what they leave and what they put in its place; a step of each."""
    setup = Setup()
    with on_cpu(), model_parallel(setup):
        communicator = code_of("from megatron.core.pipeline_parallel.p2p_communication")["P2PCommunicator"]
        assert communicator is pipeline_parallel.P2PCommunicator
        theirs, ours = Trainer(setup), Trainer(setup)
        expected = reported(theirs.step(schedules.get_forward_backward_func))
        names = code_of("from megatron.core.pipeline_parallel import get_forward_backward_func")
        names |= {"forward_step": ours._forward_step, "data_iterator": ours._micro_batches()}
        names |= {"model": ours.chunks, "num_microbatches": NUM_MICROBATCHES}
        names |= {"seq_length": SEQ_LENGTH, "micro_batch_size": MICRO_BATCH_SIZE}
        for chunk in ours.chunks:
            chunk.zero_grad_buffer()
        assert_same_bits(
            reported(code_of("losses = forward_backward_func", names)["losses"]), expected, "losses"
        )
        assert_same_bits(gradients(ours.chunks), gradients(theirs.chunks), "gradients")


def test_the_code_of_the_page(ranks):
    ranks.run(2, run_the_page, deadline=90)
