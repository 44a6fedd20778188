"""The backend "pipecomm": torch.distributed's calls return what plain torch computes in one process."""

from __future__ import annotations

import contextlib
import functools
import re
import tempfile
import time
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from documents import block
from patterns import assert_same, pattern, poison
from ranks import on_ranks, once_a_test
from scripts import Script

from pipecomm_ext import PipeCommMismatch, PipeCommPeerLost, PipeCommTimeout
from pipecomm_ext.backend import MIN_TORCH, register
from pipecomm_ext.communicator import reductions

IS_NEW_ENOUGH = tuple(map(int, torch.__version__.split(".")[:2])) >= MIN_TORCH
needs_new_torch = pytest.mark.skipif(not IS_NEW_ENOUGH, reason="the backend needs torch 2.14")
DTYPES = [torch.bool, torch.uint8, torch.int16, torch.int64, torch.bfloat16, torch.float32, torch.complex64]
ReduceOp = dist.ReduceOp


@once_a_test
def group_of(size: int):
    return dist.new_group(list(range(size)), backend="pipecomm", timeout=timedelta(seconds=50))


@once_a_test
def gloo_group(size: int):
    return dist.new_group(list(range(size)), backend="gloo")


def both(*sizes: int):
    """A test on real ranks that an older torch skips."""
    return lambda body: needs_new_torch(on_ranks(*sizes)(body))


def ended(work) -> None:
    """Waits for an asynchronous call, twice."""
    if work is not None:
        assert work.wait() and work.wait(timedelta(seconds=5)) and work.is_completed() and work.is_success()
        assert work.exception() is None


# ---- collectives ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@both(1, 3)
def test_data_of_all_ranks_arrive(world, dtype, async_op):
    group, size, rank = group_of(world.size), world.size, world.rank
    for shape in ((), (0,), (5,), (3, 4), (300, 41)):
        tensors = [pattern(shape, dtype, src) for src in range(size)]
        mine = tensors[rank]
        for root in {0, size - 1}:
            got = mine.clone() if rank == root else poison(shape, dtype)
            ended(dist.broadcast(got, root, group, async_op))
            assert_same(got, tensors[root])
            gathered = [poison(shape, dtype) for _ in range(size)] if rank == root else None
            ended(dist.gather(mine, gathered, root, group, async_op))
            got = poison(shape, dtype)
            ended(dist.scatter(got, tensors if rank == root else None, root, group, async_op))
            assert_same(got, mine)
            for src in range(size if gathered else 0):
                assert_same(gathered[src], tensors[src])
        outputs = [poison(shape, dtype) for _ in range(size)]
        ended(dist.all_gather(outputs, mine, group, async_op))
        for src in range(size):
            assert_same(outputs[src], tensors[src])
        if shape:
            whole = poison((size * shape[0], *shape[1:]), dtype)
            ended(dist.all_gather_single(whole, mine, group, async_op))
            assert_same(whole, torch.cat(tensors))
        stacked = poison((size, *shape), dtype)
        ended(dist.all_gather_single(stacked, mine, group, async_op))
        assert_same(stacked, torch.stack(tensors))


@both(1, 2, 3)
def test_uneven_sizes_and_strides(world):
    group, size, rank = group_of(world.size), world.size, world.rank
    parts = [
        [pattern((src + 2 * dst, 3), torch.float32, src, dst) for dst in range(size)] for src in range(size)
    ]
    received = [poison((src + 2 * rank, 3), torch.float32) for src in range(size)]
    ended(dist.all_to_all(received, parts[rank], group, async_op=True))
    lengths = [len(part) for part in parts[rank]], [len(part) for part in received]
    output = poison((sum(lengths[1]), 3), torch.float32)
    ended(dist.all_to_all_single(output, torch.cat(parts[rank]), lengths[1], lengths[0], group, True))
    for src, part in enumerate(output.split(lengths[1])):
        assert_same(received[src], parts[src][rank])
        assert_same(part, parts[src][rank])
    uneven = [poison((src, 2), torch.int32) for src in range(size)]
    dist.all_gather(uneven, pattern((rank, 2), torch.int32, rank), group)
    for src in range(size):
        assert_same(uneven[src], pattern((src, 2), torch.int32, src))
    strided = torch.full((4, 6), float(rank)).t()[::2]
    dist.all_reduce(strided, group=group)
    assert torch.equal(strided, torch.full((3, 4), float(sum(range(size)))))
    dist.broadcast(strided.fill_(rank), size - 1, group)
    assert torch.equal(strided, torch.full((3, 4), size - 1.0))
    reduced = torch.empty(rank + 1)
    dist.reduce_scatter(reduced, [torch.full((dst + 1,), float(rank)) for dst in range(size)], group=group)
    assert torch.equal(reduced, torch.full((rank + 1,), float(sum(range(size)))))


