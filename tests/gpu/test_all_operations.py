"""What is built on messages, with CUDA tensors over NCCL: the same results as on the host, to the bit."""

from __future__ import annotations

import copy
import itertools
from types import SimpleNamespace

import pytest
import torch
from gpu_world import DEADLINE_S, comm_on, comm_over, on_devices, over_transports, take_device
from patterns import assert_same, pattern
from pipelines import WIDTH, Block, Pipeline, batches, make_executor, plan_named, squared_error
from ranks import on_ranks
from relay_cases import Traffic, topology_of
from sequence_cases import cut, numbers, remainder_first
from torch import nn

from pipecomm_ext import (
    _C,
    StageRelay,
    all_to_all,
    all_to_all_many,
    gather_forward_split_backward,
    split_forward_gather_backward,
)
from pipecomm_ext.pipeline_parallel import P2PCommunicator
from pipecomm_ext.schedules import DualPipe, DualPipeV

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
TOKENS, CHANNELS = 37, 24


# ---- sequence parallelism --------------------------------------------------------------------------------


def pieces(comm) -> list[int]:
    return remainder_first(TOKENS, comm.size)


SEQUENCE_OPERATIONS = {
    "all_to_all": lambda x, comm, scale: all_to_all(cut(x, 0, pieces(comm), comm.rank), comm, 1, 0, TOKENS),
    "many": lambda x, comm, scale: all_to_all_many(
        [cut(x, 0, pieces(comm), comm.rank), x[: pieces(comm)[comm.rank], ::2]], comm, 1, 0, TOKENS
    )[1],
    "split": lambda x, comm, scale: split_forward_gather_backward(x, comm, 0, grad_scale=scale),
    "split of columns": lambda x, comm, scale: split_forward_gather_backward(x, comm, 1, grad_scale=scale),
    "gather": lambda x, comm, scale: gather_forward_split_backward(
        cut(x, 0, pieces(comm), comm.rank), comm, 0, pieces(comm), scale
    ),
}


@on_ranks(2, 3, deadline=DEADLINE_S)
@on_devices
@pytest.mark.parametrize("grad_scale", [None, "up", "down"])
def test_sequence_parallel_results_and_gradients(world, device, grad_scale):
    comms = [("cpu", world.fresh_comm(device="cpu", transport="tcp")), (device, comm_on(world, device))]
    for dtype, (name, operation) in itertools.product(FLOATS, SEQUENCE_OPERATIONS.items()):
        results = []
        for kind, comm in comms:
            whole = numbers((TOKENS, CHANNELS), dtype, name, world.rank).to(kind).requires_grad_()
            result = operation(whole, comm, grad_scale)
            result.backward(numbers(result.shape, dtype, "gradient", world.rank).to(kind))
            results.append((result.detach().cpu(), whole.grad.cpu()))
        for ours, hosts in zip(results[1], results[0], strict=True):
            if (device, name, grad_scale) == ("cuda", "gather", "down"):
                # Its gradient is local, and torch divides by 3 on a GPU as it multiplies by 1/3.
                torch.testing.assert_close(ours, hosts, rtol=torch.finfo(dtype).eps, atol=0.0)
            else:
                assert_same(ours, hosts, (name, dtype))


# ---- stage relay -----------------------------------------------------------------------------------------


RELAYS = [
    ("cpu", (1, 2), "own transport"),
    *itertools.product(["cuda"], [(1, 1), (1, 2), (2, 1)], ["own transport", "tcp"]),
]


@pytest.mark.parametrize(("device", "stages", "over"), RELAYS, ids=str)
def test_relays(ranks, device, stages, over):
    ranks.run(sum(stages), body_relays, device, stages, over, deadline=DEADLINE_S)


