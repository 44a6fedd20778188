"""Checks each forward of a transformers model, and refuses a piece that it would treat as a whole sequence.

Only the model itself is certain to get the piece: what it derives from tokens outside its attention never
reaches this package. A piece is recognised by the lengths of tokens and mask, and by those that split_batch()
has made in this process; a mark on the tensors would not survive `.to(device)`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .attention import NAME, calls, check_config, registered_group, telling_the_others
from .model_loss import check_labels, check_loss, seeing_shares
from .model_outputs import check_output
from .model_traits import BY_MASK, check_class, traits_of, whole_positions
from .pieces import cut, state_of

TOKENS = ("input_ids", "inputs_embeds")
CACHES = ("cache", "past_key_values")  # before transformers 5.24 the second one alone
OF_ONE_TOKEN = ("logits_to_keep", "num_logits_to_keep")
_pieces: set[tuple[int, int]] = set()  # tokens of the sequence, tokens of the piece


def note_piece(length: int, num_tokens: int) -> None:
    """Records a piece of `num_tokens` tokens, which this rank holds of a sequence of `length` tokens."""
    _pieces.add((length, num_tokens))


@contextlib.contextmanager
def positions_as_given() -> Iterator[None]:
    """Treats positions as passed by the user, even if they count from 0."""
    _thread.are_positions_given = True
    try:
        yield
    finally:
        _thread.are_positions_given = False


def watch_models() -> None:
    """Adds the checks before and after the forward of all transformers models, including later classes."""
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
            check_class(type(self))
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
    """Positional parameters, and all that may be passed by name (None: any). Faster than a signature."""
    code = getattr(forward, "__code__", None)
    if code is None:
        return (), None
    positional = code.co_varnames[1 : code.co_argcount]
    if code.co_flags & inspect.CO_VARKEYWORDS:
        return positional, None
    return positional, frozenset(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])


class _Piece(NamedTuple):
    tokens: Tensor
    num_tokens: int
    length: int  # of the whole sequence
    is_whole: bool
    is_ours: bool  # the attention of the model, if the piece is not whole
    given: Mapping[str, Any]
    accepted: frozenset[str] | None


def _piece(
    model: PreTrainedModel, given: Mapping[str, Any], accepted: frozenset[str] | None
) -> _Piece | None:
    mask = given.get("attention_mask")
    tokens = next((given[name] for name in TOKENS if given.get(name) is not None), None)
    if not isinstance(mask, Tensor) or not isinstance(tokens, Tensor) or tokens.dim() < 2:
        return None
    num_tokens, length = tokens.size(1), mask.size(-1)
    if num_tokens > length:
        return None
    is_compiling = torch.compiler.is_compiling()
    # In a graph the pieces would be guarded, and each new one would cause a recompilation.
    is_noted = not is_compiling and (length, num_tokens) in _pieces
    if num_tokens == length:  # in a group of one rank, where only labels differ from the batch
        has_labels = not is_compiling and given.get("shift_labels") is not None
        is_one = has_labels and (is_noted or _is_ours(model))
        return _Piece(tokens, num_tokens, length, True, False, given, accepted) if is_one else None
    for name in CACHES:
        if _holds_tokens(given.get(name)):
            return None
    is_ours = _is_ours(model)
    if not is_ours:
        may_be_one = is_noted or (is_compiling and not model._is_stateful)
        if not may_be_one or _has_users_attention(model):
            return None
    return _Piece(tokens, num_tokens, length, False, is_ours, given, accepted)


def _holds_tokens(cache: Any) -> bool:
    """Whether the cache holds tokens, so that the mask covers these and the new ones. A cache of fixed size
    counts as such: its length is a tensor, and reading it would wait for the device.
    """
    if cache is None:
        return False
    return not isinstance(cache, Cache) or cache.is_compileable or cache.get_seq_length() != 0


class _Thread(threading.local):
    shares: list[Any] | None = None  # losses of the running model, and of those that it calls
    are_positions_given = False


_thread = _Thread()


def _compute(model: PreTrainedModel, piece: _Piece, forward: Callable[[], Any]) -> Any:
    if torch.compiler.is_compiling():  # anything read of the forward would be guarded
        _check_attention(model, piece)
        _check_options(type(model).__name__, piece)
        return forward()
    with telling_the_others(piece.tokens):
        _check_attention(model, piece)
        is_inside = _thread.shares is not None
        if not is_inside:
            _check_model(model, piece)
    has_labels = piece.given.get("labels") is not None
    num_calls = calls.num
    with contextlib.ExitStack() as stack:
        if not is_inside:
            _thread.shares = []
            stack.callback(setattr, _thread, "shares", None)
        shares = cast("list[Any]", _thread.shares)
        if has_labels:
            stack.enter_context(seeing_shares(model, piece.is_whole, shares))
        if is_inside:
            return forward()
        if not piece.is_whole and (modules := traits_of(model).rotary_embeddings):
            state = state_of(registered_group())
            stack.enter_context(whole_positions(modules, piece.length, state))
        output = forward()
    with telling_the_others(piece.tokens):
        if has_labels:
            check_loss(model, output, shares)
        if piece.is_whole:
            return output
        _check_calls(model, calls.num - num_calls)
        return check_output(model, piece.tokens, output)


def _check_attention(model: PreTrainedModel, piece: _Piece) -> None:
    if piece.is_whole or piece.is_ours:
        return
    raise ValueError(
        f"{type(model).__name__} got {piece.num_tokens} tokens of a sequence of {piece.length}, which "
        f"split_batch() has split, but its attention is {model.config._attn_implementation!r} and sees these "
        f'{piece.num_tokens} only: make the model with attn_implementation="{NAME}". Models made from one '
        "config share it, and the attention of the last one made is that of all: give each model a "
        "config of its own, copy.deepcopy(config)"
    )


def configs_of(config: Any) -> Iterator[PreTrainedConfig]:
    """The config of a model and those of its parts, which are also checked when they are called alone."""
    yield config
    for name in config.sub_configs:
        if isinstance(part := getattr(config, name, None), PreTrainedConfig):
            yield from configs_of(part)


def _is_ours(model: PreTrainedModel) -> bool:
    return any(config._attn_implementation == NAME for config in configs_of(model.config))


def _has_users_attention(model: PreTrainedModel) -> bool:
    """Whether the attention is a user's function, which may exchange tokens; no "owner/kernel" of the hub."""
    name = str(model.config._attn_implementation)
    function = ALL_ATTENTION_FUNCTIONS.get(name)
    return function is not None and "/" not in name and not function.__module__.startswith("transformers.")


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
                f"{option} cannot be given with a piece, as each rank would keep logits of its own: leave it "
                "out, and take what you need of all logits"
            )
    if given.get("output_router_logits"):
        raise ValueError(f"{NAME} cannot split the router's auxiliary loss: set output_router_logits=False")
    if given.get("position_ids") is None:
        raise ValueError(
            f"{name} needs the position_ids of its piece: pass them on, as split_batch() made them"
        )


