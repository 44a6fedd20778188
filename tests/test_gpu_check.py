"""The stages of `make gpu-check`, with commands that need no GPU: a failing one does not stop the others."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from pathlib import Path

import pytest
from scripts import REPOSITORY

spec = importlib.util.spec_from_file_location("gpu_check", REPOSITORY / "tests" / "gpu" / "check.py")
gpu_check = sys.modules["gpu_check"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(gpu_check)


def stage(name: str, script: str, limit_s: float = 60.0, **options):
    return gpu_check.Stage(name, ["sh", "-c", script], limit_s, **options)


def outcomes(results: Path) -> dict[str, str]:
    return {entry["name"]: entry["result"] for entry in json.loads((results / "summary.json").read_text())}


def test_no_stage_stops_another(tmp_path: Path, capfd) -> None:
    stages = [
        stage("good", "echo one; echo '1 passed'"),
        stage("bad", "echo trouble; exit 3"),
        stage("needs-bad", "touch never", after="bad"),
        stage("needs-good", 'echo "${PYTHONPATH%%:*}"', after="good"),
        stage("small", "echo too small; exit 77"),
        stage("missing", "touch never", missing=lambda: "no such tool"),
        stage("told", 'echo "told $WHAT"', environment={"WHAT": "this"}),
        gpu_check.Stage("absent", ["/nonexistent/program"], 60.0),
        stage("measures", """echo '{"us": 3.5}' > {figures}"""),
    ]
    assert gpu_check.run_stages(stages, tmp_path, 600.0) == 1
    passed = dict.fromkeys(["good", "needs-good", "told", "measures"], "passed")
    skipped = dict.fromkeys(["needs-bad", "small", "missing"], "skipped")
    assert outcomes(tmp_path) == passed | skipped | {"bad": "failed", "absent": "failed"}
    for name, note in {
        "good": "1 passed",
        "bad": "trouble",
        "needs-bad": "bad has not passed",
        "needs-good": str(REPOSITORY / "python"),
        "small": "too small",
        "told": "told this",
        "missing": "no such tool",
    }.items():
        assert json.loads((tmp_path / f"{name}.json").read_text())["note"] == note
    assert (tmp_path / "good.log").read_text() == "one\n1 passed\n"
    assert json.loads((tmp_path / "measures.json").read_text())["figures"] == {"us": 3.5}
    assert json.loads((tmp_path / "bad.json").read_text())["status"] == 3
    table = capfd.readouterr().out.split("log or reason\n")[1].splitlines()
    assert [line.split()[0] for line in table] == [each.name for each in stages]
    assert table[1].split()[1] == "failed" and table[1].endswith("bad.log")


def test_a_stage_that_hangs_is_killed_with_what_it_started(tmp_path: Path) -> None:
    began, child = time.monotonic(), tmp_path / "child"
    stages = [stage("hangs", f"sleep 300 & echo $! > {child}; wait", limit_s=0.5), stage("next", "exit 1")]
    assert gpu_check.run_stages(stages, tmp_path, 600.0) == gpu_check.TIMED_OUT
    assert outcomes(tmp_path) == {"hangs": "timed out", "next": "failed"}
    while Path(f"/proc/{child.read_text().strip()}/exe").exists():  # a zombie has none
        assert time.monotonic() - began < 100
        time.sleep(0.02)


def test_all_stages_together_have_a_limit(tmp_path: Path) -> None:
    stages = [stage("long", "sleep 300"), stage("late", "touch never")]
    assert gpu_check.run_stages(stages, tmp_path, 1.1) == gpu_check.TIMED_OUT
    assert outcomes(tmp_path) == {"long": "timed out", "late": "skipped"}
    assert json.loads((tmp_path / "late.json").read_text())["note"] == "no time is left"


def test_nothing_but_good_stages_and_an_interrupt(tmp_path: Path) -> None:
    def interrupt():
        raise KeyboardInterrupt

    stages = [stage("good", "true"), stage("interrupted", "true", missing=interrupt), stage("late", "true")]
    assert gpu_check.run_stages(stages[:1], tmp_path, 60.0) == 0
    assert gpu_check.run_stages(stages, tmp_path, 60.0) == 130
    assert outcomes(tmp_path) == {"good": "passed"}


@pytest.mark.parametrize("num_gpus", [0, 1, 4])
def test_the_stages_name_what_exists(num_gpus: int) -> None:
    """Files, stages on which others depend, and every test of tests/gpu in a stage of `make gpu-check`."""
    stages = gpu_check.all_stages(num_gpus) if num_gpus else gpu_check.first_stages()
    names = [each.name for each in stages]
    assert len(set(names)) == len(names)
    files = [part for each in stages for part in each.command if part.endswith(".py")]
    assert all((REPOSITORY / file).is_file() for file in files), files
    tests = {f"tests/gpu/{path.name}" for path in (REPOSITORY / "tests" / "gpu").glob("test_*.py")}
    assert not num_gpus or tests <= set(files), tests - set(files)
    for idx, each in enumerate(stages):
        assert each.after is None or each.after in names[:idx], each.name


def test_without_a_gpu_it_says_so(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert gpu_check.main(["--results", str(tmp_path)]) == 2
    assert "no CUDA device" in capsys.readouterr().err


@pytest.mark.parametrize(("folder", "script"), [("bench", "run"), ("examples", "train_text")])
def test_the_stages_pass_options_that_exist(monkeypatch, folder: str, script: str) -> None:
    """The options of our scripts; a wrong one ends the test by SystemExit."""
    monkeypatch.syspath_prepend(REPOSITORY / folder)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    module = importlib.import_module(script)
    stages = [each.command for each in gpu_check.all_stages(4) + gpu_check.all_stages(1)]
    commands = [list(command) for command in stages if f"{folder}/{script}.py" in command]
    for command in commands:
        args = module.parse_arguments(command[command.index(f"{folder}/{script}.py") + 1 :])
        assert args.device == "cuda" and args.ranks >= 2
    assert commands


@pytest.mark.parametrize("nccl_version", [(2, 28, 9), (2, 30, 7)])
@pytest.mark.parametrize(("num_gpus", "num_ranks"), [(1, 2), (1, 3), (2, 2), (2, 4)])
def test_ranks_share_gpus_if_there_are_too_few(monkeypatch, num_gpus, num_ranks, nccl_version) -> None:
    """From NCCL 2.30 on, two ranks use its mode for that; otherwise each counts as on its own host."""
    monkeypatch.syspath_prepend(REPOSITORY / "examples")
    launch = importlib.import_module("lib.launch")
    taken, hosts = [], []
    monkeypatch.setattr("torch.cuda.device_count", lambda: num_gpus)
    monkeypatch.setattr("torch.cuda.nccl.version", lambda: nccl_version)
    monkeypatch.setattr("torch.cuda.set_device", taken.append)
    for rank in range(num_ranks):
        monkeypatch.setattr(launch.os, "environ", environment := {})
        launch.take_gpu(rank, num_ranks)
        hosts.append(environment.get("NCCL_HOSTID"))
    assert taken == [rank % num_gpus for rank in range(num_ranks)]
    is_shared, is_mode = num_ranks > num_gpus, nccl_version >= (2, 30) and num_ranks <= 2 * num_gpus
    assert ("NCCL_MAX_CTAS" in environment) == is_shared
    assert ("NCCL_MULTI_RANK_GPU_ENABLE" in environment) == (is_shared and is_mode)
    assert len(set(hosts)) == (num_ranks if is_shared and not is_mode else 1)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(RuntimeError, match="sees no CUDA device"):
        launch.take_gpu(0, 2)
