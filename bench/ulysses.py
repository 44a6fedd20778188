"""Ulysses attention whose exchanges overlap computation, against exchange, attention, exchange in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import timeline
import torch
import torch.distributed as dist
from all_to_all import Trade
from ops import BASELINE, MIB, Bench, Case, Op
from torch.nn import functional

from pipecomm_ext import Communicator, ulysses_attention

HEADS_EACH, HEAD_DIM = 8, 64  # of a rank, after the exchange
SEQ, HEADS = 1, 2  # dims of [batch, seq, heads, head_dim]
CHUNKS = (1, 2, 4, 8)
ALONE = "attention"  # of a rank's heads, without communication
NUM_TRIALS = 5  # of each part of the work, to see which one takes longer, and for a picture


def build(bench: Bench, num_bytes: int) -> Iterator[Case]:
    """[1, S, 8 P, 64] to heads, attention, and back; size: of q, k, v, result. torch: all_to_all_single."""
    for has_backward in (False, True):
        # Attention that sleeps takes as long as the exchanges of one transport.
        apart = [{name: comm} for name, comm in bench.comms.items()]
        for comms in apart if bench.attention == "sleep" else [bench.comms]:
            yield _case(bench, Sublayer.of(bench, num_bytes, has_backward), comms)


def timelines(bench: Bench, num_bytes: int) -> dict[str, list[timeline.Call]]:
    """The fastest of some calls with one chunk, and with most chunks; first transport, with backward."""
    sublayer = Sublayer.of(bench, num_bytes, has_backward=True)
    comm = next(iter(bench.comms.values()))
    if bench.attention == "sleep":
        sublayer.sleep_as_long_as(_duration_s(partial(sublayer.exchange, comm)))
    attention, panels = sublayer.attention, {}
    for chunks in (CHUNKS[0], CHUNKS[-1]):
        recorded = []
        for _ in range(NUM_TRIALS):
            sublayer.attention = timeline.Stamped(attention)
            call = partial(sublayer.by_ours, comm, chunks)
            recorded.append(timeline.record(comm, chunks, sublayer.attention, call))
        panels[num_chunks_text(chunks)] = min(recorded, key=timeline.duration_s)
    return panels


def _case(bench: Bench, sublayer: Sublayer, comms: dict[str, Communicator]) -> Case:
    exchange_of = {name: f"{comm.transport} exchange" for name, comm in comms.items()}
    exchanges = {exchange_of[name]: partial(sublayer.exchange, comm) for name, comm in comms.items()}
    durations = {name: _duration_s(call) for name, call in exchanges.items()}
    if bench.attention == "sleep":
        sublayer.sleep_as_long_as(*durations.values())
    durations[ALONE] = _duration_s(sublayer.compute)

    calls: dict[str, Callable] = {BASELINE: sublayer.by_torch}
    bound_of = {}
    for name, comm in comms.items():
        calls[name] = partial(sublayer.by_ours, comm, "auto")
        for chunks in CHUNKS:
            calls[f"{name} {num_chunks_text(chunks)}"] = partial(sublayer.by_ours, comm, chunks)
        bound = max(ALONE, exchange_of[name], key=durations.__getitem__)
        bound_of |= {impl: bound for impl in calls if impl not in bound_of}
    result, *gradients = sublayer.expected()
    return Case(
        num_bytes=4 * sublayer.mine[0].nbytes,
        received=[(sublayer.gradients, torch.cat(gradients))] if gradients else [],
        calls={**calls, ALONE: sublayer.compute, **exchanges},
        label="forward and backward" if sublayer.has_backward else "forward",
        returns=result,
        bound_of=bound_of,
        parts={ALONE, *exchanges},
        tolerance=torch.finfo(bench.dtype).eps ** 0.5,
        moves_size=False,
    )


def num_chunks_text(chunks: int) -> str:
    return f"{chunks} chunk" if chunks == 1 else f"{chunks} chunks"


@dataclass
class Sublayer:
    """Attention between its exchanges, on one rank: the calls to compare."""

    rank: int
    size: int
    whole: list[torch.Tensor]  # q, k and v of all ranks, and the gradient of the result
    mine: list[torch.Tensor]  # this rank's piece of each
    heads: list[torch.Tensor]  # and what it has after the exchange
    gradients: torch.Tensor  # of the three of `mine`, in a row
    has_backward: bool
    attention: Callable[..., torch.Tensor]

    @classmethod
    def of(cls, bench: Bench, num_bytes: int, has_backward: bool) -> Sublayer:
        num_heads = HEADS_EACH * bench.size
        tokens = max(1, bench.numel(num_bytes) // (4 * num_heads * HEAD_DIM))
        generator = torch.Generator().manual_seed(0)
        shape = (1, tokens * bench.size, num_heads, HEAD_DIM)
        whole = [torch.randn(shape, generator=generator).to(bench.device, bench.dtype) for _ in range(4)]
        mine, heads = (
            [tensor.chunk(bench.size, dim)[bench.rank].clone() for tensor in whole] for dim in (SEQ, HEADS)
        )
        gradients = torch.zeros(3 * mine[0].numel(), dtype=bench.dtype, device=bench.device)
        for tensor, grad in zip(mine, gradients.chunk(3), strict=False):
            tensor.requires_grad_(has_backward).grad = grad.view_as(tensor)
        for tensor in heads[:3]:
            tensor.requires_grad_(has_backward)
        return cls(bench.rank, bench.size, whole, mine, heads, gradients, has_backward, sdpa)

    def sleep_as_long_as(self, seconds: float) -> None:
        """Replaces attention by sleep, forward and backward together."""
        self.attention = asleep(seconds / (1 + self.has_backward))

    def by_ours(self, comm: Communicator, chunks: int | str) -> torch.Tensor:
        return self._run(lambda *qkv: ulysses_attention(*qkv, self.attention, comm, chunks=chunks))

    def by_torch(self) -> torch.Tensor:
        """q, k and v one after the other, attention, and the result."""
        sizes = [self.mine[0].size(SEQ)] * self.size, [HEADS_EACH] * self.size
        to_heads = Trade(HEADS, SEQ, sizes[1], sizes[0], self.rank)
        to_sequence = Trade(SEQ, HEADS, sizes[0], sizes[1], self.rank)

        def call(*qkv: torch.Tensor) -> torch.Tensor:
            heads = [_Traded.apply(to_heads, to_sequence, tensor) for tensor in qkv]
            return _Traded.apply(to_sequence, to_heads, self.attention(*heads))

        return self._run(call)

    def exchange(self, comm: Communicator) -> None:
        """The exchanges alone."""
        self._run(lambda *qkv: ulysses_attention(*qkv, asleep(0), comm, chunks=1))

    def compute(self) -> None:
        """Attention alone."""
        result = self.attention(*self.heads[:3])
        if self.has_backward:
            torch.autograd.grad(result, self.heads[:3], self.heads[3])

    def _run(self, call: Callable[..., torch.Tensor]) -> torch.Tensor:
        self.gradients.zero_()
        result = call(*self.mine[:3])
        if self.has_backward:
            result.backward(self.mine[3])
        return result.detach()

    def expected(self) -> list[torch.Tensor]:
        """This rank's piece of the result, and the gradients of its q, k and v in one dim."""
        *qkv, grad = (tensor.detach().requires_grad_(self.has_backward) for tensor in self.whole)
        result = self.attention(*qkv)
        grads = torch.autograd.grad(result, qkv, grad) if self.has_backward else ()
        result, *grads = (tensor.detach().chunk(self.size, SEQ)[self.rank] for tensor in (result, *grads))
        return [result, *(grad.flatten() for grad in grads)]


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (tensor.transpose(SEQ, HEADS) for tensor in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v).transpose(SEQ, HEADS)


