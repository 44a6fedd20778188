"""Weight gradients of an output embedding that are deferred to the end of a step, on the last stage.

Semantics: megatron.core (Core 0.20). With config.defer_embedding_wgrad_compute the model's layer does not
compute its weight gradient, but puts activations and gradients of outputs into two lists,
`embedding_activation_buffer` and `grad_output_buffer`. The schedules clear them at the start, and compute the
weight gradient from them in the pipeline's bubble.
"""

from __future__ import annotations

from typing import Any

import torch

from ..sequence_parallel import gather_forward_split_backward
from .config import setting
from .shapes import size_of
from .wrapped_model import owner_of


def clear_embedding_activation_buffer(config: Any, model: Any, is_last_stage: bool) -> Any:
    """Empties the buffer of activations; returns the module that has it, or None if nothing is deferred.

    `model` may be a list of chunks, of which the last one has the embedding.
    """
    if not is_last_stage or not setting(config, "defer_embedding_wgrad_compute"):
        return None
    chunk = model[-1] if isinstance(model, (list, tuple)) else model
    module = owner_of(chunk, "embedding_activation_buffer")
    if module is None:
        raise ValueError("defer_embedding_wgrad_compute needs a model with an embedding_activation_buffer")
    module.embedding_activation_buffer.clear()
    return module


def finish_embedding_wgrad_compute(
    config: Any, embedding_module: Any, is_last_stage: bool, tp_group: Any
) -> None:
    """Adds the deferred gradients to the weight's `main_grad`, or `grad` if it has none; empties both
    buffers.

    With sequence_parallel an activation is one rank's part of the sequence, dim 0, and is gathered over
    `tp_group`.
    """
    if not is_last_stage or not setting(config, "defer_embedding_wgrad_compute"):
        return
    activations, grads = embedding_module.embedding_activation_buffer, embedding_module.grad_output_buffer
    if len(activations) != len(grads):
        raise ValueError(f"there are {len(activations)} activations and {len(grads)} gradients of outputs")
    if embedding_module.share_embeddings_and_output_weights:
        weight = embedding_module.shared_embedding_or_output_weight()
    else:
        weight = embedding_module.output_layer.weight
    is_split = setting(config, "sequence_parallel") and size_of(tp_group) > 1
    with torch.no_grad():
        while activations:
            activation, grad = activations.pop(0), grads.pop(0)
            if is_split:
                activation = gather_forward_split_backward(
                    activation, tp_group, 0, [activation.size(0)] * size_of(tp_group), grad_scale=None
                )
            _accumulate(weight, grad.flatten(0, -2).t() @ activation.flatten(0, -2))


def _accumulate(weight: torch.Tensor, gradient: torch.Tensor) -> None:
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is not None:
        main_grad.add_(gradient)
    elif weight.grad is None:
        weight.grad = gradient.to(weight.dtype)
    else:
        weight.grad.add_(gradient)
