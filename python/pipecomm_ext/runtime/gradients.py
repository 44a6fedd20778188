"""What follows a step: gradients of weights that several stages hold, and the norm over the whole pipeline.

Gradients are local tensors here: a DTensor (of FSDP2 or tensor parallelism) stands for the part of this rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
from torch import nn

from ..communicator import Communicator, Recv, Send
from ..errors import PipeCommMismatch
from ..schedules.plan import Plan
from .data_parallel import loaded, modules_of

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

CHANNEL = 1  # of gradients
_WRAPPERS = {"module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}
Names = Iterable[int] | Mapping[int, str]
Held = dict[int, list[nn.Parameter]]  # by pipeline rank; those of other ranks are not known: []


class StepGradients:
    """The gradients after a step, and which weights have been added up since.

    Args:
        stages: those of pipeline rank `rank`.
        loss_fn: its parameters count in the norm, if it is a module.
        ranks_of: for each pipeline rank the ranks of the communicator that it stands for.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        stages: Mapping[int, Any],
        loss_fn: Any,
        communicator: Communicator,
        ranks_of: Sequence[Sequence[int]],
    ):
        self._plan, self._rank, self._stages, self._loss_fn = plan, rank, stages, loss_fn
        self._communicator, self._ranks_of = communicator, ranks_of
        self._place = ranks_of[rank].index(communicator.rank)  # within my pipeline rank
        self._shared: dict[nn.Parameter, bool] = {}  # added up by sum_shared: whether it counts in the norm
        self._has_summed_replicas = False

    # ---------------------------------------------------------------- sums

    def sum_replicas(self) -> None:
        """See `Executor.sum_replica_gradients`."""
        plan = self._plan
        if plan.replicas and any(len(ranks) > 1 for ranks in self._ranks_of):
            raise ValueError(
                f"the replicas of {plan.name} must be one rank each, but the topology has stages of several; "
                "add their gradients up over groups of your own"
            )
        trained = {stage: _trained_parameters(stage, self._stages[stage]) for stage in self._stages}
        weights: list[Held] = []
        for group in plan.replicas:
            mine = [trained[stage] for stage in group if stage in trained]
            owners: Held = {plan.owner[stage]: [] for stage in group}
            weights += [{**owners, self._rank: list(copies)} for copies in zip(*mine, strict=True)]
        self._sum([held for held in weights if not any(copy in self._shared for copy in held[self._rank])])
        self._has_summed_replicas = True

    def holders(self, weights: Mapping[str | nn.Parameter, Names]) -> list[Held]:
        """The checked argument of `Executor.sum_shared_gradients`; refused on all ranks if wrong on one."""
        with self._communicator.collective("all_to_all"):
            if not isinstance(weights, Mapping):
                raise TypeError(
                    f"weights must map names or parameters to stages, not {type(weights).__name__}"
                )
            if self._plan.replicas and self._has_summed_replicas:
                raise ValueError(
                    "sum_shared_gradients needs the gradients as the step left them: call it before "
                    "sum_replica_gradients"
                )
            held = [self._held(key, names) for key, names in weights.items()]
        numbers = self._gather(torch.tensor(float(len(held)), dtype=torch.float64)).tolist()
        owners = {owner for copies in held for owner in copies}
        for rank in sorted(rank for owner in owners for rank in self._ranks_of[owner]):
            if numbers[rank] != len(held):
                raise PipeCommMismatch(
                    f"rank {self._communicator.rank}: sum_shared_gradients: {len(held)} weights here, "
                    f"{numbers[rank]:.0f} on rank {rank}, which holds one of them; give the same on both",
                    op="sum_shared_gradients",
                    rank=self._communicator.rank,
                    peer=rank,
                )
        return held

    def sum_shared(self, held: Sequence[Held]) -> None:
        """See `Executor.sum_shared_gradients`."""
        mine = [copies for copies in held if self._rank in copies]
        self._sum(mine)
        for copies in mine:
            first, *others = copies[self._rank]
            self._shared[first] = self._rank == min(copies)
            self._shared |= dict.fromkeys(others, False)

    def _held(self, key: str | nn.Parameter, stages: Names) -> Held:
        """Who holds a weight, replicas included."""
        if isinstance(stages, (str, int)) or not isinstance(stages, Iterable):
            raise TypeError(f"the stages of a shared weight must be a list or a mapping, not {stages!r}")
        names = dict(stages) if isinstance(stages, Mapping) else dict.fromkeys(stages, key)
        if not names or not all(isinstance(s, int) and 0 <= s < len(self._plan.owner) for s in names):
            raise ValueError(f"the stages of a shared weight must be some of this plan, got {list(names)}")
        for group in self._plan.replicas:
            for stage in [stage for stage in group if stage in names]:
                names |= dict.fromkeys(group, names[stage])
        held: Held = {}
        for stage, name in names.items():
            copies = held.setdefault(self._plan.owner[stage], [])
            if stage in self._stages:
                copy = _parameter(stage, self._stages[stage], name)
                copies += [copy] if not any(copy is other for other in copies) else []
        if len({len(self._ranks_of[owner]) for owner in held}) > 1:
            raise ValueError(
                "the pipeline ranks of a shared weight must be equally many ranks each, since their "
                "gradients are added up rank by rank; add them up over groups of your own"
            )
        return held

    def _sum(self, weights: Sequence[Held]) -> None:
        """Replaces the gradients of each weight by their sum, the same bits on all ranks that hold it."""
        parts: list[dict[int, torch.Tensor]] = []  # by pipeline rank, in order
        ops: list[Send | Recv] = []
        for held in weights:
            first, *others = map(_local_gradient, held[self._rank])
            mine = sum(others, start=first).contiguous()
            parts.append({})
            for owner in sorted(held):
                if owner == self._rank:
                    parts[-1][owner] = mine
                    continue
                peer = self._ranks_of[owner][self._place]
                parts[-1][owner] = torch.empty_like(mine)
                ops += [Send(mine, peer, CHANNEL), Recv(parts[-1][owner], peer, CHANNEL)]
        self._communicator.batch_p2p(ops)
        totals = []  # all of them before any is stored: a parameter may be in several entries
        for by_owner in parts:
            first, *others = by_owner.values()
            totals.append(sum(others, start=first))
        for held, total in zip(weights, totals, strict=True):
            for copy in held[self._rank]:
                _set_local_gradient(copy, total)

    # ---------------------------------------------------------------- norm

    def total_norm(self, norm_type: float) -> torch.Tensor:
        """Over the whole pipeline, each weight once."""
        copies = self._copies()
        counted = [part for part in self._parameters() if self._counts(part, part in copies)]
        return torch.linalg.vector_norm(self._gather(self._norm(counted, norm_type)), norm_type)

    def scale(self, max_norm: float, total: torch.Tensor) -> None:
        """Scales all gradients of this rank so that a total norm of `total` becomes `max_norm` at most."""
        factor = (max_norm / (total + 1e-6)).clamp(max=1.0)  # torch's formula
        gradients = [part for part in map(_local_gradient_or_none, self._parameters()) if part is not None]
        for device in {part.device for part in gradients}:
            of_device = [part for part in gradients if part.device == device]
            torch._foreach_mul_(of_device, factor.to(device))

    def _parameters(self) -> list[nn.Parameter]:
        return _parameters_of(modules_of([*self._stages.values(), self._loss_fn]))

    def _gather(self, number: torch.Tensor) -> torch.Tensor:
        """[ranks of the communicator]: the numbers, float64[], of all of them."""
        mine = number.to(self._communicator.device)
        numbers = [torch.empty_like(mine) for _ in range(self._communicator.size)]
        self._communicator.all_to_all([mine] * len(numbers), numbers)
        return torch.stack(numbers)

    def _copies(self) -> set[nn.Parameter]:
        """Those of my stages whose first replica is another stage."""
        further = {stage for group in self._plan.replicas for stage in group[1:]}
        first: list[Any] = []
        others: list[Any] = []
        for stage, function in self._stages.items():
            (others if stage in further else first).append(function)
        return {*_parameters_of(modules_of(others))} - {*_parameters_of(modules_of(first))}

    def _counts(self, parameter: nn.Parameter, is_copy: bool) -> bool:
        """Whether this rank counts a parameter: of several copies one does, and each rank its own pieces."""
        if not self._shared.get(parameter, not is_copy):
            return False
        is_first = self._ranks_of[self._rank][0] == self._communicator.rank
        return is_first or getattr(parameter, "tensor_model_parallel", False)

    def _norm(self, parameters: list[nn.Parameter], norm_type: float) -> torch.Tensor:
        """Of the gradients of whole parameters; those that are sharded over a mesh are added up over it."""
        by_sharding: dict[Any, list[torch.Tensor]] = {}
        for parameter in parameters:
            gradient = _local_gradient_or_none(parameter)
            parts = by_sharding.setdefault(_sharding(parameter), [])
            if gradient is not None and gradient.numel():
                parts.append(gradient)
        norms = []
        for sharding, parts in by_sharding.items():
            norm = torch.nn.utils.get_total_norm(parts, norm_type).to(
                self._communicator.device, torch.float64
            )
            for group in sharding:
                norms_of_group = [torch.empty_like(norm) for _ in range(dist.get_world_size(group))]
                dist.all_gather(norms_of_group, norm, group)
                norm = torch.linalg.vector_norm(torch.stack(norms_of_group), norm_type)
            norms.append(norm)
        zero = torch.zeros((), dtype=torch.float64, device=self._communicator.device)
        return torch.linalg.vector_norm(torch.stack([zero, *norms]), norm_type)


