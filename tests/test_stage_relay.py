"""The stage relay: the same bits by every route, for stages of any sizes, layouts and dtypes."""

from __future__ import annotations

import functools
import itertools
import re
import time
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from ranks import on_ranks
from relay_cases import Traffic, numbers, same_bytes, topology_of

from pipecomm_ext import Communicator, PipeCommMismatch, StageRelay
from pipecomm_ext.relay import cost

SIZES = [(1, 2), (2, 1), (1, 2, 2), (2, 3), (4, 2, 1), (1, 3, 4)]
ALGORITHMS = ["sharded", "direct", "auto"]
SPECS = [
    ((7,), torch.float32),
    ((5, 3), torch.bfloat16),
    ((4, 2, 3), torch.float64),
    ((2, 3, 2, 2), torch.float16),
    ((0, 3), torch.float32),
    ((3, 2), torch.complex64),
]
NO_GRADIENTS = [((6, 2), torch.int64), ((2, 9), torch.bool), ((1, 3), torch.float8_e4m3fn)]


def layouts_of(num_stages):
    """One for all stages, and lists that differ by stage."""
    replicated, rows, columns, last = "replicated", ("sharded", 0), ("sharded", 1), ("sharded", -1)
    return [
        [replicated] * num_stages,
        [(last, replicated)[idx % 2] for idx in range(num_stages)],
        [rows] * num_stages,
        [(replicated, rows)[idx % 2] for idx in range(num_stages)],
        [(rows, replicated, columns)[idx % 3] for idx in range(num_stages)],
        [(rows, columns)[idx % 2] for idx in range(num_stages)],
    ]


def all_at_once(relay: StageRelay, traffic: Traffic) -> None:
    """Everything in flight together, over every link of the ring, waited for in an odd order."""
    started(relay, traffic)()


def started(relay: StageRelay, traffic: Traffic) -> Callable[[], None]:
    """Starts all; returns a function that waits and compares."""
    spec = (traffic.shape, traffic.dtype)
    gradient, gradient_work = relay.recv_backward(*spec, async_op=True)
    sends = [relay.send_backward(traffic.sent_backward(), async_op=True)]
    activation, activation_work = relay.recv_forward(*spec, async_op=True)
    sends.append(relay.send_forward(traffic.sent_forward(), async_op=True))

    def finish() -> None:
        for work in (activation_work, *sends, gradient_work, activation_work):
            work.wait(30)
            assert work.is_completed()
        check(activation, traffic.received_forward(), traffic)
        check(gradient, traffic.received_backward(), traffic)

    return finish


def stage_by_stage(relay: StageRelay, traffic: Traffic) -> None:
    """Around the ring and back; each call waits."""
    spec = (traffic.shape, traffic.dtype)
    if traffic.stage_idx == 0:
        assert relay.send_forward(traffic.sent_forward()) is None
        activation = relay.recv_forward(*spec)
        assert relay.send_backward(traffic.sent_backward()) is None
        gradient = relay.recv_backward(*spec)
    else:
        activation = relay.recv_forward(*spec)
        relay.send_forward(traffic.sent_forward())
        gradient = relay.recv_backward(*spec)
        relay.send_backward(traffic.sent_backward())
    check(activation, traffic.received_forward(), traffic)
    check(gradient, traffic.received_backward(), traffic)


def check(actual, expected, traffic):
    assert same_bytes(actual, expected), (traffic.layouts, traffic.grad_reduce, traffic.shape, traffic.dtype)
    assert not actual.requires_grad


