"""Compared with torch.distributed.pipelining: its CSV of schedules, and its results with the same stages."""

from __future__ import annotations

import copy
import csv
import io
import os
import tempfile
from collections.abc import Iterable
from types import SimpleNamespace

import pytest
import torch
from pipelines import Block, batches, plan_named, squared_error
from ranks import on_ranks
from torch import nn

from pipecomm_ext import schedules
from pipecomm_ext.schedules import Executor, Plan, PlanError


def local_stages(mine: Iterable[int], size: int, num_stages: int) -> list[SimpleNamespace]:
    """What torch's schedules need of the stages of rank 0 for construction."""
    common = dict(group_size=size, group_rank=0, num_stages=num_stages, submod=nn.Identity())
    return [SimpleNamespace(stage_index=stage, is_last=stage == num_stages - 1, **common) for stage in mine]


def torch_rows(name: str, size: int, num_micros: int) -> list[list[str]]:
    """The cells that torch writes for its schedule. Interleaved1F1B with one stage per rank is 1F1B; the
    order of Schedule1F1B of torch 2.11 begins with micro-batch 1 on the last rank."""
    from torch.distributed.pipelining import schedules as theirs

    if name == "Schedule1F1B":
        mine, num_stages, name = [0], size, "ScheduleInterleaved1F1B"
    else:
        mine, num_stages = [0, size if "Interleaved" in name else 2 * size - 1], 2 * size
    schedule = getattr(theirs, name)(local_stages(mine, size, num_stages), num_micros, squared_error)
    order = schedule.pipeline_order
    return [["" if action is None else str(action) for action in order[rank]] for rank in range(size)]


def written(rows: list[list[str]]) -> str:
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    return text.getvalue()


@pytest.mark.parametrize("name", [
    "Schedule1F1B", "ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble",
    "ScheduleDualPipeV",
])  # fmt: skip
@pytest.mark.parametrize("size, num_micros", [(2, 4), (4, 8)])
def test_a_plan_from_the_csv_of_torch(name, size, num_micros, tmp_path):
    rows = torch_rows(name, size, num_micros)
    path = tmp_path / "schedule.csv"
    path.write_text(written(rows))
    plan = Plan.from_csv(path)
    schedules.check(plan)
    assert (plan.P, plan.M, len(plan.chains)) == (size, num_micros, 1)
    assert plan.num_stages == (size if name == "Schedule1F1B" else 2 * size)
    computes = [[cell for cell in row if cell] for row in rows]
    assert list(csv.reader(io.StringIO(plan.to_csv(format="torch")))) == computes
    assert any("OVERLAP" in cell for row in computes for cell in row) == (name == "ScheduleDualPipeV")
    placed_as = {
        "Schedule1F1B": schedules.one_f_one_b,
        "ScheduleZBVZeroBubble": schedules.zb_v,
        "ScheduleDualPipeV": schedules.dualpipev,
    }.get(name, lambda P, M: schedules.interleaved_1f1b(P, M, 2))
    assert plan.owner == placed_as(size, num_micros).owner  # stages have the same numbers


def torch_reads(path, plan: Plan):
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    stages = local_stages(plan.stages_of(0), plan.P, plan.num_stages)
    schedule = _PipelineScheduleRuntime(stages, plan.M, squared_error)
    schedule._load_csv(path)
    return schedule


@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b", "interleaved_1f1b", "zb_h1", "zb_h2", "zb_v",
                                  "dualpipev", "u_shaped"])  # fmt: skip
def test_torch_reads_the_csv_of_a_plan(name, tmp_path):
    plan = plan_named(name, 4)
    text = plan.to_csv(tmp_path / "plan.csv", format="torch")
    schedule = torch_reads(tmp_path / "plan.csv", plan)
    assert [schedule.stage_index_to_group_rank[stage] for stage in plan.chains[0]] == [*plan.owner]
    order = written([map(str, row) for row in schedule.pipeline_order.values()])
    assert order.splitlines() == text.splitlines()
    schedule._dump_csv(tmp_path / "lowered.csv")  # with messages and FSDP's actions
    again = Plan.from_csv(tmp_path / "lowered.csv")
    assert "SEND_F" in (tmp_path / "lowered.csv").read_text(encoding="utf-8")
    assert again.compute == plan.compute
    schedules.check(again)


def test_what_torch_adds_when_it_lowers_is_left_out():
    rows = [
        "0UNSHARD,0F0,0SEND_F0,0F1,0WAIT_SEND_F0,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0WAIT_SEND_F1,0REDUCE_GRAD,"
        "0WAIT_REDUCE_GRAD,0RESHARD",
        "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1WAIT_SEND_B0,1B1,1SEND_B1,1WAIT_SEND_B1,1REDUCE_GRAD",
    ]
    plan = Plan.from_csv("\n".join(rows) + "\n")
    assert plan.to_csv(format="torch") == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
    schedules.check(plan)


def test_stages_are_numbered_along_the_chain():
    plan = Plan("back", 2, 1, owner=[1, 0], next_of=[None, 0], compute=["F1.0 B1.0", "F0.0 B0.0"])
    assert plan.to_csv(format="torch") == "0F0,0B0\n1F0,1B0\n"


