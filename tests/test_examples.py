"""The examples train, equal the unsplit model or report a difference, and end cleanly in all cases."""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import time

import pytest
import torch
from scripts import REPOSITORY, Script, assert_refused, run_on_ranks, run_script, run_under_torchrun

sys.path.insert(0, str(REPOSITORY / "examples"))
import dualpipe_train  # noqa: E402
import train_text  # noqa: E402
import train_transformers  # noqa: E402
import ulysses_attention  # noqa: E402
from lib.text_model import TextBatches, split_layers  # noqa: E402

TRAIN = "examples/train_text.py"
TINY = "--layers 4 --hidden 32 --seq-len 16 --batch-size 8 --microbatches 4".split()
SHORT = "--layers 2 --batch-size 8 --microbatches 4".split()


@pytest.mark.slow
def test_the_command_line_trains_and_draws(tmp_path):
    arguments = ["--ranks", 2, *TINY, "--steps", 12, "--verify", "--out", tmp_path / "out"]
    exit_code, output = run_script(TRAIN, *arguments, is_fresh=True)
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
         "1 stage x 3 sequence pieces (2 blocks; 1+1+0 tokens, 1+0+0 heads), 4 micro-batches"),
        (4, ["--stages", "1,2,1", *SHORT, "--layers", 3, "--seq-len", 16, "--hidden", 96],
         "3 stages of 1+2+1 ranks (1+1+1 blocks), 4 micro-batches"),
        (2, [*TINY, "--schedule", "zb_v"], "4 stages (1+1+1+1 blocks), 4 micro-batches, zb_v, cpu"),
        (4, [*TINY, "--schedule", "dualpipe", "--sequence-parallel", 2, "--hidden", 64],
         "2 stages x 2 sequence pieces (2+2 blocks; 8+8 tokens, 1+1 heads), 4 micro-batches, dualpipe, cpu"),
    ],
    ids=["four stages", "uneven sequences", "more pieces than tokens", "1, 2 and 1 ranks", "zb_v",
         "dualpipe with split sequences"],
)  # fmt: skip
def test_split_training_equals_unsplit(ranks, tmp_path, num_ranks, arguments, pipeline):
    options = ["--ranks", num_ranks, *arguments, "--steps", 4, "--verify", "--out", tmp_path]
    output = run_on_ranks(ranks, num_ranks, "train_text", *options)
    assert f"pipeline   {pipeline}" in output, output
    assert_trained(output, 4)
    if "--schedule" in arguments:
        assert_drawn(output)


def assert_drawn(output: str) -> None:
    timelines = r"^timeline +(\S+) .*\nsimulated: .*\n((?:.+\n){2})measured: .*\n((?:.+\n?){2})"
    drawn = re.search(timelines, output, re.MULTILINE)
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
def test_ranks_of_torchrun(tmp_path):
    command = f"torchrun --standalone --nproc-per-node 2 {TRAIN} {' '.join(TINY)}"
    output = run_under_torchrun(f"{command} --steps 3 --out {tmp_path}", REPOSITORY)
    assert "pipeline   2 stages" in output, output


@pytest.mark.slow
@pytest.mark.parametrize(("ending", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, 1)])
def test_an_interrupt_and_a_killed_rank_end_everything(tmp_path, ending, code):
    arguments = ["--ranks", 2, *TINY, "--steps", 100_000, "--out", tmp_path / "out"]
    with Script(TRAIN, *arguments) as script:
        until = time.monotonic() + 60
        while "0/100000" not in script.text:  # the progress bar, just before the first step
            assert not script.read(until), script.text
        if ending == signal.SIGINT:
            os.killpg(script.process.pid, ending)
        else:
            os.kill(script.pids()[-1], ending)
        exit_code, output = script.finish(20)
        assert exit_code == code, output
        if ending == signal.SIGINT:
            assert "interrupted" in output and "Traceback" not in output, output
        else:
            assert re.search(r"SIGKILL|PipeComm\w+", output), output
        script.assert_nothing_left()


