"""After a step: sums of the gradients of shared weights, means of buffers of copies, and the total norm.

Gradients are local tensors here: a DTensor (of FSDP2 or tensor parallelism) stands for the part of this rank.
"""

from __future__ import annotations

import hashlib
import math
import operator
import warnings
import weakref
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from ..communicator import Communicator, Recv, Send
from ..core.tensor_specs import version_of
from ..core.user_code import stacklevel_of_user
from ..errors import PipeCommMismatch
from ..schedules.plan import Plan
from .arguments import of_all_ranks
from .data_parallel import loaded, modules_of
from .graph_parameters import GraphParameters

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

CHANNEL = 1  # of gradients
_WRAPPERS = {"module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}
Names = Iterable[int] | Mapping[int, str]
Held = dict[int, list[nn.Parameter]]  # by pipeline rank; those of other ranks are not known: []


class _Sum(NamedTuple):
    """A gradient that contains a sum."""

    total: weakref.ref[torch.Tensor]
    is_kept: torch.Tensor | None = None  # whether no later step has found it zeroed; None: no step since

    def is_of(self, parameter: torch.Tensor) -> bool:
        return parameter.grad is not None and parameter.grad is self.total()


# Of all executors together: several may have the same stages, as those of DualPipe do.
_sums: MutableMapping[torch.Tensor, _Sum] = WeakIdKeyDictionary()


def _note_step(stages: Mapping[int, Any]) -> None:
    """Records, before a step of the stages, which sums are still in the same tensors. Whether they have been
    zeroed is read only if it matters, since that waits for the device. Other stages may be those of another
    thread, which changes their gradients meanwhile."""
    if not _sums:
        return
    for parameter in (part for module in stages.values() for part in _named_parameters(module)):
        made = _sums.get(parameter)
        if made is not None and made.is_of(parameter):
            is_kept = _local_gradient(parameter).any()
            _sums[parameter] = _Sum(made.total, is_kept if made.is_kept is None else is_kept & made.is_kept)


class StepGradients:
    """The gradients after a step, and which weights have been summed since.

    Args:
        stages: those of pipeline rank `rank`.
        loss_fn: its parameters count in the norm, if it is a module.
        ranks_of: the ranks of the communicator that form each pipeline rank.
        graph_parameters: the parameters found in the stages' graphs.
        before: the gradients of the step before, when the step begins.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        stages: Mapping[int, Any],
        loss_fn: Any,
        communicator: Communicator,
        ranks_of: Sequence[Sequence[int]],
        graph_parameters: GraphParameters,
        before: StepGradients | None = None,
    ):
        self._plan, self._rank, self._stages, self._loss_fn = plan, rank, stages, loss_fn
        self._communicator, self._ranks_of = communicator, ranks_of
        self._graph_parameters = graph_parameters
        self._place = ranks_of[rank].index(communicator.rank)  # within my pipeline rank
        self._shared: dict[torch.Tensor, bool] = {}  # summed by sum_shared: whether it counts in the norm
        self._has_summed_replicas = self._has_clipped = False
        # Versions when the first step began; empty if no warning is needed, None before that step.
        self._buffers: dict[tuple[int, str], tuple[int, int]] | None = None
        if before is not None:
            self._buffers = _buffer_versions(plan, stages) if before._buffers is None else before._buffers
            _note_step(stages)

    # ---------------------------------------------------------------- sums

    def _require_fresh(self, parameters: Iterable[nn.Parameter], call: str) -> None:
        """Raises if a gradient contains the sum of an earlier step, which another sum would double."""
        if self._has_clipped:
            raise ValueError(f"{call} must precede clip_grad_norm_, which needs the sums")
        sums = [(part, _sums.get(part)) for part in parameters]
        if any(made and made.is_of(part) and (made.is_kept is None or made.is_kept) for part, made in sums):
            raise ValueError(
                f"{call} must be called once, after the last step before the optimizer: the gradients were "
                "added up after an earlier step already, and have not been zeroed since"
            )

    def require_replicas_unsummed(self) -> None:
        """Raises ValueError, on all ranks, if this step's gradients are summed already."""
        if self._has_summed_replicas:
            raise ValueError(
                "sum_replica_gradients must be called once: the gradients of this step are sums already"
            )

    def sum_replicas(self) -> None:
        """See `Executor.sum_replica_gradients`."""
        plan = self._plan
        self._require_single_ranks("add their gradients up over groups of your own")
        trained = {stage: _trained_parameters(stage, self._stages[stage]) for stage in self._stages}
        weights: list[Held] = []
        for group in plan.replicas:
            mine = [trained[stage] for stage in group if stage in trained]
            owners: Held = {plan.owner[stage]: [] for stage in group}
            weights += [{**owners, self._rank: list(copies)} for copies in zip(*mine, strict=True)]
        weights = [held for held in weights if not any(copy in self._shared for copy in held[self._rank])]
        self._require_fresh((copy for held in weights for copy in held[self._rank]), "sum_replica_gradients")
        self._sum(weights)
        self._has_summed_replicas = True
        if self._buffers and self._buffers != _buffer_versions(plan, self._stages):
            self._buffers = {}  # one warning is enough
            warnings.warn(
                f"{plan.name}: the buffers of stages with the same weights have changed, as the running "
                "statistics of BatchNorm do, each by the micro-batches that this copy has seen: call "
                "average_replica_buffers() before you save or evaluate",
                stacklevel=stacklevel_of_user(),
            )

    def average_buffers(self) -> None:
        """See `Executor.average_replica_buffers`."""
        self._require_single_ranks("average their buffers over groups of your own")
        self._buffers = {}  # nothing to warn of
        sums, places = [], []
        for group in self._plan.replicas:
            mine = [_averaged_buffers(self._stages[stage]) for stage in group if stage in self._stages]
            owners = sorted({self._plan.owner[stage] for stage in group})
            for copies in zip(*mine, strict=True):
                wide = torch.complex128 if copies[0].is_complex() else torch.float64
                sums.append((owners, reduce(operator.add, [copy.to(wide) for copy in copies])))
                places.append((copies, len(group)))
        for (copies, count), parts in zip(places, self._exchanged(sums), strict=True):
            mean = reduce(operator.add, parts) / count
            for copy in copies:
                copy.copy_(mean)

    def _require_single_ranks(self, cure: str) -> None:
        if self._plan.replicas and any(len(ranks) > 1 for ranks in self._ranks_of):
            raise ValueError(
                f"the replicas of {self._plan.name} must be one rank each, but the topology has stages of "
                f"several; {cure}"
            )

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
            names = [self._names(key, stages) for key, stages in weights.items()]
            held = [self._held(name_of) for name_of in names]
            mine: list[nn.Parameter] = []
            for key, copies in zip(weights, held, strict=True):
                if any(copy is other for copy in copies.get(self._rank, ()) for other in mine):
                    raise ValueError(
                        f"a weight must be named once in sum_shared_gradients: that of {_shown(key)} is also "
                        "that of another name; give all its stages under one"
                    )
                mine += copies.get(self._rank, ())
            if any(copy in self._shared for copy in mine):
                raise ValueError(
                    "a weight must be named once in sum_shared_gradients: its gradient is a sum already"
                )
            self._require_fresh(mine, "sum_shared_gradients")
        self._require_same_weights([sorted(name_of) for name_of in names])
        return held

    def _require_same_weights(self, weights: Sequence[Sequence[int]]) -> None:
        """Raises PipeCommMismatch, on all ranks, unless each rank and those that name weights of its stages
        name the same ones. Each weight is the list of its stages."""
        owner_of, claims = self._plan.owner, []
        for owner in range(self._plan.P):
            claimed = [stages for stages in weights if owner in {owner_of[stage] for stage in stages}]
            digest = hashlib.sha256(repr(claimed).encode()).digest()
            claims.append(int.from_bytes(digest[:7], "little") if claimed else 0)
        everybody = self._gather(torch.tensor(claims, dtype=torch.int64, device="cpu")).tolist()
        for rank, theirs in enumerate(everybody):
            for owner, claim in enumerate(theirs):
                for holder in self._ranks_of[owner]:
                    if claim and claim != everybody[holder][owner]:
                        raise PipeCommMismatch(
                            f"rank {self._communicator.rank}: sum_shared_gradients: ranks {rank} and "
                            f"{holder} name different weights of rank {holder}; give the same weights in "
                            "the same order on all ranks that hold any of them",
                            op="sum_shared_gradients",
                            rank=self._communicator.rank,
                            peer=holder,
                        )

    def sum_shared(self, held: Sequence[Held]) -> None:
        """See `Executor.sum_shared_gradients`."""
        mine = [copies for copies in held if self._rank in copies]
        self._sum(mine)
        for copies in mine:
            first, *others = copies[self._rank]
            self._shared[first] = self._rank == min(copies)
            self._shared |= dict.fromkeys(others, False)

    def _names(self, key: str | nn.Parameter, stages: Names) -> dict[int, str | nn.Parameter]:
        """The stages that hold a weight, including replicas, with its name there."""
        if isinstance(stages, (str, int)) or not isinstance(stages, Iterable):
            raise TypeError(f"the stages of a shared weight must be a list or a mapping, not {stages!r}")
        names: dict[int, str | nn.Parameter] = (
            {**stages} if isinstance(stages, Mapping) else dict.fromkeys(stages, key)
        )
        if not names or not all(isinstance(s, int) and 0 <= s < len(self._plan.owner) for s in names):
            raise ValueError(f"the stages of a shared weight must be some of this plan, got {list(names)}")
        for group in self._plan.replicas:
            for stage in [stage for stage in group if stage in names]:
                names |= dict.fromkeys(group, names[stage])
        return names

    def _held(self, names: Mapping[int, str | nn.Parameter]) -> Held:
        """The holders of a weight that has these names in the stages."""
        held: Held = {}
        for stage, name in names.items():
            copies = held.setdefault(self._plan.owner[stage], [])
            if stage in self._stages:
                copy = _parameter(stage, self._stages[stage], name)
                copies += [copy] if not any(copy is other for other in copies) else []
        if len({len(self._ranks_of[owner]) for owner in held}) > 1:
            raise ValueError(
                "the stages of a shared weight must have the same number of ranks, since their "
                "gradients are added up rank by rank; add them up over groups of your own"
            )
        return held

    def _sum(self, weights: Sequence[Held]) -> None:
        """Replaces the gradients of each weight by their sum, the same bits on all ranks that hold it."""
        mine = [
            (sorted(held), reduce(operator.add, map(_local_gradient, held[self._rank]))) for held in weights
        ]
        # All of them before any is stored: a parameter may be in several entries.
        totals = [reduce(operator.add, parts) for parts in self._exchanged(mine)]
        for held, total in zip(weights, totals, strict=True):
            for copy in held[self._rank]:
                _local_gradient(copy).copy_(total)
                assert copy.grad is not None
                _sums[copy] = _Sum(weakref.ref(copy.grad))

    def _exchanged(self, tensors: Sequence[tuple[Sequence[int], torch.Tensor]]) -> list[list[torch.Tensor]]:
        """Exchanges each tensor with the pipeline ranks listed with it; returns all of theirs, in order."""
        parts: list[list[torch.Tensor]] = []
        ops: list[Send | Recv] = []
        for owners, tensor in tensors:
            mine = tensor.contiguous()
            parts.append([mine if owner == self._rank else torch.empty_like(mine) for owner in owners])
            for owner, theirs in zip(owners, parts[-1], strict=True):
                if owner != self._rank:
                    peer = self._ranks_of[owner][self._place]
                    ops += [Send(mine, peer, CHANNEL), Recv(theirs, peer, CHANNEL)]
        self._communicator.batch_p2p(ops)
        return parts

    # ---------------------------------------------------------------- norm

    def total_norm(self, norm_type: float) -> torch.Tensor:
        """The norm over the whole pipeline, each weight once."""
        if self._plan.replicas and not self._has_summed_replicas:
            warnings.warn(
                f"clip_grad_norm_ of {self._plan.name} before sum_replica_gradients takes the gradients of "
                "the first copies for those of the weights; add them up first",
                stacklevel=stacklevel_of_user(),
            )
        copies = self._copies()
        counted = [part for part in self._parameters() if self._counts(part, part in copies)]
        if hiding := [stage for stage in self._stages if self._graph_parameters.may_hide(stage)]:
            warnings.warn(
                f"stages {hiding} are functions with activation checkpointing of what shows no module: the "
                "norm leaves out parameters that are hidden there; give a module, or checkpoint with "
                "use_reentrant=False",
                stacklevel=stacklevel_of_user(),
            )
        return torch.linalg.vector_norm(self._gather(self._norm(counted, norm_type)), norm_type)

    def scale(self, max_norm: float, total: torch.Tensor) -> None:
        """Scales all gradients of this rank so that a total norm of `total` becomes `max_norm` at most."""
        self._has_clipped |= math.isfinite(max_norm)
        factor = (max_norm / (total + 1e-6)).clamp(max=1.0)  # torch's formula
        gradients = [part for part in map(_local_gradient_or_none, self._parameters()) if part is not None]
        for device in {part.device for part in gradients}:
            of_device = [part for part in gradients if part.device == device]
            torch._foreach_mul_(of_device, factor.to(device))

    def _parameters(self) -> list[torch.Tensor]:
        return list(dict.fromkeys([*self._parameters_of(self._stages), *_named_parameters(self._loss_fn)]))

    def _parameters_of(self, stages: Iterable[int]) -> list[torch.Tensor]:
        """The parameters of the stages' modules, and those found in their graphs."""
        stages = list(stages)
        for stage in stages:
            named = _named_parameters(self._stages[stage])
            if self._graph_parameters.may_hide(stage) and not [*named, *self._graph_parameters.of([stage])]:
                raise ValueError(
                    f"stage {stage} is a function with activation checkpointing that hides its parameters: "
                    "give a module, or checkpoint with use_reentrant=False"
                )
        named = [part for stage in stages for part in _named_parameters(self._stages[stage])]
        return [*named, *self._graph_parameters.of(stages)]

    def _gather(self, mine: torch.Tensor) -> torch.Tensor:
        """This tensor of each rank of the communicator, as one tensor."""
        return torch.stack(of_all_ranks(self._communicator, mine.to(self._communicator.device)))

    def _copies(self) -> set[torch.Tensor]:
        """The parameters of my stages whose first replica is another stage."""
        further = {stage for group in self._plan.replicas for stage in group[1:]} & {*self._stages}
        return {*self._parameters_of(further)} - {*self._parameters_of({*self._stages} - further)}

    def _counts(self, parameter: torch.Tensor, is_copy: bool) -> bool:
        """Whether this rank counts a parameter: one of several copies counts, and all pieces do."""
        if not self._shared.get(parameter, not is_copy):
            return False
        is_first = self._ranks_of[self._rank][0] == self._communicator.rank
        return is_first or getattr(parameter, "tensor_model_parallel", False)

    def _norm(self, parameters: list[torch.Tensor], norm_type: float) -> torch.Tensor:
        """The norm of the gradients of whole parameters; sharded ones are summed over their mesh."""
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
    """Returns both as floats. Raises ValueError or TypeError."""
    max_norm, norm_type = float(max_norm), float(norm_type)
    if not max_norm >= 0:
        raise ValueError(f"max_norm must be a number >= 0, got {max_norm}")
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
    """A parameter of a stage, given itself or by its name without the prefixes of wrappers."""
    trained = _trained_parameters(stage, module)
    if isinstance(name, nn.Parameter):
        found = [parameter for parameter in trained if parameter is name]
    else:
        found = [part for long, part in module.named_parameters() if _plain(long) == _plain(str(name))]
        found = [parameter for parameter in found if parameter.requires_grad]
    if not found:
        raise ValueError(
            f"stage {stage} must have {_shown(name)} as a parameter that requires gradients; if names "
            "differ, map each stage to its name"
        )
    return found[0]


def _shown(name: str | nn.Parameter) -> str:
    return repr(name) if isinstance(name, str) else f"the given parameter of shape {list(name.shape)}"


def _plain(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _named_parameters(function: Any) -> list[nn.Parameter]:
    return [part for module in modules_of([function]) for part in module.parameters(recurse=False)]


def _averaged_buffers(module: Any) -> list[torch.Tensor]:
    buffers = module.buffers() if isinstance(module, nn.Module) else ()
    return [buffer for buffer in buffers if buffer.is_floating_point() or buffer.is_complex()]


def _buffer_versions(plan: Plan, stages: Mapping[int, Any]) -> dict[tuple[int, str], tuple[int, int]]:
    """The versions of the buffers that `average_buffers` would average; a forward may change them."""
    replicated = {stage for group in plan.replicas for stage in group} & {*stages}
    modules = {stage: stages[stage] for stage in replicated if _averaged_buffers(stages[stage])}
    return {
        (stage, name): (id(buffer), version_of(buffer))
        for stage, module in modules.items()
        for name, buffer in module.named_buffers()
    }


def _is_dtensor(tensor: torch.Tensor | None) -> TypeGuard[DTensor]:
    return isinstance(tensor, loaded("torch.distributed.tensor", "DTensor"))


def _sharding(parameter: torch.Tensor) -> tuple[dist.ProcessGroup, ...]:
    """The groups whose ranks hold different parts of a parameter."""
    if not _is_dtensor(parameter):
        return ()
    dims = enumerate(parameter.placements)
    return tuple(parameter.device_mesh.get_group(dim) for dim, kind in dims if not kind.is_replicate())


def _local_gradient_or_none(parameter: torch.Tensor) -> torch.Tensor | None:
    """Returns the local part of the gradient, with which it shares memory."""
    gradient = parameter.grad
    if not (_is_dtensor(gradient) and _is_dtensor(parameter)):
        return gradient
    if gradient.placements != parameter.placements:  # sums that torch has left pending
        gradient = parameter.grad = gradient.redistribute(parameter.device_mesh, parameter.placements)
    return gradient.to_local()


def _local_gradient(parameter: torch.Tensor) -> torch.Tensor:
    """Returns the local part of the gradient, or new zeros if there is none."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    gradient = _local_gradient_or_none(parameter)
    assert gradient is not None
    return gradient
