"""PyTorch's own tests of torch.distributed pass with the backend "pipecomm" as they do with gloo."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from pinned import needs

needs("torch")

MIN_PASSED = {False: 100, True: 12}  # of 112 and 12 with torch 2.14.1: a suite that skips all is no proof


@pytest.mark.parametrize("is_all_to_all", [False, True], ids=["all but all-to-alls", "all-to-alls"])
def test_what_gloo_passes(tmp_path, is_all_to_all):
    script = Path(__file__).with_name("torch_suite.py")
    command = [sys.executable, str(script), str(tmp_path), *(["--all-to-all"] if is_all_to_all else [])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith('["test_')]  # ranks print, too
    outcomes = {name: rest for name, *rest in map(json.loads, lines)}
    failed = {name: text for name, (outcome, text) in outcomes.items() if outcome == "failed"}
    assert not failed, "\n\n".join(f"{name}: {text[-800:]}" for name, text in failed.items())
    num_passed = sum(outcome == "passed" for outcome, _ in outcomes.values())
    assert num_passed >= MIN_PASSED[is_all_to_all], outcomes
