"""Scripts of schedules/test_combinations.py, which train a model without knowing whether it is cut."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from combination_sides import OneProcess, OnRanks, Side
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from pipecomm_ext import PipeCommError


def train(side: Side, optimizer=None, num_steps: int = 2, around=contextlib.nullcontext) -> None:
    optimizer = optimizer or side.optimizer(momentum=0.9)
    for _ in range(num_steps):
        with around():
            side.step()
        side.sum()
        optimizer.step()
        optimizer.zero_grad()


def autocast(side: Side) -> None:
    train(side, around=lambda: torch.autocast("cpu", torch.bfloat16))


def anomaly_detection(side: Side) -> None:
    train(side, around=torch.autograd.detect_anomaly)


def saved_tensors_elsewhere(side: Side) -> None:
    train(side, around=torch.autograd.graph.save_on_cpu)


def fused_optimizer(side: Side) -> None:
    train(side, side.optimizer(torch.optim.AdamW, fused=isinstance(side, OnRanks)))


def foreach_optimizer(side: Side) -> None:
    train(side, side.optimizer(torch.optim.AdamW, foreach=isinstance(side, OnRanks)))


def accumulation_in_place(side: Side, then: Callable[[], Any] = lambda: None) -> list[Any]:
    """Zeros instead of None between optimizer steps: a gradient that was summed once is no sum any more."""
    optimizer, results = side.optimizer(), []
    for num_steps in (1, 2, 2):
        for _ in range(num_steps):
            side.step()
        side.sum()
        results.append(then())
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return results


def clipped(side: Side) -> list[torch.Tensor]:
    return accumulation_in_place(side, lambda: side.clip(0.5))


def scaled(side: Side) -> list[float]:
    """The first stage's gradients overflow in the second step: no optimizer steps, all lower the scale."""
    side.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    optimizer, scales = side.optimizer(), []
    for idx in range(5):
        side.step()
        side.sum()
        if idx == 1 and 0 in side.modules:
            next(side.modules[0].parameters()).grad.fill_(torch.inf)
        side.unscale(optimizer)
        side.clip(0.5)
        side.scaler.step(optimizer)
        side.scaler.update()
        optimizer.zero_grad()
        scales.append(torch.tensor(side.scaler.get_scale()))
    assert scales[1] < scales[0]
    return scales


def scaled_fused(side: Side) -> list[float]:
    side.optimizer = lambda: Side.optimizer(side, torch.optim.AdamW, fused=isinstance(side, OnRanks))
    return scaled(side)


def moving_average(side: Side) -> dict[int, Any]:
    averages = {
        depth: AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        for depth, module in side.modules.items()
    }
    optimizer = side.optimizer()
    for _ in range(3):
        train(side, optimizer, 1)
        for depth, average in averages.items():
            average.update_parameters(side.modules[depth])
    return {depth: dict(average.module.named_parameters()) for depth, average in averages.items()}


def evaluation_between(side: Side) -> dict[int, Any]:
    """Evaluates between two steps whose gradients accumulate, in both modes of the modules."""
    optimizer = side.optimizer()
    side.step()
    for module in side.modules.values():
        module.eval()
    with torch.inference_mode():
        side.evaluate()
    losses = side.evaluate()
    for module in side.modules.values():
        module.train()
    side.step()
    side.sum()
    optimizer.step()
    return losses


def evaluation(side: Side) -> dict[int, Any]:
    side.evaluate()
    return side.evaluate()  # a rank that was done with the first gets its error here


def saved_and_loaded(side: Side) -> None:
    optimizer = side.optimizer(torch.optim.AdamW)
    train(side, optimizer)
    file = io.BytesIO()
    torch.save([[module.state_dict() for module in side.modules.values()], optimizer.state_dict()], file)
    train(side, optimizer)
    file.seek(0)
    states, optimizer_state = torch.load(file)
    for module, state in zip(side.modules.values(), states, strict=True):
        module.load_state_dict(state)
    optimizer = side.optimizer(torch.optim.AdamW)
    optimizer.load_state_dict(optimizer_state)
    train(side, optimizer)