@both(1, 2, 3, 4)
def test_reductions(world):
    group, size, rank = group_of(world.size), world.size, world.rank
    operators = {
        ReduceOp.SUM: torch.add,
        ReduceOp.PRODUCT: torch.mul,
        ReduceOp.MIN: torch.minimum,
        ReduceOp.MAX: torch.maximum,
    }
    for length in (1, 1000, 50_001):
        tensors = [torch.randint(1, 9, (length,)) + src for src in range(size)]
        for dtype in (torch.int16, torch.int64, torch.float32, torch.float64):
            every = [tensor.to(dtype) for tensor in tensors]
            for op, combine in operators.items():
                expected = functools.reduce(combine, every)
                works, results = [], []
                for _ in range(3):
                    results.append(every[rank].clone())
                    works.append(dist.all_reduce(results[-1], op, group, async_op=True))
                for work in reversed(works):
                    ended(work)
                for result in results:
                    assert_same(result, expected)
                one = every[rank].clone()
                dist.reduce(one, size - 1, op, group)
                assert rank != size - 1 or torch.equal(one, expected)
                output = torch.empty(length, dtype=dtype)
                source = torch.cat([every[rank]] * size)
                ended(dist.reduce_scatter_single(output, source, op, group, async_op=True))
                assert_same(output, expected)
    halves = torch.full((9,), rank + 1.0)
    dist.all_reduce(halves, ReduceOp.AVG, group)
    assert torch.equal(halves, torch.full((9,), (size + 1) / 2))
    scaled = torch.ones(3)
    dist.all_reduce(scaled, ReduceOp.PREMUL_SUM(2.5), group)
    assert torch.equal(scaled, torch.full((3,), 2.5 * size))


