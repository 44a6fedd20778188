"""What a model derives from its tokens, and would derive differently from a piece of them.

This follows from the model's classes: which of them computes positions, which RoPE depends on the longest
position, and which class computes attention without transformers' interface.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import types
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from .attention import NAME
from .pieces import cut, gather

BY_TOKENS, BY_MASK = "by_tokens", "by_mask"
SHIFTS = {"pad", "roll"}  # of tokens
_NO_CODE = (lambda: None).__code__
POOLED = ("ForSequenceClassification", "ForMultipleChoice", "ForNextSentencePrediction")
_OWN_ATTENTION = (
    "computes attention by itself, not through transformers' AttentionInterface, so that it would see the "
    "tokens of its piece only"
)


@dataclass(frozen=True)
class ModelTraits:
    refusal: str | None  # why the model cannot compute a piece
    positions: str | None  # BY_TOKENS, BY_MASK: how it counts them, if none are given; None: from 0
    rotary_embeddings: tuple[nn.Module, ...]  # whose frequencies depend on the longest position


_known: weakref.WeakKeyDictionary[PreTrainedModel, ModelTraits] = weakref.WeakKeyDictionary()


def traits_of(model: PreTrainedModel) -> ModelTraits:
    if (traits := _known.get(model)) is None:
        positions = [found for module in model.modules() if (found := _positions(module)) is not None]
        rotary_embeddings = filter(_depends_on_the_longest_position, model.modules())
        traits = ModelTraits(_refusal(model), next(iter(positions), None), tuple(rotary_embeddings))
        _known[model] = traits
    return traits


def _refusal(model: PreTrainedModel) -> str | None:
    if model._is_stateful:
        return "its layers carry a state along the sequence, and only attention goes over the pieces"
    if "decoder_input_ids" in inspect.signature(type(model).forward).parameters:
        return "its decoder attends to another sequence than its own, whose pieces are others"
    if type(model).__name__.endswith(POOLED):
        return (
            "its output is made of one token of a row, which one rank holds: take the hidden states of "
            "model.base_model, and make the output of those"
        )
    if _has_an_attention_of_its_own(type(model)) and not model.config.sub_configs:
        return f"it {_OWN_ATTENTION}"
    if not any(_takes(module, "position_ids") for module in model.modules() if _is_model(module)):
        return "its forward takes no position_ids, and would count those of each piece from 0"
    for module in model.modules():
        if type(module).__name__.endswith("Embeddings"):
            if _takes(module, "attention_mask"):
                return "its embeddings take attention_mask, which is that of the whole sequence"
            if SHIFTS & {*_code(module).co_names} and getattr(module, "trigram_input", True):
                return "its embeddings are made of neighbouring tokens, which another rank may hold"
    return None


def _is_model(module: nn.Module) -> bool:
    return isinstance(module, PreTrainedModel)


def _code(module: nn.Module) -> types.CodeType:
    return getattr(inspect.unwrap(type(module).forward), "__code__", _NO_CODE)


def _takes(module: nn.Module, name: str) -> bool:
    code = _code(module)
    return name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def _has_an_attention_of_its_own(cls: type[PreTrainedModel]) -> bool:
    is_of_transformers = cls.__module__.startswith("transformers.")
    return is_of_transformers and not (cls._supports_attention_backend or cls._can_set_attn_implementation())


def check_class(cls: type[PreTrainedModel]) -> None:
    """Refuses classes that choose among their own attention classes, and do not find this one."""
    for name, classes in getattr(sys.modules.get(cls.__module__), "__dict__", {}).items():
        if name.endswith("_ATTENTION_CLASSES") and isinstance(classes, dict) and NAME not in classes:
            raise ValueError(f"{NAME} cannot be the attention of {cls.__name__}, which {_OWN_ATTENTION}")


def _positions(module: nn.Module) -> str | None:
    code = _code(module)
    if "create_position_ids_from_input_ids" in code.co_names:
        return BY_TOKENS
    is_counting = "cumsum" in code.co_names and {"position_ids", "attention_mask"} <= {*code.co_varnames}
    return BY_MASK if is_counting and _is_model(module) else None


def _depends_on_the_longest_position(module: nn.Module) -> bool:
    kinds = getattr(module, "rope_type", None)
    return any(
        isinstance(kind, str) and (kind == "longrope" or "dynamic" in kind)
        for kind in (kinds.values() if isinstance(kinds, dict) else [kinds])
    )


@contextlib.contextmanager
def whole_positions(modules: tuple[nn.Module, ...], length: int, state: Any) -> Iterator[None]:
    """Makes rotary embeddings see the positions of the whole sequence, and cuts the piece from the result."""

    def gather_positions(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if "position_ids" in kwargs:
            return args, {**kwargs, "position_ids": gather(kwargs["position_ids"], -1, length, state)}
        return (args[0], gather(args[1], -1, length, state), *args[2:]), kwargs

    def cut_result(module: nn.Module, args: tuple[Any, ...], result: Any) -> Any:
        if isinstance(result, Tensor):
            return cut(result, -2, state)
        return tuple(cut(tensor, -2, state) for tensor in result)

    with contextlib.ExitStack() as stack:
        for module in modules:
            before = module.register_forward_pre_hook(gather_positions, with_kwargs=True)
            after = module.register_forward_hook(cut_result)
            stack.callback(before.remove)
            stack.callback(after.remove)
        yield
