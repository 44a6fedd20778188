"""The example trains a model of transformers over split sequences, equals the unsplit one, and says so."""

from __future__ import annotations

import argparse
import importlib.util
import re
import sys

import pytest
import torch
from scripts import REPOSITORY, run_on_ranks, run_script

if importlib.util.find_spec("transformers") is None:
    pytest.skip("transformers is not installed", allow_module_level=True)
sys.path.insert(0, str(REPOSITORY / "examples"))
import train_transformers  # noqa: E402

TRAIN = "examples/train_transformers.py"
TINY = ["--seq-len", 41, "--batch-size", 4, "--hidden", 48, "--heads", 6, "--kv-heads", 2, "--verify"]


def assert_trained(output: str, num_steps: int) -> None:
    first, last = map(float, re.search(r"^loss +([\d.]+) -> ([\d.]+)", output, re.MULTILINE).groups())
    assert last < first - 0.2, output
    assert f"equal to the unsplit model in {num_steps} steps" in output, output
    assert re.search(r"^continued +b'import os\\nimport sys", output, re.MULTILINE), output
    assert "Warning" not in output and "Traceback" not in output, output


@pytest.mark.slow
def test_the_command_line():
    exit_code, output = run_script(TRAIN, "--ranks", 2, *TINY, "--steps", 12)
    assert exit_code == 0, output
    assert_trained(output, 12)


def test_uneven_pieces(ranks):
    exit_code, output = run_on_ranks(ranks, 4, "train_transformers", "--ranks", 4, *TINY, "--steps", 12)
    assert exit_code == 0, output
    assert "a rank holds [11, 10, 10, 10]" in output
    assert_trained(output, 12)


@pytest.mark.parametrize("worst", [1e-5, 1.0, float("nan")])
def test_the_verdict(capsys, worst):
    args = argparse.Namespace(layers=1, heads=2, kv_heads=1, batch_size=1, seq_len=9, steps=2)
    comm = argparse.Namespace(rank=0, size=2, transport="shm", transport_reason="")
    unsplit = argparse.Namespace(worst=worst)
    exit_code = train_transformers.report(args, comm, [2.0, 1.0], 1.0, torch.tensor([65]), unsplit)
    assert exit_code == (0 if worst == 1e-5 else 1)
    assert ("equal to" if worst == 1e-5 else "DIFFERS from") in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hidden", "40"], "--hidden 40 must be a multiple of twice --heads 8"),
        (["--kv-heads", "3"], "--kv-heads 3 must divide --heads 8"),
        (["--seq-len", "3"], "--seq-len 3 cannot be split over 4 ranks"),
        (["--steps", "0"], "--steps must be positive, got 0"),
    ],
)
def test_bad_arguments_are_explained(capsys, arguments, message):
    with pytest.raises(SystemExit) as ended:
        train_transformers.parse_arguments(arguments)
    assert ended.value.code == 2 and message in capsys.readouterr().err
