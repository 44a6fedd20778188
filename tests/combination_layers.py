"""Layers of schedules/test_combinations.py: what users build models of, besides linear layers."""

from __future__ import annotations

import torch
from pipelines import WIDTH, Block
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint


class Seeded(nn.Module):
    """Dropout whose seed is part of the data, maybe within a checkpoint that recomputes it."""

    def __init__(self, depth: int, use_reentrant: bool | None = None):
        super().__init__()
        self.block, self.depth, self.use_reentrant = Block(depth), depth, use_reentrant
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x, seed):
        torch.manual_seed(int(seed[0]) + self.depth)
        x = x * self.gain
        if self.use_reentrant is None:
            return self.inner(x), seed
        return checkpoint(self.inner, x, use_reentrant=self.use_reentrant), seed

    def inner(self, x):
        return functional.dropout(self.block(functional.dropout(x, 0.3)), 0.3)


def in_checkpoints(depth: int) -> nn.Module:
    return Seeded(depth, use_reentrant=False)


def in_reentrant_checkpoints(depth: int) -> nn.Module:
    return Seeded(depth, use_reentrant=True)


class Adapted(nn.Module):
    """LoRA: two small matrices added to frozen weights; the first layer has none, so nothing to train."""

    def __init__(self, depth: int):
        super().__init__()
        self.base = Block(depth).requires_grad_(False)
        self.down = nn.Linear(WIDTH, 2, bias=False, dtype=torch.float64) if depth else None
        self.up = nn.Linear(2, WIDTH, bias=False, dtype=torch.float64) if depth else None

    def forward(self, x):
        return self.base(x) if self.down is None else self.base(x) + self.up(self.down(x))


class Normed(Block):
    """BatchNorm of rows."""

    def __init__(self, depth: int):
        super().__init__(depth)
        self.batch_norm = nn.BatchNorm1d(WIDTH, momentum=None, dtype=torch.float64)

    def forward(self, x):
        return super().forward(self.batch_norm(x))


class Reusing(Block):
    """Returns a buffer that its next forward writes into."""

    def forward(self, x):
        self.__dict__.setdefault("out", torch.empty_like(x)).copy_(super().forward(x))
        return self.out


class Parametrized(Block):
    """Weights made of weights; one of them twice."""

    def __init__(self, depth: int):
        super().__init__(depth)
        self.square = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        nn.init.eye_(self.square.weight)
        parametrizations.weight_norm(self.first)
        parametrizations.orthogonal(self.square)

    def forward(self, x):
        return super().forward(self.square(torch.tanh(self.square(x))))


class Compiled(Block):
    """A block of torch.compile; each copy is compiled separately."""

    compiled = None

    def forward(self, x):
        if self.compiled is None:
            self.compiled = torch.compile(super().forward, backend="aot_eager")
        return self.compiled(x)


class Penalised(Block):
    """Computes a gradient within the forward, which is differentiated again."""

    def forward(self, x):
        with torch.enable_grad():
            inner = x if x.requires_grad else x.clone().requires_grad_()
            energy = torch.tanh(self.first(inner)).square().sum()
            (force,) = torch.autograd.grad(energy, inner, create_graph=torch.is_grad_enabled())
        return super().forward(x) - 0.1 * force


class Retaining(Block):
    """Keeps the gradient of an activation where a split backward is divided, one for each micro-batch."""

    def __init__(self, depth: int):
        super().__init__(depth)
        self.kept = []

    def forward(self, x):
        hidden = self.first(x)
        hidden.retain_grad()
        self.kept.append(hidden)
        return x + self.second(torch.tanh(hidden))


class Summing(Block):
    """Has a hook on a tensor that sums the gradients it sees."""

    def __init__(self, depth: int):
        super().__init__(depth)
        self.register_buffer("seen", torch.zeros(9, dtype=torch.float64))

    def forward(self, x):
        hidden = self.first(x)
        hidden.register_hook(self.add)
        return x + self.second(torch.tanh(hidden))

    def add(self, grad):
        self.seen += grad.sum(0)