def run_cases(world, sizes, cases, transport) -> None:
    topology = topology_of(world, list(sizes))
    comm = world.shared_comm(channels=6, transport=transport) if transport else None
    for idx, (algorithm, layouts, grad_reduce, (shape, dtype)) in enumerate(cases):
        if any(layout != "replicated" and layout[1] >= len(shape) for layout in layouts):
            continue
        relay = StageRelay(
            topology, algorithm=algorithm, layout=layouts, grad_reduce=grad_reduce, communicator=comm
        )
        traffic = Traffic(topology, layouts, grad_reduce, shape, dtype, idx)
        (all_at_once if idx % 2 == 0 else stage_by_stage)(relay, traffic)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_values_and_gradients(ranks, sizes):
    layouts, routes = layouts_of(len(sizes)), ["sharded", "direct"]  # "auto" is one of them
    with_gradients = itertools.product(routes, layouts, ["leader", "sum", "mean"], SPECS)
    without = itertools.product(routes, layouts, ["leader"], NO_GRADIENTS)
    cases = [*with_gradients, *without]
    # Every seventh case still covers every value of each factor: their numbers are not multiples of 7.
    ranks.run(sum(sizes), run_cases, sizes, cases[::7], None)


@pytest.mark.parametrize("sizes", [(1, 2), (2, 3)], ids=str)
def test_values_and_gradients_over_sockets(ranks, sizes):
    cases = list(itertools.product(ALGORITHMS, layouts_of(len(sizes)), ["sum"], SPECS[:3]))
    ranks.run(sum(sizes), run_cases, sizes, cases[::2], "tcp")


@on_ranks(5)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_large_tensors_of_mixed_dtypes(world, algorithm):
    """Enough bytes for rendezvous, windows and several chunks; several relays in flight in each direction."""
    topology = topology_of(world, [2, 3])
    layouts = [["replicated"] * 2, [("sharded", 1), "replicated"]]
    specs = [((300, 1001), torch.float32), ((1 << 10, 1 << 10), torch.bfloat16)]
    steps = []
    for step, (layout, spec) in enumerate(itertools.product(layouts, specs)):
        relay = StageRelay(topology, algorithm=algorithm, grad_reduce="mean", layout=layout)
        steps.append(started(relay, Traffic(topology, layout, "mean", *spec, step)))
    for finish in reversed(steps):
        finish()


@on_ranks(5)
@pytest.mark.parametrize("algorithm", ["leader", "pipelined"])
def test_former_routes_mean_direct(world, algorithm):
    """Their names are accepted, also by one stage alone, and produce the same bits."""
    topology = topology_of(world, [2, 3])
    mine = algorithm if topology.is_pipeline_first_stage() else "direct"
    for name, grad_reduce in ((algorithm, "leader"), (mine, "mean")):
        relay = StageRelay(topology, algorithm=name, grad_reduce=grad_reduce)
        traffic = Traffic(topology, ["replicated"] * 2, grad_reduce, (5, 3), torch.bfloat16, algorithm)
        all_at_once(relay, traffic)
        stage_by_stage(relay, traffic)


@on_ranks(4)
@pytest.mark.parametrize(("grad_reduce", "expected"), [("sum", 258.0), ("mean", 86.0)])
def test_gradients_of_small_dtypes_are_added_in_fp32(world, grad_reduce, expected):
    """In bfloat16, 256 + 1 is 256."""
    topology = topology_of(world, [1, 3])
    relay = StageRelay(topology, grad_reduce=grad_reduce)
    if topology.is_pipeline_first_stage():
        assert relay.recv_backward([5], torch.bfloat16).tolist() == [expected] * 5
    else:
        value = 256.0 if topology.is_vtp_stage_rank0() else 1.0
        relay.send_backward(torch.full((5,), value, dtype=torch.bfloat16))


@on_ranks(3)
def test_strides_scalars_and_unshared_memory(world):
    topology = topology_of(world, [1, 2])
    whole = numbers((6, 4), torch.float32, "strided")
    for algorithm in ALGORITHMS:
        relay = StageRelay(topology, algorithm=algorithm)
        if topology.is_pipeline_first_stage():
            relay.send_forward(whole.t().contiguous().t())
            relay.send_forward(torch.tensor(7.5))
        else:
            received = relay.recv_forward([6, 4], torch.float32)
            assert same_bytes(received, whole) and received.is_contiguous() and received._base is None
            received.add_(1)  # its own memory
            assert same_bytes(received, whole + 1)
            assert relay.recv_forward((), torch.float32).item() == 7.5


