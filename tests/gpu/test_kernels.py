"""Pack and unpack kernels against the CPU executor, on one rank: every box goes from the rank to itself."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from patterns import DTYPES, assert_same, pattern, poison
from ranks import on_ranks

from pipecomm_ext import _C


def plans(rng: random.Random):
    """A plan of one rank, and the shapes and dtype of its input and output."""
    while True:
        dtype = rng.choice(DTYPES)
        shape = [rng.choice((1, 2, 3, 5, 8, 16, 33, 64)) for _ in range(rng.randint(2, 5))]
        scatter, gather = rng.sample(range(len(shape)), 2)
        spec = (shape, dtype, [shape[scatter]], [shape[gather]])
        yield _C.plan_all_to_all(0, 1, [spec], scatter, gather), shape, dtype


def kernels_comm(world):
    """A communicator that copies with the kernels, and not with the CPU executor behind staging."""
    comm = world.fresh_comm(device="cuda")
    assert comm.transport == "nccl", comm.transport_reason
    return comm


def copy(comm, sources: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
    """Tensors of two dims or more, in one exchange."""
    specs = [(list(source.shape), source.dtype, [source.shape[1]], [source.shape[0]]) for source in sources]
    comm.exchange(_C.plan_all_to_all(0, 1, specs, 1, 0), sources, targets)


@on_ranks(1, deadline=120)
@pytest.mark.parametrize("seed", range(4))
def test_copies_equal_the_cpu_executor(world, seed):
    """Strided and misaligned inputs and outputs of all dtypes."""
    comms = {"cpu": world.fresh_comm(device="cpu"), "cuda": kernels_comm(world)}
    rng = random.Random(seed)
    for case_idx, (plan, shape, dtype) in enumerate(itertools.islice(plans(rng), 100)):
        offset, order = rng.randint(0, 3), rng.sample(range(len(shape)), len(shape))
        outputs = {}
        for kind, comm in comms.items():
            numel = torch.Size(shape).numel()
            flat = pattern(numel + 3, dtype, seed, case_idx).to(kind)[offset : offset + numel]
            whole = flat.view([shape[dim] for dim in order])
            source = whole.permute([order.index(dim) for dim in range(len(shape))])
            outputs[kind] = poison((numel + 3,), dtype).to(kind)
            target = outputs[kind][offset : offset + numel].view(shape)
            comm.exchange(plan, [source], [target])
        assert_same(outputs["cuda"].cpu(), outputs["cpu"], (seed, case_idx, shape, dtype, order))


@on_ranks(1, deadline=120)
@pytest.mark.parametrize("row_bytes", [1, 2, 3, 17, 127, 128, 130, 131, 1000, 4099])
def test_rows_of_odd_lengths_at_every_alignment(world, row_bytes):
    """Rows with gaps to rows without and back; what lies around them stays as it was."""
    comm, num_rows = kernels_comm(world), 37
    dense_bytes, gapped_bytes = num_rows * row_bytes, num_rows * (row_bytes + 7)
    for from_gap, to_gap in itertools.product(range(16), (0, 1, 2, 4, 8, 15)):
        dense = pattern(dense_bytes + 32, torch.uint8, row_bytes, from_gap).cuda()
        gapped = poison((gapped_bytes + 32,), torch.uint8).cuda()
        rows = dense[from_gap : from_gap + dense_bytes].view(num_rows, row_bytes)
        table = gapped[to_gap : to_gap + gapped_bytes].view(num_rows, row_bytes + 7)[:, 3 : 3 + row_bytes]
        expected = gapped.cpu()
        expected[to_gap : to_gap + gapped_bytes].view(num_rows, -1)[:, 3 : 3 + row_bytes] = rows.cpu()
        copy(comm, [rows], [table])
        assert_same(gapped.cpu(), expected, (from_gap, to_gap, "into gaps"))
        back = poison((dense_bytes + 32,), torch.uint8).cuda()
        expected = back.cpu()
        expected[from_gap : from_gap + dense_bytes] = rows.cpu().view(-1)
        copy(comm, [table], [back[from_gap : from_gap + dense_bytes].view(num_rows, row_bytes)])
        assert_same(back.cpu(), expected, (from_gap, to_gap, "out of gaps"))


@on_ranks(1, deadline=120)
@pytest.mark.parametrize("num_tensors", [1, 4, 5, 24, 25, 196, 197, 1000])
def test_any_number_of_tasks(world, num_tensors):
    comm, sizes = kernels_comm(world), (1, 3, 64, 4099, 100_003)
    sources = [pattern((2, sizes[idx % len(sizes)]), torch.uint8, idx).cuda() for idx in range(num_tensors)]
    targets = [poison(source.shape, torch.uint8).cuda() for source in sources]
    copy(comm, sources, targets)
    for idx, (source, target) in enumerate(zip(sources, targets, strict=True)):
        assert torch.equal(source, target), idx


@on_ranks(1, deadline=300)
def test_more_than_two_to_the_31_vectors_and_offsets_beyond_4_gib(world):
    num_rows = (1 << 31) + 4099
    if torch.cuda.mem_get_info()[0] < 5 * num_rows:
        pytest.skip("needs 11 GB of device memory")
    comm = kernels_comm(world)
    table = torch.zeros(num_rows, 2, dtype=torch.uint8, device="cuda")
    table[:, 1] = 0xA5
    for start in range(0, num_rows, 1 << 28):
        part = table[start : start + (1 << 28), 0]
        part.copy_(torch.arange(start, start + len(part), device="cuda") * 2654435761 >> 13 & 0xFF)
    column = torch.empty(num_rows, 1, dtype=torch.uint8, device="cuda")
    copy(comm, [table[:, :1]], [column])
    assert torch.equal(column, table[:, :1])
    table[:, 0] = 0
    copy(comm, [column], [table[:, :1]])
    assert torch.equal(column, table[:, :1]) and bool((table[:, 1] == 0xA5).all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("num_tensors", [1, 2, 3, 8, 65, 500])
def test_means_equal_those_of_the_cpu(dtype, num_tensors):
    for numel, offset in itertools.product((0, 1, 7, 4099), (0, 1)):
        generator = torch.Generator().manual_seed(numel)
        given = torch.randn(num_tensors, numel + 40, generator=generator).to(dtype)
        means = {}
        for kind in ("cpu", "cuda"):
            rows = given.to(kind, copy=True)
            parts = [row[offset : offset + numel] for row in rows]
            _C.reduce(parts[0], parts, "AVG")
            means[kind] = rows.cpu()
        assert_same(means["cuda"], means["cpu"], (numel, offset))
