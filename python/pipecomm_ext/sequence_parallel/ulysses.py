"""Ulysses attention in one call: sequence for heads, attention, and back, in chunks of heads that overlap.

While a chunk is computed the next AHEAD chunks arrive, and the result of the previous one goes back. More
chunks would share the link, and a rank that is late with its first chunk stays late. Autograd runs the chunks
backwards in the same way: `_Leave` posts the gradients of the first results, `_Depart` waits for those of a
chunk and posts the next ones, `_Arrive` posts what attention's backward made of them, `_Enter` waits for all.
These gradients bypass the graph: `_Run` moves them directly to and from the boxes of whole tensors, so no
chunk is cut out or put together by a copy. A backward that is itself recorded (create_graph=True) sends them
through the graph, in one exchange for all chunks, without overlap.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..communicator import Communicator, Work
from ..communicator.registry import communicator_of, rank_and_size
from ..core.checked import whole_number
from ..core.extension import _C
from ..errors import PipeCommError, PipeCommMismatch
from .all_to_all import OP, all_to_all, exchange_step
from .attention_calls import call_attention
from .differentiable import apply
from .graph_link import check_linked, graph_link
from .head_chunks import best_num_chunks, head_chunks
from .sizes import Sizes, cal_split_sizes, checked_spec, dim_index, taken_as_equal
from .ulysses_plans import Layout, enter_gradient_plan, enter_plan, leave_gradient_plan, leave_plan

Attention = Callable[..., Tensor]

AHEAD = 2  # chunks in flight while one is computed: one moves, one keeps the link busy after it


def ulysses_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attention: Attention | None = None,
    process_group: Any = None,
    *,
    chunks: int | str = "auto",
    gather_size: int | None = None,
    heads_dim: int = 2,
    seq_dim: int = 1,
    **attention_kwargs: Any,
) -> Tensor:
    """Attention over a sequence of which each rank holds a piece; communication overlaps with computation.

    Every rank passes its piece of the sequence, with all heads. An all-to-all gives it the whole sequence of
    some heads, `attention` runs on them, and another all-to-all brings the result back. Heads are exchanged
    and computed in chunks: those of the next chunks arrive, and those of the last one return, while one is
    computed, forward and backward. Equal to attention on one rank that holds everything, for any lengths,
    numbers of heads (also fewer than ranks) and key/value heads, which are sent to several ranks only if
    these read them.

    Args:
        q, k, v: tensors with a sequence dim, a dim of heads and a last dim of channels, say [batch, sequence,
            heads, channels]; equal lengths of the sequence, and in `k` and `v` equal numbers of heads, at
            most those of `q`: query head h reads key/value head h * kv_heads // heads.
        attention: called as attention(q, k, v, **attention_kwargs) with tensors of the same layout, whole
            sequences and some of the heads, once per chunk; returns a tensor like its `q` (the number of
            channels may be another one). With fewer key/value heads than query heads it gets these if those
            of a chunk divide evenly, and else one for each query head. None: torch's
            scaled_dot_product_attention. It may be called with the heads of one rank only, so it must not
            mix heads or depend on their number. If it has a parameter `heads` (no default, or
            None), it gets their numbers among all query heads, a range: `slopes[heads]` for ALiBi. It must
            not write to its k and v. If it uses trained parameters, q, k or v must require a gradient.
        process_group: a torch group, a Communicator, or None for the default group.
        chunks: number of chunks, at most the query heads of a rank; 1 does not overlap. "auto" decides by a
            model of the transport, equally on all ranks, and takes 1 where overlap does not pay: over shared
            memory the cores that would compute move the bytes. In a graph of torch.compile it is 1.
        gather_size: the length of the whole sequence, of which rank r must hold cal_split_sizes(gather_size,
            P)[r]. Without it all ranks must hold the same length, which is checked.
        heads_dim, seq_dim: dims of q, k and v; negative ones count from the end.
        attention_kwargs: passed to `attention` unchanged (say is_causal=True).

    Returns:
        a tensor like `q`, this rank's piece of the result.

    Raises:
        ValueError, IndexError, TypeError: bad arguments on this rank, or a wrong result of its attention.
        PipeCommMismatch: another rank refused, its attention raised, or the ranks' arguments do not fit; the
            next call works.

    Example:
        ```python
        q = torch.randn(1, 3, 4, 8)  # [batch, this rank's tokens, heads, head_dim]
        k, v = torch.randn(1, 3, 2, 8), torch.randn(1, 3, 2, 8)  # two key/value heads
        out = ulysses_attention(q, k, v, process_group=comm, is_causal=True)  # [1, 3, 4, 8]
        ```
    """
    if torch.compiler.is_compiling():
        dims = checked_dims(q, k, v, heads_dim, seq_dim)
        attention = sdpa(*dims) if attention is None else attention
        return _traced(q, k, v, attention, process_group, *dims, gather_size, attention_kwargs)
    comm = communicator_of(process_group, q)
    with comm.collective(OP):
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            checked_spec(tensor, name)
        dims = checked_dims(q, k, v, heads_dim, seq_dim)
        run = _Run(comm, layout_of(comm, q, k, v, *dims, chunks, gather_size), v.size(-1))
        enter_plan(run.layout, 0)  # checks the lengths
    with taken_as_equal(run.layout.seq_dim, "gather_size" if gather_size is None else None):
        entered = _Enter.apply(run, q, k, v)
        chunk_results = []
        try:
            for chunk in range(run.layout.num_chunks):
                arrived = run.arrive(chunk, entered[3 * chunk : 3 * chunk + 3])
                link = graph_link(*arrived)
                result = run.attend(chunk, arrived, attention or sdpa(*dims), attention_kwargs)
                check_linked(result, link)
                chunk_results.append(_Depart.apply(run, chunk, result, link))
        except Exception as error:
            run.refuse_the_rest(error)
            raise
        return _Leave.apply(run, *chunk_results)


# ---- arguments --------------------------------------------------------------------------------------------


def checked_dims(q: Tensor, k: Tensor, v: Tensor, heads_dim: Any, seq_dim: Any) -> tuple[int, int]:
    num_dims = q.dim()
    if num_dims < 3 or k.dim() != num_dims or v.dim() != num_dims:
        counts = [tensor.dim() for tensor in (q, k, v)]
        raise ValueError(f"q, k and v must have the same number of dims, at least three, not {counts}")
    heads_dim, seq_dim = dim_index(heads_dim, num_dims, "heads_dim"), dim_index(seq_dim, num_dims, "seq_dim")
    if num_dims - 1 in (heads_dim, seq_dim) or heads_dim == seq_dim:
        raise ValueError(
            f"heads_dim {heads_dim} and seq_dim {seq_dim} must differ, and neither may be the last dim, "
            "which holds channels"
        )
    for dim in set(range(num_dims - 1)) - {heads_dim}:
        if not q.size(dim) == k.size(dim) == v.size(dim):
            lengths = [tensor.size(dim) for tensor in (q, k, v)]
            raise ValueError(f"q, k and v must have the same length along dim {dim}, not {lengths}")
    num_heads, num_kv_heads = q.size(heads_dim), k.size(heads_dim)
    if v.size(heads_dim) != num_kv_heads:
        raise ValueError(
            f"k has {num_kv_heads} heads and v {v.size(heads_dim)}; they must have the same number"
        )
    if not 1 <= num_kv_heads <= num_heads:
        raise ValueError(f"k and v have {num_kv_heads} heads; they must have 1 to {num_heads}, as many as q")
    return heads_dim, seq_dim


def layout_of(comm, q, k, v, heads_dim, seq_dim, chunks, gather_size) -> Layout:
    if gather_size is None:
        seq_sizes = (q.size(seq_dim),) * comm.size
    else:
        seq_sizes = tuple(cal_split_sizes(whole_number(gather_size, "gather_size"), comm.size))
    most = max(1, -(-q.size(heads_dim) // comm.size))
    if chunks == "auto":
        # For the rank with the longest piece: all ranks must choose the same number.
        row_elements = [math.prod(t.shape[:seq_dim] + t.shape[seq_dim + 1 :]) for t in (q, k, v, q)]
        row_bytes = sum(n * t.element_size() for n, t in zip(row_elements, (q, k, v, q), strict=True))
        num_flops = 4 * row_elements[0] * sum(seq_sizes) ** 2 / comm.size
        moved = row_bytes * max(seq_sizes)
        num_chunks = best_num_chunks(comm.transport, q.device.type, moved, num_flops, most)
    else:
        num_chunks = min(whole_number(chunks, 'chunks, if it is not "auto",'), most)
        if num_chunks < 1:
            raise ValueError(f'chunks must be positive or "auto", not {chunks}')
    tensors = (q, k, v)
    shapes = tuple(tuple(tensor.shape) for tensor in tensors)
    dtypes = tuple(tensor.dtype for tensor in tensors)
    return Layout(comm.rank, shapes, dtypes, heads_dim, seq_dim, seq_sizes, num_chunks)


def sdpa(heads_dim: int, seq_dim: int) -> Attention:
    """torch's attention for tensors of any layout."""

    def attention(q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> Tensor:
        q, k, v = (tensor.movedim((heads_dim, seq_dim), (-3, -2)) for tensor in (q, k, v))
        kwargs.setdefault("enable_gqa", q.size(-3) != k.size(-3))
        result = functional.scaled_dot_product_attention(q, k, v, **kwargs)
        return result.movedim((-3, -2), (heads_dim, seq_dim))

    return attention


def _traced(q, k, v, attention, process_group, heads_dim, seq_dim, gather_size, kwargs) -> Tensor:
    """In a compiled graph: one chunk, by operators that stay in it. Key/value heads that several ranks read
    are copied for each of them.
    """
    rank, size = rank_and_size(process_group)
    heads = head_chunks(q.size(heads_dim), k.size(heads_dim), size, 1)
    [q_sizes], [kv_sizes] = heads.q_sizes, heads.kv_sizes
    if heads.received != tuple(range(heads.num_kv_heads)):
        k, v = (tensor[_at(heads_dim, list(heads.received))] for tensor in (k, v))
    q, k, v = (
        all_to_all(tensor, process_group, heads_dim, seq_dim, gather_size, scatter_sizes=sizes)
        for tensor, sizes in ((q, q_sizes), (k, kv_sizes), (v, kv_sizes))
    )
    link = graph_link(q, k, v).to(q.dtype)
    nothing = link.expand(*q.shape[:heads_dim], 0, *q.shape[heads_dim + 1 : -1], v.size(-1))
    if q_sizes[rank] == 0:
        result = nothing
    else:
        read = [head - heads.kv_starts[0][rank] for head in heads.read_by(0, rank)]
        if not _is_even(read):
            k, v = (tensor[_at(heads_dim, read)] for tensor in (k, v))
        result = call_attention(attention, q, k, v, kwargs, heads.q_starts[0][rank], q_sizes[rank])
        check_linked(result, link)
        result = torch.cat([result.to(q.dtype), nothing], heads_dim)
    length = result.size(seq_dim)
    seq_sizes = [length // size] * size if gather_size is None else cal_split_sizes(length, size)
    return all_to_all(
        result, process_group, seq_dim, heads_dim, scatter_sizes=seq_sizes, gather_sizes=q_sizes
    )


def _at(dim: int, indices: list[int]) -> tuple[Any, ...]:
    return (*(slice(None),) * dim, indices)


def _is_even(read: list[int]) -> bool:
    """Whether each key/value head is read by the same number of query heads, in order."""
    needed = sorted(set(read))
    return read == [head for head in needed for _ in range(len(read) // len(needed))]


# ---- one call ---------------------------------------------------------------------------------------------


@dataclass
class _Posted:
    tensors: list[Tensor]
    work: Work


class _Run:
    """One call: its exchanges, forward and backward, and the gradients that bypass the graph."""

    def __init__(self, comm: Communicator, layout: Layout, num_channels: int):
        self.comm, self.layout, self.num_channels = comm, layout, num_channels
        self.needs = (False, False, False)  # of q, k and v: which require a gradient
        self.qkv: Sequence[Tensor] = ()  # whole, until all of it is sent
        self.result: Tensor | None = None
        self.result_grad: Tensor | None = None
        self.entered: list[list[Tensor]] = []  # the heads of q, k and v of each chunk
        self.entering: list[_Posted] = []
        self.leaving: list[_Posted] = []
        self.arrived: list[tuple[Tensor, Tensor]] = []  # k and v of the chunks so far
        self.enter_numbers: list[int] = []
        self.leave_numbers: list[int] = []
        self.grads_back: dict[int, _Posted] = {}  # of results, by chunk
        self.grads_out: list[Work] = []
        self.whole_grads: list[Tensor] = []  # of those of q, k and v that need one

    def outputs_of(self, plan: _C.PreparedExchange, inputs: Sequence[Tensor]) -> list[Tensor]:
        return [
            self.comm.empty(shape, tensor.dtype)
            for shape, tensor in zip(plan.output_shapes, inputs, strict=True)
        ]

    def post(self, plan, inputs, outputs=None, gradient_of: int = 0) -> _Posted:
        if outputs is None:
            outputs = self.outputs_of(plan, inputs)
        work = self.comm.exchange(plan, inputs, outputs, async_op=True, op=OP, gradient_of=gradient_of)
        return _Posted(outputs, work)

    # forward

    def enter(self, chunk: int) -> None:
        """Posts the exchange to the heads of a chunk, if there is one."""
        if chunk < self.layout.num_chunks:
            plan = enter_plan(self.layout, chunk)
            with torch.no_grad():  # the receive buffers belong to the graph already
                self.entering.append(self.post(plan, self.qkv, self.entered[chunk]))

    def refuse_the_rest(self, error: Exception) -> None:
        """Refuses the exchanges that the other ranks have posted, or will, and this one has not."""
        if isinstance(error, PipeCommError) and not isinstance(error, PipeCommMismatch):
            return  # there is no other rank to tell
        for _ in range(len(self.entering) + len(self.leaving), 2 * self.layout.num_chunks):
            self.comm.refuse(OP, error)

    def arrive(self, chunk: int, entered: Sequence[Tensor]) -> list[Tensor]:
        """Waits for the heads of a chunk, which belong to the graph from here on."""
        self.entering[chunk].work.wait()
        self.enter(chunk + AHEAD)
        arrived = list(entered)
        recorded = [idx for idx, tensor in enumerate(arrived) if tensor.requires_grad]
        if recorded:
            parts = _Arrive.apply(self, chunk, *(arrived[idx] for idx in recorded))
            for idx, part in zip(recorded, parts, strict=True):
                arrived[idx] = part
        return arrived

    def attend(self, chunk: int, arrived: Sequence[Tensor], attention: Attention, kwargs: Any) -> Tensor:
        q, *kv = arrived
        heads, rank, dim = self.layout.heads, self.layout.rank, self.layout.heads_dim
        self.arrived.append((kv[0], kv[1]))
        first, count = heads.q_starts[chunk][rank], heads.q_sizes[chunk][rank]
        shape = (*q.shape[:-1], self.num_channels)
        if count == 0:
            return q.new_empty(shape)
        read = heads.read_by(chunk, rank)
        k, v = self._kv_of(read[0], read[-1] + 1)
        if not _is_even(read):
            index = torch.tensor([head - read[0] for head in read], device=k.device)
            k, v = k.index_select(dim, index), v.index_select(dim, index)
        result = call_attention(attention, q, k, v, kwargs, first, count)
        spec = checked_spec(result, "the result of attention")
        if tuple(spec[0]) != shape or result.device != q.device:
            raise ValueError(
                f"attention returned {tuple(spec[0])} on {result.device} for heads {first} to "
                f"{first + count - 1}, where {shape} on {q.device} belongs"
            )
        return result.to(q.dtype)  # autocast may have lowered it

    def _kv_of(self, begin: int, end: int) -> list[Tensor]:
        """The key/value heads [begin, end) of k and v, from the chunks with which they came."""
        heads, rank, dim = self.layout.heads, self.layout.rank, self.layout.heads_dim
        parts: list[tuple[Tensor, ...]] = []
        for chunk, tensors in enumerate(self.arrived):
            start, size = heads.kv_starts[chunk][rank], heads.kv_sizes[chunk][rank]
            low, high = max(begin, start), min(end, start + size)
            if low < high:
                parts.append(tuple(tensor.narrow(dim, low - start, high - low) for tensor in tensors))
        return [
            tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim)
            for tensors in zip(*parts, strict=True)
        ]

    # backward

    def return_grad(self, chunk: int) -> None:
        """Posts the exchange to the gradient of a chunk's result, if there is one."""
        if chunk < 0:
            return
        grad = self.result_grad
        assert grad is not None
        plan = leave_gradient_plan(self.layout, chunk, self.num_channels, grad.dtype)
        self.grads_back[chunk] = self.post(plan, [grad], gradient_of=self.leave_numbers[chunk])
        if chunk == 0:
            self.result_grad = None

    # backward, recorded: through the graph, by one node each, so that its order is the same on all ranks

    def result_grads_of(self, grad: Tensor) -> Sequence[Tensor]:
        """The gradients of all chunks' results from that of the whole result."""
        heads, layout = self.layout.heads, self.layout
        places = zip(heads.q_starts, heads.q_sizes, strict=True)
        sent = [grad.index_select(layout.heads_dim, _index(*place, grad.device)) for place in places]
        sizes = [(size, layout.seq_sizes) for size in heads.q_sizes]
        return self._exchanged(sent, sizes, layout.heads_dim, layout.seq_dim)

    def whole_grads_of(self, grads: Sequence[Tensor]) -> Iterator[Tensor]:
        """The gradients of those of q, k and v that need one from those of all chunks, chunk by chunk."""
        heads, layout = self.layout.heads, self.layout
        kv = heads.kv_starts, heads.kv_sizes
        needed = [
            (shape, places)
            for shape, places, need in zip(
                layout.shapes, ((heads.q_starts, heads.q_sizes), kv, kv), self.needs, strict=True
            )
            if need
        ]
        sizes = [
            (layout.seq_sizes, sizes[chunk]) for chunk in range(layout.num_chunks) for _, (_, sizes) in needed
        ]
        back = self._exchanged(grads, sizes, layout.seq_dim, layout.heads_dim)
        for idx, (shape, (starts, lengths)) in enumerate(needed):
            whole = back[idx].new_zeros(shape)
            for chunk, grad in enumerate(back[idx :: len(needed)]):
                index = _index(starts[chunk], lengths[chunk], grad.device)
                whole = whole.index_add(layout.heads_dim, index, grad)
            yield whole

    def _exchanged(
        self,
        tensors: Sequence[Tensor],
        sizes: Sequence[tuple[Sizes, Sizes]],
        scatter_dim: int,
        gather_dim: int,
    ) -> Sequence[Tensor]:
        requests = tuple(
            (tuple(tensor.shape), tensor.dtype, None, *both)
            for tensor, both in zip(tensors, sizes, strict=True)
        )
        step = exchange_step(self.comm.rank, self.comm.size, requests, scatter_dim, gather_dim)
        return apply(self.comm, step, tensors)


def _index(starts: Sizes, sizes: Sizes, device: torch.device) -> Tensor:
    places = [start + idx for start, size in zip(starts, sizes, strict=True) for idx in range(size)]
    return torch.tensor(places, dtype=torch.int64, device=device)


class _Enter(torch.autograd.Function):
    """Posts the first exchanges; returns the tensors of all chunks, which may not even be posted yet."""

    @staticmethod
    def forward(ctx, run: _Run, *qkv: Tensor) -> tuple[Tensor, ...]:
        ctx.run = run
        ctx.set_materialize_grads(False)
        run.needs = ctx.needs_input_grad[1:]
        run.qkv = [tensor.detach() for tensor in qkv]
        run.entered = [
            run.outputs_of(enter_plan(run.layout, idx), qkv) for idx in range(run.layout.num_chunks)
        ]
        run.enter(0)
        run.entering[0].work.wait()  # a rank that refuses the call refuses only this exchange
        for chunk in range(1, AHEAD):
            run.enter(chunk)
        outputs = [tensor for tensors in run.entered for tensor in tensors]
        ctx.mark_non_differentiable(*(tensor for idx, tensor in enumerate(outputs) if not run.needs[idx % 3]))
        return tuple(outputs)

    @staticmethod
    def backward(ctx, *grads: Tensor | None):
        run: _Run = ctx.run
        if torch.is_grad_enabled():
            chunk_grads = [grad for idx, grad in enumerate(grads) if run.needs[idx % 3]]
            recorded = run.whole_grads_of(chunk_grads)  # type: ignore[arg-type]
            return None, *(next(recorded) if need else None for need in run.needs)
        works, run.grads_out = run.grads_out, []
        whole, run.whole_grads = iter(run.whole_grads), []
        for work in works:
            work.wait()
        return None, *(
            _summed(run.layout, idx, next(whole)) if need else None for idx, need in enumerate(run.needs)
        )


def _summed(layout: Layout, idx: int, grad: Tensor) -> Tensor:
    """Adds up what several ranks returned for one key/value head."""
    received = layout.heads.received
    if idx == 0 or received == tuple(range(layout.heads.num_kv_heads)):
        return grad
    index = torch.tensor(received, device=grad.device)
    return grad.new_zeros(layout.shapes[idx]).index_add_(layout.heads_dim, index, grad)


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx, run: _Run, chunk: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.run, ctx.chunk = run, chunk
        ctx.mark_dirty(*tensors)  # they are written by now, and attention may write to its q
        return tensors

    @staticmethod
    def backward(ctx, *grads: Tensor):
        run: _Run = ctx.run
        if torch.is_grad_enabled():
            return None, None, *grads
        plan = enter_gradient_plan(run.layout, ctx.chunk, run.needs)
        if not run.whole_grads:
            run.whole_grads = run.outputs_of(plan, grads)
        posted = run.post(plan, grads, run.whole_grads, gradient_of=run.enter_numbers[ctx.chunk])
        run.grads_out.append(posted.work)
        return None, None, *[None] * len(grads)


class _Depart(torch.autograd.Function):
    """Posts the return of a chunk's result. Its `link` to what arrived makes autograd run the `_Arrive` of
    this chunk also if attention did not use some of it.
    """

    @staticmethod
    def forward(ctx, run: _Run, chunk: int, result: Tensor, link: Tensor) -> Tensor:
        ctx.run, ctx.chunk, ctx.link_dtype = run, chunk, link.dtype
        ctx.set_materialize_grads(False)
        plan = leave_plan(run.layout, chunk, run.num_channels, result.dtype)
        if run.result is None:
            [run.result] = run.outputs_of(plan, [result])
        run.leaving.append(run.post(plan, [result], [run.result]))
        return result

    @staticmethod
    def backward(ctx, *grads: Tensor | None):
        [grad] = grads
        if grad is None:
            posted = ctx.run.grads_back.pop(ctx.chunk)
            posted.work.wait()
            [grad] = posted.tensors
            ctx.run.return_grad(ctx.chunk - AHEAD)
            return None, None, grad, None
        # The gradients of what arrived depend on all of it, and on `grad`, even if attention did not use it:
        # so the next backward is collective, too.
        return None, None, grad, grad.narrow(-1, 0, 0).sum().to(ctx.link_dtype)


class _Leave(torch.autograd.Function):
    """Waits for the results of all chunks."""

    @staticmethod
    def forward(ctx, run: _Run, *results: Tensor) -> Tensor:
        ctx.run = run
        for posted in run.leaving:
            posted.work.wait()
        run.enter_numbers = [posted.work.number for posted in run.entering]
        run.leave_numbers = [posted.work.number for posted in run.leaving]
        run.qkv, run.entered, run.entering, run.leaving, run.arrived = (), [], [], [], []
        result, run.result = run.result, None
        assert result is not None
        return result

    @staticmethod
    def backward(ctx, *grads: Tensor):
        [grad] = grads
        run: _Run = ctx.run
        num_chunks = run.layout.num_chunks
        if torch.is_grad_enabled():
            return None, *run.result_grads_of(grad)
        run.result_grad = grad
        for chunk in range(num_chunks - 1, num_chunks - 1 - AHEAD, -1):  # in autograd's order
            run.return_grad(chunk)
        return None, *[None] * num_chunks
