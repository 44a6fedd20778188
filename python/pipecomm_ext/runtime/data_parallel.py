"""Stages in torch's data-parallel wrappers: each reduces its gradients once, at the end of a step.

`DistributedDataParallel` (DDP), `fully_shard` (FSDP2) and its `replicate` reduce when a backward ends. A step
has one backward for each micro-batch, in any order and maybe in two halves, and the weight half skips hooks
that these wrappers rely on. So they only accumulate during a step, as in torch's gradient accumulation, and
then run their own reduction: with their buckets, communication hooks, dtypes and process groups.

torch.distributed.pipelining does the same for schedules that do not split the backward. Private names of
torch's wrappers are used in this file only; `_require` reports one that a release of torch has changed.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .weight_grad_store import Closure


def loaded(module: str, name: str) -> Any:
    """A class of a torch module, for `isinstance`; () if the module is not imported, so it has no objects."""
    return getattr(sys.modules.get(module), name, ())


def modules_of(functions: Iterable[Any]) -> list[nn.Module]:
    """All modules in the given ones, and in what given functions are bound to, close over or name."""
    held = held_objects(functions, nn.Module)
    return list(dict.fromkeys(part for module in held for part in module.modules()))


def held_objects(functions: Iterable[Any], kind: type) -> list[Any]:
    """The objects of a kind among the given ones, and among those that given functions are bound to, close
    over or name."""
    found: dict[Any, None] = {}
    waiting, seen = list(functions)[::-1], set()
    while waiting:
        value = waiting.pop()
        if isinstance(value, kind):
            found[value] = None
        elif callable(value) and not isinstance(value, nn.Module) and id(value) not in seen:
            seen.add(id(value))
            waiting += _held_by(value, kind)
    return list(found)


def _held_by(function: Any, kind: type) -> Iterator[Any]:
    if isinstance(function, functools.partial):
        yield from (function.func, *function.args, *function.keywords.values())
    yield from getattr(function, "__dict__", {}).values()
    if (owner := getattr(function, "__self__", None)) is not None:
        yield owner
        yield from (value for value in getattr(owner, "__dict__", {}).values() if isinstance(value, kind))
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # the cell is still empty
            yield cell.cell_contents
    names_of_module = getattr(function, "__globals__", {})
    for name in getattr(getattr(function, "__code__", None), "co_names", ()):
        if isinstance(value := names_of_module.get(name), kind):
            yield value


def _refuse_unsupported(modules: Iterable[nn.Module]) -> None:
    """Raises ValueError if one of the modules reduces gradients in a way that a pipeline cannot drive."""
    contract = sys.modules.get("torch.distributed._composable.contract")
    for module in modules:
        if isinstance(module, DistributedDataParallel):
            _refuse_ddp(module)
        elif hasattr(type(module), "no_sync"):
            _refuse_foreign(module)
        elif contract is not None and not _is_sharded(module):
            if "replicate" in (contract._get_registry(module) or ()):
                raise ValueError(
                    "a stage is replicated by torch.distributed._composable.replicate, which hides its DDP; "
                    "wrap the stage in DistributedDataParallel, or use fully_shard"
                )


def _refuse_foreign(module: nn.Module) -> None:
    """Refuses FSDP1, DeepSpeed's engine and others; not Megatron-core's DDP if it reduces after the step."""
    config, kind = getattr(module, "ddp_config", None), type(module)
    if getattr(config, "overlap_grad_reduce", True):
        raise ValueError(
            f"a stage is wrapped in {kind.__module__}.{kind.__name__}, which reduces gradients in each "
            "backward and not once per step; use fully_shard (FSDP2) or DistributedDataParallel, or "
            "with Megatron-core's DDP overlap_grad_reduce=False and finish_grad_sync()"
        )


def _refuse_ddp(ddp: DistributedDataParallel) -> None:
    refused = {
        "static_graph=True": ddp.static_graph,
        "mixed_precision=": getattr(ddp, "mixed_precision", None) is not None,
        "delay_all_reduce_named_params=": getattr(ddp, "_delay_all_reduce_params", ()),
        "join()": ddp._join_config.enable,
        "the Python reducer of torch.compile": getattr(ddp, "_use_python_reducer", False),
        "optimizers that run within backward": any(
            hasattr(parameter, "_in_backward_optimizers") for parameter in ddp.parameters()
        ),
    }
    for setting, is_used in refused.items():
        if is_used:
            raise ValueError(
                f"a stage is wrapped in DistributedDataParallel with {setting}, which needs one backward per "
                "step and not one for each micro-batch; leave it out"
            )


class ReducedOnce:
    """The data-parallel modules of a training step. A context manager: they accumulate within it, and reduce
    at its end; after an exception they discard the step instead."""

    def __init__(self, stages: Mapping[int, Any], others: Iterable[Any], is_training: bool):
        functions = [*stages.values(), *others] if is_training else []
        modules = modules_of(functions)
        _refuse_unsupported(modules)
        ddps = [_Ddp(module) for module in modules if isinstance(module, DistributedDataParallel)]
        self._sharded = _Sharded(list(filter(_is_sharded, modules)))
        self._parts: list[_Ddp | _Sharded] = [*ddps, self._sharded]
        self._sharded_of: dict[int, list[Any]] = {
            stage: list(filter(_is_sharded, modules_of([function])))
            for stage, function in (stages.items() if self._sharded.modules else ())
        }

    def weight_work(self, stage: int, works: list[Closure]) -> list[Closure]:
        """The work of a W, with the stage's weights gathered before it and its gradients stored after it."""
        modules = self._sharded_of.get(stage)
        if not modules or not works:
            return works
        gather = [module.unshard for module in modules]
        return [*gather, *works, *(group.post_backward for group in _groups_of(modules))]

    def __enter__(self) -> ReducedOnce:
        for part in self._parts:
            part.hold()
        return self

    def __exit__(self, exc_type, exc, traceback) -> None:
        for part in self._parts:
            part.release()
        if exc is not None:
            self._sharded.forget()
            return
        for part in self._parts:
            part.reduce()


