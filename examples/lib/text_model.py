"""The small byte-level language model that the examples train, how it is cut into stages, and its text."""

from __future__ import annotations

import functools
import itertools
import sysconfig
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from .sequence import SequencePiece

VOCABULARY = 256  # bytes in, bytes out: no tokenizer
MAX_TEXT_BYTES = 4_000_000
HEAD_DIM = 32


class Embedding(nn.Module):
    """Bytes and their positions in the sequence: int64[batch, tokens] -> float[batch, tokens, hidden]."""

    def __init__(self, hidden: int, piece: SequencePiece):
        super().__init__()
        self.tokens = piece.tokens
        self.byte = nn.Embedding(VOCABULARY, hidden)
        self.position = nn.Parameter(torch.empty(piece.seq_len, hidden))
        nn.init.normal_(self.byte.weight, std=0.02)
        nn.init.normal_(self.position, std=0.02)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        return self.byte(text) + self.position[self.tokens]


class Block(nn.Module):
    """Pre-norm transformer block with causal attention: float[batch, tokens, hidden] -> the same shape."""

    def __init__(self, hidden: int, depth: int, piece: SequencePiece):
        super().__init__()
        self.attend = piece.attend
        self.norm_attention, self.norm_mlp = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
        for linear in (
            self.out,
            self.down,
        ):  # residual branches start small, so that the sum over the depth keeps its scale
            nn.init.normal_(linear.weight, std=0.02 / (2 * depth) ** 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(self.norm_attention(x))
        q, k, v = qkv.unflatten(-1, (3, -1, HEAD_DIM)).unbind(2)  # [batch, tokens, heads, head_dim] each
        x = x + self.out(self.attend(q, k, v).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm_mlp(x))))


class Head(nn.Module):
    """float[batch, tokens, hidden] -> logits float[batch, tokens, 256]."""

    def __init__(self, hidden: int):
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.logits = nn.Linear(hidden, VOCABULARY, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.logits(self.norm(x))


def build_layers(num_blocks: int, hidden: int, piece: SequencePiece, seed: int) -> list[nn.Module]:
    """All layers in order for this piece's tokens, with the same weights wherever the seed is the same."""
    torch.manual_seed(seed)
    blocks = [Block(hidden, num_blocks, piece) for _ in range(num_blocks)]
    return [Embedding(hidden, piece), *blocks, Head(hidden)]


def split_layers(num_blocks: int, num_stages: int) -> list[range]:
    """Layer indices of each stage: blocks remainder-first, the embedding on the first, the head on the last.

    >>> split_layers(num_blocks=5, num_stages=2)
    [range(0, 4), range(4, 7)]
    """
    if num_stages > num_blocks:
        raise ValueError(
            f"{num_blocks} blocks cannot fill {num_stages} stages; give --layers {num_stages} or more"
        )
    share, remainder = divmod(num_blocks, num_stages)
    bounds = [1 + idx * share + min(idx, remainder) for idx in range(num_stages + 1)]
    bounds[0], bounds[-1] = 0, num_blocks + 2
    return [range(start, end) for start, end in itertools.pairwise(bounds)]


def loss_of(logits: torch.Tensor, targets: torch.Tensor, seq_len: int) -> torch.Tensor:
    """Cross entropy in nats per byte of whole sequences; for a piece, its share, which may be 0."""
    nats = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return nats / (len(targets) * seq_len)


@functools.cache
def read_sources(directory: Path) -> bytes:
    return b"\n".join(path.read_bytes() for path in sorted(directory.glob("*.py")))[:MAX_TEXT_BYTES]


class TextBatches:
    """Batches of Python's standard library, a function of (seed, step): every rank draws the same ones."""

    def __init__(self, batch_size: int, seq_len: int, seed: int):
        self.directory = Path(sysconfig.get_paths()["stdlib"])
        text = read_sources(self.directory)
        if len(text) <= seq_len:
            raise FileNotFoundError(
                f"no Python sources in {self.directory}: this Python was installed without them"
            )
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.batch_size, self.seq_len, self.seed = batch_size, seq_len, seed

    def __call__(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(inputs, targets), int64[batch, seq] each; a target is the byte that follows its input."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        starts = torch.randint(len(self.text) - self.seq_len, (self.batch_size, 1), generator=generator)
        rows = self.text[starts + torch.arange(self.seq_len + 1)].long()
        return rows[:, :-1], rows[:, 1:]
