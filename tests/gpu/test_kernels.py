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


@on_ranks(1, deadline=120)
@pytest.mark.parametrize("seed", range(4))
def test_copies_equal_the_cpu_executor(world, seed):
    """Strided and misaligned inputs and outputs of all dtypes."""
    comms = {kind: world.fresh_comm(device=kind) for kind in ("cpu", "cuda")}
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
