"""torchtitan's splitter and torch.distributed.pipelining: torch's schedules against the Executor."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from pinned import needs
from torch import nn

needs("torchtitan")

from page import code_of  # noqa: E402
from pipelines import plan_named  # noqa: E402
from side_by_side import assert_same_bits, gradients, ratio_of_times  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B  # noqa: E402
from torch.distributed.pipelining.schedules import (  # noqa: E402
    ScheduleDualPipeV,
    ScheduleZBVZeroBubble,
    _PipelineScheduleRuntime,
)
from torchtitan_client import VOCAB, cross_entropy, split  # noqa: E402

from pipecomm_ext.schedules import Executor, Plan  # noqa: E402

NUM_MICROBATCHES, SEQ_LEN = 8, 64
SCHEDULES = {
    "one_f_one_b": Schedule1F1B,
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "zb_v": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}


class Stage(PipelineStage):
    """Without torch's messages that warm NCCL up: in a V one goes to the own rank, which gloo refuses."""

    def _get_init_p2p_neighbors_ops(self):
        return []


@dataclass
class Job:
    """A model's stages of this rank and the batch, for both sides; copies start from equal weights."""

    rank: int
    plan: Plan

    def __post_init__(self):
        self.num_stages = len(self.plan.owner)
        self.stages = self.plan.stages_of(self.rank)
        self.has_last = self.num_stages - 1 in self.stages
        generator = torch.Generator().manual_seed(1)
        tokens = torch.randint(0, VOCAB, (2 * NUM_MICROBATCHES, SEQ_LEN + 1), generator=generator)
        self.inputs, self.labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def modules(self) -> dict[int, nn.Module]:
        return {stage: module for stage, module in enumerate(split(self.num_stages)) if stage in self.stages}

    def schedule(self, schedule_class, modules):
        stages = [Stage(module, idx, self.num_stages, torch.device("cpu")) for idx, module in modules.items()]
        return schedule_class(
            stages[0] if schedule_class is Schedule1F1B else stages,
            n_microbatches=NUM_MICROBATCHES,
            loss_fn=cross_entropy,
            scale_grads=True,
        )

    def executor(self, plan, modules) -> Executor:
        return Executor(plan, modules, loss_fn=cross_entropy, loss_scale="mean")

    def torchs_step(self, schedule, modules) -> list[torch.Tensor]:
        zero_gradients(modules)
        losses: list = []
        schedule.step(
            *([self.inputs] if 0 in self.stages else []),
            target=self.labels if self.has_last else None,
            losses=losses if self.has_last else None,
        )
        return [loss.detach() for loss in losses]

    def our_step(self, executor, modules) -> list[torch.Tensor]:
        zero_gradients(modules)
        return executor.step(self.inputs, self.labels).losses or []


def zero_gradients(modules: dict[int, nn.Module]) -> None:
    for module in modules.values():
        module.zero_grad()


def assert_same(ours: tuple[list, dict], theirs: tuple[list, dict]) -> None:
    """Of (losses, modules)."""
    assert_same_bits(ours[0], theirs[0], "losses")
    assert_same_bits(gradients(ours[1].values()), gradients(theirs[1].values()), "gradients")


def train_both(world, name):
    job = Job(world.rank, plan_named(name, world.size, NUM_MICROBATCHES))
    theirs, ours = job.modules(), job.modules()
    schedule = job.schedule(SCHEDULES[name], theirs)
    with job.executor(job.plan, ours) as executor:
        assert_same((job.our_step(executor, ours), ours), (job.torchs_step(schedule, theirs), theirs))
        return ratio_of_times(lambda: job.torchs_step(schedule, theirs), lambda: job.our_step(executor, ours))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules(ranks, report, name, size):
    report(f"{name}, {size} ranks", ranks.run(size, train_both, name, deadline=60)[0])


def exchange_files(world, name, folder):
    """torch's order of actions in our Executor, and ours in torch's runtime."""
    job = Job(world.rank, plan_named(name, world.size, NUM_MICROBATCHES))
    theirs, ours, back = job.modules(), job.modules(), job.modules()
    schedule = job.schedule(SCHEDULES[name], theirs)
    torchs_file, our_file = (f"{folder}/{side}{world.rank}.csv" for side in ("torchs", "ours"))
    schedule._dump_csv(torchs_file)
    truth = job.torchs_step(schedule, theirs), theirs
    with job.executor(Plan.from_csv(torchs_file), ours) as executor:
        assert_same((job.our_step(executor, ours), ours), truth)
    job.plan.to_csv(our_file, format="torch")
    runtime = job.schedule(_PipelineScheduleRuntime, back)
    runtime._load_csv(our_file)
    assert_same((job.torchs_step(runtime, back), back), truth)


@pytest.mark.parametrize("name", ["interleaved_1f1b", "zb_v", "dualpipev"])
def test_files_of_schedules(ranks, tmp_path, name):
    ranks.run(2, exchange_files, name, str(tmp_path))


def run_the_page(world):
    """The block of the page, with the stages of torchtitan's splitter, against torch's schedule."""
    job = Job(world.rank, plan_named("interleaved_1f1b", world.size, NUM_MICROBATCHES))
    theirs, ours = job.modules(), job.modules()
    expected = job.torchs_step(job.schedule(ScheduleInterleaved1F1B, theirs), theirs)
    stages = [Stage(module, idx, job.num_stages, torch.device("cpu")) for idx, module in ours.items()]
    names = {"torch": torch, "stages": stages, "pp_size": world.size, "num_microbatches": NUM_MICROBATCHES}
    names["pp_mesh"] = init_device_mesh("cpu", (world.size,), mesh_dim_names=("pp",))["pp"]
    names |= {"loss_fn": cross_entropy, "inputs": job.inputs, "labels": job.labels}
    code_of("pp_executor = ", names)["pp_executor"].close()
    assert_same((names["losses"] or [], ours), (expected, theirs))


def test_the_code_of_the_page(ranks):
    ranks.run(2, run_the_page, deadline=60)
