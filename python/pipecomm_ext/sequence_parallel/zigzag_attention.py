"""Attention over a sequence in zigzag order: each rank of a ring group attends with its two slices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..communicator import Communicator
from ..communicator.registry import communicator_of, rank_and_size
from ..core.checked import whole_number
from ..core.tensor_specs import spec_of
from .all_to_all import OP, all_to_all_many
from .attention_calls import call_attention
from .differentiable import apply
from .graph_link import graph_link
from .head_chunks import kv_head_of
from .sizes import Sizes, cal_split_sizes, checked_spec, taken_as_equal
from .ulysses import Attention, checked_dims, sdpa
from .zigzag_exchange import ReadStep, ZigzagLayout

# Keywords that mean the same for any part of the sequence.
KEYWORDS = ("dropout_p", "scale", "enable_gqa")


def zigzag_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attention: Attention | None = None,
    process_group: Any = None,
    *,
    is_causal: bool,
    gather_size: int | None = None,
    heads_dim: int = 2,
    seq_dim: int = 1,
    **attention_kwargs: Any,
) -> Tensor:
    """Attention over a sequence that ranks hold in zigzag order, which balances the work.

    Of 2R slices of the sequence, rank r of R holds the slices r and 2R - 1 - r, as
    `load_balanced_split_forward_gather_backward` returns them. One exchange brings the keys and values that
    its queries read, in the order of the sequence: all of them, or, if attention is causal, those up to the
    end of its second slice. One exchange returns their gradients, which are summed in rank order. Equal to
    attention on one rank that holds everything. If it is causal and the slices are equal, every rank has the
    same number of query-key pairs.

    Args:
        q, k, v: as for `ulysses_attention`: equal lengths of the sequence, heads, a last dim of channels.
        attention: called as attention(q, k, v, is_causal=..., **attention_kwargs) with tensors of the same
            layout; returns a tensor like its `q` (the number of channels may be another one). If causal,
            it is called for each slice of queries, with the keys up to the end of this slice, so that the
            last query reads all keys, the one before it all but one, and so on (flash-attention's `causal`;
            torch's is_causal means this for equal lengths only). Else it is called once, with all keys. If it
            has a parameter `heads`, it gets their numbers, see `ulysses_attention`. None: torch's
            scaled_dot_product_attention.
        process_group: a torch group, a Communicator, or None for the default group.
        is_causal: whether a query reads only the keys up to its own place.
        gather_size: the length of the whole sequence, cut in slices by cal_split_sizes(gather_size, 2R).
            Without it all ranks must hold the same even length, which is checked.
        heads_dim, seq_dim: dims of q, k and v; negative ones count from the end.
        attention_kwargs: for `attention`: `dropout_p`, `scale` and `enable_gqa`. Others may depend on
            positions in the sequence, as masks do, and are refused; bind the rest to `attention`.

    Returns:
        a tensor like `q`, for this rank's two slices.

    Raises:
        ValueError, IndexError, TypeError: bad arguments on this rank; nothing was sent.
        PipeCommMismatch: another rank refused, or the ranks' arguments do not fit; the next call works.

    Example:
        ```python
        whole = torch.randn(1, 8, 4, 8)  # on every rank, [batch, tokens, heads, head_dim]
        q = load_balanced_split_forward_gather_backward(whole, comm, dim=1)  # 4 of its tokens
        out = zigzag_attention(q, q, q, process_group=comm, is_causal=True)
        ```
    """
    if torch.compiler.is_compiling():
        dims = check_arguments(q, k, v, is_causal, heads_dim, seq_dim, attention_kwargs)
        k, v, spans = traced_keys(process_group, k, v, is_causal, dims[1], gather_size)
    else:
        comm = communicator_of(process_group, q)
        with comm.collective(OP):
            dims = check_arguments(q, k, v, is_causal, heads_dim, seq_dim, attention_kwargs)
        k, v, spans = read_keys(comm, k, v, is_causal, dims[1], gather_size)
    return attend(q, k, v, attention, spans, is_causal, *dims, attention_kwargs)


def check_arguments(
    q: Any, k: Any, v: Any, is_causal: Any, heads_dim: Any, seq_dim: Any, attention_kwargs: Mapping[str, Any]
) -> tuple[int, int]:
    """Checks the arguments; returns both dims, counted from the front."""
    if not torch.compiler.is_compiling():
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            checked_spec(tensor, name)
    if not isinstance(is_causal, bool):
        raise TypeError(f"is_causal must be a bool, not {type(is_causal).__name__}")
    for name, value in attention_kwargs.items():
        if name not in KEYWORDS and value is not None:
            raise ValueError(
                f"{name} may depend on places in the sequence, of which attention is given a part, so it "
                f"cannot be passed on; if it does not, bind it to attention: functools.partial(attention, "
                f"{name}=...)"
            )
    return checked_dims(q, k, v, heads_dim, seq_dim)


def zigzag_slices(length: int, num_ranks: int, gather_size: Any) -> Sizes:
    """The lengths of the 2R slices, of which a rank holds `length`; without `gather_size` all are equal."""
    if gather_size is not None:
        return tuple(cal_split_sizes(whole_number(gather_size, "gather_size"), 2 * num_ranks))
    if num_ranks > 1 and length % 2:
        raise ValueError(
            f"a rank holds two slices of equal lengths, so {length} must be even; give gather_size if they "
            "are not equal"
        )
    return tuple(cal_split_sizes(length * num_ranks, 2 * num_ranks))


def read_keys(
    comm: Communicator, k: Tensor, v: Tensor, is_causal: bool, seq_dim: int, gather_size: Any
) -> tuple[Tensor, Tensor, list[tuple[int, int]]]:
    """Keys and values that this rank's queries read, and for each call of attention the number of queries
    and of keys. Collective: what raises here raises on all ranks.
    """
    with comm.collective(OP):
        length = k.size(seq_dim)
        slices = zigzag_slices(length, comm.size, gather_size)
        specs = checked_spec(k, "k"), checked_spec(v, "v")
        layout = ZigzagLayout(comm.rank, specs, seq_dim, slices, is_causal)
        if sum(layout.num_held) != length:
            raise ValueError(
                f"gather_size {gather_size} means a length of {sum(layout.num_held)} along dim {seq_dim} on "
                f"rank {comm.rank} of {comm.size}, not {length}"
            )
        step = ReadStep(layout, [tensor.requires_grad and torch.is_grad_enabled() for tensor in (k, v)])
    if comm.size == 1:
        return k, v, [(length, length)]
    with taken_as_equal(seq_dim, "gather_size" if gather_size is None else None, parts=2):
        k, v = apply(comm, step, [k, v])
    if not is_causal:
        return k, v, [(length, layout.num_read)]
    first, second = layout.num_held
    return k, v, [(first, layout.starts[comm.rank + 1]), (second, layout.num_read)]


def traced_keys(
    process_group: Any, k: Tensor, v: Tensor, is_causal: bool, seq_dim: int, gather_size: Any
) -> tuple[Tensor, Tensor, list[tuple[int, int]]]:
    """`read_keys` in a compiled graph, by operators that stay in it: brings all keys and values, and drops
    what this rank does not read.
    """
    rank, size = rank_and_size(process_group)
    slices = zigzag_slices(k.size(seq_dim), size, gather_size)
    held = [slices[idx] + slices[-1 - idx] for idx in range(size)]
    if size == 1:
        return k, v, [(held[0], held[0])]
    copies = [tensor.unsqueeze(-1).expand(*tensor.shape, size) for tensor in (k, v)]
    arrived = all_to_all_many(
        copies, process_group, k.dim(), seq_dim, scatter_sizes=[1] * size, gather_sizes=held
    )
    starts = [sum(held[:idx]) for idx in range(size)]
    starts += [starts[idx] + slices[idx] for idx in reversed(range(size))]
    ends = [sum(slices[: idx + 1]) for idx in range(2 * size)]
    num_slices = 2 * size - rank if is_causal else 2 * size
    places = list(zip(starts, slices, strict=True))[:num_slices]
    k, v = (
        torch.cat([whole.squeeze(-1).narrow(seq_dim, *place) for place in places], seq_dim)
        for whole in arrived
    )
    if not is_causal:
        return k, v, [(held[rank], ends[-1])]
    return k, v, [(slices[rank], ends[rank]), (slices[-1 - rank], ends[-1 - rank])]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attention: Attention | None,
    spans: Sequence[tuple[int, int]],
    is_causal: bool,
    heads_dim: int,
    seq_dim: int,
    kwargs: Mapping[str, Any],
    first_head: int = 0,
) -> Tensor:
    """Attention of consecutive queries, one call for each span with queries, put together."""
    attention = _causal_sdpa(heads_dim, seq_dim) if attention is None else attention
    num_heads, num_kv_heads = q.size(heads_dim), k.size(heads_dim)
    if num_heads % num_kv_heads:
        read = [kv_head_of(head, num_heads, num_kv_heads) for head in range(num_heads)]
        index: tuple[Any, ...] = (*(slice(None),) * heads_dim, read)
        k, v = (tensor[index] for tensor in (k, v))
    results, begin = [], 0
    for num_queries, num_keys in spans:
        if not num_queries:
            continue
        some = q.narrow(seq_dim, begin, num_queries)
        keys, values = (tensor.narrow(seq_dim, 0, num_keys) for tensor in (k, v))
        given = {**kwargs, "is_causal": is_causal}
        result = call_attention(attention, some, keys, values, given, first_head, num_heads)
        shape = (*some.shape[:-1], v.size(-1))
        if tuple(spec_of(result, "the result of attention")[0]) != shape:
            raise ValueError(
                f"attention returned {tuple(result.shape)} for queries {begin} to {begin + num_queries - 1} "
                f"of this rank, where {shape} belongs"
            )
        results.append(result.to(q.dtype))  # autocast may have lowered it
        begin += num_queries
    # So that the backward reaches the exchange on every rank, even one without queries.
    link = graph_link(q, k, v).to(q.dtype)
    nothing = link.expand(*q.shape[:seq_dim], 0, *q.shape[seq_dim + 1 : -1], v.size(-1))
    return torch.cat([*results, nothing], seq_dim)


def _causal_sdpa(heads_dim: int, seq_dim: int) -> Callable[..., Tensor]:
    """torch's attention, where the last query reads the last key if it is causal."""
    whole = sdpa(heads_dim, seq_dim)

    def attention(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, **kwargs: Any) -> Tensor:
        num_queries, num_keys = q.size(seq_dim), k.size(seq_dim)
        if is_causal and num_queries != num_keys:
            from torch.nn.attention.bias import causal_lower_right  # imports torch._dynamo: a second or two

            if torch.compiler.is_compiling():
                ones = torch.ones(num_queries, num_keys, dtype=torch.bool, device=q.device)
                mask = ones.tril(num_keys - num_queries)
            else:  # needs no mask in memory if a kernel supports this one
                mask = causal_lower_right(num_queries, num_keys)
            return whole(q, k, v, **{**kwargs, "attn_mask": mask})
        return whole(q, k, v, is_causal=is_causal, **kwargs)

    return attention
