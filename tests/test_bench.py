"""The benchmarks move and compute the right data, by every implementation, and count wrong data and work."""

from __future__ import annotations

import sys
import time
from unittest import mock

import pytest
import torch
from patterns import assert_same, pattern, poison
from ranks import on_ranks
from scripts import REPOSITORY
from test_backend import needs_new_torch

sys.path.insert(0, str(REPOSITORY / "bench"))
import all_to_all as all_to_all_op  # noqa: E402
import measure as measure_module  # noqa: E402
import relay  # noqa: E402
import ulysses  # noqa: E402
from backend import BACKEND_OPS  # noqa: E402
from bare_socket import NAME as SOCKET  # noqa: E402
from bare_socket import BareSockets, is_possible  # noqa: E402
from measure import Result  # noqa: E402
from ops import BASELINE, MEMCPY, OPS, Bench, Case  # noqa: E402
from pipeline_p2p import PIPELINE_OPS  # noqa: E402
from reductions import REDUCTION_OPS  # noqa: E402
from report import row  # noqa: E402
from schedule import SCHEDULE_OPS  # noqa: E402
from sequence_ops import SEQUENCE_OPS  # noqa: E402
from work import count_work  # noqa: E402

NUM_BLOCKS = 2  # enough for tests


def bench_of(world, *transports, dtype=torch.bfloat16, channels=2, **options) -> Bench:
    comms = {f"pipecomm {name}": world.shared_comm(transport=name, channels=channels) for name in transports}
    return Bench(world.rank, world.size, torch.device("cpu"), dtype, comms, **options)


def measure(case: Case, dtype: torch.dtype, iters: int = NUM_BLOCKS) -> list[Result]:
    with mock.patch.object(measure_module, "NUM_BLOCKS", NUM_BLOCKS):
        return measure_module.measure("test", case, dtype, torch.device("cpu"), iters=iters, warmup=1)


def measured(case: Case, dtype=torch.bfloat16, iters=NUM_BLOCKS) -> list[Result]:
    """The results of a case, in the order of its implementations; nothing may arrive wrong."""
    results = measure(case, dtype, iters)
    assert [result.impl for result in results] == list(case.calls) and results[0].impl == BASELINE
    for result in results:
        assert result.num_wrong == 0, row(result)
        assert result.label == case.label
    return results


# ---- what ops move ----------------------------------------------------------------------------------------


@on_ranks(2, 3)
def test_bare_sockets_move_the_bytes(world):
    assert is_possible()
    destination, source = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    sockets = BareSockets(destination, source)
    for numel in (1, 1000, 3_000_000):
        received = poison((numel,), torch.int16)
        sockets.exchange(pattern((numel,), torch.int16, world.rank), received)
        assert_same(received, pattern((numel,), torch.int16, source))
    BareSockets(None, None)  # a rank may have no peer


@on_ranks(2, 3)
@pytest.mark.parametrize("op", OPS)
def test_every_op_moves_the_right_data(world, op):
    for dtype, num_bytes in ((torch.float32, 4), (torch.bfloat16, 4096), (torch.uint8, 100_000)):
        case = OPS[op].build(bench_of(world, "tcp", dtype=dtype), num_bytes)
        results = measured(case, dtype)
        bound = SOCKET if op in ("p2p", "sendrecv", "pingpong") else MEMCPY
        bounds = [bound] if case.has_bandwidth else []
        assert [result.impl for result in results] == [BASELINE, "pipecomm tcp", *bounds]
        for result in results:
            assert (result.bound_ratio is not None) == (bool(bounds) and result.impl != MEMCPY)
            assert result.impl != SOCKET or result.bound_ratio == 1.0
            assert len(result.iterations_us) == NUM_BLOCKS
            assert 0 < result.min_us <= result.median_us <= max(result.iterations_us)
        assert results[0].ratio == 1.0 and results[1].ratio > 0