def test_every_layer_has_one_stage():
    for num_blocks in range(1, 9):
        for num_stages in range(1, num_blocks + 1):
            stages = split_layers(num_blocks, num_stages)
            assert [idx for stage in stages for idx in stage] == list(range(num_blocks + 2))
            num_blocks_of = [sum(1 <= idx <= num_blocks for idx in stage) for stage in stages]
            assert max(num_blocks_of) - min(num_blocks_of) <= 1
            assert num_blocks_of == sorted(num_blocks_of)[::-1]


def test_batches_are_a_function_of_seed_and_step():
    one, same, other = TextBatches(4, 8, seed=1), TextBatches(4, 8, seed=1), TextBatches(4, 8, seed=2)
    inputs, targets = one(step=3)
    assert inputs.shape == targets.shape == (4, 8)
    assert inputs[:, 1:].equal(targets[:, :-1])
    assert inputs.equal(same(step=3)[0])
    assert not inputs.equal(one(step=4)[0]) and not inputs.equal(other(step=3)[0])


# ---- the other examples -----------------------------------------------------------------------------------

DUALPIPE = "--steps 4 --seq-len 8"
LLAMA = "--seq-len 41 --batch-size 4 --hidden 48 --heads 6 --kv-heads 2 --steps 8 --verify"
OTHERS = {  # script, ranks, arguments, a line of its output
    "DualPipe": ("dualpipe_train", 2, DUALPIPE, "pipeline   DualPipe: 2 stages, 2 ranks"),
    "DualPipeV": ("dualpipe_train", 2, f"{DUALPIPE} --v", "pipeline   DualPipeV: 4 stages, 2 ranks"),
    "uneven attention": (
        "ulysses_attention", 3, "--seq-len 101 --heads 7 --kv-heads 2 --head-dim 8",
        r"tokens     2 x 101 bytes, a rank holds \[34, 34, 33\]",
    ),
    "fewer tokens and heads than ranks": (
        "ulysses_attention", 4, "--seq-len 3 --heads 3 --kv-heads 1 --head-dim 8 --dtype float64",
        r"heads      3, a rank attends \[1, 1, 1, 0\]",
    ),
    "transformers": (
        "train_transformers", 2, LLAMA, r"continued .*\n    import os\n    import sys\n    \n    def "
    ),
    "transformers, uneven": (
        "train_transformers", 4, LLAMA, r"tokens     4 x 41 bytes, a rank holds \[11, 10, 10, 10\]"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_other_examples_equal_the_unsplit_computation(ranks, tmp_path, name):
    """The first row of each script is a command that starts its ranks; others run on ranks of the pool."""
    module, size, arguments, line = OTHERS[name]
    if module == "train_transformers":
        pytest.importorskip("transformers")
    options = ["--ranks", size, *arguments.split(), "--out", tmp_path]
    if name in ("DualPipe", "uneven attention", "transformers"):
        exit_code, output = run_script(f"examples/{module}.py", *options)
        assert exit_code == 0, output
    else:
        output = run_on_ranks(ranks, size, module, *options)
    assert re.search(f"^{line}", output, re.MULTILINE), output
    assert re.search(r"^verify +equal to the unsplit", output, re.MULTILINE), output
    assert "Warning" not in output and "Traceback" not in output, output
    losses = re.findall(r"(?:loss |^loss +|-> )([\d.]+)(?= nats| ->)", output, re.MULTILINE)
    assert (len(losses) > 1) == (module != "ulysses_attention"), output
    assert not losses or float(losses[-1]) < float(losses[0]), output
    [picture] = re.findall(r"^picture +(\S+)$", output, re.MULTILINE)
    assert picture.startswith(str(tmp_path)) and os.path.getsize(picture) > 10_000


def test_a_difference_of_attention_is_found(monkeypatch, tmp_path):
    """With a limit that no result can meet, the verdict and the exit code report a difference."""
    monkeypatch.setitem(ulysses_attention.LIMIT, torch.float32, -1.0)
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}.items():
        monkeypatch.setenv(name, str(value))
    args = ulysses_attention.parse_arguments(["--seq-len", "9", "--device", "cpu", "--out", str(tmp_path)])
    assert ulysses_attention.launch.run(ulysses_attention.run_rank, args) == 1


@pytest.mark.parametrize("worst", [1e-5, 1.0, float("nan")])
def test_the_verdict_about_transformers(capsys, tmp_path, worst):
    args = argparse.Namespace(
        layers=1, heads=2, kv_heads=1, batch_size=1, seq_len=9, steps=2, out=str(tmp_path)
    )
    comm = argparse.Namespace(rank=0, size=2, transport="shm", transport_reason="")
    unsplit = argparse.Namespace(worst=worst)
    exit_code = train_transformers.report(args, comm, [2.0, 1.0], 1.0, torch.tensor([65]), unsplit)
    assert exit_code == (0 if worst == 1e-5 else 1)
    assert ("equal to" if worst == 1e-5 else "DIFFERS from") in capsys.readouterr().out


# ---- arguments --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        (train_text, "--batch-size 10 --microbatches 4", "not a multiple of --microbatches 4"),
        (train_text, "--ranks 5 --layers 4", "give --layers 5 or more"),
        (train_text, "--hidden 40", "not a multiple of 32"),
        (train_text, "--steps 0", "--steps must be positive, got 0"),
        (train_text, "--sequence-parallel 0", "--sequence-parallel must be positive, got 0"),
        (train_text, "--schedule zb", "unknown schedule 'zb'; expected one of dualpipe, dualpipev, gpipe"),
        (
            train_text,
            "--schedule dualpipe --microbatches 4",
            "M=4 micro-batches are too few for P=4 ranks",
        ),
        (train_text, "--schedule zb_v --layers 7", "give --layers 8 or more"),
        (train_text, "--layers 0", "--layers must be positive, got 0"),
        (train_text, "--sequence-parallel 3", "4 ranks cannot form stages of 3 ranks each"),
        (train_text, "--ranks 10 --sequence-parallel 2 --layers 4", "give --layers 5 or more"),
        (train_text, "--stages 1,x", "is not a list of numbers of ranks"),
        (train_text, "--stages 1,0", "must be 1 or more each"),
        (train_text, "--stages 1,3", "a stage of 3 ranks needs as many heads, there are 2"),
        (train_text, "--stages 1,1,1,1,1 --layers 4", "give --layers 5 or more"),
        (train_text, "--stages 1,2 --sequence-parallel 2", "does not go with --sequence-parallel"),
        (dualpipe_train, "--steps 0", "--steps must be positive, got 0"),
        (dualpipe_train, "--hidden 40", "--hidden 40 is not a multiple of 32"),
        (dualpipe_train, "--ranks 3", "--ranks 3 --chunks 8: "),
        (dualpipe_train, "--chunks 6", "--ranks 4 --chunks 6: "),
        (dualpipe_train, "--layers 3", "4 stages need as many blocks; give --layers 4 or more"),
        (dualpipe_train, "--v --layers 4", "8 stages need as many blocks; give --layers 8 or more"),
        (ulysses_attention, "--kv-heads 11", "--kv-heads 11 must be at most --heads 10"),
        (ulysses_attention, "--seq-len 0", "--seq-len must be positive, got 0"),
        (train_transformers, "--hidden 40", "--hidden 40 must be a multiple of twice --heads 8"),
        (train_transformers, "--kv-heads 3", "--kv-heads 3 must divide --heads 8"),
        (train_transformers, "--seq-len 3", "--seq-len 3 cannot be split over 4 ranks"),
        (train_transformers, "--steps 0", "--steps must be positive, got 0"),
    ],
)
def test_bad_arguments_are_explained(capsys, script, arguments, message):
    assert_refused(capsys, script.parse_arguments, arguments, message)


@pytest.mark.parametrize("script", [train_text, dualpipe_train, ulysses_attention, train_transformers])
def test_a_missing_gpu_is_told_in_a_line(capsys, monkeypatch, script):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert_refused(capsys, script.parse_arguments, "--device cuda", "sees no CUDA device; use --device cpu")


@pytest.mark.parametrize(
    ("arguments", "num_layers"),
    [
        ("--ranks 4 --schedule zb_v", 8),
        ("--ranks 2 --schedule zb_v", 4),
        ("--ranks 10 --sequence-parallel 2", 5),
        ("--stages 1,1,1,1,1", 5),
        ("--stages 1,1,1,1,1 --layers 7", 7),
        ("", 4),
    ],
)
def test_there_are_as_many_blocks_as_stages_by_default(arguments, num_layers):
    assert train_text.parse_arguments(arguments.split()).layers == num_layers