class _Ddp:
    """A DDP module. Within its user's `no_sync()` it also keeps accumulating at the end of the step."""

    def __init__(self, module: DistributedDataParallel):
        self._module = module
        _require(module.reducer, "prepare_for_backward")

    def hold(self) -> None:
        self._reduces = self._module.require_backward_grad_sync
        self._module.require_backward_grad_sync = False

    def release(self) -> None:
        self._module.require_backward_grad_sync = self._reduces

    def reduce(self) -> None:
        """Runs a backward without gradients of parameters, which makes DDP reduce what is in `.grad`."""
        if not self._reduces:
            return
        parameters = [parameter for parameter in self._module.parameters() if parameter.requires_grad]
        with contextlib.ExitStack() as hooks, torch.enable_grad():
            for parameter in parameters:
                hooks.enter_context(_without_hooks(parameter))
            root = _NoGradients.apply(*parameters)
            self._module.reducer.prepare_for_backward([root])
            root.backward()
        self._module._check_reducer_finalized()  # raises if a parameter has been frozen meanwhile
        self._module.require_forward_param_sync = True  # so that the next forward broadcasts the buffers


class _NoGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *parameters: torch.Tensor) -> torch.Tensor:
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx, *gradients: torch.Tensor) -> tuple[None, ...]:
        return (None,) * len(ctx.needs_input_grad)


@contextlib.contextmanager
def _without_hooks(parameter: nn.Parameter) -> Iterator[None]:
    """Removes its users' hooks, which have seen the gradients already and do not expect None."""
    hooks = parameter._backward_hooks
    held = dict(hooks or {})
    (hooks or held).clear()
    try:
        yield
    finally:
        if hooks is not None:
            hooks.update(held)


class _Sharded:
    """All FSDP2 modules of a rank. The settings of their users (`set_requires_gradient_sync` and so on) are
    restored at the end of the step, and decide what is reduced and resharded then."""

    _FLAGS = ("reduce_grads", "all_reduce_grads", "reshard_after_backward")

    def __init__(self, modules: list[Any]):
        self.modules = modules
        self._states = list(dict.fromkeys(_state_of(module) for module in modules))

    def hold(self) -> None:
        holders: list[tuple[Any, tuple[str, ...]]] = [
            (group, self._FLAGS) for group in _groups_of(self.modules)
        ]
        holders += [(state._state_ctx, ("is_last_backward",)) for state in self._states]
        self._settings = []
        for holder, flags in holders:
            _require(holder, *flags)
            self._settings += [(holder, flag, getattr(holder, flag)) for flag in flags]
        for holder, flag, _ in self._settings:
            setattr(holder, flag, False)

    def release(self) -> None:
        for holder, flag, value in self._settings:
            setattr(holder, flag, value)

    def reduce(self) -> None:
        for group in _groups_of(self.modules):
            group.post_backward()
        for state in self._states:
            if state._is_root:
                state._root_post_backward_final_callback()

    def forget(self) -> None:
        """Drops the gradients of unsharded weights, which no `zero_grad` reaches, and the hooks' state."""
        for group in _groups_of(self.modules):
            for part in group.fsdp_params:
                if "unsharded_accumulated_grad" in vars(part):  # in torch 2.15 it is the one below
                    part.unsharded_accumulated_grad = None
                if hasattr(part, "_unsharded_param"):
                    part._unsharded_param.grad = None
            group._training_state = type(group._training_state).IDLE
            group._post_forward_indices.clear()
        for state in self._states:
            state._training_state = type(state._training_state).IDLE
            state._modules_to_run_forward.clear()
            state._state_ctx.iter_forward_root = None
            state._state_ctx.post_backward_final_callback_queued = False
            state._comm_ctx.post_forward_order = []
        for module in self.modules:
            module.reshard()


def _is_sharded(module: nn.Module) -> bool:
    return isinstance(module, loaded("torch.distributed.fsdp", "FSDPModule"))


def _state_of(module: Any) -> Any:
    _require(module, "_get_fsdp_state")
    state = module._get_fsdp_state()
    _require(state, "_state_ctx", "_is_root", "_root_post_backward_final_callback")
    return state


def _groups_of(modules: Iterable[Any]) -> list[Any]:
    """The groups of parameters that are gathered and reduced together; a state has one, or in newer releases
    of torch a list of them."""
    groups: dict[Any, None] = {}
    for state in map(_state_of, modules):
        several = getattr(state, "_fsdp_param_groups", None)
        if several is None:
            _require(state, "_fsdp_param_group")
            several = [state._fsdp_param_group]
        groups |= dict.fromkeys(group for group in several if group is not None)
    return list(groups)


def _require(holder: Any, *names: str) -> None:
    for name in names:
        if not hasattr(holder, name):
            raise RuntimeError(
                f"torch {torch.__version__} has no {type(holder).__name__}.{name}, which an Executor needs "
                "to reduce the gradients of DDP and FSDP2 stages once per step; use a torch from 2.11 to 2.15"
            )
