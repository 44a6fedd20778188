"""`torch.set_default_device` and `torch.device` as a context are for the tensors of the user."""

from __future__ import annotations

import pytest
import torch
from ranks import on_ranks
from torch.nn.functional import mse_loss

from pipecomm_ext import cal_split_sizes_multi, packed_data_split_forward_gather_backward, ulysses_attention
from pipecomm_ext.pipeline_parallel import P2PCommunicator, PipelineConfig, forward_backward_no_pipelining
from pipecomm_ext.schedules import Executor, get_plan

CPU = torch.device("cpu")


@on_ranks(2)
@pytest.mark.parametrize("name", ["1f1b", "zb_v"])
def test_an_executor(world, name):
    plan = get_plan(name, P=2, M=4)
    stages = [torch.nn.Linear(4, 4) for _ in plan.stages_of(world.rank)]
    x, target = torch.ones(8, 4), torch.zeros(8, 4)
    with torch.device("meta"), Executor(plan, stages, loss_fn=mse_loss, record_timeline=True) as executor:
        assert not executor.step(x, target).losses or world.rank == plan.owner[plan.num_stages - 1]
        executor.clip_grad_norm_(1.0)
        executor.timeline()
        with torch.no_grad():
            executor.step(x, target)
    assert all(parameter.grad.isfinite().all() for stage in stages for parameter in stage.parameters())


@on_ranks(2)
def test_shapes_that_are_announced(world):
    config = PipelineConfig(pipeline_dtype=torch.float32, variable_seq_lengths=True)
    p2p = P2PCommunicator(world.group, config)
    with torch.device("meta"):
        p2p.send_forward(torch.ones(2, 3, device=CPU), p2p.is_pp_last_stage)
        received = p2p.recv_forward([()], p2p.is_pp_first_stage)
    if world.rank == 1:
        assert torch.equal(received[0], torch.ones(2, 3))


@on_ranks(2)
def test_sequence_parallelism(world):
    x = torch.ones(2, 4, 3, 4, requires_grad=True)
    with torch.device("meta"):
        ulysses_attention(x, x, x, process_group=world.comm, is_causal=True, chunks=2).sum().backward()
        assert cal_split_sizes_multi([5, 3], 2).tolist() == [[3, 2], [2, 1]]
        packed = packed_data_split_forward_gather_backward(x[0], world.comm, [3, 1])
    assert packed.device == CPU and x.grad.isfinite().all()


@on_ranks(1)
def test_megatrons_step(world):
    model = torch.nn.Linear(4, 1)
    counts = []
    model.config = PipelineConfig(finalize_model_grads_func=lambda model, count, **_: counts.append(count))
    model.config.calculate_per_token_loss, model.set_input_tensor = True, print
    inputs = iter([torch.ones(3, 4)] * 2)
    with torch.device("meta"):
        forward_backward_no_pipelining(
            forward_step_func=lambda data, model: (model(next(data)).sum(), lambda out: (out, {})),
            data_iterator=inputs,
            model=model,
            num_microbatches=2,
            seq_length=1,
            micro_batch_size=1,
        )
    assert model.weight.grad.tolist() == [[3.0] * 4] and counts[0].device == CPU
