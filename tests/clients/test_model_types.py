"""The sweep over all types of models, and the table of the guide that comes of it."""

from __future__ import annotations

import collections
import re

import pytest
from documents import ROOT
from pinned import needs

needs("transformers")

from model_types import Sweep, model_types  # noqa: E402

PER_CALL = 12  # types that go through one world
GUIDE = ROOT / "docs" / "transformers.md"
BEGIN, END = "<!-- model types -->\n", "<!-- end of model types -->"
# What a refusal says, as the table does.
REASONS = [
    ("carry a state", "layers that carry a state along the sequence"),
    ("cannot split layers of type", "layers that are not attention"),
    ("computes attention by itself|takes its mask as a tensor", "attention of their own"),
    ("computed its piece without", "tokens mixed by something else than attention"),
    ("does not support (.*?) \\(", "{}"),
    ("makes its mask of more", "masks of types or blocks of tokens"),
    ("takes no position_ids", "positions that cannot be given"),
    ("keys of", "attention to other tokens than the sequence's"),
    ("its decoder attends to another sequence", "encoder-decoders"),
    ("its embeddings", "embeddings of more than a token and its position"),
    ("attention_mask is", "masks that they make themselves"),
]


@pytest.fixture(scope="module")
def swept():
    """(type, kind): {case: verdict}, as the tests add it."""
    return {}


def sweep(world, types):
    models = Sweep(world)
    return [models.verdicts(*each) for each in types]


@pytest.mark.parametrize("begin", range(0, len(model_types()), PER_CALL))
def test_types_are_right_or_refused_by_name(ranks, swept, begin):
    types = model_types()[begin : begin + PER_CALL]
    found = dict(zip(types, ranks.run(2, sweep, types, deadline=500)[0], strict=True))
    swept.update(found)
    bad = [
        (*each, case, verdict)
        for each, cases in found.items()
        for case, verdict in cases.items()
        if verdict.startswith(("wrong", "nameless"))
    ]
    assert bad == []


def reason_of(verdict: str) -> str:
    for pattern, reason in REASONS:
        if found := re.search(pattern, verdict):
            return reason.format(*found.groups())
    raise AssertionError(f"REASONS has none for: {verdict}")


def row_of(cases: dict[str, str]) -> str:
    """What the table says of a type with these verdicts."""
    plain = cases["plain"]
    if plain.startswith("not built"):
        return "not compared: no small model of it was made, or it does not run in one process"
    if plain.startswith("refused"):
        return "refused: " + reason_of(plain)
    parts = [case for case, verdict in cases.items() if verdict.startswith("refused")]
    if "generate plain" not in cases:  # as of all masked models
        parts.remove("labels")
    unknown = [case for case, verdict in cases.items() if verdict.startswith("not built")]
    told = (("refused", parts), ("not compared", unknown))
    return "right" + "".join(f", but {what}: {', '.join(cases)}" for what, cases in told if cases)


def outcome_of(row: str) -> str:
    return re.split("[,:]", row)[0]


def table_of(swept: dict[tuple[str, str], dict[str, str]]) -> str:
    rows: dict[str, dict[str, list[str]]] = {}
    for (name, kind), cases in sorted(swept.items()):
        rows.setdefault(row_of(cases), {}).setdefault(kind, []).append(name)
    order = ["right", "refused", "not compared"]
    counts = {kind: collections.Counter() for kind in ("causal", "masked")}
    for row, kinds in rows.items():
        for kind, names in kinds.items():
            counts[kind][outcome_of(row)] += len(names)
    totals = (
        f"{of_kind.total()} {kind} types: " + ", ".join(f"{of_kind[outcome]} {outcome}" for outcome in order)
        for kind, of_kind in counts.items()
    )
    lines = ["; ".join(totals) + ".", "", "| | causal | masked |", "|---|---|---|"]
    for row, kinds in sorted(rows.items(), key=lambda item: (order.index(outcome_of(item[0])), item[0])):
        lines.append(
            f"| {row} | " + " | ".join(" ".join(kinds.get(k, [])) for k in ("causal", "masked")) + " |"
        )
    return "\n".join(lines) + "\n"


def test_the_table_of_the_guide(swept):
    if len(swept) < len(model_types()):
        pytest.skip("all types must be in the same run")
    text = GUIDE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    table = rest.partition(END)[0]
    assert table == table_of(swept), f"put this into {GUIDE}:\n{table_of(swept)}"