def wait_for(condition, seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.005)


@on_ranks(5)
@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_arrives_without_anybody_waiting(world, algorithm, transport):
    topology = topology_of(world, [2, 3])
    comm = world.shared_comm(channels=6, transport=transport)
    relay = StageRelay(topology, algorithm=algorithm, communicator=comm)
    whole = numbers((1 << 19,), torch.float32, "unwatched", algorithm)
    if topology.is_pipeline_first_stage():
        work = relay.send_forward(whole, async_op=True)
        wait_for(work.is_completed)
        relay.drain()
    else:
        received, work = relay.recv_forward(whole.shape, whole.dtype, async_op=True)
        wait_for(work.is_completed)
        assert same_bytes(received, whole)
        work.wait()


@on_ranks(4)
@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_many_large_tensors_in_flight_both_ways(world, transport):
    """Waits for operations before they are posted, and dropped handles."""
    topology, rows = topology_of(world, [2, 2]), [40_000] * 5 + [30_001]
    comm = world.shared_comm(channels=6, transport=transport)
    relay = StageRelay(topology, algorithm="sharded", communicator=comm)
    for _ in range(3):
        if topology.is_pipeline_first_stage():
            for idx, length in enumerate(rows):
                relay.send_forward(torch.full((length, 6), float(idx), dtype=torch.float64), async_op=True)
            received = [relay.recv_backward([length, 6], torch.float64, async_op=True) for length in rows]
        else:
            received = [relay.recv_forward([length, 6], torch.float64, async_op=True) for length in rows]
        for idx, (tensor, work) in enumerate(received):
            work.wait()
            assert tensor.eq(idx).all()
            if topology.is_pipeline_last_stage():
                relay.send_backward(tensor.clone(), async_op=True)
        relay.drain()


@on_ranks(3)
def test_drain_tells_what_went_wrong(world):
    topology = topology_of(world, [1, 2])
    relay = StageRelay(topology)
    if topology.is_pipeline_first_stage():
        for length in (3, 4, 3):
            relay.send_forward(torch.zeros(length), async_op=True)
        with pytest.raises(PipeCommMismatch, match=r"relay of float32\[4\]"):
            relay.drain()
        relay.drain()
    else:
        relay.recv_forward([3], torch.float32)
        with pytest.raises(PipeCommMismatch):
            relay.recv_forward([3], torch.float32)
        relay.recv_forward([3], torch.float32)


# ---- errors -----------------------------------------------------------------------------------------------


def expect(kinds, text, call):
    with pytest.raises(kinds, match=re.escape(text)):
        result = call()
        if result is not None:
            result[1].wait(10)


def still_works(relay: StageRelay, step) -> None:
    topology = relay.topology
    layouts = ["replicated"] * topology.num_stages
    all_at_once(relay, Traffic(topology, layouts, relay._grad_reduce, (5, 3), torch.float32, step))


@on_ranks(3, 5)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("is_async", [False, True])
def test_disagreeing_stages_hear_of_it(world, algorithm, is_async):
    topology = topology_of(world, [1, 2] if world.size == 3 else [2, 3])
    relay = StageRelay(topology, algorithm=algorithm)
    is_first = topology.is_pipeline_first_stage()
    sent = torch.zeros(4, 6)
    for shape, dtype in [((6, 4), torch.float32), ((4, 6), torch.float64), ((4, 5), torch.float32)]:
        if is_first:
            call = lambda: (None, relay.send_forward(sent, True)) if is_async else relay.send_forward(sent)  # noqa: E731
        else:
            call = lambda: relay.recv_forward(shape, dtype, is_async)  # noqa: B023, E731
        expect(PipeCommMismatch, "relay of float32[4, 6]", call)
        still_works(relay, (shape, str(dtype)))


