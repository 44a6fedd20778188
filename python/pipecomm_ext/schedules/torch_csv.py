"""The CSV form of torch.distributed.pipelining: one row per rank, one cell per action.

    0F1                    stage, kind, micro-batch; F, B, I and W are the kinds of a Plan
    (0F1;3B0)OVERLAP_F_B   a fused slot
    <empty>                the rank is idle

There is one chain, and stages are numbered along it, as they are here (V schedules included). What torch adds
when it lowers a schedule (messages such as 0SEND_F1, UNSHARD, RESHARD and REDUCE_GRAD of FSDP, and the waits
WAIT_SEND_F, WAIT_SEND_B and WAIT_REDUCE_GRAD of torch 2.15) is left out. The source of the form is
torch/distributed/pipelining/schedules.py (`_Action`, `_load_csv`) of torch 2.11 to 2.15.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from typing import Any

from .actions import Action, Compute, Fused
from .compute_plan import ComputePlan
from .plan_error import PlanError

_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")
_FUSED = re.compile(r"\(\s*(\d+F\d+)\s*;\s*(\d+B\d+)\s*\)OVERLAP_F_B")
_LOWERED = re.compile(r"\d+(?:(?:SEND|RECV|WAIT_SEND)_[FB]\d+|UNSHARD|RESHARD|(?:WAIT_)?REDUCE_GRAD)")


def is_torch_form(rows: Sequence[Sequence[str]]) -> bool:
    """Whether the first action in these cells is written as torch does it."""
    first = next((cell.strip() for cells in rows for cell in cells if cell.strip()), "")
    return first[:1].isdigit() or first[:1] == "("


def read_torch_rows(rows: Sequence[Sequence[str]]) -> dict[str, Any]:
    """The arguments of `Plan`, from cells by rank. Raises PlanError."""
    owner: dict[int, int] = {}
    compute: list[list[Compute]] = []
    num_micros = 0
    for rank, cells in enumerate(rows):
        compute.append([])
        for column, cell in enumerate(map(str.strip, cells)):
            if not cell or _LOWERED.fullmatch(cell):
                continue
            texts = fused.groups() if (fused := _FUSED.fullmatch(cell)) else (cell,)
            actions = [_action(text, rank, column) for text in texts]
            for action in actions:
                owner.setdefault(action.stage, rank)
                num_micros = max(num_micros, action.micro + 1)
            compute[-1].append(Fused(*actions) if fused else actions[0])
    return {"name": "torch", "P": len(compute), "M": num_micros, "owner": owner, "compute": compute}


def _action(text: str, rank: int, column: int) -> Action:
    match = _ACTION.fullmatch(text)
    if match is None:
        raise PlanError(
            f"line {rank + 1}, cell {column + 1}: {text!r} is not an action of torch's schedules; expected a "
            "text like '0F1' (kind F, B, I or W) or '(0F1;3B0)OVERLAP_F_B'",
            rank=rank,
            position=column,
        )
    return Action(match[2], int(match[1]), int(match[3]))


def torch_csv_text(plan: ComputePlan) -> str:
    """The compute rows in torch's form. Raises PlanError if there are several chains."""
    if len(plan.chains) != 1:
        raise PlanError(f"{plan.name} has {len(plan.chains)} chains of stages; torch's schedules have one")
    place_of = {stage: place for place, stage in enumerate(plan.chains[0])}

    def cell(item: Compute) -> str:
        if type(item) is Fused:
            return f"({cell(item.forward)};{cell(item.backward)})OVERLAP_F_B"
        return f"{place_of[item.stage]}{item.kind}{item.micro}"

    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(map(cell, row) for row in plan.compute)
    return text.getvalue()
