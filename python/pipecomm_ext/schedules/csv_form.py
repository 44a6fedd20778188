"""The CSV form of a plan: one row per fact, then one row per rank.

    plan,<name>,<P>,<M>
    owner,<rank of stage 0>,<rank of stage 1>,...
    next_of,<successor of stage 0>,...            an empty cell ends a chain
    replicas,0&4,1&5,...                          only if there are any
    compute,<rank>,F0.0,(F0.1&B7.0),...           one row per rank
    program,<rank>,F0.0,[A0.0>1 G1.0<1],...       one row per rank, only if the plan was lowered

The reader is strict: each cell must match as a whole, each row must be there once. It also reads the form of
torch.distributed.pipelining (`torch_csv`).
"""

from __future__ import annotations

import csv
import io
import os
from typing import Any

from .actions import Item, parse_item
from .compute_plan import ComputePlan
from .plan_error import PlanError
from .torch_csv import is_torch_form, read_torch_rows


def csv_text(plan: ComputePlan, program: tuple[tuple[Item, ...], ...] | None) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["plan", plan.name, plan.P, plan.M])
    writer.writerow(["owner", *plan.owner])
    writer.writerow(["next_of", *("" if stage is None else stage for stage in plan.next_of)])
    if plan.replicas:
        writer.writerow(["replicas", *("&".join(map(str, group)) for group in plan.replicas)])
    for rank, row in enumerate(plan.compute):
        writer.writerow(["compute", rank, *map(str, row)])
    for rank, items in enumerate(program or ()):
        writer.writerow(["program", rank, *map(str, items)])
    return text.getvalue()


def read_csv(source: str | os.PathLike[str]) -> dict[str, Any]:
    """The arguments of `Plan` that a CSV text, or the file at a path, holds. Raises PlanError."""
    if isinstance(source, str) and "\n" in source:
        text = source
    elif isinstance(source, (str, os.PathLike)):
        with open(source, newline="", encoding="utf-8") as file:
            text = file.read()
    else:
        raise TypeError(f"expected CSV text or a path, got {source!r} of type {type(source).__name__}")
    lines = list(csv.reader(io.StringIO(text)))
    return read_torch_rows(lines) if is_torch_form(lines) else _read_rows(lines)


def _read_rows(lines: list[list[str]]) -> dict[str, Any]:
    facts: dict[str, tuple[int, list[str]]] = {}  # line and cells
    rows: dict[str, dict[int, tuple[Item, ...]]] = {"compute": {}, "program": {}}
    for line, cells in enumerate(lines, start=1):
        if not cells:
            continue
        key, values = cells[0], cells[1:]
        if key in rows:
            rank = _integer(values[0] if values else "", line, "rank")
            if rank in rows[key]:
                raise PlanError(f"line {line}: a second {key} row for rank {rank}", rank=rank)
            rows[key][rank] = tuple(
                _item(cell, rank, line, idx) for idx, cell in enumerate(values[1:], start=3)
            )
        elif key not in ("plan", "owner", "next_of", "replicas") or key in facts:
            raise PlanError(
                f"line {line}: {key!r} is unknown or appears twice; expected plan, owner, next_of, "
                "replicas, compute, program"
            )
        else:
            facts[key] = line, values
    for key in ("plan", "owner", "next_of"):
        if key not in facts:
            raise PlanError(f"the CSV has no {key!r} row")
    line, cells = facts["plan"]
    if len(cells) != 3:
        raise PlanError(f"line {line}: expected plan,<name>,<P>,<M>, got {cells}")
    name, P = cells[0], _integer(cells[1], line, "P")
    M = _integer(cells[2], line, "M")
    line, cells = facts["owner"]
    owner = [_integer(cell, line, "owner") for cell in cells]
    line, cells = facts["next_of"]
    next_of = [None if cell == "" else _integer(cell, line, "next_of") for cell in cells]
    line, cells = facts.get("replicas", (0, []))
    replicas = [[_integer(stage, line, "replicas") for stage in cell.split("&")] for cell in cells]
    return {
        "name": name,
        "P": P,
        "M": M,
        "owner": owner,
        "next_of": next_of,
        "replicas": replicas,
        "compute": _by_rank("compute", rows, P),
        "program": _by_rank("program", rows, P) if rows["program"] else None,
    }


def _by_rank(key: str, rows: dict[str, dict[int, tuple[Item, ...]]], P: int) -> list[tuple[Item, ...]]:
    if set(rows[key]) != set(range(P)):
        raise PlanError(f"{key} rows for ranks {sorted(rows[key])}; expected one for each of 0..{P - 1}")
    return [rows[key][rank] for rank in range(P)]


def _integer(cell: str, line: int, what: str) -> int:
    if not (cell.isascii() and cell.isdigit()):
        raise PlanError(f"line {line}: {what} must be a non-negative integer, got {cell!r}")
    return int(cell)


def _item(cell: str, rank: int, line: int, column: int) -> Item:
    try:
        return parse_item(cell)
    except PlanError as error:
        raise PlanError(f"line {line}, cell {column}: {error}", rank=rank, position=column - 3) from None