def require_norm(max_norm: Any, norm_type: Any) -> tuple[float, float]:
    """Raises ValueError or TypeError."""
    max_norm, norm_type = float(max_norm), float(norm_type)
    if not max_norm >= 0:
        raise ValueError(f"max_norm must be a number from 0 on, got {max_norm}")
    if not norm_type > 0:
        raise ValueError(f"norm_type must be a positive number or inf, got {norm_type}")
    return max_norm, norm_type


def require_finite(total: torch.Tensor, norm_type: float) -> None:
    if not math.isfinite(total.item()):
        raise RuntimeError(
            f"the total norm of order {norm_type} is {total.item()}: gradients that are not finite cannot be "
            "clipped; skip this step, or scale them nevertheless with error_if_nonfinite=False"
        )


def _trained_parameters(stage: int, module: Any) -> list[nn.Parameter]:
    if not isinstance(module, nn.Module):
        raise TypeError(f"stage {stage} must be a module to have gradients, not {type(module).__name__}")
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def _parameter(stage: int, module: Any, name: str | nn.Parameter) -> nn.Parameter:
    """A parameter of a stage, given itself or by its name, where what wrappers add to names is left out."""
    trained = _trained_parameters(stage, module)
    if isinstance(name, nn.Parameter):
        found = [parameter for parameter in trained if parameter is name]
        shown = f"the given parameter of shape {list(name.shape)}"
    else:
        found = [part for long, part in module.named_parameters() if _plain(long) == _plain(str(name))]
        found = [parameter for parameter in found if parameter.requires_grad]
        shown = repr(name)
    if not found:
        raise ValueError(
            f"stage {stage} must have {shown} as a parameter that requires gradients; if names differ, map "
            "each stage to its name"
        )
    return found[0]


