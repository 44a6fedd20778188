"""`Plan`: a pipeline schedule as frozen data.

A Plan is a `ComputePlan` (topology and compute rows) plus its program: the same rows with sends and receives.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from functools import cached_property
from typing import Any

from .actions import Action, Group, Item, actions_in, as_item, parse_row
from .compute_plan import ComputePlan, Neighbours, Owners, Rows, per_stage, read_rows
from .costs import UNIT_COSTS, Costs
from .csv_form import csv_text, read_csv
from .gc_pause import gc_paused
from .lowering import MAX_GROUP_OPS, lowered_rows
from .plan_error import PlanError, row_text
from .torch_csv import torch_csv_text

_CONTENT = ("name", "P", "M", "owner", "next_of", "replicas", "compute")


class Plan(ComputePlan):
    """Who computes what in which order, and the messages that this takes.

    Args:
        name: free text.
        P, M: number of ranks; number of micro-batches over all chains (each runs M / number of chains).
        owner: rank of each stage; stages are 0 .. S-1. A sequence or a mapping.
        next_of: successor of each stage, None where a chain ends (a loss stage), in the same forms; default:
            one chain 0 .. S-1.
        prev_of: predecessor of each stage; follows from next_of and is verified if given.
        replicas: groups of stages that hold the same weights.
        compute: one row per rank: actions, fused slots, or their texts; a whole row may be one text.
        program: one row per rank: the compute row with groups of sends and receives, as the rank runs it; if
            not given, the lowering at unit costs (`lower`).

    The arguments are attributes of the plan. Plans are immutable, hashable (the hash is the same in every
    process) and compare by content.

    Raises:
        PlanError: (a ValueError) the data do not form a plan at all. `check` proves that a plan is complete
            and free of deadlock.

    Example:
        ```python
        plan = get_plan("gpipe", P=2, M=4)
        plan.to_csv("my_plan.csv")  # a row for each rank, to edit by hand
        assert Plan.from_csv("my_plan.csv") == plan
        ```
    """

    _program: tuple[tuple[Item, ...], ...] | None

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
        program: Rows | None = None,
    ):
        super().__init__(name, P, M, owner, next_of, prev_of, replicas, compute)
        vars(self)["_program"] = None if program is None else read_rows("program", program, P, as_item)

    @property
    def has_own_program(self) -> bool:
        """True if the program was given (or lowered with `lower`), not left to the default."""
        return self._program is not None

    @cached_property
    def program(self) -> tuple[tuple[Item, ...], ...]:
        """The rows that the ranks run: compute rows with groups of sends and receives in between.

        Raises PlanError if the compute rows are incomplete or deadlock.
        """
        return lower(self).program if self._program is None else self._program

    def replace(self, **changes: Any) -> Plan:
        """A copy with some constructor arguments changed; a new `compute` or topology drops the program."""
        fields: dict[str, Any] = dict(zip(_CONTENT, self._key(), strict=True))
        if set(changes) <= {"name", "replicas"}:
            fields["program"] = self._program
        return Plan(**{**fields, **changes})

    def __reduce__(self) -> tuple[type[Plan], tuple[Any, ...]]:
        topology = self.owner, self.next_of, self.prev_of, self.replicas
        return Plan, (self.name, self.P, self.M, *topology, self.compute, self._program)

    def _key(self) -> tuple[Any, ...]:
        return tuple(getattr(self, field) for field in _CONTENT)

    def __eq__(self, other: object) -> bool:
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

    def __hash__(self) -> int:
        return int(self.digest[:15], 16)

    def __str__(self) -> str:
        """One line per rank: its compute row."""
        return "\n".join(row_text(row) for row in self.compute)

    def __repr__(self) -> str:
        return f"<Plan {self.name} P={self.P} M={self.M} stages={self.num_stages} digest={self.digest[:8]}>"

    def to_csv(self, path: str | os.PathLike[str] | None = None, format: str = "pipecomm") -> str:
        """The plan as CSV text, also written to `path` if given: the whole plan, or with format="torch" its
        compute rows as `_PipelineScheduleRuntime._load_csv` of torch.distributed.pipelining reads them.

        Raises PlanError if torch's form cannot describe it: there are several chains.
        """
        if format not in ("pipecomm", "torch"):
            raise ValueError(f'format must be "pipecomm" or "torch", not {format!r}')
        text = csv_text(self, self._program) if format == "pipecomm" else torch_csv_text(self)
        if path is not None:
            with open(path, "w", newline="", encoding="utf-8") as file:
                file.write(text)
        return text

    @classmethod
    def from_csv(cls, source: str | os.PathLike[str]) -> Plan:
        """Reads the output of `to_csv`: the text itself (it has line ends), or the path of a file.

        It recognises the form. Plans in torch's form are named "torch"; idle cells, messages and FSDP actions
        are left out. Strict: PlanError names line and cell.
        """
        return cls(**read_csv(source))

    @classmethod
    def from_text(
        cls,
        text: str,
        *,
        name: str = "custom",
        next_of: Neighbours | None = None,
        replicas: Iterable[Iterable[int]] = (),
    ) -> Plan:
        """A plan from its rows of text, one line per rank as `str(plan)` prints them.

        Owners and M follow from where the actions stand; chains from `next_of` (default: one chain).
        """
        rows = [parse_row(line) for line in text.strip().splitlines()]
        owner: dict[int, int] = {}
        last_micro = -1
        for rank, row in enumerate(rows):
            for value in row:
                if type(value) is Group:
                    raise PlanError(f"{value} in row {rank}: a text of rows holds actions only", rank=rank)
                for action in actions_in(value):
                    owner.setdefault(action.stage, rank)
                    last_micro = max(last_micro, action.micro)
        if last_micro < 0:
            raise PlanError("the text holds no action")
        following = next_of if next_of is not None else [*range(1, len(owner)), None]
        num_chains = sum(1 for stage in per_stage("next_of", following) if stage is None)
        return cls(name, len(rows), (last_micro + 1) * num_chains, owner, next_of, None, replicas, rows)


@gc_paused()
def lower(plan: Plan, costs: Costs = UNIT_COSTS, *, max_group_ops: int = MAX_GROUP_OPS) -> Plan:
    """The plan with its program, ordered by the times that `costs` predict.

    The program is correct whatever the real durations; good estimates make it fast. Raises PlanError if the
    compute rows are incomplete or deadlock.
    """
    program = lowered_rows(plan, costs, max_group_ops)
    lowered = object.__new__(Plan)  # the fields are valid already: nothing to read again
    lowered.__dict__.update(plan.__dict__, _program=program, program=program)
    return lowered


def merge_split_backward(plan: Plan, stages: Iterable[int] | None = None) -> Plan:
    """The plan for stages that cannot split their backward (default: all): I becomes B, W is dropped."""
    merged = set(range(plan.num_stages) if stages is None else stages)

    def rewrite(row):
        for item in row:
            if type(item) is Action and item.stage in merged and item.kind in "IW":
                if item.kind == "I":
                    yield Action("B", item.stage, item.micro)
            else:
                yield item

    return plan.replace(compute=[tuple(rewrite(row)) for row in plan.compute])
