"""Faults in every operation, see fault_cases.py. The suite plays a few for each; PIPECOMM_TEST_FAULTS=all, or
`make faults`, plays every combination.
"""

from __future__ import annotations

import os

import pytest
from fault_cases import all_cases, chosen_cases, run_case

CASES = all_cases() if os.environ.get("PIPECOMM_TEST_FAULTS") == "all" else chosen_cases()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_fault(ranks, case):
    run_case(ranks, case)
