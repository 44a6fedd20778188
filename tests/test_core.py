"""Checks that several modules share, and what a new Python has of the package."""

from __future__ import annotations

import math
import subprocess
import sys
from datetime import timedelta

import pytest
import torch

from pipecomm_ext import _C, cal_split_sizes
from pipecomm_ext.core.checked import whole_number
from pipecomm_ext.pipeline_parallel import PipelineParallelLayerLayout
from pipecomm_ext.schedules import dualpipe


class Index:
    def __index__(self) -> int:
        return 3


@pytest.mark.parametrize("value", [3, Index(), torch.tensor(3), torch.tensor([3], dtype=torch.uint8)[0]])
def test_whole_numbers_are_taken_in_every_form(value):
    assert whole_number(value, "x") == 3


@pytest.mark.parametrize("value", [True, 3.0, "3", None, torch.tensor(True), torch.tensor(3.0), [3]])
def test_what_is_not_a_whole_number_is_refused_by_name_bools_too(value):
    kind = type(value).__name__
    with pytest.raises(TypeError, match=rf"^the length must be an int, not {kind}$"):
        whole_number(value, "the length")


@pytest.mark.parametrize(
    "call", [lambda: cal_split_sizes(5, True), lambda: PipelineParallelLayerLayout("EL", True)]
)
def test_bools_are_no_sizes(call):
    with pytest.raises(TypeError, match="must be an int, not bool"):
        call()


def test_timeouts_in_seconds():
    given = (2, 2.5, timedelta(minutes=1), math.inf)
    assert [_C.timeout_seconds(timeout) for timeout in given] == [2, 2.5, 60, None]
    for wrong in (0, -1, math.nan, 1e9, timedelta(0)):
        with pytest.raises(ValueError, match="timeout must be more than 0 and at most 10 years"):
            _C.timeout_seconds(wrong)
    for wrong in (True, "5"):
        with pytest.raises(TypeError, match="timeout must be a number of seconds, a timedelta or None"):
            _C.timeout_seconds(wrong)


def test_a_new_python_has_the_public_modules_as_attributes_and_the_same_hashes():
    program = """
import sys, pipecomm_ext
assert "pipecomm_ext.schedules" not in sys.modules, "loaded before use"
for name in ("distributed", "integrations", "parallel_state", "pipeline_parallel", "schedules"):
    assert getattr(pipecomm_ext, name) is sys.modules[f"pipecomm_ext.{name}"]
assert not hasattr(pipecomm_ext, "no_such_module")
assert "transformers" not in sys.modules, "loaded before use"
plan = pipecomm_ext.schedules.dualpipe(4, 8)
print(hash(plan), plan.digest)
"""
    command = [sys.executable, "-c", program]
    printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=200).stdout
    plan = dualpipe(4, 8)
    assert printed.split() == [str(hash(plan)), plan.digest]