@on_ranks(3, 5)
@pytest.mark.parametrize("grad_reduce", ["leader", "sum"])
@pytest.mark.parametrize("algorithm", ["direct", "sharded"])
def test_a_stage_that_disagrees_with_itself(world, algorithm, grad_reduce):
    """One rank of the sending, or of the receiving stage differs: all ranks raise."""
    topology = topology_of(world, [1, 2] if world.size == 3 else [2, 3])
    relay = StageRelay(topology, algorithm=algorithm, grad_reduce=grad_reduce)
    is_odd = world.rank == world.size - 1
    length = 9 if is_odd else 8
    if topology.is_pipeline_first_stage():
        expect(PipeCommMismatch, "relay", lambda: relay.send_forward(torch.zeros(8)))
        expect(PipeCommMismatch, "relay", lambda: relay.recv_backward([8], torch.float32))
    else:
        expect(PipeCommMismatch, "relay", lambda: relay.recv_forward([length], torch.float32))
        expect(PipeCommMismatch, "relay", lambda: relay.send_backward(torch.zeros(length)))
    still_works(relay, "self")


@on_ranks(5)
def test_pieces_must_be_remainder_first(world):
    topology = topology_of(world, [2, 3])
    relay = StageRelay(topology, layout=("sharded", 0))
    if topology.is_pipeline_first_stage():
        mine = torch.zeros(1 + 2 * world.rank, 2)
        expect(ValueError, "hold lengths [1, 3] along dim 0", lambda: relay.send_forward(mine))
        expect(ValueError, "tensor must be [2, 2]", lambda: relay.send_forward(mine, shape=(4, 2)))
    else:
        for _ in range(2):
            expect(PipeCommMismatch, "refused by rank", lambda: relay.recv_forward([4, 2], torch.float32))
    shape = (5, 2)
    traffic = Traffic(topology, [("sharded", 0)] * 2, "leader", shape, torch.float32, "pieces")
    if topology.is_pipeline_first_stage():
        relay.send_forward(traffic.sent_forward(), shape=shape)
    else:
        check(relay.recv_forward(shape, torch.float32), traffic.received_forward(), traffic)


@on_ranks(5)
@pytest.mark.parametrize("grad_reduce", ["leader", "sum", "mean"])
@pytest.mark.parametrize("layout", ["replicated", ("sharded", 0), [("sharded", 1), "replicated"]], ids=str)
def test_one_rank_rejects_the_call(world, layout, grad_reduce):
    """Before or after its stage reduces: neither the stage nor the link is left out of step."""
    topology = topology_of(world, [2, 3])
    relay = StageRelay(topology, layout=layout, grad_reduce=grad_reduce)
    layouts = layout if isinstance(layout, list) else [layout] * 2
    shape, dtype = (4, 2), torch.float32
    traffic = Traffic(topology, layouts, grad_reduce, shape, dtype, "rejected")
    bad_gradients = [("no tensor", TypeError), (torch.ones(4, 2).to_sparse(), ValueError), (None, TypeError)]
    for bad, kind in bad_gradients:
        told = PipeCommMismatch, f"refused by rank 4: {kind.__name__}"
        if topology.is_pipeline_first_stage():
            expect(*told, lambda: relay.recv_backward(shape, dtype))
        elif world.rank == 4:
            expect(kind, "tensor must be", lambda: relay.send_backward(bad))  # noqa: B023
        else:
            expect(*told, lambda: relay.send_backward(traffic.sent_backward()))
        all_at_once(relay, traffic)
    if topology.is_pipeline_first_stage():
        expect(PipeCommMismatch, "refused by rank 4", lambda: relay.send_forward(traffic.sent_forward()))
    elif world.rank == 4:
        expect(ValueError, "lengths >= 0", lambda: relay.recv_forward([-1, 2], dtype))
    else:
        expect(PipeCommMismatch, "refused by rank 4: ValueError", lambda: relay.recv_forward(shape, dtype))
    all_at_once(relay, traffic)


