"""Refuses outputs that are not per token of the piece: made of one token, or of all, they would be wrong."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

# Outputs that may begin with the batch dim and have no token dim second: their inputs are not split.
NOT_OF_TOKENS = ("image", "video", "audio", "vision", "encoder")


def check_output(model: PreTrainedModel, tokens: Tensor, output: Any) -> Any:
    """Returns the output, with None for what an encoder's pooler has computed from the first token."""
    values: dict[Any, Any]
    if isinstance(output, Mapping):
        values = dict(output)
    elif isinstance(output, (tuple, list)):
        values = dict(enumerate(output))
    else:  # a tensor, or an unknown type of the user's
        values = {0: output}
    for key, value in values.items():
        if not isinstance(value, Tensor) or value.dim() < 2 or not value.is_floating_point():
            continue
        if value.size(0) != tokens.size(0):
            continue
        if key == "pooler_output" and isinstance(output, MutableMapping):
            output[key] = None
        elif key == 1 and value.dim() == 2 and getattr(model, "pooler", None) is not None:
            output = (output[0], None, *output[2:])  # as with return_dict=False
        elif value.size(1) != tokens.size(1) and not str(key).startswith(NOT_OF_TOKENS):
            raise ValueError(
                f"{type(model).__name__} returns {key} of shape {tuple(value.shape)}, where its piece has "
                f"{tokens.size(1)} tokens: what is made of one token, or of all, is made of the wrong ones. "
                "Take the hidden states of model.base_model, and make it of those of the whole sequence"
            )
    return output
