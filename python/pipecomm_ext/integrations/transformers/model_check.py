"""Refuses a piece of a sequence in a model whose attention would see no more than that piece.

Another attention makes masks in its own way or none at all, so that only the call of the model is sure to
see the piece. Each call of a transformers model compares the lengths that it is given with those of the
pieces that split_batch() has made in this process; a mark on the tensors would not survive `.to(device)`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedConfig, PreTrainedModel

from .attention import NAME, telling_the_others

TOKENS = ("input_ids", "inputs_embeds")
_pieces: set[tuple[int, int]] = set()  # tokens of the sequence, tokens of the piece


def note_piece(length: int, num_tokens: int) -> None:
    """Of a sequence of `length` tokens, `num_tokens` of which this rank holds."""
    if num_tokens != length:
        _pieces.add((length, num_tokens))


def watch_models() -> None:
    """Lets each call of a transformers model begin with the check."""
    call = PreTrainedModel.__call__  # that of nn.Module

    @functools.wraps(call)
    def checked(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        _check(self, args, kwargs)
        return nn.Module.__call__(self, *args, **kwargs)

    if call is nn.Module.__call__:
        PreTrainedModel.__call__ = checked  # type: ignore[method-assign]


def _check(model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    mask = kwargs.get("attention_mask")
    tokens = next((t for t in (*args[:1], *map(kwargs.get, TOKENS)) if isinstance(t, Tensor)), None)
    if not isinstance(mask, Tensor) or tokens is None or tokens.dim() < 2:
        return
    length, num_tokens = mask.size(-1), tokens.size(1)
    if torch.compiler.is_compiling():  # where a set would be guarded, and each new piece compile anew
        is_piece = length > num_tokens and not model._is_stateful
    else:
        is_piece = (length, num_tokens) in _pieces
    if not is_piece or _holds_tokens(kwargs.get("past_key_values")) or NAME in _attentions(model.config):
        return
    with telling_the_others(tokens):
        raise ValueError(
            f"{type(model).__name__} got {num_tokens} tokens of a sequence of {length}, which split_batch() "
            f"has split, but its attention is {model.config._attn_implementation!r} and sees these "
            f'{num_tokens} only: make the model with attn_implementation="{NAME}". Models made from one '
            "config share it, and the attention of the last one made is that of all: give each model a "
            "config of its own, copy.deepcopy(config)"
        )


def _holds_tokens(cache: Any) -> bool:
    """Then the mask is that of these and the new ones."""
    return cache is not None and not (isinstance(cache, Cache) and cache.get_seq_length() == 0)


def _attentions(config: Any) -> Iterator[str | None]:
    """Of a model and of those that it is made of, which are checked alone, too, when they are called."""
    yield config._attn_implementation
    for name in config.sub_configs:
        if isinstance(part := getattr(config, name, None), PreTrainedConfig):
            yield from _attentions(part)
