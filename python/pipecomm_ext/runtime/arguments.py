"""Checks the arguments of an Executor and brings them into one form."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ..communicator import Communicator
from ..errors import PipeCommMismatch
from ..parallel_state import PipelineTopology
from ..schedules.plan import Plan
from .values import flattened, rebuilt

Stage = Callable[..., Any]
_SHOWN_BYTES = 256  # of a setting, in the error of ranks that disagree
MicroBatches = Sequence[Any] | torch.Tensor | Mapping[str, Any]  # a list of them, or a batch to cut


def by_stage(
    name: str, values: Any, stages: list[int], all_stages: list[int], num_micros: int
) -> dict[int, Sequence[Any]]:
    """The micro-batches of this rank's `stages`: of one stage, or from a mapping, which may have other stages
    of `all_stages`, too. Raises ValueError or TypeError."""
    if not stages:
        return {}
    if not _is_by_stage(values):
        if len(stages) > 1:
            raise ValueError(
                f"{name}: the stages {stages} on this rank all need some; give a mapping from stage to a list"
            )
        values = {stages[0]: values}
    if not set(stages) <= set(values) <= set(all_stages):
        raise ValueError(f"{name} must be given for the stages {stages}, got {list(values)}")
    return {stage: _micro_batches(f"{name} of stage {stage}", values[stage], num_micros) for stage in stages}


def pre_split(name: str, values: Any, mbs_name: str, mbs: Any) -> Any:
    """`values`, or instead the list that torch.distributed.pipelining calls `mbs_name`."""
    if mbs is None:
        return values
    if values is not None:
        raise TypeError(f"give {name} or {mbs_name}, not both")
    if not isinstance(mbs, list):
        raise TypeError(
            f"{mbs_name} must be a list with one entry per micro-batch, not {type(mbs).__name__}; "
            f"a whole batch is cut if it is given as {name}"
        )
    return mbs


def _is_by_stage(values: Any) -> bool:
    """Whether this is a mapping from stages, not one from keywords."""
    return isinstance(values, Mapping) and not (values and all(isinstance(key, str) for key in values))


def _micro_batches(name: str, values: Any, num_micros: int) -> Sequence[Any]:
    if type(values) is tuple and len(values) == num_micros > 1:
        raise ValueError(
            f"{name} is a tuple of {num_micros}, which may mean micro-batches or the parts of a whole batch; "
            "give a list if they are micro-batches, else a dict, or a list of tuples"
        )
    is_named_tuple = isinstance(values, tuple) and hasattr(values, "_fields")
    if isinstance(values, (torch.Tensor, Mapping)) or (
        isinstance(values, tuple) and (is_named_tuple or len(values) != num_micros)
    ):
        return _cut(name, values, num_micros)
    return _as_many(name, values, num_micros, "micro-batches", ", or a whole batch (a tensor, tuple or dict)")


def _as_many(name: str, values: Any, num_micros: int, what: str, alternative: str) -> Sequence[Any]:
    """A sequence with an entry for each micro-batch."""
    if not isinstance(values, Sequence) or isinstance(values, str):
        cure = "; make a list of it" if isinstance(values, Iterable) else "; this rank owns that stage"
        raise TypeError(
            f"{name} must be a list of {num_micros} {what}, not {type(values).__name__}{alternative}{cure}"
        )
    if len(values) != num_micros:
        raise ValueError(
            f"{name} has {len(values)} {what}, the plan has {num_micros}; give one entry for each"
            f"{alternative}"
        )
    return values


def _cut(name: str, batch: Any, num_micros: int) -> list[Any]:
    """The micro-batches of a whole batch: views of its tensors, cut along dim 0 as `torch.tensor_split` does,
    so that the first ones are longer by one if they cannot all be equal; None stays None."""
    tensors, structure = flattened(batch, f"{name}: the parts of a whole batch")
    lengths = [tensor.size(0) if tensor.dim() else 0 for tensor in tensors]
    if len(set(lengths)) > 1 or min(lengths, default=num_micros) < num_micros:
        raise ValueError(
            f"{name}: a whole batch is cut along dim 0 into {num_micros} micro-batches, but its tensors have "
            f"lengths {lengths} there; they must be equal and at least {num_micros}; pass what must not be "
            "split in kwargs"
        )
    pieces = [split_apart(tensor, num_micros) for tensor in tensors]
    if isinstance(batch, torch.Tensor):
        return list(pieces[0])
    return [rebuilt(tuple(piece[micro] for piece in pieces), structure) for micro in range(num_micros)]


def split_apart(tensor: torch.Tensor, num: int, dim: int = 0) -> list[torch.Tensor]:
    """`torch.tensor_split`, but a stage may write into its piece: unlike with views of one tensor, that does
    not count as a write into the others."""
    return [piece if piece.requires_grad else piece.data for piece in tensor.tensor_split(num, dim)]


def keywords_by_stage(kwargs: Any, plan: Plan, stages: Iterable[int]) -> dict[int, Sequence[Mapping]]:
    """The keywords of this rank's `stages` for each micro-batch: from one dict for all or a list of dicts,
    for all stages or by stage, those of other ranks included. Raises ValueError or TypeError."""
    if kwargs is None:
        return {}
    if not _is_by_stage(kwargs):
        if (
            not isinstance(kwargs, Mapping)
            and sum(not {*chain}.isdisjoint(stages) for chain in plan.chains) > 1
        ):
            raise ValueError(
                "kwargs: this rank has stages of several chains, whose micro-batches are not the same; give "
                "a mapping from stage to a list"
            )
        kwargs = dict.fromkeys(stages, kwargs)
    if unknown := set(kwargs) - set(range(plan.num_stages)):
        raise ValueError(f"kwargs must be given for stages 0..{plan.num_stages - 1}, got {unknown}")
    return {
        stage: _keywords(f"kwargs of stage {stage}", kwargs[stage], plan.micros_per_chain)
        for stage in stages
        if kwargs.get(stage) is not None
    }


def _keywords(name: str, values: Any, num_micros: int) -> Sequence[Mapping]:
    if isinstance(values, Mapping):
        values = [values] * num_micros
    values = _as_many(name, values, num_micros, "dicts", ", or one dict for all")
    for micro, keywords in enumerate(values):
        if not isinstance(keywords, Mapping) or not all(isinstance(key, str) for key in keywords):
            raise TypeError(
                f"{name}: entry {micro} must be a dict from keyword to value, got {keywords!r:.100}"
            )
    return values


def one_or_many(by_stage: dict[int, list]) -> Any:
    if len(by_stage) == 1:
        return next(iter(by_stage.values()))
    return by_stage or None


def ranks_by_pipeline_rank(
    plan: Plan, comm: Communicator, topology: PipelineTopology | None, rank_mapping: Sequence[int] | None
) -> tuple[tuple[int, ...], ...]:
    """The ranks of the communicator that form each pipeline rank."""
    if topology is None:
        if comm.size != plan.P:
            raise ValueError(
                f"{plan.name} is a plan for {plan.P} ranks, the communicator has {comm.size}; "
                "make the plan for as many, or give a group of that size"
            )
        return tuple((peer,) for peer in pipeline_order(rank_mapping, comm.size))
    if not isinstance(topology, PipelineTopology):
        raise TypeError(f"topology must be a PipelineTopology, not {type(topology).__name__}")
    if rank_mapping is not None:
        raise ValueError("rank_mapping must be None with a topology, whose stages are in order already")
    if topology.num_stages != plan.P:
        raise ValueError(
            f"{plan.name} is a plan for {plan.P} ranks, the topology has {topology.num_stages} stages; "
            "make the plan for as many"
        )
    return topology.stages


def pipeline_order(rank_mapping: Sequence[int] | None, size: int) -> list[int]:
    """The group rank of each pipeline rank, from the pipeline rank of each group rank (None: the same)."""
    if rank_mapping is None:
        return list(range(size))
    mapping = list(rank_mapping)
    if sorted(mapping) != list(range(size)):
        raise ValueError(
            f"rank_mapping must name each pipeline rank 0..{size - 1} once, one for each rank of the group, "
            f"got {mapping}"
        )
    return [mapping.index(rank) for rank in range(size)]


def stages_by_id(plan: Plan, rank: int, stages: Any) -> dict[int, Stage]:
    owned = plan.stages_of(rank)
    if isinstance(stages, Mapping):
        if set(stages) != set(owned):
            raise ValueError(f"rank {rank} owns the stages {list(owned)}, stages has {sorted(stages)}")
        stages = [stages[stage] for stage in owned]
    elif isinstance(stages, torch.nn.ModuleList) or (
        isinstance(stages, Sequence) and not isinstance(stages, str)
    ):
        stages = list(stages)
    else:
        raise TypeError(f"stages must be a mapping or a list of modules, not {type(stages).__name__}")
    if len(stages) != len(owned):
        raise ValueError(f"rank {rank} owns the stages {list(owned)}, stages has {len(stages)} entries")
    for stage, module in zip(owned, stages, strict=True):
        if not callable(module):
            raise TypeError(f"stage {stage} must be a module or a callable, not {type(module).__name__}")
    return dict(zip(owned, stages, strict=True))


def loss_factor(loss_scale: Any, plan: Plan) -> float:
    if loss_scale in ("sum", "mean"):
        return 1.0 if loss_scale == "sum" else 1.0 / plan.M
    if isinstance(loss_scale, bool) or not isinstance(loss_scale, (int, float)):
        raise ValueError(f'loss_scale must be "sum", "mean" or a number, not {loss_scale!r}')
    return float(loss_scale)


def warn_of_idle(plan: Plan) -> None:
    """Warns if there are too few micro-batches to keep all stages of a chain busy."""
    if plan.micros_per_chain < max(map(len, plan.chains)):
        warnings.warn(
            f"{plan.name}: {plan.micros_per_chain} micro-batches are fewer than the stages of a chain: "
            "ranks will be idle most of the time",
            stacklevel=3,
        )


def warn_of_unequal(micro_batches: Mapping[int, Sequence[Any]]) -> None:
    """Warns if the micro-batches of a stage have different numbers of rows."""
    for micros in micro_batches.values():
        num_rows = list(dict.fromkeys(map(_num_rows, micros)))
        if len(num_rows) > 1:
            warnings.warn(
                f'loss_scale="mean" weighs micro-batches alike, whose targets have {num_rows} rows; if '
                "loss_fn takes the mean over them, add up instead and divide by the rows of the whole batch: "
                'reduction="sum" and loss_scale=1 / rows',
                stacklevel=4,
            )


def _num_rows(value: Any) -> int | None:
    if not isinstance(value, torch.Tensor):
        value = next((leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)), None)
    return value.size(0) if value is not None and value.dim() else None


def device_of(stages: Any) -> torch.device | None:
    """The device of the first parameter; None if there is none, or if `stages` is of a wrong type."""
    values = stages.values() if isinstance(stages, Mapping) else stages
    if isinstance(values, Iterable):
        for module in values:
            if isinstance(module, torch.nn.Module):
                for parameter in module.parameters():
                    return parameter.device
    return None


def require_equal_settings(comm: Communicator, settings: Mapping[str, tuple]) -> None:
    """Compares each setting between all ranks. Errors show the first element of a value."""
    digests = [hashlib.sha256(repr(value).encode()).digest()[:7] for value in settings.values()]
    mine = torch.tensor([int.from_bytes(digest, "big") for digest in digests], device=comm.device)
    everybody = of_all_ranks(comm, mine)
    for peer, other in enumerate(everybody):
        if other.equal(everybody[0]):
            continue
        place = int((other != everybody[0]).nonzero()[0])
        name = list(settings)[place]
        shown = repr(settings[name][0]) if name != "plan" else settings[name][0]
        text = shown.encode()[:_SHOWN_BYTES].ljust(_SHOWN_BYTES)
        texts = of_all_ranks(comm, torch.tensor(list(text), dtype=torch.uint8, device=comm.device))
        theirs, first = (bytes(texts[rank].tolist()).decode(errors="replace").strip() for rank in (peer, 0))
        raise PipeCommMismatch(
            f"rank {comm.rank}: Executor: rank {peer} has another {name} than rank 0: {theirs}, and rank 0 "
            f"has {first}{' with other actions' if theirs == first else ''}; give all ranks the same",
            op="Executor",
            rank=comm.rank,
            peer=peer,
            origin_rank=peer,
        )


def of_all_ranks(comm: Communicator, mine: torch.Tensor) -> list[torch.Tensor]:
    """This tensor of each rank, all of one shape. Collective."""
    everybody = [torch.empty_like(mine) for _ in range(comm.size)]
    comm.all_to_all([mine] * comm.size, everybody)
    return everybody
