"""CUDA graphs over NCCL: what is captured, when it is replayed, and how they end."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from gpu_world import DEADLINE_S, nccl_comm
from ranks import on_ranks

from pipecomm_ext import _C, PipeCommError, Recv, Send, gather_forward_split_backward


class Step:
    """A batch of two messages and a strided exchange, with other data in every round."""

    def __init__(self, comm, numel: int = 1000):
        self.comm, self.peer = comm, 1 - comm.rank
        self.sent, self.received = (torch.zeros(numel, device="cuda") for _ in range(2))
        self.table = torch.zeros(numel, 3, device="cuda")
        self.plan = _C.plan_all_to_all(comm.rank, 2, [((4, 6), torch.float32, [3, 3], [4, 4])], 1, 0)
        self.wide, self.tall = torch.zeros(4, 6, device="cuda"), torch.zeros(8, 3, device="cuda")

    def __call__(self) -> None:
        self.comm.batch_p2p(
            [
                Send(self.sent, self.peer),
                Recv(self.received, self.peer),
                Send(self.sent, self.peer, 1),
                Recv(self.table[:, 1], self.peer, 1),
            ]
        )
        self.comm.exchange(self.plan, [self.wide], [self.tall], async_op=True).wait()

    def fill(self, round_idx: int) -> None:
        self.sent.fill_(round_idx + 10 * self.comm.rank)
        self.wide.fill_(round_idx + 10 * self.comm.rank)

    def verify(self, round_idx: int) -> None:
        torch.cuda.synchronize()
        value = round_idx + 10 * self.peer
        assert torch.all(self.received == value), round_idx
        assert torch.all(self.table[:, 1] == value) and not self.table[:, ::2].any(), round_idx
        assert torch.all(self.tall[4 * self.peer : 4 * self.peer + 4] == value), round_idx


def captured(step: Step, stream: torch.cuda.Stream | None = None) -> torch.cuda.CUDAGraph:
    """A graph of the step, which has run before."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step()
    return graph


@on_ranks(2, deadline=DEADLINE_S)
def test_what_has_run_before_is_captured_and_nothing_else(world):
    step, graph = Step(nccl_comm(world)), torch.cuda.CUDAGraph()
    with pytest.raises(ValueError, match="inside a CUDA graph capture"), torch.cuda.graph(graph):
        step()
    step()
    torch.cuda.synchronize()
    graph = captured(step)
    for round_idx in range(5):
        step.fill(round_idx)
        graph.replay()
        step.verify(round_idx)


@on_ranks(2, deadline=DEADLINE_S)
def test_two_graphs_on_side_streams_replayed_in_turns(world):
    comm = nccl_comm(world)
    steps = [Step(comm), Step(comm, 70_000)]
    for step in steps:
        step()
    torch.cuda.synchronize()
    graphs = [captured(step, torch.cuda.Stream()) for step in steps]
    side = torch.cuda.Stream()
    for round_idx in range(12):
        step, graph = steps[round_idx % 2], graphs[round_idx % 2]
        with torch.cuda.stream(side):
            step.fill(round_idx)
            graph.replay()
        step.verify(round_idx)


@on_ranks(2, deadline=DEADLINE_S)
def test_eager_and_replayed_calls_in_turns(world):
    """One rank replays what the other one calls, and the other way round. NCCL allows that for memory that it
    does not register, as that of torch's allocator without expandable segments."""
    step = Step(nccl_comm(world))
    step()
    torch.cuda.synchronize()
    graph = captured(step)
    for round_idx in range(12):
        step.fill(round_idx)
        graph.replay() if (round_idx + world.rank) % 2 else step()
        step.verify(round_idx)


@on_ranks(2, deadline=DEADLINE_S)
def test_many_tasks_and_a_scale_in_one_graph(world):
    comm, peer = nccl_comm(world), 1 - world.rank
    specs = [((2 + idx, 6), torch.bfloat16, [3, 3], [2 + idx] * 2) for idx in range(60)]
    plan = _C.plan_all_to_all(world.rank, 2, specs, 1, 0)
    inputs = [torch.zeros(shape, dtype=dtype, device="cuda") for shape, dtype, *_ in specs]
    outputs = [torch.zeros(2 * shape[0], 3, dtype=dtype, device="cuda") for shape, dtype, *_ in specs]
    whole = torch.ones(8, 6, device="cuda", requires_grad=True)
    upstream = torch.ones(16, 6, device="cuda")

    def step():
        comm.exchange(plan, inputs, outputs)
        result = gather_forward_split_backward(whole, comm, 0, [8, 8], "up")
        return torch.autograd.grad(result, whole, upstream)[0]

    stream = torch.cuda.Stream()  # backwards run on the stream of the forward
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        gradient = step()
    for round_idx in range(4):
        for idx, tensor in enumerate(inputs):
            tensor.fill_(idx + 10 * round_idx + world.rank)
        upstream.fill_(round_idx)
        graph.replay()
        torch.cuda.synchronize()
        for idx, tensor in enumerate(outputs):
            rows = tensor.size(0) // 2
            assert torch.all(tensor[rows * peer : rows * (peer + 1)] == idx + 10 * round_idx + peer), idx
        assert torch.all(gradient == 2 * round_idx)