def error_and_next_step(side: Side) -> None:
    """Zeroes the gradients of a failed step, and runs another one."""
    optimizer = side.optimizer()
    train(side, optimizer, 1)
    handles = [side.modules[1].register_forward_hook(failing)] if 1 in side.modules else []
    with side.failing(), pytest.raises((KeyError, PipeCommError), match="no such expert"):
        side.step()
    for handle in handles:
        handle.remove()
    optimizer.zero_grad()
    side.recover()
    train(side, optimizer, 1)


def failing(*_args) -> None:
    raise KeyError("no such expert")


def of_modules(side: Side) -> dict[int, Any]:
    """Hooks of modules that change the values, and one that sums what it sees."""
    seen = {depth: [torch.zeros(()).double()] * 3 for depth in side.modules}

    def note(depth, idx, number):
        seen[depth][idx] = seen[depth][idx] + number.detach()

    for depth, module in side.modules.items():
        module.first.register_forward_pre_hook(lambda _m, args: (args[0] * 1.5,))
        module.first.register_forward_hook(lambda _m, _args, output: output + 0.25)
        module.norm.register_forward_hook(lambda _m, _args, out, d=depth: note(d, 0, out.square().sum()))
        module.second.register_full_backward_pre_hook(lambda _m, grads: (grads[0] * 2,))
        module.norm.register_full_backward_hook(
            lambda _m, _in, out, d=depth: note(d, 1, out[0].square().sum())
        )
        module.norm.register_full_backward_hook(lambda _m, grads, _out: (grads[0].clamp(-0.1, 0.1),))
        module.second.weight.register_hook(lambda grad, depth=depth: note(depth, 2, grad.sum()))
        module.second.bias.register_hook(lambda grad: grad / 2)
    train(side, num_steps=1)
    return {depth: [side.of_all_copies(value) for value in seen[depth]] for depth in sorted(seen)}


def sums_of_hooks(side: Side) -> None:
    """The sums of the hooks in the layers Summing."""
    train(side)
    for depth in sorted(side.modules):
        side.of_all_copies(side.modules[depth].seen)


def retained(side: Side) -> dict[tuple[int, int], Any]:
    """The gradients that the layers Retaining have kept, by depth and chain."""
    side.step()
    num_micros, result = side.pipeline.plan.micros_per_chain, {}
    for depth, module in side.modules.items():
        for idx, chain in enumerate(side.chains(depth)):
            kept = module.kept[idx * num_micros : (idx + 1) * num_micros]
            result[depth, chain] = [hidden.grad for hidden in kept]
    return result


def after_accumulation(side: Side) -> None:
    """Gradients that hooks move elsewhere, like Megatron's main gradients."""
    for parameter in side.parameters():
        parameter.main_grad = torch.zeros_like(parameter)

        def move(parameter):
            parameter.main_grad += parameter.grad
            parameter.grad = None

        parameter.register_post_accumulate_grad_hook(move)
    for _ in range(2):
        side.step()
    for parameter in side.parameters():
        assert parameter.grad is None
        parameter.grad = parameter.main_grad
    side.sum()
    side.optimizer().step()


def optimizer_in_backward(side: Side) -> None:
    for parameter in side.parameters():
        parameter.optimizer = torch.optim.SGD([parameter], lr=0.1)
        parameter.register_post_accumulate_grad_hook(lambda parameter: parameter.optimizer.step())
    side.step()


def gradients_of_inputs(side: Side) -> dict[int, Any]:
    """The gradients of the inputs, by chain."""
    pipeline = side.pipeline
    given = [[x.clone().requires_grad_() for x in micros] for micros in pipeline.inputs]
    before, pipeline.inputs = pipeline.inputs, given
    side.step()
    pipeline.inputs = before
    is_mine = [pipeline.plan.owner[chain[0]] == pipeline.rank for chain in pipeline.plan.chains]
    is_whole = isinstance(side, OneProcess)
    return {i: [x.grad for x in micros] for i, micros in enumerate(given) if is_mine[i] or is_whole}


def of_batches(side: Side) -> None:
    """Running statistics; with two copies, the means of those of each copy."""
    optimizer = side.optimizer()
    for _ in range(2):
        side.step()
        side.average_buffers()
        side.sum()
        optimizer.step()
        optimizer.zero_grad()