@on_ranks(3)
@pytest.mark.parametrize("op", REDUCTION_OPS)
def test_collectives_reduce_and_gather_the_right_data(world, op):
    for dtype, num_bytes in ((torch.float32, 4), (torch.float32, 100_000), (torch.int64, 4096)):
        results = measured(
            REDUCTION_OPS[op].build(bench_of(world, "tcp", "shm", dtype=dtype), num_bytes), dtype
        )
        assert [result.impl for result in results] == [BASELINE, "pipecomm tcp", "pipecomm shm"]
        assert all((result.algbw is None) == (op == "barrier") for result in results)


@on_ranks(2)
def test_pipelines_compute_the_gradients_of_the_unsplit_model(world):
    for op in SCHEDULE_OPS.values():
        for case in op.build(bench_of(world, "tcp", dtype=torch.float32), num_bytes=512):
            results = measured(case, torch.float32)
            assert all(result.algbw is None and result.min_us > 0 for result in results)
            assert row(results[-1]).endswith(case.label)


@needs_new_torch
@on_ranks(2, 3)
def test_small_calls_of_a_process_group(world):
    cases = BACKEND_OPS["backend"].build(bench_of(world, "tcp", "shm"), 8)
    labels = [result.label for case in cases for result in measured(case)]
    assert labels[0] == "all_reduce" and labels[-1] == "send and recv" and len(labels) == 6 * 4


