"""Features that users combine with attention over split sequences: the same results as in one process.

The scripts are those of schedules/test_combinations.py. Between its layers, which compute each token
separately, is attention; the ranks hold pieces of the sequence, and sum their gradients as in the guide.
What uses only the sums, such as an optimizer, is none of ours here. ELSEWHERE names the tests of the
combinations that are not rows here.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import combination_layers as layers
import combination_scripts as scripts
import pytest
import torch
import torch.distributed as dist
from attention_cases import SEQ, WAYS, Way, assert_close, plain_attention, way_of, whole_tensors
from combination_sides import Side, assert_tests_exist, flat
from pipelines import WIDTH, Block
from ranks import on_ranks
from sequence_cases import numbers
from torch import nn
from torch.utils.checkpoint import checkpoint

LENGTH, NUM_HEADS, NUM_BATCHES = 11, 3, 2


class Mixer(nn.Module):
    """Causal attention with weights; `attention` is that of one process or of ranks."""

    def __init__(self, depth: int, attention: Callable[..., torch.Tensor], use_reentrant: bool | None):
        super().__init__()
        self.attention, self.use_reentrant = attention, use_reentrant
        # The gradient of a bias of keys is only rounding, which Adam would scale up.
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False, dtype=torch.float64)
        with torch.no_grad():
            self.qkv.weight.copy_(numbers((3 * WIDTH, WIDTH), torch.float64, "mixer", depth) / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.use_reentrant is None:
            return self.mixed(x)
        return checkpoint(self.mixed, x, use_reentrant=self.use_reentrant)

    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (NUM_HEADS, -1)) for part in self.qkv(x).chunk(3, -1))
        return x + self.attention(q, k, v).flatten(-2)


class OverSequences(Side):
    """One process, or, with a `way`, a rank that holds a piece."""

    def __init__(self, made: Sequence[nn.Module], way: Way | None, world, use_reentrant: bool | None):
        super().__init__(SimpleNamespace(), dict(enumerate(copy.deepcopy(made))))
        self.way, self.world = way, world
        attention = functools.partial(plain_attention, is_causal=True)
        if way is not None:
            attention = functools.partial(way.function, is_causal=True, gather_size=LENGTH)
        self.mixers = [Mixer(depth, attention, use_reentrant) for depth in self.modules]
        shape = (2, LENGTH, WIDTH)
        data = [
            [self.piece(numbers(shape, torch.float64, what, idx)) for idx in range(NUM_BATCHES)]
            for what in ("inputs", "targets")
        ]
        plan = SimpleNamespace(chains=[(0, 1)], owner={0: 0}, micros_per_chain=NUM_BATCHES, replicas=())
        self.pipeline = SimpleNamespace(inputs=[data[0]], targets=[data[1]], plan=plan, rank=0)

    def piece(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.way is None else self.way.piece(tensor)

    def of_all_copies(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.way is not None:
            dist.all_reduce(tensor, group=self.world.group)
        return tensor

    def loss(self, output: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        """The part of this piece in the mean over the whole."""
        loss = ((output - others[-1]) ** 2).sum() / (2 * LENGTH * WIDTH)
        return loss if self.scaler is None else self.scaler.scale(loss)

    def parameters(self) -> list[nn.Parameter]:
        return super().parameters() + [part for mixer in self.mixers for part in mixer.parameters()]

    def _run(self) -> dict[int, list[torch.Tensor]]:
        losses = []
        for x, target in zip(self.pipeline.inputs[0], self.pipeline.targets[0], strict=True):
            for module, mixer in zip(self.modules.values(), self.mixers, strict=True):
                x = module(mixer(x))
            losses.append(self.loss(x, target))
            if torch.is_grad_enabled():
                losses[-1].backward()
        return {0: list(self.of_all_copies(torch.stack(losses).detach()))}

    def sum(self) -> None:
        grads = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
        sums = self.of_all_copies(torch.cat([grad.flatten() for grad in grads]))
        for grad, total in zip(grads, sums.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(total.view_as(grad))


class Row(NamedTuple):
    script: Callable[[Side], Any] = scripts.train
    layer: Callable[[int], nn.Module] = Block
    use_reentrant: bool | None = None  # of a checkpoint around attention
    in_every_way: bool = False  # what concerns the backward of attention itself; the others take one in turn


ROWS = {
    "training": Row(in_every_way=True),
    "checkpoints": Row(use_reentrant=False, in_every_way=True),
    "reentrant checkpoints": Row(use_reentrant=True, in_every_way=True),
    "saved_tensors_hooks": Row(scripts.saved_tensors_elsewhere, in_every_way=True),
    "gradients within the forward": Row(layer=layers.Penalised),
    "retain_grad": Row(scripts.retained, layers.Retaining),
    "gradients of inputs": Row(scripts.gradients_of_inputs),
    "evaluation between steps": Row(scripts.evaluation_between),
}
WAYS_OF = {
    name: WAYS if row.in_every_way else [WAYS[idx % len(WAYS)]]
    for idx, (name, row) in enumerate(ROWS.items())
}
ELSEWHERE = {
    "autocast": "test_sequence_attention.py::test_autocast",
    "ALiBi": "test_sequence_attention.py::test_attention_that_asks_for_its_heads",
    "an error, and the next call": "test_sequence_attention.py::test_attention_that_raises_on_one_rank",
    "several backwards": "test_sequence_attention.py::test_backward_twice_and_by_recomputation",
    "second derivatives": "test_sequence_attention.py::test_second_derivatives",
    "key/value heads": "test_sequence_attention.py::test_random_cases",
    "torch.compile": "test_compiled_operations.py::test_ulysses_attention",
}


@on_ranks(4)
@pytest.mark.parametrize("name", ROWS)
def test_as_in_one_process(world, name):
    row = ROWS[name]
    made = [row.layer(depth) for depth in range(2)]
    theirs = OverSequences(made, None, world, row.use_reentrant)
    expected = row.script(theirs)
    for way_name in WAYS_OF[name]:
        ours = OverSequences(made, way_of(way_name, world), world, row.use_reentrant)
        compare(ours, theirs, row.script(ours), expected)


def compare(ours: OverSequences, theirs: OverSequences, returned: Any, expected: Any) -> None:
    sides = [
        nn.ModuleList([*side.modules.values(), *side.mixers]).state_dict().values() for side in (ours, theirs)
    ]
    for mine, truth in zip(*sides, strict=True):
        assert_close(mine, truth)
    pairs = [flat(result) for result in (returned, expected)]
    for mine, truth in zip(*pairs, strict=True):
        assert_close(mine, ours.piece(truth) if truth.dim() == 3 and truth.size(SEQ) == LENGTH else truth)


# ---- masks ------------------------------------------------------------------------------------------------


def masked_attention(q, k, v, is_causal=False, bias=None):
    return plain_attention(q, k, v, is_causal, 0 if bias is None else bias)


def biases() -> dict[str, torch.Tensor]:
    """Biases that are added to all scores of a sequence; -inf hides a key from a query."""
    rows, columns = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
    packed = torch.arange(LENGTH) >= 4  # two rows
    kept = {
        "a mask": numbers((2, 1, LENGTH, LENGTH), torch.float64, "mask") > -0.5,
        "windows": rows - columns < 3,
        "packed rows": packed[:, None] == packed,
        "padding": (columns < 8)[None],
    }
    return {
        name: torch.zeros(LENGTH, LENGTH, dtype=torch.float64).masked_fill(
            ~(mask | (rows == columns)), -torch.inf
        )
        for name, mask in kept.items()
    } | {"a bias": numbers((1, 1, LENGTH, LENGTH), torch.float64, "bias")}


@on_ranks(4)
@pytest.mark.parametrize("name", biases())
@pytest.mark.parametrize("way_name", WAYS)
def test_masks_are_right_or_refused(world, way_name, name):
    """Over Ulysses, attention sees the whole sequence, and masks are right; over a ring, a part of it."""
    way, bias = way_of(way_name, world), biases()[name].requires_grad_(name == "a bias")
    whole = whole_tensors(2, LENGTH, 4, 2)
    call = functools.partial(way.function, attention=masked_attention, is_causal=True, gather_size=LENGTH)
    if way_name != "ulysses":
        with pytest.raises(ValueError, match="bias may depend on places in the sequence"):
            call(*way.leaves(whole), bias=bias)
        return
    expected = masked_attention(*whole, True, bias)
    weights = numbers(tuple(expected.shape), expected.dtype, "weights")
    (expected * weights).sum().backward()
    truth, bias.grad, local = bias.grad, None, way.leaves(whole)
    result = call(*local, bias=bias)
    assert_close(result, way.piece(expected))
    (result * way.piece(weights)).sum().backward()
    for mine, full in zip(local, whole, strict=True):
        assert_close(mine.grad, way.piece(full.grad))
    if truth is not None:
        gradient = torch.zeros_like(bias) if bias.grad is None else bias.grad  # of the heads that I computed
        dist.all_reduce(gradient, group=world.group)
        assert_close(gradient, truth)


@on_ranks(4)
@pytest.mark.parametrize("way_name", WAYS)
def test_attention_to_another_sequence_is_refused(world, way_name):
    way = way_of(way_name, world)
    q, k, v = way.leaves(whole_tensors(1, 16, 4, 4))
    with pytest.raises(Exception, match="q, k and v must have the same length"):
        way.function(q, k[:, :-1], v[:, :-1], is_causal=True)


def test_the_tests_elsewhere_exist():
    assert_tests_exist(ELSEWHERE.values(), Path(__file__).parent)