def body_relays(world, device, stages, over):
    """By every route, waiting and not: what arrives, and the gradient that comes back."""
    topology = topology_of(world, list(stages))
    comm = comm_over(world, device, over, channels=6)
    layouts = [["replicated"] * 2, [("sharded", 0)] * 2, ["replicated", ("sharded", 1)]]
    specs = [((64, 33), torch.bfloat16), ((300, 1001), torch.float32)]
    cases = itertools.product(["sharded", "direct"], layouts, specs, [False, True])
    for step, (algorithm, layout, (shape, dtype), is_async) in enumerate(cases):
        relay = StageRelay(
            topology, algorithm=algorithm, layout=layout, grad_reduce="mean", communicator=comm
        )
        traffic = Traffic(topology, layout, "mean", shape, dtype, step)
        received = round_the_ring(relay, traffic, device, is_async)
        expected = (traffic.received_forward(), traffic.received_backward())
        for ours, theirs in zip(received, expected, strict=True):
            assert_same(ours.cpu().contiguous(), theirs.contiguous(), (algorithm, layout, dtype, is_async))


def round_the_ring(relay: StageRelay, traffic: Traffic, device: str, is_async: bool):
    """The activation and the gradient that arrive on this rank."""
    spec = (traffic.shape, traffic.dtype)
    output, gradient = traffic.sent_forward().to(device), traffic.sent_backward().to(device)
    if is_async:
        received = [relay.recv_backward(*spec, async_op=True), relay.recv_forward(*spec, async_op=True)]
        works = [relay.send_backward(gradient, async_op=True), relay.send_forward(output, async_op=True)]
        for work in (*works, *(work for _, work in received)):
            work.wait()
        return received[1][0], received[0][0]
    if traffic.stage_idx == 0:
        relay.send_forward(output)
        activation = relay.recv_forward(*spec)
        relay.send_backward(gradient)
        return activation, relay.recv_backward(*spec)
    activation = relay.recv_forward(*spec)
    relay.send_forward(output)
    arrived = relay.recv_backward(*spec)
    relay.send_backward(gradient)
    return activation, arrived


@on_ranks(2, deadline=DEADLINE_S)
@on_devices
@over_transports
def test_a_plan_that_fills_half_of_its_output(world, device, over):
    """The rest, and what lies between the elements, stays as it was."""
    comm = comm_over(world, device, over)
    whole = ((8, 6), torch.float32)
    plan = _C.plan_reshard(
        world.rank, 2, whole, ([0, 1], 0, None, False), ([0, 1], 0, None, True), own_in_place=True
    )
    mine = pattern((4, 6), torch.float32, world.rank).to(device)
    output = pattern((8, 7), torch.float32, "before", world.rank).to(device)
    expected = output.clone()
    theirs = slice(4 - 4 * world.rank, 8 - 4 * world.rank)
    expected[theirs, :6] = pattern((4, 6), torch.float32, 1 - world.rank).to(device)
    for is_async in (False, True):
        work = comm.exchange(plan, [mine], [output[:, :6]], async_op=is_async)
        if is_async:
            work.wait()
        assert_same(output.cpu(), expected.cpu(), is_async)


# ---- pipelines -------------------------------------------------------------------------------------------


@on_ranks(2, 3, deadline=DEADLINE_S)
@on_devices
@pytest.mark.parametrize("variable", [False, True], ids=["fixed", "variable"])
@pytest.mark.parametrize("batched", [False, True], ids=["individual", "batched"])
def test_stages_exchange_activations_and_gradients(world, device, variable, batched):
    config = SimpleNamespace(
        pipeline_dtype=torch.bfloat16, variable_seq_lengths=variable, batch_p2p_comm=batched
    )
    p2p = P2PCommunicator(comm_on(world, device, channels=4), config)
    is_first, is_last = world.rank == 0, world.rank == world.size - 1

    def payload(sender: int, what: str, step: int) -> torch.Tensor:
        length = 5 + (3 * sender + step) % 4 if variable else 5
        return pattern((length, 12), torch.bfloat16, sender, what, step).to(device)

    for step in range(6):
        received = p2p.recv_forward((5, 12), is_first)
        assert (received is None) == is_first
        if not is_first:
            expected = payload(world.rank - 1, "activation", step)
            assert_same(received.detach().cpu(), expected.cpu(), (step, "activation"))
        activation = payload(world.rank, "activation", step)
        received = p2p.send_forward_recv_backward(activation, (5, 12), is_last)
        if not is_last:
            expected = payload(world.rank + 1, "gradient", step)
            assert_same(received.detach().cpu(), expected.cpu(), (step, "gradient"))
        p2p.send_backward(payload(world.rank, "gradient", step), is_first)