@on_ranks(3)
def test_memory_that_one_end_does_not_have(world):
    topology = topology_of(world, [1, 2])
    relay = StageRelay(topology)
    if topology.is_pipeline_first_stage():
        expect(PipeCommMismatch, "refused by rank", lambda: relay.send_forward(torch.ones(2)))
    else:
        with pytest.raises(RuntimeError, match="(?i)alloc"):
            relay.recv_forward([1 << 50], torch.float32)
    still_works(relay, "memory")


@on_ranks(3)
def test_integer_gradients_have_no_mean(world):
    topology = topology_of(world, [2, 1])
    relay = StageRelay(topology, grad_reduce="mean")
    integers = torch.zeros(4, dtype=torch.int64)
    if topology.is_pipeline_first_stage():
        with pytest.raises(TypeError, match="needs floating-point or complex gradients, not torch.int64"):
            relay.send_backward(integers)
    else:
        expect(PipeCommMismatch, "refused", lambda: relay.recv_backward([4], torch.int64))
    still_works(relay, "integers")


@on_ranks(3)
def test_bad_arguments(world):
    """Those that are not in the matrix of reliability/bad_input_targets_parallel.py."""
    topology = topology_of(world, [1, 2])
    for kind, text, arguments in [
        (TypeError, "topology must be a PipelineTopology, not list", {"topology": [1, 2]}),
        (TypeError, "communicator must be a Communicator", {"communicator": world.group}),
        (RuntimeError, "initialize_pipeline", {"topology": None}),
    ]:
        expect(kind, text, lambda: StageRelay(**{"topology": topology, **arguments}))  # noqa: B023
    relay = StageRelay(topology, layout=("sharded", 1))
    text = "sharded along dim 1, but it has 1 dims"
    expect(ValueError, text, lambda: relay.recv_forward([4], torch.float32))
    expect(ValueError, text, lambda: relay.send_forward(torch.zeros(4)))


@on_ranks(3)
def test_a_communicator_with_few_channels(world):
    """Its transport is used; the messages have channels of their own."""
    topology = topology_of(world, [1, 2])
    comm = world.fresh_comm(channels=2, transport="tcp", timeout=33)
    relay = StageRelay(topology, communicator=comm)
    try:
        assert relay.communicator is not comm and relay.communicator.channels == 6
        assert (relay.communicator.transport, relay.communicator.timeout) == ("tcp", 33)
        still_works(relay, "few channels")
    finally:
        relay.communicator.close()


@on_ranks(2)
def test_one_stage_has_no_neighbour(world):
    topology = topology_of(world, [2])
    with pytest.raises(ValueError, match="a pipeline of one stage"):
        StageRelay(topology).send_forward(torch.zeros(2))


# ---- any two stages ---------------------------------------------------------------------------------------


@on_ranks(5)
@pytest.mark.parametrize("grad_reduce", ["leader", "sum"])
@pytest.mark.parametrize("algorithm", ["direct", "sharded"])
def test_relay_is_differentiable(world, algorithm, grad_reduce):
    """From stage 0 to 2 and back to 1, through weights on each: gradients as if it were one process."""
    sizes = [1, 2, 2]
    topology = topology_of(world, sizes)
    relay = StageRelay(topology, algorithm=algorithm, grad_reduce=grad_reduce)
    stage_idx, position = topology.get_vtp_my_stage_idx(), topology.get_tensor_model_parallel_rank()
    shape, dtype = (3, 4), torch.float64
    x = numbers(shape, dtype, "x").requires_grad_()
    weights = [numbers(shape, dtype, "weight", idx).requires_grad_() for idx in range(3)]

    # The ranks of a stage hold replicas; each one's loss is 1 / n of the whole.
    factor = {"leader": 1.0, "sum": 0.5}[grad_reduce]
    if stage_idx == 0:
        token = relay.relay(x * weights[0], shape, dtype, 0, 2)
        assert token.numel() == 0 and token.requires_grad
        token.backward()
    elif stage_idx == 2:
        received = relay.relay(None, shape, dtype, 0, 2)
        assert received.requires_grad
        relay.relay(received * weights[2] * factor, shape, dtype, 2, 1).backward()
    else:
        received = relay.relay(None, shape, dtype, 2, 1)
        (received * weights[1]).sum().backward()

    expected_x = x.detach().clone().requires_grad_()
    expected = [weight.detach().clone().requires_grad_() for weight in weights]
    y = expected_x * expected[0] * expected[2] * factor
    scale = {"leader": 1.0, "sum": 2.0}[grad_reduce]  # of what two equal replicas of stage 1 send back
    (y * expected[1]).sum().backward()
    if stage_idx == 0:
        total = scale * scale  # stage 2 sends the sum of its two, too
        assert torch.equal(x.grad, expected_x.grad * total)
        assert torch.equal(weights[0].grad, expected[0].grad * total)
    else:
        own = scale if stage_idx == 2 else 1.0
        assert torch.equal(weights[stage_idx].grad, expected[stage_idx].grad * own), position