def test_what_is_not_of_one_form_is_refused():
    with pytest.raises(PlanError, match="dualpipe has 2 chains of stages; torch's schedules have one"):
        schedules.dualpipe(2, 4).to_csv(format="torch")
    with pytest.raises(ValueError, match='format must be "pipecomm" or "torch", not \'json\''):
        schedules.gpipe(2, 4).to_csv(format="json")
    for text, place in [
        ("0F0,0X0\n", "line 1, cell 2: '0X0'"),
        ("0F0,0B0\n1F0,F1.0\n", "line 2, cell 2: 'F1.0'"),
        ("0F0,(0F1;0I0)OVERLAP_F_B\n", "line 1, cell 2: "),
        ("0F0 0B0\n", "line 1, cell 1: '0F0 0B0'"),
    ]:
        with pytest.raises(PlanError, match="expected a text like '0F1'") as caught:
            Plan.from_csv(text)
        assert place in str(caught.value)
    with pytest.raises(PlanError, match="owner must name the stages"):
        Plan.from_csv("0F0,0B0\n2F0,2B0\n")


# ---- the same stages --------------------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("name", ["Schedule1F1B", "ScheduleInterleaved1F1B"])
def test_torch_and_the_executor_give_the_same_losses_and_gradients(world, name):
    """Torch's plan runs here, and this library's plan in torch (interleaved)."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    x, y = torch.cat(batches(4, 1)), torch.cat(batches(4, 2))
    num_stages = 2 if name == "Schedule1F1B" else 4
    mine = [*range(world.rank, num_stages, 2)]
    results = {}

    def torch_stages(modules):
        return [PipelineStage(modules[stage], stage, num_stages, torch.device("cpu")) for stage in mine]

    def record(run):
        modules = {stage: copy.deepcopy(Block(stage)) for stage in mine}
        losses = run(modules)
        gradients = [p.grad for module in modules.values() for p in module.parameters()]
        results[len(results)] = [*(losses or ()), *gradients]

    def torch_step(schedule):
        losses = [] if world.rank == 1 else None
        schedule.step(*[x] * (world.rank == 0), target=y if world.rank == 1 else None, losses=losses)
        return [loss.detach() for loss in losses or ()]

    def executor_step(plan, modules):
        with Executor(
            plan, modules, communicator=world.group, loss_fn=squared_error, loss_scale="mean"
        ) as executor:
            return executor.step(x, y).losses

    if name == "Schedule1F1B":
        record(lambda modules: torch_step(Schedule1F1B(torch_stages(modules)[0], 4, squared_error)))
        plan = schedules.one_f_one_b(2, 4)
    else:
        record(lambda modules: torch_step(ScheduleInterleaved1F1B(torch_stages(modules), 4, squared_error)))
        plan = schedules.interleaved_1f1b(2, 4, 2)
        path = tempfile.mkstemp(suffix=".csv")[1]
        plan.to_csv(path, format="torch")

        def runtime(modules):
            schedule = _PipelineScheduleRuntime(torch_stages(modules), 4, squared_error)
            schedule._load_csv(path)
            os.remove(path)
            return torch_step(schedule)

        record(runtime)
    record(lambda modules: executor_step(plan, modules))
    record(lambda modules: executor_step(Plan.from_csv(written(torch_rows(name, 2, 4))), modules))
    expected, *others = results.values()
    for other in others:
        assert all(map(torch.equal, expected, other))


# ---- the same arguments -----------------------------------------------------------------------------------


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x, *, factor):
        return self.weight * factor * x


@on_ranks(2)
def test_pre_split_inputs_have_the_names_of_torch(world):
    stage = Scaled()
    inputs, targets, factors = [torch.ones(1), torch.ones(2)], [torch.zeros(1), torch.zeros(2)], (2.0, 3.0)
    keywords = [{"factor": factor} for factor in factors]
    arguments = dict(arg_mbs=[(x,) for x in inputs], kwarg_mbs=keywords, target_mbs=targets)
    with Executor(schedules.gpipe(2, 2), [stage], loss_fn=squared_error) as executor:
        losses = executor.step(**arguments).losses
        evaluated = executor.eval(**arguments).losses
        refusals = [
            (dict(inputs=inputs), TypeError, "give inputs or arg_mbs, not both"),
            (dict(arg_mbs=torch.ones(2, 1)), TypeError, "arg_mbs must be a list with one entry per micro"),
            (dict(kwarg_mbs=keywords[:1]), ValueError, "kwargs"),
        ]
        for wrong, error, text in 10 * refusals:  # each rank reports its own, never the other's abort
            with pytest.raises(error, match=text):
                executor.step(**{**arguments, **wrong})
        assert executor.step(**arguments).losses == losses  # the executor can still be used
    cases = zip(inputs, targets, factors, strict=True)
    expected = [squared_error(factor**2 * x, y).item() for x, y, factor in cases]
    assert (losses and [loss.item() for loss in losses]) == (expected if world.rank == 1 else None)
    assert evaluated == losses
