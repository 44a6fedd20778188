"""The split backward on random graphs: weights shared or unused, views, writes in place, several outputs,
inputs returned as they are, hooks that change gradients, Python Functions, recomputation."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

from pipecomm_ext.runtime.backward import run_backward, split_backward

WIDTH = 4


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient * weight, gradient * x


def in_place(a, b):
    y = a * 1
    y.mul_(b)
    return y


def hooked(a, _):
    y = a * 1
    if y.requires_grad:
        y.register_hook(lambda gradient: gradient.clamp(-1, 1) * 1.5)
    return y


OPS = [
    lambda a, b: a * b,
    lambda a, b: a + b,
    lambda a, b: a @ b,
    lambda a, b: torch.tanh(a),
    lambda a, b: nn.functional.layer_norm(a, (WIDTH,), b[0], b[1]),
    lambda a, b: nn.functional.linear(a, b, a[0]),
    lambda a, b: a.t(),
    lambda a, b: torch.cat([a[:2], b[2:]]),
    lambda a, b: torch.cat(a.split(2)[::-1]),
    lambda a, b: a.detach() * b,
    lambda a, b: checkpoint(lambda p, q: torch.sin(p) @ q, a, b, use_reentrant=False),
    Scale.apply,
    in_place,
    hooked,
]


def random_graph(seed: int):
    """Three weights, two inputs (one of which may need no gradient), and outputs that need one."""
    choice = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    leaves = [torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64) / 2 for _ in range(5)]
    for leaf in leaves[: 5 if seed % 3 else 4]:
        leaf.requires_grad_()
    tensors = list(leaves)
    for _ in range(choice.randint(1, 14)):
        op = choice.choice(OPS)
        tensors.append(op(choice.choice(tensors), choice.choice(tensors)))
    outputs = [choice.choice(tensors) for _ in range(choice.randint(1, 3))]
    return leaves[:3], leaves[3:], [output for output in outputs if output.requires_grad]


@pytest.mark.parametrize("part", range(4))
def test_random_graphs(part):
    num_split = 0
    for seed in range(100 * part, 100 * (part + 1)):
        results = []
        for is_split in (False, True):
            weights, inputs, outputs = random_graph(seed)
            generator = torch.Generator().manual_seed(seed)
            gradients = [torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64) for _ in outputs]
            edges = [get_gradient_edge(output) for output in outputs]
            del outputs
            if not is_split:
                run_backward(edges, gradients)
            else:
                work = split_backward(edges, gradients, [x for x in inputs if x.requires_grad])
                num_split += bool(work)
                after_input_half = [None if x.grad is None else x.grad.clone() for x in inputs]
                for rest in work:
                    rest()
                assert_equal(seed, after_input_half, [x.grad for x in inputs])  # W does not change them
            results.append([leaf.grad for leaf in (*weights, *inputs)])
        assert_equal(seed, *results)
    assert num_split > 40


def assert_equal(seed: int, actual, expected) -> None:
    for mine, theirs in zip(actual, expected, strict=True):
        assert (mine is None) == (theirs is None), f"seed {seed}"
        if mine is not None:
            assert torch.allclose(mine, theirs, rtol=1e-9, atol=1e-10), f"seed {seed}: {mine} is not {theirs}"
