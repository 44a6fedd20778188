"""GradScalers on the ranks of a pipeline: an overflow in any stage counts on all ranks."""

from __future__ import annotations

import contextlib
import functools
import math
import warnings

import pytest
import torch
from pipelines import WIDTH, prepared
from ranks import on_ranks
from torch import nn

from pipecomm_ext import PipeCommMismatch
from pipecomm_ext.schedules import get_plan

pytestmark = pytest.mark.filterwarnings("ignore:.*micro-batches are fewer than the stages")


@on_ranks(2)
def test_scalers_that_differ_and_wrong_ones_are_refused_on_all_ranks(world):
    pipeline, executor = prepared(world, get_plan("one_f_one_b", 2, 4))
    optimizer = torch.optim.SGD(nn.ModuleList(pipeline.stages.values()).parameters(), lr=0.1)
    equal = torch.amp.GradScaler("cpu")
    for scaler, text in (
        (
            torch.amp.GradScaler("cpu", init_scale=2.0 + world.rank),
            "of rank 1 has the scale 3.0, .* 0 has 2.0",
        ),
        (torch.amp.GradScaler("cpu", init_scale=2.0, enabled=world.rank == 0), "rank 1 has the scale 0.0"),
        (equal if world.rank else None, "scaler must be a torch.amp.GradScaler, not NoneType"),
    ):
        with pytest.raises((TypeError, PipeCommMismatch), match=text):
            executor.unscale_(scaler, optimizer)
    executor.unscale_(torch.amp.GradScaler(enabled=False), optimizer)
    pipeline.step(executor)
    executor.unscale_(equal, None if world.rank else optimizer)
    if world.rank == 0:
        equal.step(optimizer)
    equal.update()


@on_ranks(2)
def test_a_scaler_that_is_updated_alone_is_a_warning(world):
    scaler = torch.amp.GradScaler("cpu")
    pipeline, executor, optimizer = scaled(world, scaler)
    scaler.scale(torch.zeros(()))
    for is_agreed in (True, True, False):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            pipeline.step(executor)
            pipeline.step(executor)  # accumulates
        (functools.partial(executor.unscale_, scaler) if is_agreed else scaler.unscale_)(optimizer)
        scaler.step(optimizer)
        scaler.update()
    expected = pytest.warns(UserWarning, match="was updated without Executor.unscale_")
    with expected if world.rank == 1 else contextlib.nullcontext():
        pipeline.step(executor)


def update(executor, scaler, optimizer) -> None:
    executor.unscale_(scaler, optimizer)
    scaler.step(optimizer)
    scaler.update()


def scaled(world, scaler):
    """A pipeline whose loss the scaler scales, its executor, and an optimizer."""
    pipeline, executor = prepared(
        world, get_plan("one_f_one_b", 2, 4), loss_fn=lambda output, target: scaler.scale(output.sum())
    )
    return pipeline, executor, torch.optim.SGD(nn.ModuleList(pipeline.stages.values()).parameters(), lr=0.1)


@on_ranks(2)
def test_a_scaler_of_two_executors_that_is_updated_for_both_is_no_warning(world):
    scaler = torch.amp.GradScaler("cpu")
    pipelines = [scaled(world, scaler) for _ in range(2)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            for pipeline, executor, optimizer in pipelines:
                pipeline.step(executor)
                update(executor, scaler, optimizer)


@on_ranks(2)
def test_a_scaler_that_is_loaded_is_no_warning(world):
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    pipeline, executor, optimizer = scaled(world, scaler)
    pipeline.step(executor)
    update(executor, scaler, optimizer)
    pipeline.step(executor)
    scaler.load_state_dict({**scaler.state_dict(), "scale": 2.0})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipeline.step(executor)
    update(executor, scaler, optimizer)
    assert scaler.get_scale() == 2.0


@on_ranks(2)
@pytest.mark.parametrize("overflows", [(True, False), (False, True), (False, False)])
def test_each_optimizer_skips_by_itself(world, overflows):
    """As in one process, and the scale follows all of them, also on a rank that trains nothing."""
    _, executor = prepared(world, get_plan("one_f_one_b", 2, 4))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(()))
    weights = [nn.Parameter(torch.ones(WIDTH)) for _ in overflows]
    optimizers = [torch.optim.SGD([weight], lr=1.0) for weight in weights]
    for weight, overflow in zip(weights, overflows, strict=True):
        weight.grad = torch.full_like(weight, math.inf if overflow else 4.0)
    for optimizer in optimizers:
        executor.unscale_(scaler, optimizer if world.rank == 0 else None)
    for optimizer in optimizers if world.rank == 0 else ():
        scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == (2.0 if any(overflows) else 4.0)
    if world.rank == 0:
        assert [weight[0].item() for weight in weights] == [float(overflow) for overflow in overflows]
