"""info() and the command line: facts, reasons, and a doctor that finds what is wrong."""

from __future__ import annotations

import faulthandler
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from scripts import run_program

import pipecomm_ext
from pipecomm_ext import _C
from pipecomm_ext import __main__ as command_line
from pipecomm_ext.diagnostics import doctor
from pipecomm_ext.diagnostics.info import choose_transport, format_info, info, transport_status, warnings_of
from pipecomm_ext.transports import TRANSPORTS
from pipecomm_ext.transports import nccl as nccl_module

KEYS = {"version", "build", "python", "torch", "cuda", "nccl", "transports", "choice", "environment"}
KEYS |= {"settings", "communicators", "warnings"}
CUDA = {"built": True, "reason": "nvcc 13.0", "devices": ["GPU"]}
NCCL = {"loaded_version": "2.28.9", "libraries": ["/a/libnccl.so.2"]}


def test_info_is_plain_data_with_the_promised_keys() -> None:
    facts = pipecomm_ext.info()
    assert set(facts) == KEYS
    assert json.loads(json.dumps(facts)) == facts
    assert facts["version"] == pipecomm_ext.__version__
    assert facts["torch"]["version"] == torch.__version__
    assert facts["torch"]["tested"][0] == "2.11"
    assert facts["cuda"]["built"] == _C.build_info["with_cuda"]
    assert set(facts["transports"]) == set(TRANSPORTS) == {"tcp", "nccl", "shm"}
    for status in facts["transports"].values():
        assert isinstance(status["available"], bool) and status["reason"]
    assert facts["transports"]["tcp"]["available"]
    for choice in facts["choice"].values():
        assert facts["transports"][choice["transport"]]["available"] and choice["reason"]


def test_info_sees_the_nccl_that_torch_loaded() -> None:
    nccl = info()["nccl"]
    if torch.version.cuda is None:
        assert nccl["loaded_version"] is None and nccl["libraries"] == []
    else:
        assert nccl["loaded_version"] == ".".join(map(str, torch.cuda.nccl.version()[:3]))
        assert len(nccl["libraries"]) == 1


def test_info_lists_the_communicators_that_are_open(tmp_path) -> None:
    before = info()["communicators"]
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with pipecomm_ext.Communicator() as comm:
            (facts,) = (each for each in info()["communicators"] if each not in before)
            expected = {"rank": 0, "size": 1, "device": "cpu", "transport": comm.known_transport}
            assert facts == expected | {"nccl_communicators": 0, "nccl_bytes": 0}
        assert info()["communicators"] == before
    finally:
        dist.destroy_process_group()


def test_info_shows_our_environment_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPECOMM_CHECK", "full")
    monkeypatch.setenv("PIPECOMM_TEST_SAMPLE", "7")
    assert info()["environment"]["PIPECOMM_CHECK"] == "full"
    assert "PIPECOMM_CHECK=full" in format_info(info()) and "PIPECOMM_TEST_SAMPLE=7" in format_info(info())


@pytest.mark.parametrize("name", ["PIPECOMM_SECRET", "PIPECOMM_SECRETS", "PIPECOMM_TOKEN"])
def test_info_shows_no_secret_and_no_value_of_a_name_that_may_be_a_misspelt_one(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "swordfish")
    assert f"{name}=(hidden)" in format_info(info())
    assert "swordfish" not in repr(info()) + format_info(info())


