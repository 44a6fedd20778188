"""Sees each forward of a transformers model, and refuses a piece that it would compute as if it were all.

Only the model itself is sure to see the piece: what it derives from tokens, apart from its attention, never
comes to this package. A piece is known by the lengths of tokens and mask, and by those that split_batch() has
made in this process; a mark on the tensors would not survive `.to(device)`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .attention import NAME, calls, check_config, registered_group, telling_the_others
from .model_loss import check_labels, seen_loss
from .model_traits import BY_MASK, check_class, traits_of, whole_positions
from .pieces import state_of

TOKENS = ("input_ids", "inputs_embeds")
OF_ONE_TOKEN = ("logits_to_keep", "num_logits_to_keep")
# Outputs that may begin with the batch and have no tokens second, for what they are of is not split.
NOT_OF_TOKENS = ("image", "video", "audio", "vision", "encoder")
# Tokens of the sequence, tokens of the piece: positions that split_batch() has counted from 0, by rank.
_pieces: dict[tuple[int, int], dict[tuple[int, ...], Tensor]] = {}


def note_piece(length: int, num_tokens: int, rank: tuple[int, ...], counted: Tensor | None) -> None:
    """Of a sequence of `length` tokens, `num_tokens` of which this rank holds; `counted`: those of a row."""
    rows = _pieces.setdefault((length, num_tokens), {})
    if counted is not None:
        rows[rank] = counted


@contextlib.contextmanager
def positions_as_given() -> Iterator[None]:
    """Even where split_batch() would have counted the same."""
    _thread.are_positions_given = True
    try:
        yield
    finally:
        _thread.are_positions_given = False


def watch_models() -> None:
    """Lets the forward of all transformers models begin and end with the checks; of those to come as well."""
    make_class = PreTrainedModel.__init_subclass__.__func__  # type: ignore[attr-defined]
    make_model = PreTrainedModel.__init__
    if hasattr(make_model, "_checks_pieces"):
        return

    def make_watched_class(cls: type[PreTrainedModel], **options: Any) -> None:
        make_class(cls, **options)
        _watch(cls)

    @functools.wraps(make_model)
    def make_checked_model(self: PreTrainedModel, config: Any, *args: Any, **kwargs: Any) -> None:
        if getattr(config, "_attn_implementation", None) == NAME:
            check_class(type(self), NAME)
        make_model(self, config, *args, **kwargs)

    make_checked_model._checks_pieces = True  # type: ignore[attr-defined]
    PreTrainedModel.__init_subclass__ = classmethod(make_watched_class)  # type: ignore[assignment]
    PreTrainedModel.__init__ = make_checked_model  # type: ignore[method-assign]
    for cls in _subclasses(PreTrainedModel):
        _watch(cls)


def _subclasses(cls: type[PreTrainedModel]) -> Iterator[type[PreTrainedModel]]:
    child: type[PreTrainedModel]
    for child in cls.__subclasses__():
        yield child
        yield from _subclasses(child)


def _watch(cls: type[PreTrainedModel]) -> None:
    forward = cls.forward
    if forward is nn.Module.forward or hasattr(forward, "_checks_pieces"):
        return
    positional, accepted = _parameters(inspect.unwrap(forward))

    @functools.wraps(forward)
    def checked(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(positional, args, strict=False)), **kwargs} if args else kwargs
        piece = _piece(self, given, accepted)
        if piece is None:
            return forward(self, *args, **kwargs)
        return _compute(self, piece, lambda: forward(self, *args, **kwargs))

    checked._checks_pieces = True  # type: ignore[attr-defined]
    cls.forward = checked


def _parameters(forward: Any) -> tuple[tuple[str, ...], frozenset[str] | None]:
    """By place, and all that may be passed by name; None: everything. Quicker than a signature."""
    code = getattr(forward, "__code__", None)
    if code is None:
        return (), None
    positional = code.co_varnames[1 : code.co_argcount]
    if code.co_flags & inspect.CO_VARKEYWORDS:
        return positional, None
    return positional, frozenset(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])


@dataclass(frozen=True)
class _Piece:
    tokens: Tensor
    length: int  # of the whole sequence
    given: Mapping[str, Any]
    accepted: frozenset[str] | None

    @property
    def num_tokens(self) -> int:
        return self.tokens.size(1)

    @property
    def is_whole(self) -> bool:
        return self.num_tokens == self.length


def _piece(
    model: PreTrainedModel, given: Mapping[str, Any], accepted: frozenset[str] | None
) -> _Piece | None:
    mask = given.get("attention_mask")
    tokens = next((given[name] for name in TOKENS if given.get(name) is not None), None)
    if not isinstance(mask, Tensor) or not isinstance(tokens, Tensor) or tokens.dim() < 2:
        return None
    piece = _Piece(tokens, mask.size(-1), given, accepted)
    if piece.num_tokens > piece.length:
        return None
    if piece.is_whole:  # in a group of one rank, where no more than labels are made for pieces
        is_noted = not torch.compiler.is_compiling() and (piece.length, piece.length) in _pieces
        return piece if is_noted and given.get("shift_labels") is not None else None
    if _holds_tokens(given.get("past_key_values")):
        return None
    if _is_ours(model):
        return piece
    if torch.compiler.is_compiling():  # where the pieces would be guarded, and each new one compile anew
        return None if model._is_stateful else piece
    if (piece.length, piece.num_tokens) not in _pieces or _has_users_attention(model):
        return None
    return piece


def _holds_tokens(cache: Any) -> bool:
    """Then the mask is that of these and the new ones."""
    return cache is not None and not (isinstance(cache, Cache) and cache.get_seq_length() == 0)


class _Thread(threading.local):
    is_inside = False  # of a model of which this one is a part
    are_positions_given = False


_thread = _Thread()


def _compute(model: PreTrainedModel, piece: _Piece, forward: Callable[[], Any]) -> Any:
    if torch.compiler.is_compiling():  # what is seen of the forward would be guarded
        _check_attention(model, piece)
        _check_options(type(model).__name__, piece)
        return forward()
    with telling_the_others(piece.tokens):
        _check_attention(model, piece)
        if not _thread.is_inside:
            _check_model(model, piece)
    if _thread.is_inside:
        return forward()
    _thread.is_inside = True
    num_calls = calls.num
    with contextlib.ExitStack() as stack:
        stack.callback(setattr, _thread, "is_inside", False)
        loss = None
        if piece.given.get("labels") is not None:
            loss = stack.enter_context(seen_loss(model, piece.is_whole))
        if not piece.is_whole and (modules := traits_of(model).rotary_embeddings):
            state = state_of(registered_group())
            stack.enter_context(whole_positions(modules, piece.length, state))
        output = forward()
    with telling_the_others(piece.tokens):
        if loss is not None:
            loss.check(model, output)
        if not piece.is_whole:
            _check_output(model, piece, output, calls.num - num_calls)
    return output


def _check_attention(model: PreTrainedModel, piece: _Piece) -> None:
    if piece.is_whole or _is_ours(model):
        return
    raise ValueError(
        f"{type(model).__name__} got {piece.num_tokens} tokens of a sequence of {piece.length}, which "
        f"split_batch() has split, but its attention is {model.config._attn_implementation!r} and sees these "
        f'{piece.num_tokens} only: make the model with attn_implementation="{NAME}". Models made from one '
        "config share it, and the attention of the last one made is that of all: give each model a "
        "config of its own, copy.deepcopy(config)"
    )


def configs_of(config: Any) -> Iterator[PreTrainedConfig]:
    """Of a model and of those that it is made of, which are checked alone, too, when they are called."""
    yield config
    for name in config.sub_configs:
        if isinstance(part := getattr(config, name, None), PreTrainedConfig):
            yield from configs_of(part)


def _is_ours(model: PreTrainedModel) -> bool:
    return any(config._attn_implementation == NAME for config in configs_of(model.config))


def _has_users_attention(model: PreTrainedModel) -> bool:
    """A function of the user's own, which may exchange tokens as well."""
    function = ALL_ATTENTION_FUNCTIONS.get(model.config._attn_implementation)
    return function is not None and not function.__module__.startswith("transformers.")


