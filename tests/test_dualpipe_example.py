"""The DualPipe example trains both variants and finds them equal to the unsplit model."""

from __future__ import annotations

import re
import sys

import pytest
from scripts import REPOSITORY, run_script

sys.path.insert(0, str(REPOSITORY / "examples"))
import dualpipe_train  # noqa: E402


@pytest.mark.parametrize(("options", "name"), [([], "DualPipe: 2 stages"), (["--v"], "DualPipeV: 4 stages")])
def test_it_trains_as_the_unsplit_model(tmp_path, options, name):
    exit_code, output = run_script(
        "examples/dualpipe_train.py", "--ranks", 2, "--steps", 4, "--seq-len", 8, *options, scratch=tmp_path
    )
    assert exit_code == 0, output
    assert f"pipeline   {name}, 2 ranks, 6 chunks" in output, output
    assert re.search(r"^verify +equal to the unsplit model in 4 steps", output, re.MULTILINE), output
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+) nats", output)]
    assert len(losses) == 4 and losses[-1] < losses[0], output
    assert "Warning" not in output and "Traceback" not in output, output


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
