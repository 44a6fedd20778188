"""Generation from a long prompt, which is computed over split sequences."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from .attention import NAME
from .batch import split_batch
from .model_check import CACHES, configs_of, positions_as_given
from .pieces import gather, state_of
from .required import CACHE

if TYPE_CHECKING:
    from transformers.cache_utils import DynamicLayer

MODES = ("greedy_search", "sample")


def generate(
    model: PreTrainedModel,
    input_ids: Tensor,
    attention_mask: Tensor,
    process_group: Any = None,
    **options: Any,
) -> Any:
    """Returns what `model.generate` returns; the prompt is computed in pieces.

    Each rank computes its piece of the prompt. Then all get the keys and values of all pieces, so that new
    tokens need no communication: every rank generates all of them, with torch's attention. All ranks generate
    the same tokens; if these are sampled (do_sample=True), only if the ranks' random numbers are equal.

    Args:
        model: with attn_implementation="pipecomm_ulysses". Its cache is used even where its config says
            use_cache=False.
        input_ids, attention_mask: [batch, tokens], the same on all ranks, padded on the left; at least as
            many tokens as ranks.
        process_group: the group that was passed to `register`.
        options: of `model.generate`, for greedy search or sampling of one sequence for each prompt.

    Raises:
        ValueError: as `split_batch` and the model's forward; beams, several sequences for a prompt, assisted
            generation, and the like; use_cache=False.

    Example:
        ```python
        prompt = torch.arange(10).view(2, 5)
        tokens = generate(model, prompt, torch.ones_like(prompt), max_new_tokens=3, do_sample=False)
        ```
    """
    _check_options(cast(Any, model), options)
    cache = _prefilled(model, input_ids, attention_mask, process_group)
    options |= {CACHE: cache, "use_cache": True}
    with _attention_of_torch(model):
        return cast(Any, model).generate(input_ids, attention_mask=attention_mask, **options)


def _check_options(model: Any, options: dict[str, Any]) -> None:
    if options.get("use_cache") is False:
        raise ValueError("generate() takes no use_cache=False: it computes the prompt for the cache")
    if any(options.get(name) is not None for name in CACHES):
        raise ValueError("generate() takes no past_key_values or cache: it computes the whole prompt")
    config = copy.deepcopy(options.get("generation_config") or model.generation_config)
    config.update(**model.generation_config.to_dict(), defaults_only=True, allow_custom_entries=True)
    config.update(**{name: value for name, value in options.items() if name != "generation_config"})
    mode = config.get_generation_mode(options.get("assistant_model")).value
    if mode not in MODES:
        raise ValueError(
            f"generate() takes no {mode} (num_beams, an assistant, ...), only greedy search and sampling"
        )
    if (config.num_return_sequences or 1) > 1:
        raise ValueError(
            "generate() takes no num_return_sequences: repeat the prompt, "
            "input_ids.repeat_interleave(num_return_sequences, 0), and the mask likewise"
        )


@contextlib.contextmanager
def _attention_of_torch(model: PreTrainedModel) -> Iterator[None]:
    """Replaces this package's attention by torch's, wherever the model uses it."""
    split = [config for config in configs_of(model.config) if config._attn_implementation == NAME]
    attention = "sdpa" if model._supports_sdpa else "eager"
    try:
        for config in split:
            config._attn_implementation_internal = attention
        yield
    finally:
        for config in split:
            config._attn_implementation_internal = NAME


@torch.no_grad()
def _prefilled(model: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor, group: Any) -> DynamicCache:
    """The cache of all tokens but the last one, with which `model.generate` begins.

    The last one is computed with the others: positions may be counted, or scaled, by the longest one.
    """
    prompt = {"input_ids": input_ids, "attention_mask": attention_mask}
    counts = "position_ids" in inspect.signature(model.forward).parameters
    if counts:  # as generate() does, for such models
        positions = attention_mask.long().cumsum(1) - 1
        prompt["position_ids"] = positions.masked_fill(attention_mask == 0, 0)
    piece = split_batch(prompt, group)
    cache = DynamicCache()  # without the config: layers with a sliding window keep all, too, as pieces must
    with positions_as_given() if counts else contextlib.nullcontext():
        model.base_model(**piece, **{CACHE: cache, "use_cache": True})
    length, state = input_ids.size(1), state_of(group)
    whole = DynamicCache()
    for idx, layer in enumerate(cast("list[DynamicLayer]", cache.layers)):
        if layer.keys is None or layer.values is None:
            raise ValueError(f"generate() needs keys and values of each layer, and layer {idx} keeps none")
        pieces = (layer.keys, layer.values)
        keys, values = (gather(tensor, 2, length, state)[:, :, :-1].contiguous() for tensor in pieces)
        whole.update(keys, values, idx)
    return whole
