"""Which tokens of a sequence a rank holds: all of them, or a piece if the ranks of a stage split it."""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist

from pipecomm_ext import Communicator, cal_split_sizes, ulysses_attention

from .attention import attend_heads


class SequencePiece:
    """The tokens of each sequence that this rank holds, and how they attend to all of them.

    `comm` joins the ranks that split the sequence, remainder-first; None: this rank holds the whole.
    `attend` takes q, k, v and returns the result, as [batch, my tokens, all heads, head_dim].
    """

    def __init__(self, seq_len: int, num_heads: int, comm: Communicator | None = None):
        self.comm, self.seq_len = comm, seq_len
        if comm is None:
            self.idx, self.attend = 0, attend_heads
            self.sizes, self.head_sizes = [seq_len], [num_heads]
        else:
            split = {"process_group": comm, "gather_size": seq_len, "is_causal": True}
            self.idx, self.attend = comm.rank, functools.partial(ulysses_attention, **split)
            self.sizes, self.head_sizes = (cal_split_sizes(n, comm.size) for n in (seq_len, num_heads))
        start = sum(self.sizes[: self.idx])
        self.tokens = slice(start, start + self.sizes[self.idx])

    def sum_over_pieces(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """The sums over the ranks that split the sequence, on all of them, by one all-reduce."""
        if self.comm is None:
            return tensors
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        dist.all_reduce(flat, group=self.comm.group)
        parts = flat.split([tensor.numel() for tensor in tensors])
        return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]