@on_ranks(2, 3)
def test_messages_between_stages(world):
    bench = bench_of(world, "tcp", "shm", channels=4)
    for num_bytes in (1000, 300_000):
        results = measured(PIPELINE_OPS["pipeline_p2p"].build(bench, num_bytes))
        assert [result.impl for result in results] == [
            f"{name}{kind}" for name in (BASELINE, *bench.comms) for kind in ("", " variable")
        ]
        assert results[0].num_bytes == max(2048, num_bytes // 2048 * 2048)


@on_ranks(3)
@pytest.mark.parametrize("op", SEQUENCE_OPS)
def test_sequence_parallel_ops(world, op):
    num_cases = 0
    for case in SEQUENCE_OPS[op].build(bench_of(world, "tcp", "shm"), 50_000):
        num_cases += 1
        for result in measured(case):
            assert result.impl == MEMCPY or result.bound_ratio > 0
            assert result.work.copy_passes >= 0 and result.work.allocated_bytes >= 0
    assert num_cases >= 4


@on_ranks(2, 4)
def test_relays(world):
    labels = []
    for case in relay.build(bench_of(world, "shm"), 50_000):
        assert {BASELINE, "pipecomm shm", MEMCPY} <= {result.impl for result in measured(case)}
        labels.append(case.label)
    num_cases = {2: 1, 4: 3 * len(relay.LAYOUTS)}[world.size]
    assert len(set(labels)) == len(labels) == num_cases


@pytest.mark.parametrize("attention", ["sdpa", "sleep"])
@on_ranks(3)
def test_ulysses_attention(world, attention):
    bench = bench_of(world, "tcp", "shm", dtype=torch.float32, attention=attention)
    labels = []
    for case in ulysses.build(bench, 50_000):
        results = measured(case, bench.dtype)
        for result in results:
            assert (result.bound_ratio is None) == (result.impl in case.parts) and result.algbw is None
        labels.append((case.label, len(results)))
    num_calls = {"sdpa": [14], "sleep": [8, 8]}[attention]
    assert labels == [(label, num) for label in ("forward", "forward and backward") for num in num_calls]


@on_ranks(2)
def test_timelines_hold_what_a_call_did(world):
    bench = bench_of(world, "tcp", dtype=torch.float32, attention="sleep")
    for panel, calls in ulysses.timelines(bench, 50_000).items():
        num_chunks = int(panel.split()[0])
        assert len(calls) == world.size
        for call in calls:
            attention, arrivals, returns = call.rows.values()
            assert [len(row) for row in (attention, arrivals, returns)] == [2, 2, 2]
            for chunk in range(num_chunks):
                forward, backward = (one_pass[chunk] for one_pass in attention)
                assert call.begin <= arrivals[0][chunk][0] < arrivals[0][chunk][1] <= forward[0]
                assert forward[1] <= returns[0][chunk][0] < returns[0][chunk][1] <= backward[0]
                assert returns[1][chunk][1] <= backward[0] < backward[1]
                assert backward[1] <= arrivals[1][chunk][0] < arrivals[1][chunk][1] <= call.end


@on_ranks(3)
def test_a_matrix_of_bytes(world):
    matrix = ((0, 4096, 100), (8, 0, 0), (2, 30_000, 6))
    [case] = all_to_all_op.build(bench_of(world, "tcp", "shm", matrix=matrix), 0)
    assert case.num_bytes == 34096  # what rank 1 receives
    assert len(measured(case)) == 3


# ---- what is counted and measured -------------------------------------------------------------------------


@on_ranks(2)
def test_wrong_data_is_counted_over_all_ranks(world):
    """A call that changes one element on each rank, one that does nothing, and the limits of tolerance."""
    buffer, expected = torch.zeros(10), torch.full((10,), 5.0)

    def almost():
        buffer.copy_(expected)[world.rank] = 6.0

    case = Case(40, [(buffer, expected)], {BASELINE: almost, "lazy": lambda: None})
    results = measure(case, torch.float32)
    assert [result.num_wrong for result in results] == [2, 20]

    buffer, expected = torch.zeros(3), torch.tensor([100.0, 1.0, 0.0])
    deviations = {BASELINE: 0.09, "far": 0.11, "not finite": float("nan")}
    calls = {
        name: lambda deviation=deviation: buffer.copy_(expected).add_(torch.tensor([0, deviation, 0]))
        for name, deviation in deviations.items()
    }
    case = Case(12, [(buffer, expected)], calls, tolerance=1e-3)
    results = measure(case, torch.float32)
    assert [result.num_wrong for result in results] == [0, 2, 2]


@on_ranks(2)
def test_times_are_the_slowest_ranks(world):
    calls = {BASELINE: lambda: time.sleep(0.002 * (1 + world.rank)), "quick": lambda: time.sleep(0.001)}
    slow, quick = measured(Case(4, [], calls), torch.float32, 2 * NUM_BLOCKS)
    assert slow.min_us >= 4000 and quick.min_us >= 1000
    assert 1.2 < quick.ratio
    assert slow.algbw == pytest.approx(4 / slow.median_us / 1e3)


@on_ranks(2)
def test_counted_work_is_what_the_algorithms_do(world):
    """Passes of the even and uneven cases with one batch, heads to sequence."""
    passes, cases = {}, list(all_to_all_op.build(bench_of(world, "tcp"), 1_000_000))
    for case in cases:
        for _ in range(2):
            for call in case.calls.values():
                call()
        for impl in case.calls:
            passes[case.label, impl] = case.work(impl)
    for label, impl, expected in [
        ("even, H to S", BASELINE, 1),
        ("even, H to S", "pipecomm tcp", 1),
        ("even, H to S, B=2", BASELINE, 2),
        ("H uneven, H to S", BASELINE, 2),
        ("S uneven, H to S", BASELINE, 2),
        ("both uneven, H to S", all_to_all_op.LIST, 2),
        ("both uneven, H to S", "pipecomm tcp", 1),
        ("both uneven, S to H", all_to_all_op.LIST, 1),
        ("both uneven, H to S", all_to_all_op.BARE, 0),
    ]:
        assert passes[label, impl].copy_passes == pytest.approx(expected, abs=0.1), (label, impl)
    assert passes["even, H to S", all_to_all_op.BARE].allocated_bytes == 0
    assert passes["even, H to S", "pipecomm tcp"].allocated_bytes == cases[0].num_bytes


def test_work_of_plain_torch():
    tensor = torch.zeros(100, 10)
    work = count_work(lambda: tensor.t().contiguous().view(-1).clone(), tensor.nbytes, None)
    assert work.copy_passes == 2 and work.allocated_bytes == 2 * tensor.nbytes
    assert count_work(lambda: tensor.view(-1), tensor.nbytes, None).copy_passes == 0
