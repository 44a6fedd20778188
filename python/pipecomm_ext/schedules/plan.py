"""`Plan`: a pipeline schedule as frozen data.

A stage knows its owner and its successor, nothing else. Chains follow from the successors, so two opposite
chains (DualPipe), a chain folded over the ranks (interleaved, V) or one that comes home (U-shaped) are all
the same thing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from .actions import ACT, Action, Compute, Fused, Item, PlanError, actions_in, as_compute, as_item, parse_row

if TYPE_CHECKING:
    from .flow import Flow


class Plan:
    """Who computes what in which order, and which messages that takes.

    name       free text
    P, M       number of ranks; number of micro-batches over all chains (each chain runs M / number of chains)
    owner      rank of each stage; stages are 0 .. S-1
    next_of    successor of each stage, None where a chain ends (a loss stage); default: one chain 0 .. S-1
    prev_of    predecessor of each stage; follows from next_of and is verified if given
    replicas   groups of stages that hold the same weights
    compute    one row per rank: actions, fused slots, or their texts; a whole row may be one text
    program    one row per rank: the compute row with groups of sends and receives; what really runs. If not
               given, it is the lowering at unit costs (`lower`)

    Sequences or mappings are accepted for owner and next_of. Raises PlanError (a ValueError) where the data
    make no plan at all; whether a plan is complete and free of deadlock is told by `check`.

    Plans are immutable, hashable (the hash is the same in every process) and compare by content.
    """

    name: str
    P: int
    M: int
    owner: tuple[int, ...]
    next_of: tuple[int | None, ...]
    prev_of: tuple[int | None, ...]
    replicas: tuple[tuple[int, ...], ...]
    compute: tuple[tuple[Compute, ...], ...]

    def __init__(self, name, P, M, owner, next_of=None, prev_of=None, replicas=(), compute=(), program=None):
        _require_count("P", P)
        _require_count("M", M)
        owner = _per_stage("owner", owner)
        num_stages = len(owner)
        for stage, rank in enumerate(owner):
            if not _is_int(rank) or not 0 <= rank < P:
                raise PlanError(f"owner of stage {stage} is {rank!r}; expected a rank in 0..{P - 1}")
        if next_of is None:
            next_of = [*range(1, num_stages), None]
        next_of = _per_stage("next_of", next_of, num_stages)
        derived_prev_of = _invert(next_of)
        if prev_of is not None and _per_stage("prev_of", prev_of, num_stages) != derived_prev_of:
            raise PlanError(
                f"prev_of {tuple(prev_of)} contradicts next_of, from which follows {derived_prev_of}"
            )
        self._set("name", str(name))
        self._set("P", P)
        self._set("M", M)
        self._set("owner", owner)
        self._set("next_of", next_of)
        self._set("prev_of", derived_prev_of)
        self._set("replicas", _read_replicas(replicas, num_stages))
        self._set("compute", _read_rows("compute", compute, P, as_compute))
        self._set("_program", None if program is None else _read_rows("program", program, P, as_item))
        if M % len(self.chains):
            raise PlanError(f"M={M} micro-batches do not divide over {len(self.chains)} chains of stages")

    def _set(self, attribute, value):
        object.__setattr__(self, attribute, value)

    def __setattr__(self, attribute, value):
        raise AttributeError(
            f"a Plan is immutable: {attribute!r} cannot be set; use plan.replace({attribute}=...)"
        )

    def __delattr__(self, attribute):
        raise AttributeError(f"a Plan is immutable: {attribute!r} cannot be deleted")

    @property
    def num_stages(self) -> int:
        return len(self.owner)

    @cached_property
    def chains(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each chain from input to loss, chains in the order of their first stages."""
        chains = []
        for first, prev in enumerate(self.prev_of):
            if prev is None:
                chain = [first]
                while self.next_of[chain[-1]] is not None:
                    chain.append(self.next_of[chain[-1]])
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

    def receiver_of(self, what: str, stage: int) -> int | None:
        """The rank that needs the ACT or GRAD of `stage` as a message; None if it stays on its rank or
        nobody does."""
        consumer = (self.next_of if what == ACT else self.prev_of)[stage]
        if consumer is None or self.owner[consumer] == self.owner[stage]:
            return None
        return self.owner[consumer]

    @cached_property
    def flow(self) -> Flow:
        """The data flow of the compute rows. Raises PlanError if they are not complete."""
        from .flow import Flow

        return Flow(self)

    @property
    def has_own_program(self) -> bool:
        """True if the program was given (or lowered with `lower`), not left to the default."""
        return self._program is not None

    @cached_property
    def program(self) -> tuple[tuple[Item, ...], ...]:
        """What each rank runs: its compute row with groups of sends and receives between. Raises PlanError if
        the compute rows deadlock."""
        if self._program is not None:
            return self._program
        from .lower import lower

        return lower(self)._program

    def with_trusted_program(self, program) -> Plan:
        """This plan with the rows that `lower` made of it: nothing to read or validate again."""
        plan = object.__new__(Plan)
        plan.__dict__.update(self.__dict__, _program=program, program=program)
        return plan

    def replace(self, **changes) -> Plan:
        """A copy with some constructor arguments changed. A new `compute` or topology drops the old
        program."""
        fields = {
            "name": self.name,
            "P": self.P,
            "M": self.M,
            "owner": self.owner,
            "next_of": self.next_of,
            "replicas": self.replicas,
            "compute": self.compute,
        }
        if set(changes) <= {"name", "replicas"}:
            fields["program"] = self._program
        return Plan(**{**fields, **changes})

    def __reduce__(self):
        return Plan, (
            self.name,
            self.P,
            self.M,
            self.owner,
            self.next_of,
            self.prev_of,
            self.replicas,
            self.compute,
            self._program,
        )

    def _key(self):
        return self.name, self.P, self.M, self.owner, self.next_of, self.replicas, self.compute

    def __eq__(self, other):
        if not isinstance(other, Plan):
            return NotImplemented
        if self is other:
            return True
        if self._key() != other._key():
            return False
        return (self._program is None and other._program is None) or self.program == other.program

    @cached_property
    def digest(self) -> str:
        """Hex digest of name, topology and compute rows; equal on all ranks that made the same plan."""
        head = repr(self._key()[:-1])
        return hashlib.sha256(f"{head}\n{self}".encode()).hexdigest()

    def __hash__(self):
        return int(self.digest[:15], 16)

    def __str__(self) -> str:
        """One line per rank: its compute row."""
        return "\n".join(row_text(row) for row in self.compute)

    def __repr__(self) -> str:
        return f"<Plan {self.name} P={self.P} M={self.M} stages={self.num_stages} digest={self.digest[:8]}>"

    def to_csv(self, path=None) -> str:
        """The whole plan as CSV text, also written to `path` if given."""
        from .csv_form import write_csv

        return write_csv(self, path)

    @classmethod
    def from_csv(cls, source) -> Plan:
        """Reads what `to_csv` wrote: the text itself (it has line ends), or the path of a file. Strict:
        PlanError names line and cell."""
        from .csv_form import read_csv

        return read_csv(source)

    @classmethod
    def from_text(cls, text: str, *, name="custom", next_of=None, replicas=()) -> Plan:
        """A plan from its rows of text, one line per rank as `str(plan)` prints them.

        Owners and M follow from where the actions stand; chains from `next_of` (default: one chain).
        """
        rows = [parse_row(line) for line in text.strip().splitlines()]
        owner: dict[int, int] = {}
        last_micro = -1
        for rank, row in enumerate(rows):
            for value in row:
                if type(value) not in (Action, Fused):
                    raise PlanError(f"{value} in row {rank}: a text of rows holds actions only", rank=rank)
                for action in actions_in(value):
                    owner.setdefault(action.stage, rank)
                    last_micro = max(last_micro, action.micro)
        if last_micro < 0:
            raise PlanError("the text holds no action")
        following = next_of if next_of is not None else [*range(1, len(owner)), None]
        num_chains = sum(1 for stage in _per_stage("next_of", following) if stage is None)
        return cls(name, len(rows), (last_micro + 1) * num_chains, owner, next_of, None, replicas, rows)


