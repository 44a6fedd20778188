"""The example trains, equals the unsplit model, and ends cleanly whatever happens."""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import time

import pytest
import torch
from scripts import REPOSITORY, Script, run_on_ranks, run_script

sys.path.insert(0, str(REPOSITORY / "examples"))
import train_text  # noqa: E402
from text_model import TextBatches, split_layers  # noqa: E402

TRAIN = "examples/train_text.py"
TINY = ["--layers", 4, "--hidden", 32, "--seq-len", 16, "--batch-size", 8, "--microbatches", 4]
SHORT = ["--layers", 2, "--batch-size", 8, "--microbatches", 4]


@pytest.mark.slow
def test_the_command_line_trains_and_draws(tmp_path):
    exit_code, output = run_script(
        TRAIN, "--ranks", 2, *TINY, "--steps", 12, "--verify",
        "--out", tmp_path / "out",
    )  # fmt: skip
    assert exit_code == 0, output
    assert "pipeline   2 stages" in output, output
    assert_trained(output, 12)
    picture = tmp_path / "out" / "loss.png"
    assert f"picture    {picture}" in output
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and picture.stat().st_size > 10_000


def assert_trained(output: str, num_steps: int) -> None:
    """The loss falls, and every step is that of the unsplit model."""
    first, last = map(float, re.search(r"^loss +([\d.]+) -> ([\d.]+)", output, re.MULTILINE).groups())
    assert last < first - (0.5 if num_steps > 6 else 0.0), output
    assert f"verify     equal to the unsplit model in {num_steps} steps" in output, output
    assert re.search(r"^transport +\w+: \S", output, re.MULTILINE), output
    assert "Warning" not in output and "Traceback" not in output, output


@pytest.mark.parametrize(
    ("num_ranks", "arguments", "pipeline"),
    [
        (4, TINY, "4 stages"),
        (4, ["--sequence-parallel", 2, *SHORT, "--seq-len", 17, "--hidden", 96],
         "2 stages x 2 sequence pieces (1+1 blocks; 9+8 tokens, 2+1 heads), 4 micro-batches"),
        (3, ["--sequence-parallel", 3, *SHORT, "--seq-len", 2, "--hidden", 32],
         "1 stages x 3 sequence pieces (2 blocks; 1+1+0 tokens, 1+0+0 heads), 4 micro-batches"),
        (4, ["--stages", "1,2,1", *SHORT, "--layers", 3, "--seq-len", 16, "--hidden", 96],
         "3 stages of 1+2+1 ranks (1+1+1 blocks), 4 micro-batches"),
    ],
    ids=["four stages", "uneven sequences", "more pieces than tokens", "1, 2 and 1 ranks"],
)  # fmt: skip
def test_split_training_equals_unsplit(ranks, tmp_path, num_ranks, arguments, pipeline):
    exit_code, output = run_on_ranks(
        ranks, num_ranks, "train_text", "--ranks", num_ranks, *arguments, "--steps", 6, "--verify",
        "--out", tmp_path,
    )  # fmt: skip
    assert exit_code == 0, output
    assert f"pipeline   {pipeline}" in output, output
    assert_trained(output, 6)


@pytest.mark.parametrize(
    ("num_ranks", "arguments", "pipeline"),
    [
        (2, ["--schedule", "zb_v"], "4 stages (1+1+1+1 blocks), 4 micro-batches, zb_v, cpu"),
        (4, ["--schedule", "dualpipe", "--sequence-parallel", 2, "--hidden", 64],
         "2 stages x 2 sequence pieces (2+2 blocks; 8+8 tokens, 1+1 heads), 4 micro-batches, dualpipe, cpu"),
    ],
    ids=["zb_v", "dualpipe with split sequences"],
)  # fmt: skip
def test_other_schedules_train_the_same(ranks, tmp_path, num_ranks, arguments, pipeline):
    exit_code, output = run_on_ranks(
        ranks, num_ranks, "train_text", "--ranks", num_ranks, *TINY, *arguments, "--steps", 4, "--verify",
        "--out", tmp_path,
    )  # fmt: skip
    assert exit_code == 0, output
    assert f"pipeline   {pipeline}" in output, output
    assert_trained(output, 4)
    drawn = re.search(
        r"^timeline +(\S+) .*\nsimulated: .*\n((?:.+\n){2})measured: .*\n((?:.+\n?){2})", output, re.MULTILINE
    )
    assert drawn, output
    assert all(re.fullmatch(r"  \d \|[FBIWX.]{96}\|", row) for row in (drawn[2] + drawn[3]).splitlines())
    page = open(drawn[1], encoding="utf-8").read()
    assert "simulated, in seconds" in page and "measured, in seconds" in page


@pytest.mark.parametrize("changed", ["nothing", "loss", "gradient", "not finite", "weights"])
def test_verify_finds_a_difference(changed):
    args = argparse.Namespace(
        layers=1, hidden=32, seq_len=8, batch_size=4, microbatches=2, steps=3, seed=1, lr=1e-3
    )
    split, unsplit = (train_text.UnsplitModel(args, torch.device("cpu")) for _ in range(2))
    for step in range(args.steps):
        loss, gradients = split.backward()
        if step == 1 and changed == "loss":
            loss *= 1.001
        elif step == 1 and changed == "gradient":
            gradients[-1][0, 0] += 1.0
        elif step == 1 and changed == "not finite":
            gradients[0].fill_(float("nan"))
        unsplit.follow(loss, [gradient.clone() for gradient in gradients])
        split.follow(loss, gradients)
        if step == 1 and changed == "weights":
            split.optimizer.step()
    lines = {}
    exit_code = train_text.verify(unsplit, lines.__setitem__)
    assert exit_code == (0 if changed == "nothing" else 1)
    assert lines["verify"].startswith("equal to" if changed == "nothing" else "DIFFERS from")


