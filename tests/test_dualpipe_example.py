"""The DualPipe example trains both variants and finds them equal to the unsplit model."""

from __future__ import annotations

import re
import sys

import pytest
from scripts import REPOSITORY, run_on_ranks, run_script

sys.path.insert(0, str(REPOSITORY / "examples"))
import dualpipe_train  # noqa: E402

ARGUMENTS = ["--ranks", 2, "--steps", 4, "--seq-len", 8]


def assert_trained(output: str, name: str) -> None:
    assert f"pipeline   {name}, 2 ranks, 6 chunks" in output, output
    assert re.search(r"^verify +equal to the unsplit model in 4 steps", output, re.MULTILINE), output
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+) nats", output)]
    assert len(losses) == 4 and losses[-1] < losses[0], output
    assert "Warning" not in output and "Traceback" not in output, output


@pytest.mark.slow
def test_the_command_line_trains():
    exit_code, output = run_script("examples/dualpipe_train.py", *ARGUMENTS)
    assert exit_code == 0, output
    assert_trained(output, "DualPipe: 2 stages")


def test_the_folded_variant_trains_as_the_unsplit_model(ranks):
    exit_code, output = run_on_ranks(ranks, 2, "dualpipe_train", *ARGUMENTS, "--v")
    assert exit_code == 0, output
    assert_trained(output, "DualPipeV: 4 stages")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "--steps must be positive, got 0"),
        (["--hidden", "40"], "--hidden 40 is not a multiple of 32"),
    ],
)
def test_bad_arguments_are_explained(capsys, arguments, message):
    with pytest.raises(SystemExit) as ended:
        dualpipe_train.parse_arguments(arguments)
    assert ended.value.code == 2 and message in capsys.readouterr().err