def row_text(row: Iterable[Item]) -> str:
    return " ".join(map(str, row))


def merge_split_backward(plan: Plan, stages: Iterable[int] | None = None) -> Plan:
    """The plan for stages that cannot split their backward (default: all): I becomes B, W goes."""
    merged = set(range(plan.num_stages) if stages is None else stages)

    def rewrite(row):
        for item in row:
            if type(item) is Action and item.stage in merged and item.kind in "IW":
                if item.kind == "I":
                    yield Action("B", item.stage, item.micro)
            else:
                yield item

    return plan.replace(compute=[tuple(rewrite(row)) for row in plan.compute])


def _is_int(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _require_count(name: str, value) -> None:
    if not _is_int(value):
        raise TypeError(f"{name} must be an int, got {value!r} of type {type(value).__name__}")
    if value < 1:
        raise PlanError(f"{name} must be at least 1, got {value}")


def _per_stage(name: str, values, num_stages: int | None = None) -> tuple:
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


def _invert(next_of) -> tuple[int | None, ...]:
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


def _read_replicas(replicas, num_stages: int) -> tuple[tuple[int, ...], ...]:
    groups = tuple(tuple(group) for group in replicas)
    seen: set[int] = set()
    for group in groups:
        for stage in group:
            if not _is_int(stage) or not 0 <= stage < num_stages or stage in seen:
                raise PlanError(f"replicas {groups}: {stage!r} is not a stage, or stands there twice")
            seen.add(stage)
    return groups


def _read_rows(name: str, rows, P: int, read) -> tuple[tuple, ...]:
    rows = tuple(rows)
    if len(rows) != P:
        raise PlanError(f"{name} has {len(rows)} rows for P={P} ranks; expected one row per rank")
    result = []
    for rank, row in enumerate(rows):
        values = parse_row(row) if isinstance(row, str) else row
        items = []
        for position, value in enumerate(values):
            try:
                items.append(read(value))
            except PlanError as error:
                raise PlanError(
                    f"{name} of rank {rank}, position {position}: {error}",
                    rank=rank,
                    position=position,
                    action=value,
                ) from None
        result.append(tuple(items))
    return tuple(result)
