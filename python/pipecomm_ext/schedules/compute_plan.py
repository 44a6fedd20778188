"""`ComputePlan`: who computes what in which order; the part of a `Plan` that its messages follow from.

A stage knows its owner and its successor, nothing else. Chains follow from the successors, so two opposite
chains (DualPipe), a chain folded over the ranks (interleaved, V) and one that returns to its first rank
(U-shaped) are all described alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from .actions import ACT, Compute, as_compute, parse_row
from .plan_error import PlanError

Owners = Sequence[int] | Mapping[int, int]
Neighbours = Sequence[int | None] | Mapping[int, int | None]
Rows = Iterable[str | Iterable[Any]]


class ComputePlan:
    """The topology and the compute rows of a `Plan`, which documents the fields. Immutable.

    Passes over these rows (`flow`, `ComputeRun`, `lowered_rows`) are functions of a ComputePlan.
    """

    name: str
    P: int
    M: int
    owner: tuple[int, ...]
    next_of: tuple[int | None, ...]
    prev_of: tuple[int | None, ...]
    replicas: tuple[tuple[int, ...], ...]
    compute: tuple[tuple[Compute, ...], ...]
    derived: dict[str, Any]  # results that passes keep with the plan; shared with its lowerings

    def __init__(
        self,
        name: str,
        P: int,
        M: int,
        owner: Owners,
        next_of: Neighbours | None = None,
        prev_of: Neighbours | None = None,
        replicas: Iterable[Iterable[int]] = (),
        compute: Rows = (),
    ):
        require_count("P", P)
        require_count("M", M)
        owner = per_stage("owner", owner)
        num_stages = len(owner)
        for stage, rank in enumerate(owner):
            if not _is_int(rank) or not 0 <= rank < P:
                raise PlanError(f"owner of stage {stage} is {rank!r}; expected a rank in 0..{P - 1}")
        if next_of is None:
            next_of = [*range(1, num_stages), None]
        next_of = per_stage("next_of", next_of, num_stages)
        derived_prev_of = _invert(next_of)
        if prev_of is not None and per_stage("prev_of", prev_of, num_stages) != derived_prev_of:
            raise PlanError(
                f"prev_of {tuple(prev_of)} contradicts next_of, from which follows {derived_prev_of}"
            )
        vars(self).update(
            name=str(name),
            P=P,
            M=M,
            owner=owner,
            next_of=next_of,
            prev_of=derived_prev_of,
            replicas=_read_replicas(replicas, num_stages),
            compute=read_rows("compute", compute, P, as_compute),
            derived={},
        )
        if M % len(self.chains):
            raise PlanError(f"M={M} micro-batches do not divide over {len(self.chains)} chains of stages")

    def __setattr__(self, attribute, value):
        raise AttributeError(
            f"a Plan is immutable: {attribute!r} cannot be set; use plan.replace({attribute}=...)"
        )

    def __delattr__(self, attribute):
        raise AttributeError(f"a Plan is immutable: {attribute!r} cannot be deleted")

    @property
    def num_stages(self) -> int:
        """Number of stages of all chains."""
        return len(self.owner)

    @cached_property
    def chains(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each chain from input to loss, chains in the order of their first stages."""
        chains = []
        for first, prev in enumerate(self.prev_of):
            if prev is None:
                chain = [first]
                while (following := self.next_of[chain[-1]]) is not None:
                    chain.append(following)
                chains.append(tuple(chain))
        if sum(map(len, chains)) != self.num_stages:
            ring = sorted(set(range(self.num_stages)) - {stage for chain in chains for stage in chain})
            raise PlanError(f"next_of makes a ring of stages {ring}; a chain must begin and end")
        return tuple(chains)

    @property
    def micros_per_chain(self) -> int:
        """Number of micro-batches of every chain; ids are 0 .. micros_per_chain-1 within a chain."""
        return self.M // len(self.chains)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that `rank` owns, by increasing id."""
        return tuple(stage for stage, owner in enumerate(self.owner) if owner == rank)

    def stage_before(self, stage: int) -> int:
        """The predecessor of a stage that has one."""
        prev = self.prev_of[stage]
        assert prev is not None
        return prev

    def stage_after(self, stage: int) -> int:
        """The successor of a stage that has one."""
        following = self.next_of[stage]
        assert following is not None
        return following

    def receiver_of(self, what: str, stage: int) -> int | None:
        """The rank that needs the ACT or GRAD of `stage` as a message; None if no other rank needs it."""
        consumer = (self.next_of if what == ACT else self.prev_of)[stage]
        if consumer is None or self.owner[consumer] == self.owner[stage]:
            return None
        return self.owner[consumer]


def _is_int(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def require_count(name: str, value) -> None:
    if not _is_int(value):
        raise TypeError(f"{name} must be an int, got {value!r} of type {type(value).__name__}")
    if value < 1:
        raise PlanError(f"{name} must be at least 1, got {value}")


def per_stage(name: str, values: Any, num_stages: int | None = None) -> tuple[Any, ...]:
    """A tuple indexed by stage, from a sequence or a mapping."""
    if isinstance(values, Mapping):
        if set(values) != set(range(len(values))):
            raise PlanError(f"{name} must name the stages 0..{len(values) - 1}, got {sorted(values)}")
        values = [values[stage] for stage in range(len(values))]
    elif isinstance(values, str) or not isinstance(values, Sequence):
        raise TypeError(f"{name} must be a sequence or a mapping with one entry per stage, got {values!r}")
    if num_stages is not None and len(values) != num_stages:
        raise PlanError(f"{name} has {len(values)} entries for {num_stages} stages")
    if not values:
        raise PlanError(f"{name} is empty; a plan has at least one stage")
    return tuple(values)


def _invert(next_of: Sequence[int | None]) -> tuple[int | None, ...]:
    prev_of: list[int | None] = [None] * len(next_of)
    for stage, following in enumerate(next_of):
        if following is None:
            continue
        if not _is_int(following) or not 0 <= following < len(next_of):
            raise PlanError(
                f"next_of stage {stage} is {following!r}; expected a stage in 0..{len(next_of) - 1} or None"
            )
        if prev_of[following] is not None:
            raise PlanError(f"stages {prev_of[following]} and {stage} both have stage {following} as next_of")
        prev_of[following] = stage
    return tuple(prev_of)


def _read_replicas(replicas: Iterable[Iterable[int]], num_stages: int) -> tuple[tuple[int, ...], ...]:
    groups = tuple(tuple(group) for group in replicas)
    seen: set[int] = set()
    for group in groups:
        for stage in group:
            if not _is_int(stage) or not 0 <= stage < num_stages or stage in seen:
                raise PlanError(f"replicas {groups}: {stage!r} is not a stage, or is listed twice")
            seen.add(stage)
    return groups


def read_rows(name: str, rows: Rows, P: int, read_item: Callable[[Any], Any]) -> tuple[tuple[Any, ...], ...]:
    rows = tuple(rows)
    if len(rows) != P:
        raise PlanError(f"{name} has {len(rows)} rows for P={P} ranks; expected one row per rank")
    result = []
    for rank, row in enumerate(rows):
        values = parse_row(row) if isinstance(row, str) else row
        items = []
        for position, value in enumerate(values):
            try:
                items.append(read_item(value))
            except PlanError as error:
                text = f"{name} of rank {rank}, position {position}: {error}"
                raise PlanError(text, rank=rank, position=position, action=value) from None
        result.append(tuple(items))
    return tuple(result)