def _check_model(model: PreTrainedModel, piece: _Piece) -> None:
    check_labels(model, piece.given)
    if piece.is_whole:
        return
    name, given = type(model).__name__, piece.given
    traits = traits_of(model)
    if traits.refusal is not None:
        raise ValueError(f"{name} cannot be split along the sequence: {traits.refusal}")
    if piece.accepted is not None:
        for needed in ("attention_mask", "shift_labels"):
            if given.get(needed) is not None and needed not in piece.accepted:
                raise ValueError(f"{name} cannot be split along the sequence: its forward takes no {needed}")
    _check_options(name, piece)
    _check_positions(name, traits.positions, piece)
    _check_config(name, model.config, piece.length)


def _check_options(name: str, piece: _Piece) -> None:
    given = piece.given
    for option in OF_ONE_TOKEN:
        if isinstance(given.get(option), Tensor) or given.get(option):
            raise ValueError(
                f"{option} cannot be given with a piece, as each rank would keep logits of its own"
            )
    if given.get("output_router_logits"):
        raise ValueError(f"{NAME} cannot split the router's auxiliary loss: set output_router_logits=False")
    if given.get("position_ids") is None:
        raise ValueError(
            f"{name} needs the position_ids of its piece: pass them on, as split_batch() made them"
        )