@pytest.mark.slow
def test_runs_under_torchrun(tmp_path):
    exit_code, output = run_script(
        TRAIN, *TINY, "--steps", 3, "--out", tmp_path / "out",
        launcher=("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
    )  # fmt: skip
    assert exit_code == 0 and "pipeline   2 stages" in output, output


def busy_script(tmp_path) -> Script:
    return Script(
        TRAIN,
        "--ranks",
        2,
        *TINY,
        "--steps",
        100_000,
        "--out",
        tmp_path / "out",
    )


def wait_until_training(script: Script) -> None:
    """Reads the progress bar until the first step is shown."""
    until = time.monotonic() + 60
    text = ""
    while not re.search(r" [1-9]\d*/100000", text):
        assert time.monotonic() < until, text
        text += script.process.stdout.read(1)


@pytest.mark.slow
def test_interrupt_ends_everything(tmp_path):
    with busy_script(tmp_path) as script:
        wait_until_training(script)
        os.killpg(script.process.pid, signal.SIGINT)
        exit_code, output = script.finish(20)
        assert exit_code == 130 and "interrupted" in output and "Traceback" not in output, output
        script.assert_nothing_left()


@pytest.mark.slow
def test_a_killed_rank_ends_everything(tmp_path):
    with busy_script(tmp_path) as script:
        wait_until_training(script)
        os.kill(script.pids()[-1], signal.SIGKILL)
        exit_code, output = script.finish(20)
        assert exit_code == 1 and re.search(r"SIGKILL|PipeComm\w+", output), output
        script.assert_nothing_left()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch-size", "10", "--microbatches", "4"], "not a multiple of --microbatches 4"),
        (["--ranks", "5", "--layers", "4"], "give --layers 5 or more"),
        (["--hidden", "40"], "not a multiple of 32"),
        (["--steps", "0"], "--steps must be positive, got 0"),
        (["--sequence-parallel", "0"], "--sequence-parallel must be positive, got 0"),
        (
            ["--schedule", "zb"],
            "--schedule zb: unknown schedule 'zb'; expected one of dualpipe, dualpipev, gpipe",
        ),
        (["--schedule", "dualpipe", "--microbatches", "4"], "M=4 micro-batches are too few for P=4 ranks"),
        (["--schedule", "zb_v", "--layers", "7"], "give --layers 8 or more"),
        (["--layers", "0"], "--layers must be positive, got 0"),
        (["--sequence-parallel", "3"], "4 ranks cannot form stages of 3 ranks each"),
        (["--ranks", "10", "--sequence-parallel", "2", "--layers", "4"], "give --layers 5 or more"),
        (["--stages", "1,x"], "is not a list of numbers of ranks"),
        (["--stages", "1,0"], "must be 1 or more each"),
        (["--stages", "1,3"], "a stage of 3 ranks needs as many heads, there are 2"),
        (["--stages", "1,1,1,1,1", "--layers", "4"], "give --layers 5 or more"),
        (["--stages", "1,2", "--sequence-parallel", "2"], "does not go with --sequence-parallel"),
    ],
)
def test_bad_arguments_are_explained(capsys, arguments, message):
    with pytest.raises(SystemExit) as ended:
        train_text.parse_arguments(arguments)
    assert ended.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "num_layers"),
    [
        (["--ranks", "4", "--schedule", "zb_v"], 8),
        (["--ranks", "2", "--schedule", "zb_v"], 4),
        (["--ranks", "10", "--sequence-parallel", "2"], 5),
        (["--stages", "1,1,1,1,1"], 5),
        (["--stages", "1,1,1,1,1", "--layers", "7"], 7),
        ([], 4),
    ],
)
def test_there_are_as_many_blocks_as_stages_by_default(arguments, num_layers):
    assert train_text.parse_arguments(arguments).layers == num_layers


@pytest.mark.parametrize("num_blocks", range(1, 9))
def test_every_layer_has_one_stage(num_blocks):
    for num_stages in range(1, num_blocks + 1):
        stages = split_layers(num_blocks, num_stages)
        assert [idx for stage in stages for idx in stage] == list(range(num_blocks + 2))
        num_blocks_of = [sum(1 <= idx <= num_blocks for idx in stage) for stage in stages]
        assert max(num_blocks_of) - min(num_blocks_of) <= 1 and num_blocks_of == sorted(num_blocks_of)[::-1]


def test_batches_are_a_function_of_seed_and_step():
    one, same, other = TextBatches(4, 8, seed=1), TextBatches(4, 8, seed=1), TextBatches(4, 8, seed=2)
    inputs, targets = one(step=3)
    assert inputs.shape == targets.shape == (4, 8)
    assert inputs[:, 1:].equal(targets[:, :-1])
    assert inputs.equal(same(step=3)[0])
    assert not inputs.equal(one(step=4)[0]) and not inputs.equal(other(step=3)[0])
