"""Features that users combine with a pipeline, by every entry point: the same as in one process, in float64.

A row is a script that trains a model without knowing whether it is cut: weights, buffers and the script's
results are then compared.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from combination_sides import ENTRIES, NUM_ROWS, OneProcess, Side, assert_tests_exist
from combination_table import ELSEWHERE, ROWS
from pipelines import Pipeline
from ranks import on_ranks

SLOW = {"torch.compile"}


@on_ranks(2)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in ROWS]
)
def test_as_in_one_process(world, name):
    row = ROWS[name]
    for entry, (plan, kind) in ENTRIES.items():
        outcome = row.outcome(entry)
        if outcome == "not run":
            continue
        torch.manual_seed(1)
        pipeline = Pipeline(
            plan, world.rank, lambda depth: row.layer(depth).to(row.dtype), last_rows=NUM_ROWS
        )
        convert = (lambda x, seed: (x, torch.full((len(x),), seed))) if row.seeded else (lambda x, _: x)
        pipeline.inputs = [
            [convert(x.to(row.dtype), 100 * idx) for idx, x in enumerate(micros, 1)]
            for micros in pipeline.inputs
        ]
        pipeline.targets = [[x.to(row.dtype) for x in micros] for micros in pipeline.targets]
        ours, theirs = kind(pipeline, world, row.fails), OneProcess(pipeline)
        with pytest.warns(UserWarning, match=row.warned) if row.warned else contextlib.nullcontext():
            if outcome == "refused":
                with world.breaking(), pytest.raises(Exception, match=row.refused):
                    row.script(ours)
            else:
                returned, expected = row.script(ours), row.script(theirs)
                compare(ours, theirs, returned, expected, f"{name}, {entry}", row.dtype)
        ours.close()


def assert_same(ours: Any, theirs: Any, what: str, tolerance: float) -> None:
    torch.testing.assert_close(
        ours, theirs, rtol=tolerance, atol=tolerance, msg=lambda text: f"{what}: {text}"
    )


def compare(ours: Side, theirs: Side, returned: Any, expected: Any, what: str, dtype: torch.dtype) -> None:
    tolerance = 1e-10 if dtype is torch.float64 else 1e-5
    for depth, module in ours.modules.items():
        state = theirs.modules[depth].state_dict()
        for key, value in module.state_dict().items():
            if ours.pipeline.plan.replicas and not value.is_floating_point():
                continue  # a copy's number of batches is its own
            assert_same(value, state[key], f"{what}: {key} of stage {depth}", tolerance)
    if isinstance(returned, dict):
        expected = {key: value for key, value in expected.items() if key in returned}
    assert_same(returned or [], expected or [], what, tolerance)


def test_the_tests_elsewhere_exist():
    assert_tests_exist(ELSEWHERE.values(), Path(__file__).parent)
