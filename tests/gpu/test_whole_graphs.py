"""Whole computations as one CUDA graph: a training step of a pipeline, and functions that torch compiles."""

from __future__ import annotations

from collections.abc import Callable

import torch
from gpu_world import DEADLINE_S, comm_on, finish, on_devices
from ranks import on_ranks
from torch import nn
from torch.nn import functional

from pipecomm_ext import all_to_all, ulysses_attention
from pipecomm_ext.schedules import Executor, get_plan

WIDTH, NUM_ROWS, NUM_MICROBATCHES = 24, 16, 4


def replayable(call: Callable[[], None], device: str) -> Callable[[], None]:
    """The replay of a graph of the call, which has run before; on the host the call itself."""
    if device != "cuda":
        return call
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


@on_ranks(2, deadline=DEADLINE_S)
@on_devices
def test_a_training_step_of_1f1b(world, device):
    """Forwards, backwards and messages of all micro-batches; only the data change between replays."""
    comm = comm_on(world, device, channels=4)
    plan = get_plan("1f1b", P=2, M=NUM_MICROBATCHES)
    torch.manual_seed(1)
    stages = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()).to(device) for _ in range(2)]
    mine = stages[world.rank]
    inputs, targets = (torch.zeros(NUM_ROWS, WIDTH, device=device) for _ in range(2))
    result = {}
    with Executor(
        plan, {world.rank: mine}, communicator=comm, loss_fn=functional.mse_loss, return_outputs=False
    ) as executor:

        def step() -> None:
            for weight in mine.parameters():
                if weight.grad is not None:
                    weight.grad.zero_()
            result["losses"] = executor.step(inputs, targets).losses

        for _ in range(3):  # shapes, checks and gradients are known then
            step()
        replay = replayable(step, device)
        for seed in (2, 3, 4):
            torch.manual_seed(seed)
            inputs.copy_(torch.randn(NUM_ROWS, WIDTH))
            targets.copy_(torch.randn(NUM_ROWS, WIDTH))
            replay()
            finish(device)
            chunks = zip(inputs.chunk(NUM_MICROBATCHES), targets.chunk(NUM_MICROBATCHES), strict=True)
            losses = [functional.mse_loss(stages[1](stages[0](x)), y) for x, y in chunks]
            expected = torch.autograd.grad(sum(losses), list(mine.parameters()))
            for weight, gradient in zip(mine.parameters(), expected, strict=True):
                torch.testing.assert_close(weight.grad, gradient)
            if world.rank == 1:
                torch.testing.assert_close(torch.stack(list(result["losses"])), torch.stack(losses).detach())


@on_ranks(2, deadline=DEADLINE_S)
@on_devices
def test_what_torch_compiles(world, device):
    """All-to-all and Ulysses attention, forward and backward, with CUDA graphs of torch's own."""
    comm = comm_on(world, device)

    def function(q, k, v):
        scattered = all_to_all(q * 2, comm, 2, 1)
        attended = ulysses_attention(q, k, v, process_group=comm, is_causal=True)
        return attended.sin(), scattered.cos()

    compiled = function
    if device == "cuda":  # on the host: test_compiled_operations.py
        torch._dynamo.reset()
        compiled = torch.compile(function, fullgraph=True, mode="reduce-overhead")
    for seed in range(5):  # the first calls compile and record, the others replay
        torch.manual_seed(seed)
        tensors = [torch.randn(1, 6, 4, 8).to(device).requires_grad_() for _ in range(3)]
        outcomes = []
        for call in (function, compiled):
            results = call(*tensors)
            gradients = torch.autograd.grad(sum(result.sum() for result in results), tensors)
            outcomes.append([tensor.clone() for tensor in (*results, *gradients)])
        for actual, expected in zip(*outcomes, strict=True):
            torch.testing.assert_close(actual, expected)
