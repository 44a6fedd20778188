"""A program of a user. Type checkers read it, in their strict modes (`make lint`); nothing runs it."""

# pyright: strict

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import assert_type

import pipecomm_ext as px
from pipecomm_ext import distributed as pdist
from pipecomm_ext import parallel_state, schedules
from pipecomm_ext.pipeline_parallel import PipelineConfig, get_forward_backward_func, send_forward


def messages(group: dist.ProcessGroup | None, tensor: Tensor) -> None:
    with px.Communicator(group, device="cpu", transport="auto", timeout=60) as comm:
        assert_type(comm.rank, int)
        assert_type(comm.device, torch.device)
        assert_type(comm.isend(tensor, 1), px.Work)
        assert_type(comm.barrier(async_op=True), px.Work)
        assert_type(comm.batch_p2p([px.Send(tensor, 1), px.Recv(tensor, 1)], async_op=True), px.Work)
        assert_type(comm.batch_p2p([px.Send(tensor, 1), px.Recv(tensor, 1)]), px.Work | None)
        assert_type(comm.broadcast(tensor, src=0, async_op=True), px.Work)
        assert_type(comm.all_to_all([tensor], [tensor], async_op=True), px.Work)
        assert_type(comm.failure, dict[str, Any] | None)
        comm.isend(tensor, 1).wait(timeout=1.5)
    assert_type(px.get_communicator(group), px.Communicator)
    assert_type(px.__version__, str)
    try:
        assert_type(pdist.all_to_all_single(tensor, tensor, group=group), px.Work | None)
        assert_type(pdist.recv(tensor, src=0), int)
    except px.PipeCommTimeout as error:
        assert_type(error.peer, int | None)
    except (px.PipeCommMismatch, px.PipeCommError):
        raise


def attention(q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup) -> Tensor:
    swapped = px.all_to_all(q, group, 2, 1)
    assert_type(swapped, Tensor)
    later, work = px.all_to_all(q, group, 2, 1, async_op=True)
    assert_type(later, Tensor)
    work.wait()
    several = px.all_to_all_many([q, k, v], group, 2, 1, scatter_sizes=px.cal_split_sizes(8, 2))
    piece = px.split_forward_gather_backward(several[0], group, dim=1)
    assert_type(px.gather_forward_split_backward(piece, group, dim=1, grad_scale="up"), Tensor)
    px.attention_with_cp(q, k, v, is_causal=True, gather_size=12)
    px.zigzag_attention(q, k, v, process_group=group, is_causal=True)
    return px.ulysses_attention(q, k, v, process_group=group, chunks="auto", gather_size=12)


def between_stages(activation: Tensor, config: object) -> None:
    topology = parallel_state.initialize_pipeline([2, 1])
    relay = px.StageRelay(topology, layout=[("sharded", 1), "replicated"], grad_reduce="mean")
    assert_type(relay.send_forward(activation, async_op=True), px.Work)
    assert_type(relay.recv_backward([4, 2], torch.float32), Tensor)
    gradient, work = relay.recv_backward([4, 2], torch.float32, async_op=True)
    work.wait()
    assert_type(gradient, Tensor)
    assert_type(relay.relay(activation, [4, 2], torch.float32, 0, 1), Tensor)
    assert_type(px.vtp_send_forward(activation), list[px.Work] | None)
    px.vtp_recv_forward([4, 2], config)
    assert_type(parallel_state.get_pipeline_model_parallel_rank(), int)
    assert_type(parallel_state.is_pipeline_first_stage(ignore_virtual=True), bool)


def plans() -> schedules.Plan:
    plan = schedules.gpipe(4, 8)
    assert_type(plan, schedules.Plan)
    assert_type(schedules.get_plan("zb_v", P=4, M=8), schedules.Plan)
    compute = [["F0.0", schedules.Action("B", 0, 0)]]
    own = schedules.Plan("own", 1, 1, owner=[0], compute=compute)
    schedules.check(own)
    costs = schedules.Costs(F=1, I=Fraction(1, 2), W=[1, 2.5])
    timeline = schedules.simulate(schedules.lower(schedules.dualpipe(P=4, M=10), costs), costs)
    assert_type(timeline, schedules.Timeline)
    assert_type(timeline.bubble_ratio, float)
    schedules.draw([plan, timeline], "plans.svg", titles=["one", "other"])
    assert_type(plan.to_csv("plan.csv"), str)
    assert_type(plan.owner[0], int)
    assert_type(plan.next_of[0], int | None)
    return schedules.Plan.from_csv("plan.csv").replace(name="read")


def train(
    plan: schedules.Plan, stage: nn.Module, batch: Tensor
) -> list[Tensor] | dict[int, list[Tensor]] | None:
    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().mean()

    with schedules.Executor(
        plan, [stage], loss_fn=loss_fn, loss_scale="mean", record_timeline=True
    ) as executor:
        result = executor.step([batch], {3: [batch]}, kwargs={"scale": 2.0})
        assert_type(result, schedules.StepResult)
        assert_type(executor.clip_grad_norm_(1.0), Tensor)
        assert_type(executor.timeline(), schedules.Timeline)
    pipeline = schedules.DualPipeV((stage, nn.Linear(2, 2)))
    loss, _ = pipeline.step(batch, num_chunks=8, criterion=loss_fn, labels=[batch])
    assert_type(loss, Tensor | None)
    return result.losses


def forward_step(data: Iterator[Tensor], model: nn.Module) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    return model(next(data)), torch.sum


def megatron(model: nn.Module, data: list[Tensor]) -> None:
    config = PipelineConfig(pipeline_dtype=torch.float32)
    schedule = get_forward_backward_func()
    schedule(
        forward_step_func=forward_step,
        data_iterator=iter(data),
        model=model,
        num_microbatches=2,
        seq_length=4,
        micro_batch_size=1,
    )
    send_forward(data[0], config=config)