@on_ranks(5)
@pytest.mark.parametrize("algorithm", ["direct", "sharded"])
def test_backwards_in_another_order_are_told(world, algorithm):
    """Gradients of one shape would be swapped. Stage 0 counts more relays than each of the others."""
    topology = topology_of(world, [1, 2, 2])
    relays = [StageRelay(topology, algorithm=algorithm) for _ in range(2)]
    mine, shape = topology.get_vtp_my_stage_idx(), (3,)
    leaves = [torch.zeros(shape, requires_grad=True) for _ in range(4)]
    ends = []  # of relays to stages 1, 2, 1, 2
    for idx, leaf in enumerate(leaves):
        stage = 1 + idx % 2
        if mine in (0, stage):
            ends.append(relays[idx // 2].relay(None if mine else leaf * 1, shape, torch.float32, 0, stage))
    losses = ends if mine == 0 else [(1 + idx) * end.sum() for idx, end in enumerate(ends)]
    if mine != 2:  # stage 0 begins with the first relay, the joint backward of stage 1 with the last one
        with pytest.raises(PipeCommMismatch, match="and backwards run in the same order"):
            (sum(losses) if mine else losses[0]).backward(retain_graph=True)
    for loss in losses:
        loss.backward()
    if mine == 0:
        assert [leaf.grad[0].item() for leaf in leaves] == [1, 1, 2, 2]


@on_ranks(3)
def test_relay_of_integers_and_of_what_needs_no_gradient(world):
    topology = topology_of(world, [1, 2])
    relay = StageRelay(topology)
    indices, values = numbers((4,), torch.int64, "indices"), numbers((4,), torch.float32, "values")
    if topology.is_pipeline_first_stage():
        token = relay.relay(indices, [4], torch.int64, 0, 1)
        assert token.numel() == 0 and not token.requires_grad
        relay.relay(values, [4], torch.float32, 0, 1).backward()  # receives it, although it is not needed
        assert values.grad is None
    else:
        received = relay.relay(None, [4], torch.int64, 0, 1)
        assert same_bytes(received, indices) and not received.requires_grad
        received = relay.relay(None, [4], torch.float32, 0, 1)
        received.sum().backward()


@on_ranks(5)
def test_relay_arguments(world):
    topology = topology_of(world, [1, 2, 2])
    relay = StageRelay(topology)
    stage_idx = topology.get_vtp_my_stage_idx()
    x = torch.zeros(2, 2)
    if stage_idx == 2:
        with pytest.raises(ValueError, match="this rank is in stage 2, neither in 0 nor in 1"):
            relay.relay(None, [2, 2], torch.float32, 0, 1)
        return
    mine = x if stage_idx == 0 else None
    if world.rank == 2:
        with pytest.raises(ValueError, match="tensor must be None"):
            relay.relay(x, [2, 2], torch.float32, 0, 1)
    else:
        with pytest.raises(PipeCommMismatch, match="refused by rank 2: ValueError: tensor must be None"):
            relay.relay(mine, [2, 2], torch.float32, 0, 1)
    if stage_idx == 0:
        with pytest.raises(ValueError, match="tensor is torch.float32, but dtype says torch.float64"):
            relay.relay(x, [2, 2], torch.float64, 0, 1)
    else:
        with pytest.raises(PipeCommMismatch, match="refused by rank 0"):
            relay.relay(None, [2, 2], torch.float64, 0, 1)
    result = relay.relay(mine, [2, 2], torch.float32, 0, 1)
    assert result.shape == ((0,) if stage_idx == 0 else (2, 2))


@on_ranks(6, deadline=60)
def test_over_nccl_a_link_has_one_communicator(world):
    """What a rank connects and runs, as seen by `DeviceExecution`: for each link and direction the ranks of
    both stages, and no more."""
    topology = topology_of(world, [2, 2, 2])
    connected, used = set(), set()
    comm = topology.communicator
    connect, exchange = Communicator.connect, Communicator.exchange

    def noted_connect(self, peers=None, *, channels=None, direction=None, together=False):
        if together:
            connected.update((tuple(sorted({*peers, comm.rank})), channel) for channel in channels)
        return connect(self, peers, channels=channels, direction=direction, together=together)

    def noted_exchange(self, *args, members=(), within=(), channel=None, **others):
        used.add((tuple(within or members), channel))
        return exchange(self, *args, members=members, within=within, channel=channel, **others)

    stage = topology.get_vtp_my_stage_idx()
    with mock.patch.multiple(Communicator, connect=noted_connect, exchange=noted_exchange):
        for grad_reduce in ("leader", "mean"):
            relay = StageRelay(topology, layout="replicated", algorithm="sharded", grad_reduce=grad_reduce)
            if stage > 0:
                relay.recv_forward((8,), torch.float32)
            if stage < 2:
                relay.send_forward(torch.ones(8))
                relay.recv_backward((8,), torch.float32)
            if stage > 0:
                relay.send_backward(torch.ones(8))
    assert used == connected and len(used) == (4 if stage == 1 else 2)


# ---- the cost model ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("within", ["shm", "tcp", "nccl"])
@pytest.mark.parametrize("crossing", ["shm", "tcp", "nccl"])
def test_choice_of_route(crossing, within):
    for num_speakers, num_receivers in itertools.product((1, 2, 4, 8), repeat=2):
        choose = functools.partial(
            cost.choose, crossing, within, num_speakers=num_speakers, num_receivers=num_receivers
        )
        assert choose(0)[0] == "direct"
        for num_bytes in (1 << 10, 1 << 20, 1 << 28):
            algorithm, num_chunks = choose(num_bytes)
            assert num_chunks == 1 or (algorithm == "sharded" and num_chunks <= cost.MAX_CHUNKS)
            assert num_chunks == 1 or crossing != "nccl", "both hops are on one stream"
            assert num_receivers > 1 or algorithm == "direct"
            named = choose(num_bytes, algorithm="sharded")
            assert named[0] == "sharded" and named[1] >= 1 and (named[1] == 1 or crossing != "nccl")
            assert choose(num_bytes, algorithm="direct") == ("direct", 1)


def test_what_decides_the_route():
    assert cost.choose("nccl", "nccl", 100 << 20, 8, 8)[0] == "sharded"
    # In shared memory, cores do the copies: with two, one rank's threads occupy them.
    assert cost.choose("shm", "shm", 100 << 20, 1, 2, num_cores=2)[0] == "direct"
    assert cost.choose("shm", "shm", 100 << 20, 1, 2, num_cores=16)[0] == "sharded"
    # Between two hosts each byte crosses once, and the receiving host distributes it through its memory.
    assert cost.choose("tcp", "shm", 100 << 20, 1, 4)[0] == "sharded"
    assert cost.choose("shm", "tcp", 100 << 20, 2, 4)[0] == "direct"
