"""Causal attention with grouped queries: of whole sequences, and of sequences split over ranks (Ulysses)."""

from __future__ import annotations

import itertools

import torch
from torch.nn import functional

from pipecomm_ext import Communicator, all_to_all, all_to_all_many, cal_split_sizes

SEQ, HEADS = 1, 2  # dims of [batch, seq, heads, head_dim]


def kv_head_of(head: int, num_heads: int, num_kv_heads: int) -> int:
    """The key/value head that a query head reads."""
    return head * num_kv_heads // num_heads


def take_heads(x: torch.Tensor, heads: list[int]) -> torch.Tensor:
    """These heads in this order, without a copy if they are all of them as they are."""
    return x if heads == list(range(x.size(HEADS))) else x[:, :, heads]


def attend_whole(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """All tokens, all heads."""
    kv_heads = [kv_head_of(head, q.size(HEADS), k.size(HEADS)) for head in range(q.size(HEADS))]
    return attend_heads(q, take_heads(k, kv_heads), take_heads(v, kv_heads))


def attend_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention of as many key/value as query heads; also of none, as ranks beyond the heads have."""
    if q.size(HEADS) == 0:
        return q
    q, k, v = (tensor.transpose(SEQ, HEADS) for tensor in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(SEQ, HEADS)


class UlyssesAttention:
    """Attention of tokens that are split over the ranks of a communicator: the `attend` of every rank."""

    def __init__(self, comm: Communicator, seq_len: int, num_heads: int, num_kv_heads: int):
        self.comm, self.seq_len = comm, seq_len
        self.seq_sizes = cal_split_sizes(seq_len, comm.size)
        self.head_sizes = cal_split_sizes(num_heads, comm.size)
        ends = list(itertools.accumulate(self.head_sizes))
        # For each rank the key/value head of each of its query heads, and which ones it needs.
        read = [
            [kv_head_of(head, num_heads, num_kv_heads) for head in range(end - size, end)]
            for end, size in zip(ends, self.head_sizes, strict=True)
        ]
        needed = [sorted(set(heads)) for heads in read]
        self.kv_sizes = [len(heads) for heads in needed]
        self.kv_sent = [head for heads in needed for head in heads]
        mine = needed[comm.rank]
        self.kv_local = [mine.index(head) for head in read[comm.rank]]

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k, v = take_heads(k, self.kv_sent), take_heads(v, self.kv_sent)  # a head twice if two ranks need it
        q, k, v = all_to_all_many(
            [q, k, v],
            self.comm,
            scatter_dim=HEADS,
            gather_dim=SEQ,
            gather_size=self.seq_len,
            scatter_sizes=[self.head_sizes, self.kv_sizes, self.kv_sizes],
        )
        mixed = attend_heads(q, take_heads(k, self.kv_local), take_heads(v, self.kv_local))
        return all_to_all(
            mixed,
            self.comm,
            scatter_dim=SEQ,
            gather_dim=HEADS,
            scatter_sizes=self.seq_sizes,
            gather_sizes=self.head_sizes,
        )
