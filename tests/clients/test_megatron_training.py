"""What people combine with Megatron-core's pipeline, with its own optimizer: its schedules against ours.

Its autocast is that of CUDA alone, so it is not among them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pinned import needs

needs("megatron-core")

from megatron.core import parallel_state  # noqa: E402
from megatron.core.pipeline_parallel import schedules  # noqa: E402
from megatron_client import Setup, Trainer, model_parallel, on_cpu, reported  # noqa: E402
from side_by_side import assert_same_bits, gradients  # noqa: E402
from test_megatron import with_our_communicator  # noqa: E402

from pipecomm_ext import PipeCommError, pipeline_parallel  # noqa: E402

Run = Callable[..., list[torch.Tensor]]  # forwards and backwards of a batch, or with forward_only=True
NUM_STEPS = 3


def optimized(trainer: Trainer) -> list[torch.Tensor]:
    """What the optimizer's step says, and the weights after it."""
    succeeded, norm, _ = trainer.optimizer.step()
    said = [
        float(succeeded),
        -1.0 if norm is None else float(norm),
        trainer.optimizer.get_loss_scale().item(),
    ]
    weights = [part.detach().clone() for chunk in trainer.chunks for part in chunk.parameters()]
    return [torch.tensor(said, dtype=torch.float64), *weights]


def steps(trainer: Trainer, run: Run) -> list[torch.Tensor]:
    results = []
    for _ in range(NUM_STEPS):
        trainer.zero_grad()
        results += [*run(), *gradients(trainer.chunks), *optimized(trainer)]
    return results


def accumulation(trainer: Trainer, run: Run) -> list[torch.Tensor]:
    results = []
    for num_batches in (1, 2, 2):
        trainer.zero_grad()
        for _ in range(num_batches):
            results += run()
        results += optimized(trainer)
    return results


def evaluation_between(trainer: Trainer, run: Run) -> list[torch.Tensor]:
    """Between two batches whose gradients add up."""
    trainer.zero_grad()
    results = run()
    for chunk in trainer.chunks:
        chunk.eval()
    results += run(forward_only=True)
    for chunk in trainer.chunks:
        chunk.train()
    return [*results, *run(), *gradients(trainer.chunks), *optimized(trainer)]


def overflow(trainer: Trainer, run: Run) -> list[torch.Tensor]:
    """In one stage and the second step: all skip it and lower the scale."""
    results, scales = [], []
    for idx in range(NUM_STEPS + 1):
        trainer.zero_grad()
        results += run()
        if idx == 1 and parallel_state.get_pipeline_model_parallel_rank() == 0:
            next(trainer.chunks[0].parameters()).main_grad.fill_(torch.inf)
        results += optimized(trainer)
        scales.append(trainer.optimizer.get_loss_scale().item())
    assert scales[1] == scales[0] / 2
    return results


def gradients_of_inputs(trainer: Trainer, run: Run) -> list[torch.Tensor]:
    results = steps(trainer, run)
    is_first = parallel_state.get_pipeline_model_parallel_rank() == 0
    leaves = [leaf.grad for leaf in trainer.leaves if leaf.grad is not None]
    assert bool(leaves) == is_first
    return results + leaves


