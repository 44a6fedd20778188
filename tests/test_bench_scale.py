"""The benchmark over numbers of ranks: right results, footprints that are the process's own, busy cores."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
from pathlib import Path

import pytest
from ranks import on_ranks
from scripts import REPOSITORY, run_on_ranks, run_script

sys.path.insert(0, str(REPOSITORY / "bench"))
from busy import busy_cores  # noqa: E402
from run import parse_arguments, scale  # noqa: E402

CASES = [
    "constructor and barrier",
    "barrier",
    "broadcast, 4K",
    "broadcast, 1M",
    "all-to-all, 256 a pair",
    "there and back, 1K",
]
IMPLS = ["torch", "pipecomm c10d", "pipecomm shm"]


def check_world(world: dict, num_ranks: int) -> None:
    assert world["num_ranks"] == num_ranks
    assert [(result["case"], result["impl"]) for result in world["results"]] == [
        (case, impl) for case in CASES for impl in IMPLS
    ]
    for result in world["results"]:
        assert result["num_wrong"] == 0 and result["time_us"]["median"] > 0, result
    assert [(footprint["impl"], footprint["stage"]) for footprint in world["footprints"]] == [
        (impl, stage) for impl in IMPLS for stage in scale.STAGES
    ]
    for footprint in world["footprints"]:
        assert footprint["num_threads"] > 0 and footprint["num_descriptors"] > 0, footprint


def test_one_world_of_ranks_that_are_there(ranks, tmp_path):
    numbers = tmp_path / "numbers.json"
    exit_code, output = run_on_ranks(ranks, 3, "run", "scale", "--quick", "--json", numbers)
    assert exit_code == 0, output
    [world] = json.loads(numbers.read_text())["worlds"]
    check_world(world, num_ranks=3)
    assert "all-to-all, 256 a pair" in output and "all ranks used" in output, output


@pytest.mark.slow
def test_the_command_line_goes_through_numbers_of_ranks(tmp_path):
    numbers, picture = tmp_path / "numbers.json", tmp_path / "scale.png"
    exit_code, output = run_script(
        "bench/run.py",
        "scale",
        "--iters",
        10,
        "--busy",
        "--ranks",
        "2,3",
        "--json",
        numbers,
        "--plot",
        picture,
    )
    assert exit_code == 0, output
    assert str(Path(tempfile.gettempdir()) / "pipecomm-scale-") not in numbers.read_text()
    for world, num_ranks in zip(json.loads(numbers.read_text())["worlds"], [2, 3], strict=True):
        check_world(world, num_ranks)
        assert world["arguments"]["busy"] is True
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@on_ranks(2)
def test_a_footprint_counts_threads_descriptors_and_memory(world):
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait)
    before = scale.Footprint.now()
    thread.start()
    descriptors = os.pipe()
    memory = bytearray(os.urandom(8 << 20))
    growth = scale.Footprint.now() - before
    ended.set()
    thread.join()
    for descriptor in descriptors:
        os.close(descriptor)
    assert (growth.num_threads, growth.num_descriptors) == (1, 2), growth
    assert 8 << 10 <= growth.memory_kib < 10 << 10, (growth, len(memory))


def test_busy_cores_spin_and_end():
    def spinning() -> set[str]:
        commands = {
            path.parent.name: path.read_bytes() for path in Path("/proc/self/task").glob("*/children")
        }
        return {pid for children in commands.values() for pid in children.decode().split()}

    before = spinning()
    with busy_cores():
        assert len(spinning() - before) == len(os.sched_getaffinity(0))
    assert spinning() == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["p2p", "--ranks", "2,4"], "several numbers for scale only"),
        (["scale", "--ranks", "4,1"], "--ranks must be 2 or more"),
        (["scale", "--sizes", "4K"], "scale has sizes of its own"),
        (["scale", "--device", "cuda"], "and cpu tensors"),
    ],
)
def test_bad_arguments_are_explained(capsys, arguments, message):
    with pytest.raises(SystemExit) as ended:
        parse_arguments(arguments)
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_default_numbers_of_ranks():
    assert parse_arguments(["scale"]).rank_counts == [2, 4, 8, 16, 32, 48]
    assert parse_arguments(["scale", "--quick"]).rank_counts == [2, 4]
    assert parse_arguments(["scale"]).transport == ["c10d", "shm"]
    assert parse_arguments(["p2p"]).transport == ["auto"] and parse_arguments(["p2p"]).ranks == 2
