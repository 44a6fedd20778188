"""Forward and backward of one micro-batch through one model chunk.

Signatures and semantics: megatron.core.pipeline_parallel.schedules (Megatron Core 0.20). Different on
purpose: losses are scaled out of place; all outputs that require grad are run backward, not only the first;
wrong arguments are ValueError or TypeError, not assertions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from ..core.timers import timed
from .config import setting
from .default_pipeline import is_default_last_stage, megatron_cp_group
from .loss_scaling import auxiliary_loss_scales, auxiliary_loss_setters, scaled_loss
from .shapes import size_of
from .wrapped_model import attribute_of, owner_of


def forward_step(
    forward_step_func: Callable[..., Any],
    data_iterator: Any,
    model: Any,
    num_microbatches: int,
    input_tensor: Any,
    forward_data_store: list,
    config: Any,
    cp_group_size: int,
    collect_non_loss_data: bool = False,
    checkpoint_activations_microbatch: bool | None = None,
    is_first_microbatch: bool = False,
    current_microbatch: int | None = None,
    vp_stage: int | None = None,
    is_last_stage: bool = True,
) -> tuple[Any, torch.Tensor]:
    """Runs `forward_step_func(data_iterator, model)` on the input and, on the last stage, the loss function.

    Args:
        forward_step_func: returns (output, loss function); gets `checkpoint_activations_microbatch` as a
            third argument unless that is None.
        model: offers `set_input_tensor(list)`; may offer `set_is_first_microbatch()`.
        input_tensor: a tensor, None on the first stage, or a list of them.
        forward_data_store: the last stage appends what the loss function returns in addition to the loss.
        cp_group_size: number of ranks that share a sequence.

    Returns:
        (output, number of tokens). The output is the loss on the last stage. It comes in a list if and only
        if `input_tensor` is a list; a tuple or list of outputs is that list.
    """
    with timed(setting(config, "timers"), "forward-compute"):
        if is_first_microbatch and (owner := owner_of(model, "set_is_first_microbatch")) is not None:
            owner.set_is_first_microbatch()
        if current_microbatch is not None:
            set_current_microbatch(model, current_microbatch)
        is_list = isinstance(input_tensor, list)
        attribute_of(model, "set_input_tensor")(input_tensor if is_list else [input_tensor])
        extra = () if checkpoint_activations_microbatch is None else (checkpoint_activations_microbatch,)
        with _autocast(config, input_tensor if is_list else [input_tensor]):
            output, loss_func = forward_step_func(data_iterator, model, *extra)
        output, num_tokens = forward_step_calc_loss(
            model,
            output,
            loss_func,
            config,
            vp_stage,
            collect_non_loss_data,
            num_microbatches,
            forward_data_store,
            cp_group_size,
            is_last_stage,
        )
    if not is_list:
        return output, num_tokens
    return list(output) if isinstance(output, (list, tuple)) else [output], num_tokens


def forward_step_calc_loss(
    model: Any,
    output_tensor: Any,
    loss_func: Callable[..., Any] | None,
    config: Any,
    vp_stage: int | None,
    collect_non_loss_data: bool,
    num_microbatches: int,
    forward_data_store: list,
    cp_group_size: int | None = None,
    is_last_stage: bool | None = None,
) -> tuple[Any, Any]:
    """Calls the loss function, as a part of `forward_step`; returns (output or loss, number of tokens).

    `loss_func(output)` returns (loss, data) or (loss, number of tokens, data). With `collect_non_loss_data`
    `loss_func(output, non_loss_data=True)` is called, and its result stored. Without a `loss_func` the output
    is stored. If `cp_group_size` or `is_last_stage` is None, that of the default pipeline is used.
    """
    model_vp_stage = getattr(model, "vp_stage", None)
    if None not in (vp_stage, model_vp_stage) and vp_stage != model_vp_stage:
        raise ValueError(f"vp_stage is {vp_stage}, but the model says {model_vp_stage}")
    cp_size = size_of(megatron_cp_group()) if cp_group_size is None else cp_group_size
    num_tokens: Any = torch.tensor(0, dtype=torch.int, device="cpu")
    if is_default_last_stage(vp_stage) if is_last_stage is None else is_last_stage:
        if loss_func is None:
            forward_data_store.append(output_tensor)
        elif collect_non_loss_data:
            forward_data_store.append(loss_func(output_tensor, non_loss_data=True))
        else:
            output_tensor, num_tokens, data = scaled_loss(
                loss_func(output_tensor),
                num_microbatches=num_microbatches,
                cp_size=cp_size,
                is_per_token=setting(config, "calculate_per_token_loss"),
            )
            forward_data_store.append(data)
    setters = auxiliary_loss_setters(config)
    if setters:
        first = next(iter(output_tensor), None) if isinstance(output_tensor, (list, tuple)) else output_tensor
        device = first.device if isinstance(first, torch.Tensor) else "cpu"
        scales = auxiliary_loss_scales(
            config, num_microbatches=num_microbatches, cp_size=cp_size, device=device
        )
        for kind, scale in scales.items():
            setters[kind](scale)
    return output_tensor, num_tokens


def backward_step(
    input_tensor: Any, output_tensor: Any, output_tensor_grad: Any, model_type: Any = None, config: Any = None
) -> Any:
    """Runs backward from the outputs. Returns the gradients of the inputs, a list if `input_tensor` is one.

    Args:
        input_tensor: a tensor, None, or a list of them.
        output_tensor: the same; those that do not require grad are skipped.
        output_tensor_grad: the gradient of each output; outputs without one are skipped. All None is the last
            stage: the first output is a loss, scaled by config.grad_scale_func if there is one.
        model_type: not used. Older versions of Megatron have it, newer ones have `config` instead.
        config: see `PipelineConfig`.

    Raises:
        ValueError: no output has a gradient, and the first one does not have one element, as a loss does.
    """
    config = model_type if config is None else config
    if config is None:
        raise TypeError("backward_step() needs a config")
    with timed(setting(config, "timers"), "backward-compute"):
        inputs = input_tensor if isinstance(input_tensor, list) else [input_tensor]
        outputs = list(output_tensor) if isinstance(output_tensor, list) else [output_tensor]
        grads = output_tensor_grad if isinstance(output_tensor_grad, list) else [output_tensor_grad]
        if len(outputs) != len(grads):
            raise ValueError(f"there are {len(outputs)} outputs and {len(grads)} gradients")
        for tensor in inputs:
            if tensor is not None and tensor.requires_grad:
                tensor.retain_grad()
        pairs = [pair for pair in zip(outputs, grads, strict=True) if pair[1] is not None]
        if not pairs:
            grad_scale_func = setting(config, "grad_scale_func")
            loss = outputs[0] if grad_scale_func is None else grad_scale_func(outputs[0])
            pairs = [(loss, None)]
        pairs = [pair for pair in pairs if isinstance(pair[0], torch.Tensor) and pair[0].requires_grad]
        if pairs and pairs[0][1] is None and (num_elements := pairs[0][0].numel()) != 1:
            raise ValueError(
                f"the output has {num_elements} elements and no gradient; only a loss, of one element, needs "
                "none: give its gradient, or return a scalar from the loss function"
            )
        _run_backward(pairs)
    input_grads = [None if tensor is None else tensor.grad for tensor in inputs]
    return input_grads if isinstance(input_tensor, list) else input_grads[0]


def custom_backward(output: torch.Tensor, grad_output: torch.Tensor | None) -> None:
    """Runs backward from an output whose data `deallocate_output_tensor` has freed.

    `grad_output` has the shape that the output had; None stands for 1, the gradient of a loss.

    Raises:
        TypeError: an argument is not a tensor.
        ValueError: the output has more than one element, so it was not freed.
    """
    if not isinstance(output, torch.Tensor):
        raise TypeError(f"output must be a torch.Tensor, not {type(output).__name__}")
    if not isinstance(grad_output, (torch.Tensor, type(None))):
        raise TypeError(f"grad_output must be a torch.Tensor or None, not {type(grad_output).__name__}")
    if output.numel() != 1:
        raise ValueError(
            f"output has {output.numel()} elements: it was not freed; use torch.autograd.backward for it"
        )
    _run_backward([(output, grad_output)])


def _run_backward(pairs: list[tuple[torch.Tensor, torch.Tensor | None]]) -> None:
    """Runs backward from the gradient edges of the outputs, whose data may have been freed."""
    if pairs:
        torch.autograd.backward(
            [get_gradient_edge(output) for output, _ in pairs],
            [torch.ones_like(output) if grad is None else grad for output, grad in pairs],
        )


def deallocate_output_tensor(out: Any, deallocate_pipeline_outputs: bool = False) -> None:
    """Frees the data of an output that has been sent (or of each in a list, tuple or dict); its graph stays.

    Does nothing unless `deallocate_pipeline_outputs`. The tensor has one element afterwards: see
    `custom_backward`.

    Raises:
        TypeError: the output is not a tensor.
        ValueError: it is a view, whose memory belongs to another tensor.
    """
    if out is None or not deallocate_pipeline_outputs:
        return
    if isinstance(out, (dict, list, tuple)):
        for member in out.values() if isinstance(out, dict) else out:
            deallocate_output_tensor(member, deallocate_pipeline_outputs)
        return
    if not isinstance(out, torch.Tensor):
        raise TypeError(f"an output must be a torch.Tensor, not {type(out).__name__}")
    if out._base is not None:
        raise ValueError("an output that is a view cannot be freed: its memory belongs to another tensor")
    out.data = torch.empty((1,), device=out.device, dtype=out.dtype)


def check_first_val_step(first_val_step: bool | None, forward_only: bool, cond: bool) -> bool:
    """Whether weights that are cached for a step must be recomputed.

    That is `cond`, in evaluation `cond and first_val_step` unless the latter is None.
    """
    if forward_only and first_val_step is not None:
        return first_val_step and cond
    return cond


def set_current_microbatch(model: Any, microbatch_id: int) -> None:
    """Sets `current_microbatch` of every layer of the model's `decoder`, of the transformer layers in its
    `mtp`, and of every layer of the decoder of its `vision_model`, as far as it has them.
    """
    owner = owner_of(model, "decoder")
    vision_model = getattr(owner_of(model, "vision_model"), "vision_model", None)
    layers = [*_layers_of(owner, "decoder"), *_layers_of(vision_model, "decoder")]
    layers += [layer.mtp_model_layer for layer in _layers_of(owner, "mtp")]
    for layer in layers:
        layer.current_microbatch = microbatch_id


def _layers_of(owner: Any, name: str) -> Any:
    return getattr(getattr(owner, name, None), "layers", ())


def _autocast(config: Any, inputs: list) -> Any:
    if not setting(config, "enable_autocast"):
        return contextlib.nullcontext()
    device = next((tensor.device.type for tensor in inputs if tensor is not None), None)
    if device is None:
        device = torch.device(
            setting(config, "device") or ("cuda" if torch.cuda.is_available() else "cpu")
        ).type
    return torch.autocast(device, dtype=setting(config, "autocast_dtype"))