def _check_positions(name: str, counted: str | None, piece: _Piece) -> None:
    if counted is None or _thread.are_positions_given:
        return
    positions = piece.given["position_ids"]
    from_0 = cut(torch.arange(piece.length, device=positions.device), 0, state_of(registered_group()))
    if positions.shape[-1:] != from_0.shape or not (positions == from_0).all():
        return
    how = "by its tokens, from padding_idx + 1"
    if counted == BY_MASK:
        mask = piece.given["attention_mask"]
        if mask.dim() > 2 or not (mask.long().diff(dim=-1) > 0).any():  # padded on the right, if at all
            return
        how = "by attention_mask, (attention_mask.cumsum(1) - 1).clamp(min=0)"
    raise ValueError(
        f"{name} counts positions {how}, where those of its piece count from 0: give split_batch() the "
        "position_ids of the whole batch"
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


def _check_calls(model: PreTrainedModel, num_calls: int) -> None:
    """Raises if the attention was not called. A graph does not count calls, so compiled models may pass."""
    if num_calls == 0 and not any(map(_is_compiled, model.modules())):
        raise ValueError(
            f"{type(model).__name__} computed its piece without {NAME}: what mixes its tokens is not that "
            "attention, and saw no more than the piece. Give this model whole batches, without split_batch()"
        )


def _is_compiled(module: nn.Module) -> bool:
    return module._compiled_call_impl is not None or hasattr(module.forward, "_torchdynamo_orig_callable")
