"""Generation from a long prompt, which is computed over split sequences."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from .batch import split_batch
from .pieces import gather, state_of

if TYPE_CHECKING:
    from transformers.cache_utils import DynamicLayer


def generate(
    model: PreTrainedModel,
    input_ids: Tensor,
    attention_mask: Tensor,
    process_group: Any = None,
    **options: Any,
) -> Any:
    """What `model.generate` returns; the prompt is computed split.

    Each rank computes its piece of the prompt. Then all get the keys and values of all pieces, so that new
    tokens need no communication: every rank generates all of them, with torch's attention. The ranks' tokens
    are the same; if they are drawn (do_sample=True), only where the ranks' random numbers are equal.

    Args:
        model: with attn_implementation="pipecomm_ulysses".
        input_ids, attention_mask: [batch, tokens], the same on all ranks, padded on the left; more tokens
            than ranks.
        process_group: the group that `register` was given.
        options: of `model.generate`.

    Raises:
        ValueError: as `split_batch` and the model's forward.
    """
    cache = _prefilled(model, input_ids, attention_mask, process_group)
    split = model.config._attn_implementation
    assert split is not None
    model.set_attn_implementation("sdpa")
    try:
        return cast(Any, model).generate(
            input_ids, attention_mask=attention_mask, past_key_values=cache, **options
        )
    finally:
        model.set_attn_implementation(split)


@torch.no_grad()
def _prefilled(model: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor, group: Any) -> DynamicCache:
    """The whole cache of all tokens but the last one, with which `model.generate` begins."""
    # As generate() counts them.
    position_ids = (attention_mask.long().cumsum(1) - 1).masked_fill(attention_mask == 0, 0)
    prompt = {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids}
    piece = split_batch({name: tensor[:, :-1] for name, tensor in prompt.items()}, group)
    cache = DynamicCache()  # without the config: layers with a sliding window keep all, too, as pieces must
    model.base_model(**piece, past_key_values=cache, use_cache=True)
    length, state = input_ids.size(1) - 1, state_of(group)
    whole = DynamicCache()
    for idx, layer in enumerate(cast("list[DynamicLayer]", cache.layers)):
        assert layer.keys is not None and layer.values is not None
        keys, values = (gather(tensor, 2, length, state) for tensor in (layer.keys, layer.values))
        whole.update(keys, values, idx)
    return whole