@pytest.mark.parametrize("length", [2, 20_000])
@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
@both(2)
def test_parameters_are_overwritten_as_by_gloo(world, async_op, length):
    """Also outside of torch.no_grad(), although they are leaves that require gradients."""
    group, parameter = group_of(2), torch.nn.Parameter(torch.ones(length))
    half, both_pieces = torch.full((length // 2,), 3.0), torch.ones(2 * length)
    calls = [
        (2, lambda: dist.all_reduce(parameter, group=group, async_op=async_op)),
        (2, lambda: dist.broadcast(parameter, 0, group, async_op)),
        (3, lambda: dist.all_gather_single(parameter, half, group, async_op)),
        (2, lambda: dist.reduce_scatter_single(parameter, both_pieces, group=group, async_op=async_op)),
        (6, lambda: dist.reduce_scatter(parameter, [half.repeat(2)] * 2, group=group, async_op=async_op)),
    ]
    for value, call in calls:
        ended(call())
        assert parameter.requires_grad and (parameter == value).all()


@both(2, 3)
def test_coalesced_and_object_collectives(world):
    group, size, rank = group_of(world.size), world.size, world.rank
    coalescing = dist.distributed_c10d._coalescing_manager
    tensors = [torch.full((length,), float(rank)) for length in (1, 0, 5)]
    with coalescing(group, async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor, group=group)
    manager.wait()
    for tensor in tensors:
        assert torch.equal(tensor, torch.full_like(tensor, sum(range(size))))
    outputs = [torch.empty(size * 2), torch.empty(size * 3)]
    scattered = [torch.empty(2), torch.empty(3)]
    with coalescing(group):
        for output in outputs:
            dist.all_gather_single(output, torch.full((len(output) // size,), float(rank)), group)
    with coalescing(group):
        for output, source in zip(scattered, outputs, strict=True):
            dist.reduce_scatter_single(output, source, group=group)
    for output in scattered:
        assert torch.equal(output, torch.full_like(output, float(rank * size)))
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank}, group)
    assert objects == [{"rank": src} for src in range(size)]
    some = [rank, "x"]
    dist.broadcast_object_list(some, size - 1, group)
    assert some == [size - 1, "x"]
    dist.monitored_barrier(group)
    dist.barrier(group)


# ---- point to point ---------------------------------------------------------------------------------------


@both(2, 3)
def test_any_tag_in_any_order(world):
    group, size, rank = group_of(world.size), world.size, world.rank
    following, previous = (rank + 1) % size, (rank - 1) % size
    tags = [0, 14, 11, 1 << 20, 5, 13]
    works = [dist.isend(pattern(4, torch.int32, rank, tag), following, group, tag) for tag in tags]
    received = {tag: poison((2, 2), torch.int32) for tag in tags}
    order = [5, 0, 14, 11, 1 << 20, 13]
    works += [dist.irecv(received[tag].t(), previous, group, tag) for tag in order]
    for work in works:
        ended(work)
    for tag in tags:
        assert_same(received[tag].t(), pattern(4, torch.int32, previous, tag).view(2, 2))


@both(2)
def test_tags_that_share_a_channel_never_mix(world):
    group = group_of(2)
    one, other = torch.zeros(3), torch.zeros(3)
    if world.rank == 0:
        works = [dist.isend(one, 1, group, 20), dist.isend(other, 1, group, 23)]
    else:
        works = [dist.irecv(one, 0, group, 23), dist.irecv(other, 0, group, 20)]
    for work in works:
        with pytest.raises(PipeCommMismatch, match="tag 2[03]"):
            work.wait()


@both(1, 2, 3)
def test_receives_from_any_source_and_from_oneself(world):
    group, size, rank = group_of(world.size), world.size, world.rank
    if rank == 0:
        work = dist.irecv(late := torch.empty(1), group=group, tag=9)
        sources = []
        for _ in range(2 * (size - 1)):
            got = torch.empty(2)
            sources.append(dist.recv(got, group=group))
            assert got.tolist() == [sources[-1]] * 2
        assert sorted(sources) == sorted([*range(1, size)] * 2)
        if size == 1:
            dist.isend(torch.full((1,), 7.0), 0, group, 9)
            work.wait()
            return
        ended(work)
        assert work._source_rank() == 1 and late.item() == 7
    else:
        dist.send(torch.full((2,), float(rank)), 0, group)
        dist.isend(torch.full((2,), float(rank)), 0, group)  # dropped
        if rank == 1:
            dist.isend(torch.full((1,), 7.0), 0, group, 9)
    mine = torch.zeros(3)
    works = [dist.irecv(mine, rank, group), dist.isend(torch.full((3,), 5.0), rank, group)]
    for work in works:
        ended(work)
    assert mine.tolist() == [5.0] * 3


@both(2)
def test_a_receive_from_any_source_gives_up(world):
    group = dist.new_group([0, 1], backend="pipecomm", timeout=timedelta(seconds=1))
    if world.rank == 0:
        with pytest.raises(PipeCommTimeout, match="any source: no rank has sent anything with tag 3"):
            dist.irecv(torch.empty(1), group=group, tag=3).wait()
    dist.barrier()
    if world.rank == 0:
        got = torch.empty(1)
        assert dist.recv(got, group=group) == 1 and got.item() == 7
    else:
        dist.send(torch.full((1,), 7.0), 0, group)
    dist.barrier()
    dist.destroy_process_group(group)


# ---- handles ----------------------------------------------------------------------------------------------


@both(2)
def test_futures_end_without_anybody_waiting(world):
    group, peer = group_of(2), 1 - world.rank
    tensor = torch.full((50_000,), 1.0)
    work = dist.all_reduce(tensor, group=group, async_op=True)
    future = work.get_future()
    total = future.then(lambda done: done.value()[0].sum().item())
    assert total.wait() == 100_000 and future.done() and work.is_completed()
    received = torch.empty(3)
    futures = [
        dist.irecv(received, peer, group).get_future(),
        dist.isend(torch.ones(3), peer, group).get_future(),
    ]
    torch.futures.wait_all(futures)
    assert received.tolist() == [1.0] * 3 and work.result()[0] is tensor
    dropped = torch.ones(20)
    dist.all_reduce(dropped, group=group, async_op=True)
    until = time.monotonic() + 20
    while dropped[0] != 2 and time.monotonic() < until:
        time.sleep(0.01)
    assert dropped[0] == 2


@both(2, 3)
def test_the_same_tensor_is_reduced_again_and_again(world):
    group, size = group_of(world.size), world.size
    for length in (4, 50_000):
        tensor = torch.ones(length)
        for round_idx in range(3):
            dist.all_reduce(tensor, group=group)
            assert torch.all(tensor == float(size) ** (round_idx + 1))


@both(2)
def test_plans_are_made_once_for_all_calls_alike(world):
    """torch passes a new operator in each call."""
    tensor = torch.ones(5)
    [(key, make), *_] = reductions._OF_ANY_SHAPE.items()
    make = mock.Mock(wraps=make)
    with mock.patch.dict(reductions._OF_ANY_SHAPE, {key: make}):
        for op in (ReduceOp.SUM, ReduceOp.MAX, ReduceOp(ReduceOp.MAX)) * 3:
            dist.all_reduce(tensor, op, group_of(2))
    assert make.call_count == 2, make.call_args_list


@both(2, 3)
def test_some_ranks_wait_for_a_reduction_and_others_do_not(world):
    """Small and large ones, after others in flight: the exchanges of all ranks are in one order."""
    group, size = group_of(world.size), world.size
    for first in range(4):
        tensors = [torch.full((length,), 1.0) for length in (10, 50_000, 20, 60_000, 50_000)]
        works = []
        for idx, tensor in enumerate(tensors):
            waits = (world.rank + idx) % 2 == first % 2
            works.append(dist.all_reduce(tensor, group=group, async_op=not waits))
        for work in works:
            ended(work)
        assert all(torch.all(tensor == size) for tensor in tensors)


@both(2)
def test_timeouts(world):
    group = group_of(2)
    if world.rank == 0:
        work = dist.irecv(torch.empty(1), 1, group)
        with pytest.raises(PipeCommTimeout, match="recv from rank 1 with tag 0"):
            work.wait(timedelta(seconds=0.05))
        assert not work.is_completed()
        with pytest.raises(PipeCommTimeout):
            dist.barrier(group, timeout=timedelta(seconds=0.05))
        with pytest.raises(PipeCommTimeout, match="Rank 1 failed to pass monitoredBarrier"):
            dist.monitored_barrier(group, timedelta(seconds=0.1))
        dist.barrier()
        ended(work)
    else:
        dist.barrier()
        dist.send(torch.ones(1), 0, group)
        dist.barrier(group)
        with pytest.raises(PipeCommTimeout, match="Rank 1 successfully reached monitoredBarrier"):
            dist.monitored_barrier(group, timedelta(seconds=0.1))
    dist.barrier(group)
    short = dist.new_group([0, 1], backend="pipecomm", timeout=timedelta(seconds=1))
    if world.rank == 0:
        with pytest.raises(PipeCommTimeout):
            dist.barrier(short)
    dist.barrier()


@both(2)
def test_errors_name_the_call(world):
    group, ones = group_of(2), torch.ones(4)
    calls = [
        (lambda: dist.all_reduce(ones, [ReduceOp.SUM, ReduceOp.MAX][world.rank], group), "all_reduce with"),
        (lambda: dist.all_reduce(ones[: 3 + world.rank], group=group), "all_reduce with SUM"),
        (lambda: dist.reduce(ones, world.rank, group=group), "reduce with SUM to rank"),
        (lambda: dist.broadcast(ones[: 3 + world.rank], 0, group), "broadcast"),
        (lambda: dist.all_gather([ones[:2], ones[2:]], ones[: 2 + world.rank], group), "all_gather"),
        (lambda: dist.gather(ones, [ones, ones], world.rank, group), "gather"),
    ]
    for call, text in calls:
        with pytest.raises((PipeCommMismatch, ValueError)) as caught:
            call()
        assert isinstance(caught.value, ValueError) or re.search(text, str(caught.value)), caught.value
    dist.all_reduce(ones, group=group)
    assert ones.tolist() == [2.0] * 4


def dies_in_the_middle(world):
    group = group_of(world.size)
    dist.barrier(group)
    world.mark("ready")
    if world.rank == 1:
        time.sleep(60)
    dist.all_reduce(torch.ones(10), group=group)


@needs_new_torch
def test_a_dead_peer(ranks):
    with ranks.disposable(3, dies_in_the_middle) as world:
        world.await_marks("ready")
        world.signal(1, 9)
        outcomes = world.collect(deadline=60)
    for rank in (0, 2):
        error = outcomes[rank].error
        assert error.type is PipeCommPeerLost and error.attributes["origin_rank"] == 1, outcomes[rank]


# ---- torch ------------------------------------------------------------------------------------------------


def test_an_older_torch_is_refused_by_name(monkeypatch):
    register()
    register()
    assert "pipecomm" in dist.Backend.backend_list
    from pipecomm_ext.backend import registration

    monkeypatch.setattr(torch, "__version__", "2.11.0")
    assert not registration.is_new_enough()
    with pytest.raises(RuntimeError, match="needs torch 2.14 or later, this is torch 2.11.0"):
        registration.refuse()


# ---- frameworks -------------------------------------------------------------------------------------------


def trained(wrap, group) -> list[torch.Tensor]:
    """The parameters after two steps of a small model."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    model = wrap(model, group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        model(torch.randn(5, 6, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [getattr(p, "full_tensor", lambda p=p: p)().detach().clone() for p in model.parameters()]


def with_ddp(model, group):
    return torch.nn.parallel.DistributedDataParallel(model, process_group=group)


def with_fsdp2(model, group):
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    fully_shard(model, mesh=DeviceMesh.from_group(group, "cpu"))
    return model


@pytest.mark.parametrize("wrap", [with_ddp, with_fsdp2])
@both(2)
def test_data_parallel_training_equals_gloo(world, wrap):
    ours, theirs = trained(wrap, group_of(2)), trained(wrap, gloo_group(2))
    for actual, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(actual, expected)


@both(2)
def test_dtensor_and_functional_collectives(world):
    from torch.distributed import _functional_collectives as funcol
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    group = group_of(2)
    mesh, whole = DeviceMesh.from_group(group, "cpu"), torch.arange(20.0).view(5, 4)
    sharded = distribute_tensor(whole, mesh, [Shard(0)])
    assert torch.equal(sharded.redistribute(mesh, [Shard(1)]).full_tensor(), whole)
    assert torch.equal(sharded.redistribute(mesh, [Replicate()]).to_local(), whole)
    assert sharded.sum().full_tensor() == whole.sum()
    assert funcol.all_reduce(torch.ones(3), "sum", group).tolist() == [2.0] * 3
    exchanged = funcol.all_to_all_single(
        torch.full((3,), float(world.rank)), [1, 1] if world.rank == 0 else [2, 2], [1, 2], group
    )
    assert exchanged.tolist() == ([0.0, 1.0] if world.rank == 0 else [0.0, 0.0, 1.0, 1.0])


@both(2)
def test_a_pipeline_and_a_checkpoint_of_torch(world):
    from torch.distributed import checkpoint
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    results = []
    for group in (group_of(2), gloo_group(2)):
        torch.manual_seed(world.rank)
        stage = torch.nn.Linear(4, 4)
        schedule = Schedule1F1B(
            PipelineStage(stage, world.rank, 2, torch.device("cpu"), group=group),
            n_microbatches=4,
            loss_fn=torch.nn.functional.mse_loss,
        )
        losses: list[torch.Tensor] = []
        batch = torch.arange(32.0).view(8, 4)
        if world.rank == 0:
            schedule.step(batch)
        else:
            schedule.step(target=batch, losses=losses)
        results.append([*losses, *(p.grad for p in stage.parameters())])
    for actual, expected in zip(*results, strict=True):
        assert torch.equal(actual, expected)
    folder = [tempfile.mkdtemp() if world.rank == 0 else None]
    dist.broadcast_object_list(folder, 0, group_of(2))
    state = {"mine": results[0][-1], f"rank{world.rank}": torch.full((3,), float(world.rank))}
    checkpoint.save(state, checkpoint_id=folder[0], process_group=group_of(2))
    read = {f"rank{world.rank}": torch.empty(3)}
    checkpoint.load(read, checkpoint_id=folder[0], process_group=group_of(2))
    assert read[f"rank{world.rank}"].tolist() == [world.rank] * 3


# ---- the document -----------------------------------------------------------------------------------------


@needs_new_torch
@pytest.mark.slow
def test_the_block_of_the_document(tmp_path):
    """A program that uses only the backend's name of pipecomm_ext. Then a mesh, a second group."""
    check = """
import sys, torch
numbers = torch.ones(4) * dist.get_rank()
dist.all_reduce(numbers)
assert numbers.tolist() == [1.0] * 4 and dist.get_backend() == "pipecomm", numbers
mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
dist.all_reduce(numbers, group=mesh.get_group())
assert numbers.tolist() == [2.0] * 4, numbers
dist.destroy_process_group()
dist.init_process_group("pipecomm", f"file://{sys.argv[1]}", rank=int(sys.argv[2]), world_size=2)
dist.barrier()
dist.destroy_process_group()
"""
    program = tmp_path / "program.py"
    program.write_text(block("docs/backend.md", "import torch.distributed") + check, encoding="utf-8")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    environment |= {"WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": "1"}
    with contextlib.ExitStack() as stack:
        ranks = [
            stack.enter_context(
                Script(program, tmp_path / "store", rank, is_fresh=rank == 0, RANK=str(rank), **environment)
            )
            for rank in range(2)
        ]
        ends = [rank.finish(100) for rank in ranks]
    assert [exit_code for exit_code, _ in ends] == [0, 0], ends