def _check_positions(name: str, counted: str | None, piece: _Piece) -> None:
    positions = piece.given["position_ids"]
    rows = _pieces.get((piece.length, piece.num_tokens), {}).values()
    if counted is None or _thread.are_positions_given:
        return
    if not any(torch.equal(positions, row.to(positions.device).expand_as(positions)) for row in rows):
        return
    how = "by its tokens, from padding_idx + 1"
    if counted == BY_MASK:
        mask = piece.given["attention_mask"]
        if mask.dim() > 2 or not (mask.long().diff(dim=-1) > 0).any():  # padded on the right, if at all
            return
        how = "by attention_mask, (attention_mask.cumsum(1) - 1).clamp(min=0)"
    raise ValueError(
        f"{name} counts positions {how}, where those of its piece, which split_batch() was not given, count "
        "from 0: give it the position_ids of the whole batch"
    )


def _check_config(name: str, config: Any, length: int) -> None:
    part: Any
    for part in filter(None, (config, getattr(config, "text_config", None))):
        check_config(part)
        is_tuned = getattr(part, "attn_temperature_tuning", False) and not all(part.no_rope_layers)
        if is_tuned and length >= part.floor_scale:
            raise ValueError(
                f"{name} cannot be split along a sequence of {length} tokens, as its attn_temperature_tuning "
                f"counts tokens within the piece: from floor_scale, {part.floor_scale}, on it matters"
            )


def _check_output(model: PreTrainedModel, piece: _Piece, output: Any, num_calls: int) -> None:
    name = type(model).__name__
    if num_calls == 0:
        raise ValueError(
            f"{name} computed its piece without {NAME}: what mixes its tokens is not that attention, and saw "
            "no more than the piece"
        )
    if isinstance(output, Mapping):
        values = dict(output)
    else:
        values = dict(enumerate([output] if isinstance(output, Tensor) else output))
    for key, value in values.items():
        if not isinstance(value, Tensor) or value.dim() < 2 or not value.is_floating_point():
            continue
        if value.size(0) != piece.tokens.size(0) or value.size(1) == piece.num_tokens:
            continue
        if key == "pooler_output" and isinstance(output, MutableMapping):
            output[key] = None
        elif not str(key).startswith(NOT_OF_TOKENS):
            raise ValueError(
                f"{name} returns {key} of shape {tuple(value.shape)}, where its piece has {piece.num_tokens} "
                "tokens: what is made of one token, or of all, is made of the wrong ones"
            )
