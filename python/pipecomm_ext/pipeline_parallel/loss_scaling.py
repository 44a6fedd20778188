"""Scales losses, and sets the scale of auxiliary losses.

Semantics: megatron.core.pipeline_parallel.schedules (Core 0.20).
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch

from .config import setting

# The settings that enable an auxiliary loss, by its kind.
_FEATURES = {
    "moe": "num_moe_experts",
    "mtp": "mtp_num_layers",
    "attention": "experimental_attention_variant",
}
# Megatron's classes that scale the gradients of these losses, all of them in megatron.core.transformer.
_MEGATRONS_SCALERS = {
    "moe": ("moe.moe_utils", "MoEAuxLossAutoScaler"),
    "mtp": ("multi_token_prediction", "MTPLossAutoScaler"),
    "attention": ("experimental_attention_variant.dsa", "DSAIndexerLossAutoScaler"),
}


def scaled_loss(
    outputs: Any, *, num_microbatches: int, cp_size: int, is_per_token: bool
) -> tuple[torch.Tensor, Any, Any]:
    """From what a loss function returned: (loss to run backward from, number of tokens, reduced data).

    For (loss, num_tokens, data) the loss, a sum over tokens, is divided by num_tokens (at least 1) and by the
    number of micro-batches, or left unchanged if `is_per_token`. For (loss, data) the loss is multiplied by
    cp_size and divided by the number of micro-batches.
    """
    if not isinstance(outputs, (tuple, list)) or len(outputs) not in (2, 3):
        raise ValueError(
            "a loss function must return (loss, data) or (loss, number of tokens, data), not "
            + (f"{len(outputs)} values" if isinstance(outputs, (tuple, list)) else type(outputs).__name__)
        )
    if len(outputs) == 2:
        loss, data = outputs
        return loss * cp_size / num_microbatches, torch.tensor(0, dtype=torch.int, device="cpu"), data
    loss, num_tokens, data = outputs
    if not is_per_token:
        loss = loss / torch.clamp(torch.as_tensor(num_tokens, device=loss.device), min=1) / num_microbatches
    return loss, num_tokens, data


def auxiliary_loss_scales(
    config: Any, *, num_microbatches: int, cp_size: int, device: torch.device | str = "cpu"
) -> dict[str, torch.Tensor]:
    """The factors of the auxiliary losses that `config` has, one-element tensors by kind.

    "moe" (num_moe_experts) and "attention" (experimental_attention_variant): the grad scale, times cp_size
    over the number of micro-batches; "mtp" (mtp_num_layers): without cp_size. With calculate_per_token_loss
    the grad scale alone. The grad scale is that of moe_grad_scale_func() or mtp_grad_scale_func(), else
    grad_scale_func(ones(1)), else 1.

    Raises:
        ValueError: one of these functions does not return exactly one element.
    """
    is_per_token = setting(config, "calculate_per_token_loss")
    by_microbatch = 1.0 if is_per_token else 1.0 / num_microbatches
    by_rank = 1.0 if is_per_token else cp_size / num_microbatches
    kinds = [
        ("moe", "moe_grad_scale_func", by_rank),
        ("mtp", "mtp_grad_scale_func", by_microbatch),
        ("attention", "", by_rank),
    ]
    return {
        kind: _grad_scale(config, scale_func, device) * factor
        for kind, scale_func, factor in kinds
        if setting(config, _FEATURES[kind]) is not None
    }


def auxiliary_loss_setters(config: Any) -> dict[str, Callable[[torch.Tensor], object]]:
    """The function that sets the scale of each kind of auxiliary loss of `config`: set_auxiliary_loss_scale,
    or else set_loss_scale of Megatron's class.

    Raises:
        ValueError: there is neither; the loss would be scaled wrongly.
    """
    set_scale = setting(config, "set_auxiliary_loss_scale")
    setters: dict[str, Callable[[torch.Tensor], object]] = {}
    for kind, feature in _FEATURES.items():
        if setting(config, feature) is None:
            continue
        if set_scale is not None:
            setters[kind] = functools.partial(set_scale, kind)
            continue
        module, name = _MEGATRONS_SCALERS[kind]
        try:
            scaler = getattr(importlib.import_module(f"megatron.core.transformer.{module}"), name)
        except (ImportError, AttributeError) as missing:
            raise ValueError(
                f"config.{feature} needs config.set_auxiliary_loss_scale, because Megatron's {name} cannot "
                f"be imported: {missing}"
            ) from missing
        setters[kind] = scaler.set_loss_scale
    return setters


def _grad_scale(config: Any, own_func: str, device: torch.device | str) -> torch.Tensor:
    own = setting(config, own_func) if own_func else None
    common = setting(config, "grad_scale_func")
    if own is not None:
        name, scale = own_func, own()
    elif common is not None:
        name, scale = "grad_scale_func", common(torch.ones(1, device=device))
    else:
        return torch.ones(1, device=device)
    scale = torch.as_tensor(scale, device=device)
    if scale.numel() != 1:
        raise ValueError(f"{name} must give one element, not {scale.numel()}")
    return scale
