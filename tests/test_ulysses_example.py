"""The attention example equals the unsplit attention whatever divides what, and says so if it does not."""

from __future__ import annotations

import re
import sys

import pytest
from scripts import REPOSITORY, run_on_ranks, run_script

sys.path.insert(0, str(REPOSITORY / "examples"))
import ulysses_attention  # noqa: E402


def assert_equal(output: str) -> None:
    assert re.search(r"^verify +equal to the unsplit attention", output, re.MULTILINE), output
    assert "Warning" not in output and "Traceback" not in output, output


@pytest.mark.slow
def test_the_command_line_with_uneven_pieces():
    arguments = ["--ranks", 3, "--seq-len", 101, "--heads", 7, "--kv-heads", 2, "--head-dim", 8]
    exit_code, output = run_script("examples/ulysses_attention.py", *arguments)
    assert exit_code == 0, output
    assert_equal(output)


def test_fewer_tokens_and_heads_than_ranks(ranks):
    arguments = ["--seq-len", 3, "--heads", 3, "--kv-heads", 1, "--head-dim", 8, "--dtype", "float64"]
    exit_code, output = run_on_ranks(ranks, 4, "ulysses_attention", *arguments)
    assert exit_code == 0, output
    assert_equal(output)


def test_a_difference_is_found(tmp_path, monkeypatch):
    """With a limit that nothing can meet, the verdict and the exit code are the other ones."""
    monkeypatch.setitem(ulysses_attention.LIMIT, ulysses_attention.torch.float32, -1.0)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "0")
    args = ulysses_attention.parse_arguments(["--seq-len", "9", "--device", "cpu"])
    assert ulysses_attention.launch.run(ulysses_attention.run_rank, args) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kv-heads", "11"], "--kv-heads 11 must be at most --heads 10"),
        (["--seq-len", "0"], "--seq-len must be positive, got 0"),
    ],
)
def test_bad_arguments_are_explained(capsys, arguments, message):
    with pytest.raises(SystemExit) as ended:
        ulysses_attention.parse_arguments(arguments)
    assert ended.value.code == 2 and message in capsys.readouterr().err
