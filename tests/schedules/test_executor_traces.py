"""What a step leaves behind: memory, profiler ranges, timelines."""

from __future__ import annotations

import time

import torch
from pipelines import plan_named, prepared
from ranks import on_ranks
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from pipecomm_ext.schedules import Executor


class Growing(nn.Module):
    """Makes large outputs that its own backward does not need; counts at each backward how many are left,
    once the other rank has had the time to receive them."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.storages, self.numbers_alive = [], []

    def forward(self, x):
        scaled = x * self.weight
        scaled.register_hook(self._count)
        output = scaled.expand(4096).clone()
        self.storages.append(StorageWeakRef(output.untyped_storage()))
        return output

    def _count(self, gradient):
        give_up_at = time.monotonic() + 5
        while (num_alive := sum(not storage.expired() for storage in self.storages)) > 0:
            if time.monotonic() > give_up_at:
                break
            time.sleep(0.001)
        self.numbers_alive.append(num_alive)
        return gradient


@on_ranks(2)
def test_outputs_are_freed_when_they_are_sent_and_not_at_their_backward(world):
    plan = plan_named("gpipe", 2, 12)
    stage = Growing() if world.rank == 0 else nn.Identity()
    executor = Executor(
        plan, [stage], communicator=world.shared_comm(channels=4), loss_fn=lambda y, t: y.mean() * t.sum()
    )
    ones = [torch.ones(1)] * 12
    executor.step(ones, ones)
    if world.rank == 0:
        assert stage.numbers_alive == [0] * 12
        torch.testing.assert_close(stage.weight.grad, torch.tensor([12.0]))


class Watching(nn.Module):
    """Counts at each forward how many inputs of earlier forwards are left."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.storages, self.numbers_alive = [], []

    def forward(self, x):
        self.numbers_alive.append(sum(not storage.expired() for storage in self.storages))
        self.storages.append(StorageWeakRef(x.untyped_storage()))
        return x * self.weight


@on_ranks(2)
def test_inputs_are_freed_by_their_backward(world):
    """The last stage of 1F1B holds one micro-batch at a time."""
    stage = Watching()
    executor = Executor(
        plan_named("1f1b", 2, 8),
        [stage],
        communicator=world.shared_comm(channels=4),
        loss_fn=lambda y, t: y.mean() * t.sum(),
        return_outputs=False,
    )
    ones = [torch.ones(1)] * 8
    executor.step(ones, ones)
    if world.rank == 1:
        assert stage.numbers_alive == [0] * 8


@on_ranks(2)
def test_every_action_has_a_profiler_range(world):
    plan = plan_named("dualpipev", 2)
    pipeline, executor = prepared(world, plan)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        pipeline.step(executor)
    names = {event.name for event in profile.events()}
    assert {str(item) for item in plan.compute[world.rank]} <= names


@on_ranks(2, 3)
def test_the_timeline_has_all_actions_of_all_ranks_in_order(world, tmp_path):
    plan = plan_named("zb_v", world.size)
    pipeline, executor = prepared(world, plan, record_timeline=True)
    for run_backward in (True, False):
        with torch.set_grad_enabled(run_backward):
            pipeline.step(executor)
        timeline = executor.timeline()
        for row, spans in zip(plan.compute, timeline.spans, strict=True):
            assert [span.action for span in spans] == [a for a in row if run_backward or a.kind == "F"]
            times = [time for span in spans for time in span[1:]]
            assert times == sorted(times)
        ends = {span.action: span.end for spans in timeline.spans for span in spans}
        starts = {span.action: span.start for spans in timeline.spans for span in spans}
        for action, start in starts.items():  # one clock: nothing starts before what it needs has ended
            if action.kind == "F" and plan.prev_of[action.stage] is not None:
                assert start >= ends[action._replace(stage=plan.prev_of[action.stage])] - 1e-4
        assert min(starts.values()) == 0 and timeline.makespan == max(ends.values())


@on_ranks(2)
def test_nothing_is_left_of_a_step(world):
    pipeline, executor = prepared(world, plan_named("dualpipe", 2))
    pipeline.step(executor)
    kept = [executor._alive, executor._weight_work, executor._inputs, executor._keywords, executor._ends]
    mailbox = executor._mailbox
    kept += [mailbox.outbox, mailbox.receipts, mailbox._awaited_gradients, mailbox._structures]
    assert not any(kept)