def _plain(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _parameters_of(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    """Each once."""
    return list(dict.fromkeys(part for module in modules for part in module.parameters(recurse=False)))


def _is_dtensor(tensor: torch.Tensor | None) -> TypeGuard[DTensor]:
    return isinstance(tensor, loaded("torch.distributed.tensor", "DTensor"))


def _sharding(parameter: nn.Parameter) -> tuple[dist.ProcessGroup, ...]:
    """The groups whose ranks hold different parts of a parameter."""
    if not _is_dtensor(parameter):
        return ()
    dims = enumerate(parameter.placements)
    return tuple(parameter.device_mesh.get_group(dim) for dim, kind in dims if not kind.is_replicate())


def _local_gradient_or_none(parameter: nn.Parameter) -> torch.Tensor | None:
    """Shares its memory with the gradient."""
    gradient = parameter.grad
    if not (_is_dtensor(gradient) and _is_dtensor(parameter)):
        return gradient
    if gradient.placements != parameter.placements:  # sums that torch has left pending
        gradient = parameter.grad = gradient.redistribute(parameter.device_mesh, parameter.placements)
    return gradient.to_local()


def _local_gradient(parameter: nn.Parameter) -> torch.Tensor:
    """Zeros of its own if there is none."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    gradient = _local_gradient_or_none(parameter)
    assert gradient is not None
    return gradient


def _set_local_gradient(parameter: nn.Parameter, gradient: torch.Tensor) -> None:
    _local_gradient(parameter).copy_(gradient)