HALF = {"params_dtype": torch.float16, "pipeline_dtype": torch.float16, "fp16": True}
SCALED = {
    "fp16": True,
    "initial_loss_scale": 2.0**8,
    "hysteresis": 1,
    "loss_scale_window": 2,
    "clip_grad": 0.5,
}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
DROPOUT = {"attention_dropout": 0.2, "hidden_dropout": 0.2}
ADAM = {"clip_grad": 0.0}
COMBINATIONS = {
    "GradScaler": (Setup(config=HALF, optimizer=SCALED), overflow),
    "checkpoints": (Setup(config=FULL, optimizer=ADAM), steps),
    "checkpoints of attention": (
        Setup(
            config={"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}, optimizer=ADAM
        ),
        steps,
    ),
    "dropout": (Setup(config=DROPOUT, optimizer=ADAM), steps),
    "dropout in checkpoints": (Setup(config=DROPOUT | FULL, optimizer=ADAM), steps),
    "accumulation": (Setup(optimizer=ADAM), accumulation),
    "clipping": (Setup(optimizer={"clip_grad": 0.1}), steps),
    "frozen weights": (
        Setup(trains=lambda name: "linear_qkv" in name or "final" in name, optimizer={"clip_grad": 0.1}),
        steps,
    ),
    "a frozen stage": (
        Setup(
            trains=lambda name: parallel_state.get_pipeline_model_parallel_rank() > 0,
            optimizer={"clip_grad": 0.1},
        ),
        steps,
    ),
    "shared embeddings, clipping": (Setup(ties_embeddings=True, optimizer={"clip_grad": 0.1}), steps),
    "gradients of inputs": (Setup(starts_from_embeddings=True, optimizer=ADAM), gradients_of_inputs),
    "evaluation between steps": (Setup(config=DROPOUT, optimizer=ADAM), evaluation_between),
    "distributed optimizer": (
        Setup(
            ddp={"use_distributed_optimizer": True},
            optimizer={"use_distributed_optimizer": True, "clip_grad": 0.1},
        ),
        steps,
    ),
}
PIPELINES = {"1F1B": {}, "interleaved": {"vp": 2, "config": {"batch_p2p_comm": False}}}


def setup_of(name: str, pipeline: str) -> Setup:
    setup, changed = COMBINATIONS[name][0], PIPELINES[pipeline]
    config = {**setup.config, **changed.get("config", {})}
    return Setup(**{**vars(setup), **changed, "config": config})


def train_each(world, name: str, pipeline: str) -> None:
    setup, script = setup_of(name, pipeline), COMBINATIONS[name][1]
    with on_cpu(), model_parallel(setup):
        expected, *others = (result_of(setup, script, *side) for side in SIDES.values())
        for side, results in zip(list(SIDES)[1:], others, strict=True):
            assert_same_bits(results, expected, f"results, {side}")


def result_of(setup: Setup, script: Callable, get_func: Callable, around: Callable) -> list[torch.Tensor]:
    trainer = Trainer(setup)
    torch.manual_seed(7 + parallel_state.get_pipeline_model_parallel_rank())  # of dropout

    def run(**options: Any) -> list[torch.Tensor]:
        with around():
            return reported(trainer.run(get_func, **options))

    return script(trainer, run)


SIDES = {
    "Megatron's": (schedules.get_forward_backward_func, contextlib.nullcontext),
    "our schedules": (pipeline_parallel.get_forward_backward_func, contextlib.nullcontext),
    "our communicator": (schedules.get_forward_backward_func, with_our_communicator),
}


@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize("name", COMBINATIONS)
def test_equal_bits(ranks, name, pipeline):
    ranks.run(2, train_each, name, pipeline, deadline=90)


def fail_and_go_on(world) -> None:
    """Our schedules after a step that one stage has failed, against Megatron's that none has."""
    setup = Setup(optimizer=ADAM)
    with on_cpu(), model_parallel(setup):
        expected = result_of(setup, steps, *SIDES["Megatron's"])
        trainer = Trainer(setup)
        forward_step, num_calls = trainer._forward_step, 0

        def failing(data_iterator, model):
            nonlocal num_calls
            num_calls += 1
            if num_calls == 3 and world.rank == 1:
                raise KeyError("no such expert")
            return forward_step(data_iterator, model)

        trainer._forward_step = failing
        with world.breaking(), pytest.raises((KeyError, PipeCommError), match="no such expert"):
            trainer.run(pipeline_parallel.get_forward_backward_func)
        trainer._forward_step = forward_step
        group = parallel_state.get_pipeline_model_parallel_group()
        pipeline_parallel.P2PCommunicator(group, trainer.config).close()
        results = steps(trainer, lambda: reported(trainer.run(pipeline_parallel.get_forward_backward_func)))
        assert_same_bits(results, expected, "results after a failed step")


def test_after_a_failed_step_the_next_ones_are_right(ranks):
    ranks.run(2, fail_and_go_on, deadline=90)