def status_with(cuda: dict, nccl: dict, monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    """What `info` reports of the transports in a process with these facts."""
    monkeypatch.setattr(nccl_module, "cuda_facts", lambda: cuda)
    monkeypatch.setattr(nccl_module, "nccl_facts", lambda: nccl)
    monkeypatch.setattr(nccl_module, "engine_problem", lambda: "")
    return transport_status()


@pytest.mark.parametrize(
    ("cuda", "nccl", "reason"),
    [
        ({"built": False, "reason": "there is no nvcc on PATH"}, {}, "there is no nvcc"),
        ({}, {"loaded_version": None}, "no libnccl.so.2"),
        ({"devices": []}, {}, "no CUDA device"),
    ],
)
def test_nccl_is_refused_with_the_first_reason(
    cuda: dict, nccl: dict, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = status_with({**CUDA, **cuda}, {**NCCL, **nccl}, monkeypatch)
    assert not status["nccl"]["available"]
    assert reason in status["nccl"]["reason"]
    choice = choose_transport("cuda", status)
    assert choice["transport"] == "tcp"
    assert status["nccl"]["reason"] in choice["reason"]


def test_cuda_tensors_take_nccl_where_it_is_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = choose_transport("cuda", status_with(CUDA, NCCL, monkeypatch))
    assert choice == {"transport": "nccl", "reason": "NCCL 2.28.9 and a CUDA device"}


def test_warnings_name_the_cause() -> None:
    (warning,) = warnings_of(NCCL | {"libraries": ["/a/libnccl.so.2", "/b/libnccl.so.2"]}, "2.14.1")
    assert "2 copies of NCCL are loaded (/a/libnccl.so.2, /b/" in warning
    (warning,) = warnings_of(NCCL, "9.0.0+cpu")
    assert "torch 9.0.0+cpu is newer than 2." in warning
    for fine in ({}, {"loaded_version": None, "libraries": []}):
        assert warnings_of(NCCL | fine, "2.11.0+cu130") == []


# ---- command line ---------------------------------------------------------------------------------


def test_info_command_prints_text_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["info"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"pipecomm_ext {pipecomm_ext.__version__} ")
    assert "auto        cpu tensors: " in text
    assert command_line.main(["info", "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)) == KEYS


@pytest.mark.parametrize("command", ["info", "draw", "check", "doctor"])
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        command_line.main([command, "--help"])
    assert stopped.value.code == 0
    assert f"python -m pipecomm_ext {command}" in capsys.readouterr().out


def test_the_command_line_without_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main([]) == 0
    assert capsys.readouterr().out.startswith("usage: python -m pipecomm_ext [-h] [--version] {info,")
    with pytest.raises(SystemExit) as stopped:
        command_line.main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"pipecomm_ext {pipecomm_ext.__version__}\n"


def test_a_reader_may_stop_early(tmp_path: Path) -> None:
    """As in `python -m pipecomm_ext info | true`, or with `>&-`: the status is that of the command."""
    plan = "check 1f1b --ranks 8 --microbatches 600"
    commands = {"info": 0, f"{plan} --print": 0, f"{plan} --max-activations 1 --print": 1}
    commands |= {f"doctor --flight {tmp_path}": 2, "doctor --deadline 0": 1}
    program = f"""
import os, sys
from pipecomm_ext.__main__ import main
from pipecomm_ext.diagnostics import doctor
doctor.GRACE_S = 0.1  # its ranks fail once they have imported torch, for which it need not wait
reader, writer = os.pipe()
os.dup2(writer, 1)
os.close(reader)
for has_stdout in (True, False):
    for command, status in {commands}.items():
        assert main(command.split()) == status, command
        if has_stdout:
            os.dup2(writer, 1)
    sys.stdout = None
"""
    assert "Broken pipe" not in run_program(program)


def test_doctor_passes_here(capfd: pytest.CaptureFixture[str]) -> None:
    exit_code = command_line.main(["doctor", "--deadline", "40"])
    output = capfd.readouterr().out
    assert exit_code == 0, output
    passed = [line.split()[1] for line in output.splitlines() if line.startswith("ok ")]
    assert passed == list(doctor.STEPS)
    assert output.startswith("doctor: all is well\nok    join ")
    assert "  torch       " in output and "  default     " not in output


def test_doctor_names_the_step_that_failed_and_shows_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rank fails in this process; the ranks that the doctor starts then print what it has printed."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no_such_interface")
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda *_, **__: None)
    status, printed = doctor.run_rank(0, str(tmp_path / "store"), 40.0), capsys.readouterr()
    prints = f'printf %s "$0"; printf %s "$1" >&2; exit {status}'
    monkeypatch.setattr(doctor, "rank_command", lambda *_: ["sh", "-c", prints, printed.out, printed.err])
    assert command_line.main(["doctor", "--deadline", "40"]) == 1
    output = capsys.readouterr().out
    assert any(line.startswith("FAIL  join") for line in output.splitlines()), output
    assert "--- errors of rank" in output and "Traceback" in output
    assert output.startswith("doctor: stopped at step join\nFAIL  join")


def test_doctor_stops_ranks_that_hang(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    processes = []

    def hanging_rank(*_: object) -> list[str]:
        return [sys.executable, "-c", "import time; time.sleep(600)"]

    def start(*args: object, **kwargs: object) -> subprocess.Popen:
        processes.append(popen(*args, **kwargs))
        return processes[-1]

    popen = subprocess.Popen
    monkeypatch.setattr(doctor, "rank_command", hanging_rank)
    monkeypatch.setattr(doctor, "GRACE_S", 0.2)
    monkeypatch.setattr(subprocess, "Popen", start)
    started = time.monotonic()
    assert doctor.diagnose(0.5) == 1
    assert time.monotonic() - started < 20
    assert "FAIL  join       rank 0 was still waiting when stopped; rank 1 was" in capsys.readouterr().out
    assert len(processes) == doctor.NUM_RANKS
    assert all(process.poll() is not None for process in processes)
