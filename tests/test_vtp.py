"""MindSpeed-MM's functions between stages: vtp_* over the relay, and the layerwise-disaggregated ones."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from relay_cases import numbers, same_bytes, topology_of

from pipecomm_ext import (
    PipeCommAborted,
    PipeCommError,
    PipeCommMismatch,
    PipeCommTimeout,
    parallel_state,
    vtp_recv_backward,
    vtp_recv_forward,
    vtp_send_backward,
    vtp_send_forward,
)
from pipecomm_ext.mindspeed import named_peers
from pipecomm_ext.parallel_state import PipelineTopology
from pipecomm_ext.pipeline_parallel import (
    recv_backward_with_reqs,
    recv_forward_with_reqs,
    send_backward,
    send_forward,
)

FP32 = SimpleNamespace(pipeline_dtype=torch.float32)


def finish(works) -> None:
    for work in works or []:
        work.wait(10)


@on_ranks(3)
def test_vtp_example_of_the_reference(world):
    """[1, 2]: rank 0 sends (3, 4); the gradient of rank 1 comes back, nothing is summed."""
    topology = topology_of(world, [1, 2])
    if world.rank == 0:
        works = vtp_send_forward(torch.tensor([3.0, 4.0]), topology=topology)
        assert len(works) == 1
        gradient = vtp_recv_backward([2], FP32, topology=topology)
        assert gradient.tolist() == [7.0, 8.0]
        finish(works)
    else:
        received = vtp_recv_forward([2], FP32, topology=topology)
        assert received.tolist() == [3.0, 4.0] and received.is_leaf and received.requires_grad
        works = vtp_send_backward(torch.tensor([7.0, 8.0]) * world.rank, topology=topology)
        assert (works is None) == (world.rank == 2)
        finish(works)


@on_ranks(5)
@pytest.mark.parametrize("is_async", [False, True])
def test_vtp_round_the_ring(world, is_async):
    """Wraparound both ways, with the default topology; wait() may be called twice."""
    parallel_state._topology = topology = topology_of(world, [1, 2, 2])
    try:
        mine, num_stages = topology.get_vtp_my_stage_idx(), 3
        config = SimpleNamespace(pipeline_dtype=torch.bfloat16)
        sent = vtp_send_forward(numbers((6, 2), torch.bfloat16, "F", mine)) or []
        sent += vtp_send_backward(numbers((6, 2), torch.bfloat16, "B", mine)) or []
        forward = vtp_recv_forward((6, 2), config, async_op=is_async)
        backward = vtp_recv_backward((6, 2), config, async_op=is_async)
        if is_async:
            (forward, first), (backward, second) = forward, backward
            assert list(first) == ["recv_prev"] and list(second) == ["recv_next"]
            for work in (second["recv_next"], first["recv_prev"], second["recv_next"]):
                work.wait()
                assert work.is_completed()
        assert same_bytes(forward, numbers((6, 2), torch.bfloat16, "F", (mine - 1) % num_stages))
        assert same_bytes(backward, numbers((6, 2), torch.bfloat16, "B", (mine + 1) % num_stages))
        finish(sent)
    finally:
        parallel_state.destroy()


@on_ranks(3)
def test_vtp_errors(world):
    topology = topology_of(world, [1, 2])
    no_dtype = SimpleNamespace(pipeline_dtype=None)
    sequence_parallel = SimpleNamespace(pipeline_dtype=torch.float32, sequence_parallel=True)
    for config, shape, kind, text in [
        (no_dtype, [2], RuntimeError, "config.pipeline_dtype must be set"),
        (FP32, None, RuntimeError, "tensor_shape must be given"),
        ({"pipeline_dtype": torch.float32}, [2], TypeError, "config must be an object with attributes"),
        (sequence_parallel, [2], ValueError, "with sequence_parallel"),
    ]:
        if world.rank == 0:
            with pytest.raises(PipeCommMismatch, match="refused by rank"):
                vtp_send_forward(torch.zeros(2), topology=topology)[0].wait(10)
        else:
            with pytest.raises(kind, match=text):
                vtp_recv_forward(shape, config, topology=topology)
    if world.rank == 0:
        finish(vtp_send_forward(torch.ones(2), topology=topology))
    else:
        assert vtp_recv_forward([2], FP32, topology=topology).tolist() == [1.0, 1.0]
    with pytest.raises(RuntimeError, match="there is no pipeline topology"):
        vtp_recv_forward([2], FP32)


@on_ranks(4)
def test_vtp_with_named_ranks(world):
    """Stage 1 of two ranks receives from the two ranks of lists: all its ranks get the fp32 mean."""
    topology = topology_of(world, [1, 2, 1])
    group = dist.group.WORLD
    for is_async in (False, True):
        if world.rank in (0, 3):
            value = {0: 1.0, 3: 5.0}[world.rank]
            finish(vtp_send_forward(torch.full((3,), value), topology=topology, group=group, next_rank=1))
        else:
            lists = {"group": [group, group], "prev_rank": [0, 3], "topology": topology}
            received = vtp_recv_forward([3], FP32, async_op=is_async, **lists)
            if is_async:
                received, works = received
                works["recv_prev"].wait()
                works["recv_prev"].wait()
            assert received.tolist() == [3.0] * 3 and received.is_leaf and received.requires_grad
    if world.rank == 1:
        works = vtp_send_backward(
            torch.arange(2.0), topology=topology, group=[group, group], prev_rank=[0, 3]
        )
        assert len(works) == 2
        finish(works)
    elif world.rank == 2:
        assert vtp_send_backward(torch.zeros(2), topology=topology, group=group, prev_rank=0) is None
    else:
        received = vtp_recv_backward([2], FP32, topology=topology, group=group, next_rank=1)
        assert received.tolist() == [0.0, 1.0]


@on_ranks(4)
@pytest.mark.parametrize("is_async", [False, True])
def test_the_mean_of_any_dtype(world, is_async):
    """Of {1, 6}, cast back to the dtype, for stages of one rank and of several."""
    stages, group = topology_of(world, [1, 2, 1]), dist.group.WORLD
    dtypes = [torch.complex64, torch.complex128, torch.int64, torch.int32, torch.uint8, torch.bool]
    for dtype in [*dtypes, torch.float8_e5m2, torch.float16, torch.float64]:
        config, value = SimpleNamespace(pipeline_dtype=dtype), {0: 1, 3: 6}.get(world.rank)
        if value is not None:
            tensor = torch.full((2,), value * (1 + 2j if dtype.is_complex else 1)).to(dtype)
            finish(vtp_send_forward(tensor, topology=stages, group=group, next_rank=1))
            continue
        lists = {"group": [group, group], "prev_rank": [0, 3], "topology": stages}
        received = vtp_recv_forward([2], config, async_op=is_async, **lists)
        if is_async:
            received, works = received
            works["recv_prev"].wait()
        expected = torch.tensor(3.5 + 7j if dtype.is_complex else 3.5).to(dtype)
        assert received.dtype == dtype and received.tolist() == [expected.item()] * 2


@on_ranks(4)
def test_a_mean_that_fails_on_the_first_rank(world):
    """All ranks of its stage hear of it, and the next call works."""
    topology, group = topology_of(world, [1, 2, 1]), dist.group.WORLD
    lists = {"group": [group, group], "prev_rank": [0, 3], "topology": topology}

    def fails(*_):
        raise RuntimeError("out of luck")

    for is_lucky in (False, True):
        if world.rank in (0, 3):
            finish(vtp_send_forward(torch.ones(2), topology=topology, group=group, next_rank=1))
        elif is_lucky:
            assert vtp_recv_forward([2], FP32, **lists).tolist() == [1.0, 1.0]
        else:
            _, works = vtp_recv_forward([2], FP32, async_op=True, **lists)
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(named_peers, "_take_mean", fails)
                for _ in range(2):
                    kind = RuntimeError if world.rank == 1 else PipeCommMismatch
                    with pytest.raises(kind, match="out of luck"):
                        works["recv_prev"].wait()


@on_ranks(4)
def test_named_ranks_that_do_not_fit(world):
    """The whole receiving stage raises; rank 3, of the same group, takes no part."""
    topology = topology_of(world, [1, 2, 1])
    pair = dist.new_group([0, 1])  # unused on the other ranks
    name = {"topology": topology, "group": pair}
    if world.rank == 0:
        for dtype in (torch.float64, torch.float32):
            [work] = vtp_send_forward(torch.ones(2, dtype=dtype), next_rank=1, **name)
            if dtype == torch.float64:
                with pytest.raises(PipeCommMismatch, match=r"exchange of float32\[2\]"):
                    work.wait(10)
            else:
                work.wait(10)
        with pytest.raises(TypeError, match="tensor must be a torch.Tensor, not list"):
            vtp_send_forward([1.0], next_rank=1, **name)
    elif world.rank < 3:
        _, works = vtp_recv_forward([2], FP32, async_op=True, prev_rank=0, **name)
        for _ in range(2):
            with pytest.raises(PipeCommMismatch, match=r"exchange of float64\[2\]"):
                works["recv_prev"].wait()
        assert works["recv_prev"].is_completed()
        assert vtp_recv_forward([2], FP32, prev_rank=0, **name).tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("who", "stages"),
    [
        *itertools.product(["the source", "the destination"], [[1, 2], [2, 1]]),
        ("the first ranks", [1, 2]),
    ],
    ids=str,
)
@on_ranks(3)
def test_only_one_end_names_the_other(world, stages, who):
    """No rank waits for a deadline, and the reason reaches all ranks."""
    topology = PipelineTopology(stages, timeout=60)
    is_source, is_first = topology.is_pipeline_first_stage(), topology.is_vtp_stage_rank0()
    names = {"the source": is_source, "the destination": not is_source, "the first ranks": is_first}[who]
    key = {"topology": topology}
    if names:
        key |= {"group": world.group, "next_rank": stages[0], "prev_rank": 0}
    with pytest.raises(PipeCommError) as raised:
        if is_source:
            for work in vtp_send_forward(torch.ones(2), **key) or []:
                work.wait()
        else:
            vtp_recv_forward([2], FP32, **key)
        topology.communicator.barrier()
    is_told = not (is_source and isinstance(raised.value, PipeCommMismatch))  # by a handle of a send
    if is_told:
        assert "give group, next_rank or prev_rank, or none does" in str(raised.value)
    with pytest.raises(PipeCommAborted, match="with vtp_"):
        topology.communicator.barrier()
    topology.close()


@on_ranks(2)
def test_a_wait_that_expires_names_the_rule(world):
    topology = topology_of(world, [1, 1])
    if world.rank == 1:
        _, works = vtp_recv_forward([1], FP32, async_op=True, topology=topology, prev_rank=0)
        with pytest.raises(PipeCommTimeout, match="stays in flight.*; with vtp_"):
            works["recv_prev"].wait(0.05)
    topology.communicator.barrier()
    if world.rank == 0:
        finish(vtp_send_forward(torch.ones(1), topology=topology, next_rank=1))
    else:
        works["recv_prev"].wait()


@on_ranks(5)
def test_one_edge_for_two_domains(world):
    """The edge is rank 0; the domains have a stage of two ranks each. One topology holds all of them."""
    topology = topology_of(world, [[0], [1, 2], [3, 4]])
    groups = [dist.new_group([0, leader]) for leader in (1, 3)]
    key = {"topology": topology}
    for step in range(2):
        if world.rank == 0:
            for domain, leader in enumerate((1, 3)):  # one domain after the other, each its own batch
                batch = numbers((3, 2), torch.float32, step, domain)
                finish(vtp_send_forward(batch, group=groups[domain], next_rank=leader, **key))
            mean = vtp_recv_backward((3, 2), FP32, group=groups, next_rank=[1, 3], **key)
            parts = [numbers((3, 2), torch.float32, "g", step, domain) for domain in range(2)]
            assert same_bytes(mean, (parts[0] + parts[1]) / 2)
            finish(vtp_send_forward(mean, group=groups, next_rank=[1, 3], **key))
        else:
            domain = (world.rank - 1) // 2
            is_leader = topology.is_vtp_stage_rank0()
            edge = {
                "group": groups[domain] if is_leader else dist.GroupMember.NON_GROUP_MEMBER,
                "prev_rank": 0,
            }
            received = vtp_recv_forward((3, 2), FP32, **edge, **key)
            assert same_bytes(received, numbers((3, 2), torch.float32, step, domain))
            finish(vtp_send_backward(numbers((3, 2), torch.float32, "g", step, domain), **edge, **key))
            vtp_recv_forward((3, 2), FP32, **edge, **key)


# ---- layerwise disaggregated ------------------------------------------------------------------------------


def config_of(**changes) -> SimpleNamespace:
    fields = {"pipeline_dtype": torch.float32, "layerwise_disaggregated_training": True}
    return SimpleNamespace(**{**fields, "batch_p2p_comm": False, **changes})


@on_ranks(3)
@pytest.mark.parametrize("modes", [{}, {"batch_p2p_comm": True}, {"use_ring_exchange_p2p": True}], ids=str)
def test_u_shape(world, modes):
    """Down the stages and back to the first, which has both ends; gradients in the opposite direction."""
    topology = topology_of(world, [1, 1, 1])
    config, key = config_of(**modes), {"topology": topology}
    requests = [] if "use_ring_exchange_p2p" in modes else None
    x = [numbers((2, 3), torch.float32, "x", idx) for idx in range(3)]
    g = [numbers((2, 3), torch.float32, "g", idx) for idx in range(3)]
    if world.rank == 0:
        assert recv_forward_with_reqs((2, 3), config, **key) == (None, None)
        assert send_forward(x[0], config, **key) is None
        received, reqs = recv_forward_with_reqs((2, 3), config, is_end_stage=True, **key)
        assert same_bytes(received, x[2]) and received.requires_grad and received.is_leaf and reqs == requests
        assert send_forward(x[0], config, is_end_stage=True, **key) is None  # the loss is here
        assert recv_backward_with_reqs((2, 3), config, is_end_stage=True, **key) == (None, None)
        send_backward(g[0], config, is_end_stage=True, **key)
        received, _ = recv_backward_with_reqs((2, 3), config, **key)
        assert same_bytes(received, g[1])
        assert send_backward(g[0], config, **key) is None
    else:
        is_end_stage = world.rank == 2  # only meaningful in the first stage
        received, reqs = recv_forward_with_reqs((2, 3), config, is_end_stage, **key)
        assert same_bytes(received, x[world.rank - 1]) and reqs == requests
        send_forward(x[world.rank], config, is_end_stage, **key)
        received, _ = recv_backward_with_reqs((2, 3), config, is_end_stage, **key)
        assert same_bytes(received, g[(world.rank + 1) % 3])
        send_backward(g[world.rank], config, is_end_stage, **key)


@on_ranks(2)
def test_straight_pipeline_and_requests(world):
    """Not disaggregated: no stage follows the last one. Without waiting, requests by name."""
    topology = topology_of(world, [1, 1])
    config, key = config_of(layerwise_disaggregated_training=False), {"topology": topology}
    if world.rank == 0:
        send_forward(torch.ones(4).view(2, 2).t(), config, wait_on_reqs=False, **key)
        received, reqs = recv_backward_with_reqs([3], config, wait_on_reqs=False, **key)
        assert list(reqs) == ["recv_next"]
        for _ in range(2):
            reqs["recv_next"].wait()
        assert reqs["recv_next"].is_completed() and received.tolist() == [1.0, 2.0, 3.0]
    else:
        assert send_forward(torch.ones(4), config, **key) is None
        assert recv_backward_with_reqs([3], config, **key) == (None, None)
        received, reqs = recv_forward_with_reqs((2, 2), config, wait_on_reqs=False, **key)
        reqs["recv_prev"].wait()
        assert received.tolist() == [[1.0, 1.0], [1.0, 1.0]]
        send_backward(torch.tensor([1.0, 2.0, 3.0]), config, **key)


@on_ranks(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_mean_of_several(world, dtype):
    """One edge for two clouds: the same tensor to each, and the fp32 mean of what comes back; {1, 5} -> 3."""
    topology = topology_of(world, [1, 1, 1])
    groups = [dist.group.WORLD] * 2
    config, key = config_of(pipeline_dtype=dtype), {"topology": topology}
    for wait_on_reqs in (True, False):
        if world.rank == 0:
            lists = {"group": groups, "next_rank": [1, 2], "prev_rank": [1, 2]}
            send_forward(torch.full((5,), 2.0, dtype=dtype), config, **lists, **key)
            received, reqs = recv_backward_with_reqs([5], config, wait_on_reqs=wait_on_reqs, **lists, **key)
            if not wait_on_reqs:
                for _ in range(2):
                    reqs["recv_next"].wait()
            assert received.tolist() == [3.0] * 5 and received.dtype == dtype
            assert received.is_leaf and received.requires_grad
        else:
            edge = {"group": dist.group.WORLD, "prev_rank": 0}
            received, _ = recv_forward_with_reqs([5], config, **edge, **key)
            assert received.tolist() == [2.0] * 5
            value = {1: 1.0, 2: 5.0}[world.rank]
            send_backward(torch.full((5,), value, dtype=dtype), config, **edge, **key)


@on_ranks(3)
def test_the_shortest_list_ends_it(world):
    """Two groups and two next ranks, but one previous rank: a single exchange, with the first of each."""
    topology = topology_of(world, [1, 1, 1])
    lists = {"group": [dist.group.WORLD] * 2, "next_rank": [1, 2], "prev_rank": [2], "topology": topology}
    edge = {"group": dist.group.WORLD, "prev_rank": 0, "topology": topology}
    if world.rank == 0:
        send_forward(torch.ones(2), config_of(), **lists)
        assert recv_backward_with_reqs([2], config_of(), **lists)[0].tolist() == [5.0, 5.0]
    elif world.rank == 1:
        recv_forward_with_reqs([2], config_of(), **edge)
        send_backward(torch.full((2,), 5.0), config_of(), **edge)


@on_ranks(2)
def test_layerwise_errors(world):
    topology = topology_of(world, [1, 1])
    key = {"topology": topology, "is_end_stage": True}
    for error, text, shape, config, wait_on_reqs in [
        (RuntimeError, "config.pipeline_dtype must be set", [2], config_of(pipeline_dtype=None), True),
        (RuntimeError, "tensor_shape must be given", None, config_of(), True),
        (ValueError, "False needs config.batch_p2p_comm=False", [2], config_of(batch_p2p_comm=True), False),
        (RuntimeError, "tensor_shape must be given", None, config_of(batch_p2p_comm=True), False),
    ]:
        with pytest.raises(error, match=text):
            recv_forward_with_reqs(shape, config, wait_on_reqs=wait_on_reqs, **key)
    with pytest.raises(TypeError, match="tensor must be a torch.Tensor, not list"):
        send_backward([torch.zeros(2)], config_of(), **key)
    assert send_forward(None, config_of(), topology=topology) is None  # sends nothing, as there
    assert send_backward(None, config_of(), **key) is None
    if world.rank == 0:
        with pytest.raises(PipeCommMismatch, match=r"expects float64\[2\]"):
            send_forward(torch.zeros(2), config_of(), topology=topology)
    else:
        with pytest.raises(PipeCommMismatch, match=r"sends float32\[2\]"):
            recv_forward_with_reqs([2], config_of(pipeline_dtype=torch.float64), topology=topology)


@on_ranks(2)
def test_timers(world):
    topology = topology_of(world, [1, 1])
    calls = []

    def timers(name, **kwargs):
        note = lambda event: lambda: calls.append((name, event, kwargs))  # noqa: E731
        return SimpleNamespace(start=note("start"), stop=note("stop"))

    config = config_of(timers=timers, layerwise_disaggregated_training=False)
    if world.rank == 0:
        send_forward(torch.zeros(1), config, topology=topology)
        send_backward(torch.zeros(1), config, topology=topology)
        name = "forward-send"
    else:
        recv_forward_with_reqs([1], config, topology=topology)
        name = "forward-recv"
    assert calls == [(name, "start", {"log_level": 2}), (name, "stop", {})]


def test_the_stream_that_takes_the_mean_keeps_the_memory(monkeypatch):
    """`wait` on another stream than the one for which the tensors were received."""

    class Buffer:
        is_cuda, device = True, torch.device("cuda", 0)

        def __init__(self):
            self.streams = []
            self.record_stream = self.streams.append

        def detach(self):
            return self

    buffers = []
    means = []
    comm = SimpleNamespace(
        empty=lambda shape, dtype: buffers.append(Buffer()) or buffers[-1],
        irecv=lambda *args: SimpleNamespace(wait=lambda timeout: None),
    )
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the stream of wait()")
    monkeypatch.setattr(named_peers, "_take_mean", lambda *args: means.append(args))
    for num_sources in (1, 3):
        buffers.clear()
        received = named_peers.Received([named_peers.Peer(comm, 0, 0)] * num_sources, (4,), torch.float32)
        received.wait()
        expected = [] if num_sources == 1 else ["the stream of wait()"]
        assert [buffer.streams for buffer in buffers] == [expected] * num_sources
    assert [len(tensors) for _, tensors in means] == [3]
