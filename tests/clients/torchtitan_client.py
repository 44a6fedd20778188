"""A decoder in the form of torchtitan's, which need a newer torch themselves, cut by its splitter."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional
from torchtitan.distributed.pipeline_parallel import _generate_llm_fqn_per_model_part, _split_module

VOCAB, DIM, NUM_HEADS = 64, 64, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            t.unflatten(-1, (NUM_HEADS, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(functional.silu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    """Attributes and their tolerance of None are what the splitter asks for."""

    def __init__(self, num_layers: int):
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleDict({str(idx): Block() for idx in range(num_layers)})
        self.norm, self.lm_head = nn.RMSNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.tok_embeddings is None else self.tok_embeddings(x)
        for layer in self.layers.values():
            x = layer(x)
        x = x if self.norm is None else self.norm(x)
        return x if self.lm_head is None else self.lm_head(x)


def split(num_stages: int) -> list[nn.Module]:
    """All stages of one model; every call makes equal ones."""
    torch.manual_seed(3)
    num_layers = max(2 * num_stages - 2, 4)
    model = Decoder(num_layers).double()
    return [_split_module(model, names) for names in _generate_llm_fqn_per_model_part(num_stages, num_layers)]


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