@on_ranks(2, deadline=DEADLINE_S)
def test_a_graph_that_outlives_its_communicator(world):
    """close() returns although the graph is alive; the process goes on."""
    step = Step(comm := nccl_comm(world))
    step()
    torch.cuda.synchronize()
    graph = captured(step)
    step.fill(1)
    graph.replay()
    step.verify(1)
    began = time.monotonic()
    comm.close()
    assert time.monotonic() - began < 60
    assert torch.ones(10, device="cuda").sum().item() == 10
    del graph
    assert nccl_comm(world).transport == "nccl"


@on_ranks(2, deadline=DEADLINE_S)
def test_a_replay_that_the_other_rank_misses_times_out(world):
    step = Step(comm := nccl_comm(world, timeout=20))
    step()
    torch.cuda.synchronize()
    graph = captured(step)
    began = time.monotonic()
    if world.rank == 0:
        graph.replay()
    with pytest.raises(PipeCommError):
        while time.monotonic() - began < 90:
            comm.batch_p2p([])
            time.sleep(0.1)
    assert time.monotonic() - began < 90
    comm.close()


@on_ranks(2, deadline=DEADLINE_S)
def test_another_thread_asks_for_a_message_during_a_capture(world):
    comm, peer = nccl_comm(world, channels=3), 1 - world.rank
    step = Step(comm)
    step()
    received = torch.zeros(4, device="cuda")
    comm.batch_p2p([Send(torch.ones(4, device="cuda"), peer, 2), Recv(received, peer, 2)])
    torch.cuda.synchronize()
    pending, has_ended, answers = comm.irecv(received, peer, channel=2), threading.Event(), []

    def ask() -> None:
        while not has_ended.is_set():
            answers.append(pending.is_completed())

    thread, graph = threading.Thread(target=ask), torch.cuda.CUDAGraph()
    thread.start()
    try:
        with torch.cuda.stream(torch.cuda.Stream()):  # torch.cuda.graph() would wait for the message
            graph.capture_begin()
            step()
            num_answers, limit = len(answers), time.monotonic() + 20
            while len(answers) < num_answers + 3 and time.monotonic() < limit:
                time.sleep(0.001)
            graph.capture_end()
    finally:
        has_ended.set()
        thread.join()
    assert len(answers) >= num_answers + 3 and not any(answers), answers
    comm.isend(torch.full((4,), 7.0, device="cuda"), peer, channel=2)
    pending.synchronize()
    assert received.tolist() == [7.0] * 4
    step.fill(5)
    graph.replay()
    step.verify(5)


@on_ranks(2, deadline=DEADLINE_S)
def test_a_call_beside_a_capture_is_refused(world):
    """A call on another stream while a capture has joined its channel; the capture and later calls go on."""
    comm, peer = nccl_comm(world), 1 - world.rank
    step = Step(comm)
    step()
    torch.cuda.synchronize()
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
        with torch.cuda.stream(side), pytest.raises(ValueError, match="captur"):
            comm.batch_p2p([Send(step.sent, peer), Recv(step.received, peer)])
    step.fill(3)
    graph.replay()
    step.verify(3)
    step.fill(4)
    step()
    step.verify(4)


@on_ranks(2, deadline=DEADLINE_S)
def test_the_handle_of_a_captured_send_may_be_dropped(world):
    """Its memory is not given to what the same graph computes later."""
    comm, numel = nccl_comm(world), 1 << 20
    given, other, received = (torch.zeros(numel, device="cuda") for _ in range(3))

    def step():
        if world.rank == 0:
            comm.isend(given * 2, 1)
            for _ in range(4):
                torch.full_like(given, -1)
            comm.isend(other, 1).wait()  # joins the same lane
        else:
            comm.irecv(received, 0)
            comm.irecv(other, 0).wait()

    step()
    torch.cuda.synchronize()
    graph = captured(step)
    for round_idx in range(5):
        given.fill_(round_idx)
        if world.rank == 1:
            time.sleep(0.05)  # so that the send waits
        graph.replay()
        torch.cuda.synchronize()
        assert world.rank == 0 or torch.all(received == 2 * round_idx), round_idx


@on_ranks(2, deadline=DEADLINE_S)
@pytest.mark.parametrize("check", ["auto", "full"])
def test_a_refused_batch_changes_nothing(world, check):
    """One that had run before, with one that had not."""
    comm = nccl_comm(world, check=check)
    step, fresh = Step(comm), torch.zeros(17, device="cuda")
    step()
    torch.cuda.synchronize()
    if world.rank == 0:
        graph = torch.cuda.CUDAGraph()
        batch = [Send(step.sent, 1), Recv(step.received, 1), Send(fresh, 1)]
        with torch.cuda.graph(graph):
            step.sent.add_(0)
            with pytest.raises(ValueError, match="inside a CUDA graph capture"):
                comm.batch_p2p(batch)
    for round_idx in range(3):
        step.fill(round_idx)
        step()
        step.verify(round_idx)