def asleep(seconds: float) -> Callable[..., torch.Tensor]:
    """An attention that sleeps `seconds` for all heads of a rank, forward and again backward; returns `q`."""
    return lambda q, k, v: _Sleep.apply(seconds / HEADS_EACH, q, k, v)


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, seconds_each: float, q, k, v) -> torch.Tensor:
        ctx.seconds_each = seconds_each
        time.sleep(seconds_each * min(q.size(HEADS), HEADS_EACH))  # of the whole it would take long
        return q.view_as(q)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        time.sleep(ctx.seconds_each * min(grad.size(HEADS), HEADS_EACH))
        return None, grad, torch.zeros_like(grad), torch.zeros_like(grad)


class _Traded(torch.autograd.Function):
    """torch's exchange, and its opposite as its gradient."""

    @staticmethod
    def forward(ctx, trade: Trade, back: Trade, tensor: torch.Tensor) -> torch.Tensor:
        ctx.back = back
        return trade.by_permutation(tensor)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        return None, None, ctx.back.by_permutation(grad)


def _duration_s(call: Callable[[], object]) -> float:
    """The time of the fastest of some calls, on its slowest rank; the same on all ranks."""
    seconds = []
    for _ in range(NUM_TRIALS):
        dist.barrier()
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    slowest = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.min().item()


ULYSSES_OPS = {"ulysses": Op(build, (MIB, 16 * MIB))}
