"""The attention and the mask that transformers finds under the name "pipecomm_ulysses".

transformers makes the mask once for a forward, before any layer, and calls the attention in each layer. The
mask of a split sequence is that of the whole one, as attention sees all of it; its length is known from the
2-d mask that a model gets, which is that of the whole sequence on every rank. What the layers get is not a
tensor, so that a layer which computes attention in another way fails instead of attending to its piece only.
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from ...parallel_state import ParallelState
from ...sequence_parallel import attention_with_cp, ulysses_attention
from .pieces import lengths, refusing, state_of

NAME = "pipecomm_ulysses"
LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
# Keywords of attention that change its result or request more results, and that are not passed on.
REFUSED = {
    "softcap": "soft capping of scores",
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
    "position_bias": "a position bias",
    "indices": "sparse attention",
    "block_indices": "sparse attention",
    "cache": "a paged cache",
    "output_attentions": "output_attentions=True",
}

GENERATE = "generate() of pipecomm_ext.integrations.transformers"
NO_MASK = (
    f"{NAME} needs the attention_mask of the whole sequence on every rank, padded or not: split_batch() and "
    f"{GENERATE} add it"
)


def register(process_group: Any = None, *, chunks: int | str = "auto") -> None:
    """Makes attn_implementation="pipecomm_ulysses" known to transformers. Nothing is communicated.

    A model with this attention gets one piece of the sequence on each rank of `process_group`, as
    `split_batch` makes them: any length, numbers of heads and of key/value heads. Causal and bidirectional
    masks, sliding windows, chunked attention and padding are those of the whole sequence. A second call
    replaces the first one.

    Args:
        process_group: the ranks that share a sequence: a torch group, a Communicator, or None for the default
            group. A ParallelState may have a ring group, too, over which the sequence is in zigzag order, for
            equal work of causal attention and more ranks than heads; rows are then without padding, and
            layers without windows.
        chunks: of heads, see `ulysses_attention`.

    The model's forward then raises, on the rank that finds it, while all others raise PipeCommMismatch:
        ValueError: a batch that `split_batch` did not make for these ranks; a model, a layer, a mask, a loss
            or an option, named by the text, whose result would differ for a split sequence; new tokens after
            a cache, which `generate` computes.

    Example:
        ```python
        register()
        config = LlamaConfig(vocab_size=61, hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="pipecomm_ulysses")
        ```
    """
    global _registered
    _registered = split = _SplitAttention(process_group, chunks)
    AttentionInterface.register(NAME, split.attend)
    AttentionMaskInterface.register(NAME, split.make_mask)


def telling_the_others(tensor: Tensor) -> contextlib.AbstractContextManager[None]:
    """Reports what this rank raises here to all ranks of the group that was passed to `register`."""
    if _registered is None:
        return contextlib.nullcontext()
    return refusing(_registered.process_group, tensor)


def registered_group() -> Any:
    """The `process_group` that was passed to `register`."""
    return None if _registered is None else _registered.process_group


class _NoTensorError(ValueError, AttributeError):
    """A ValueError for users; also an AttributeError, for hasattr()."""


@dataclass(frozen=True)
class _SplitMask:
    """The mask of a whole sequence, of which each rank holds a piece. It refuses to be used as a tensor."""

    length: int
    tensor: Tensor | None  # [batch or 1, 1, length, length]: bool, or added to the scores; None: no mask
    is_causal: bool = False  # without a tensor

    def refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise _NoTensorError(
            f"{NAME} cannot split this model, which takes its mask as a tensor: it computes attention by "
            "itself, or makes masks of its own"
        )

    __getitem__ = __invert__ = __rsub__ = __lt__ = __le__ = __gt__ = __ge__ = refuse

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self.refuse()

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.refuse(cls)  # type: ignore[arg-type]


@dataclass(frozen=True)
class _SplitAttention:
    process_group: Any
    chunks: int | str

    def make_mask(
        self,
        *,
        q_length: int,
        kv_length: int,
        device: torch.device | str,
        config: Any,
        q_offset: int | Tensor = 0,
        attention_mask: Tensor | None = None,
        allow_is_causal_skip: bool = True,
        allow_is_bidirectional_skip: bool = False,
        **others: Any,
    ) -> _SplitMask | None:
        """Called by transformers' create_causal_mask() and the like."""
        state = state_of(self.process_group)
        with refusing(state, torch.empty(0, device=device)):
            check_config(config)
            if q_offset > 0:
                raise ValueError(
                    f"the cache holds {q_offset} tokens already, and {NAME} does not split the new ones: use "
                    + GENERATE
                )
            if attention_mask is None:
                return None  # mask of an absent encoder; otherwise attend() refuses it
            length = attention_mask.size(-1)
            _check_keys(q_length, kv_length if kv_length != length else q_length)
            if not (allow_is_causal_skip or allow_is_bidirectional_skip):
                raise ValueError(
                    f"{NAME} knows masks of positions, windows and padding; this model makes its mask of "
                    "more (types or blocks of tokens), which is not split"
                )
            mine = lengths(state, length)[state.get_ulysses_rank()]
            if q_length != mine:
                raise ValueError(
                    f"this rank passes {q_length} tokens, where its piece of a sequence of {length} (the "
                    f"length of attention_mask) has {mine}: split_batch() makes the pieces, and {GENERATE} "
                    "takes whole prompts"
                )
            others |= {"q_length": length, "kv_length": length, "q_offset": 0, "kv_offset": 0}
            tensor = sdpa_mask(
                attention_mask=attention_mask,
                device=device,
                allow_is_causal_skip=allow_is_causal_skip,
                allow_is_bidirectional_skip=allow_is_bidirectional_skip,
                **others,
            )
            _check_ring(state, tensor)
        return _SplitMask(length, tensor, is_causal=tensor is None and allow_is_causal_skip)

    def attend(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: _SplitMask | Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        """Called by a layer: q, k and v are [batch, heads, tokens, channels]; the result has heads third."""
        calls.count()
        state = state_of(self.process_group)
        with refusing(state, query):
            for name, what in REFUSED.items():
                if others.get(name) is not None and others[name] is not False:
                    raise ValueError(f"{NAME} does not support {what} ({name}, of {type(module).__name__})")
            _check_keys(query.size(2), key.size(2))
            if isinstance(attention_mask, Tensor):
                check_config(getattr(module, "config", None))
                attention_mask = _taken_as_it_is(attention_mask, others.get("sliding_window"))
                _check_ring(state, attention_mask.tensor)
            elif attention_mask is None:
                raise ValueError(NO_MASK)
        options: dict[str, Any] = {
            "chunks": self.chunks,
            "gather_size": attention_mask.length,
            "heads_dim": 1,
            "seq_dim": 2,
        }
        options |= {"is_causal": attention_mask.is_causal, "dropout_p": dropout, "scale": scaling}
        if state.is_ring_enable():
            result = attention_with_cp(query, key, value, parallel_state=state, **options)
        else:
            group, tensor = state.get_ulysses_group(), attention_mask.tensor
            result = ulysses_attention(query, key, value, None, group, attn_mask=tensor, **options)
        return result.transpose(1, 2).contiguous(), None


_registered: _SplitAttention | None = None


class _Calls(threading.local):
    num = 0

    def count(self) -> None:
        """Counts a call, except in a captured graph, which would be guarded by the number."""
        if not torch.compiler.is_compiling():
            self.num += 1


calls = _Calls()  # of the attention


def _check_keys(num_queries: int, num_keys: int) -> None:
    if num_keys != num_queries:
        raise ValueError(
            f"{NAME} got keys of {num_keys} tokens for queries of {num_queries}: it supports no static cache "
            "and no attention across sequences"
        )


def check_config(config: Any) -> None:
    """Refuses models whose other layers would see a piece of the sequence as if it were all."""
    unknown = sorted(set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES)
    if unknown:
        raise ValueError(
            f"{NAME} cannot split layers of type {', '.join(unknown)}: only attention goes over the pieces"
        )
    if getattr(config, "output_router_logits", False):
        raise ValueError(f"{NAME} cannot split the router's auxiliary loss: set output_router_logits=False")


def _taken_as_it_is(mask: Tensor, sliding_window: int | None) -> _SplitMask:
    """Wraps a 4-d mask that was passed to the model; transformers passes it on to all layers."""
    length = mask.size(-1)
    if mask.dim() != 4 or mask.size(1) != 1 or mask.size(2) != length:
        raise ValueError(
            f"attention_mask is {tuple(mask.shape)}; it must be that of the whole sequence on every rank, "
            "[batch, tokens] or [batch, 1, tokens, tokens]"
        )
    if sliding_window is not None and sliding_window < length:
        raise ValueError(
            f"a mask of four dims, given or made of packed sequences, has no sliding window of "
            f"{sliding_window} tokens, as this layer has: use full attention, or rows of one sequence each"
        )
    return _SplitMask(length, mask)


def _check_ring(state: ParallelState, mask: Tensor | None) -> None:
    if mask is not None and state.is_ring_enable():
        raise ValueError(
            f"over a ring group {NAME} takes causal or bidirectional attention only: no padding, packed "
            "sequences, sliding windows or masks of four dims"
        )