@on_ranks(2, 3, deadline=DEADLINE_S)
@on_devices
@pytest.mark.parametrize("name", ["zb_v", "dualpipev", "1f1b"])
def test_an_executor_trains_as_the_unsplit_model(world, device, name):
    comm = comm_on(world, device, channels=4)
    plan = plan_named(name, world.size)
    pipeline = Pipeline(plan, world.rank)
    for stage in pipeline.stages.values():
        stage.to(device)
    executor = make_executor(world, plan, pipeline, communicator=comm)
    for seed in (1, 2):
        pipeline.set_data(seed)
        losses = executor.step(
            moved(pipeline.of_my(0, pipeline.inputs), device),
            moved(pipeline.of_my(-1, pipeline.targets), device),
        ).losses
        pipeline.assert_losses(moved(losses, "cpu"), pipeline.run_whole())
    for stage in pipeline.stages.values():
        stage.to("cpu")
    pipeline.assert_gradients()


def moved(values, device: str):
    """Tensors in lists and dicts of lists; None stays."""
    if isinstance(values, torch.Tensor):
        return values.to(device)
    if isinstance(values, dict):
        return {key: moved(value, device) for key, value in values.items()}
    return None if values is None else [moved(value, device) for value in values]


@pytest.mark.parametrize(("kind", "size"), [(DualPipe, 2), (DualPipeV, 2), (DualPipeV, 3)])
@on_devices
def test_dualpipe_trains_as_the_unsplit_model(ranks, device, kind, size):
    ranks.run(size, body_dualpipe, device, kind, deadline=DEADLINE_S)


def body_dualpipe(world, device, kind):
    P, rank = world.size, world.rank
    is_v = kind is DualPipeV
    whole = [Block(depth) for depth in range(2 * P if is_v else P)]
    depths = (rank, len(whole) - 1 - rank)
    num_chunks = 2 * P + 2
    data = [torch.cat(batches(num_chunks // (1 if is_v else 2), seed)) for seed in (1, 2, 3, 4)]
    inputs = {0: (data[0],)} if is_v else {0: (data[0],), P - 1: (data[1],)}
    labels = {0: [data[2]]} if is_v else {0: [data[3]], P - 1: [data[2]]}
    take_device(world, device)
    pipe = kind(nn.Sequential(*(copy.deepcopy(whole[depth]) for depth in depths)).to(device))
    loss, outputs = pipe.step(
        *moved(inputs.get(rank, ()), device),
        num_chunks=num_chunks,
        criterion=squared_error,
        labels=moved(labels.get(rank, []), device),
        return_outputs=True,
    )
    assert device == "cpu" or pipe._communicator.transport == "nccl"
    run = nn.Sequential(*whole)
    expected = {0: run(data[0])} if is_v else {P - 1: run(data[0]), 0: run(data[1])}
    assert (outputs is None) == (rank not in expected)
    if outputs is not None:
        assert outputs.device.type == device and outputs.size(-1) == WIDTH
        torch.testing.assert_close(outputs.cpu(), expected[rank].detach())
        chunks = zip(expected[rank].chunk(len(loss)), labels[rank][0].chunk(len(loss)), strict=True)
        torch.testing.assert_close(
            loss.cpu(), torch.stack([squared_error(*chunk).detach() for chunk in chunks])
        )
    assert all(parameter.grad is not None for parameter in pipe.parameters())
    pipe.close()
