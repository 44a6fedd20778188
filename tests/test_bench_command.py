"""The benchmark's command line: tables, numbers and pictures, worlds of several sizes, links, arguments."""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
import torch
from ranks import on_ranks
from scripts import REPOSITORY, assert_refused, run_on_ranks, run_script

sys.path.insert(0, str(REPOSITORY / "bench"))
import mpi  # noqa: E402
from bare_socket import NAME as SOCKET  # noqa: E402
from busy import busy_cores  # noqa: E402
from measure import Result  # noqa: E402
from ops import BASELINE  # noqa: E402
from plots import draw  # noqa: E402
from report import environment, size_text  # noqa: E402
from run import main, parse_arguments, scale  # noqa: E402

RUN = "bench/run.py"
PNG = b"\x89PNG\r\n\x1a\n"
COLUMNS = "size count type impl min median p99 algbw busbw ratio #wrong %bound".split()


# ---- runs -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_writes_table_json_and_picture(tmp_path):
    variables = {"PIPECOMM_TRANSPORT": "tcp", "SECRET_TOKEN": "not for the report"}
    numbers, picture = tmp_path / "out" / "numbers.json", tmp_path / "out" / "picture.png"
    options = ["--ranks", 2, "--sizes", "4K,64K", "--iters", 10, "--json", numbers, "--plot", picture]
    exit_code, output = run_script(RUN, "p2p", *options, **variables)
    assert exit_code == 0, output
    assert all(column in output for column in COLUMNS), output
    assert picture.read_bytes()[:8] == PNG and picture.stat().st_size > 10_000
    document = json.loads(numbers.read_text())
    assert document["format"] == 1 and document["version"] and document["torch"] == torch.__version__
    assert document["arguments"]["op"] == "p2p" and document["arguments"]["dtype"] == "torch.float32"
    assert document["arguments"]["busy"] is False
    assert document["arguments"]["json"] is None  # no path of this machine
    assert document["environment"]["PIPECOMM_TRANSPORT"] == "tcp"
    assert "SECRET_TOKEN" not in numbers.read_text()
    assert list(document["transports"]) == ["pipecomm tcp"]
    assert [(r["size_bytes"], r["impl"]) for r in document["results"]] == [
        (size, impl) for size in (4096, 65536) for impl in (BASELINE, "pipecomm tcp", SOCKET)
    ]
    for result in document["results"]:
        times, median = result["iterations_us"], result["time_us"]["median"]
        assert result["num_wrong"] == 0 and result["count"] * 4 == result["size_bytes"] and len(times) == 10
        assert median == pytest.approx(statistics.median(times), abs=0.01)
        assert result["time_us"]["min"] == pytest.approx(min(times), abs=0.01)
        assert result["algbw_gb_per_s"] == pytest.approx(result["size_bytes"] / median / 1e3)
        assert result["busbw_gb_per_s"] == result["algbw_gb_per_s"] and result["ratio_to_baseline"] > 0


@pytest.mark.slow
def test_scale_goes_through_numbers_of_ranks(tmp_path):
    numbers, picture = tmp_path / "numbers.json", tmp_path / "scale.png"
    options = ["--iters", 3, "--warmup", 1, "--ranks", "2,3", "--transport", "shm"]
    options += ["--json", numbers, "--plot", picture]
    exit_code, output = run_script(RUN, "scale", *options)
    assert exit_code == 0, output
    assert "all-to-all, 256 a pair" in output and "all ranks used" in output, output
    assert str(Path(tempfile.gettempdir()) / "pipecomm-scale-") not in numbers.read_text()
    for world, num_ranks in zip(json.loads(numbers.read_text())["worlds"], [2, 3], strict=True):
        check_world(world, num_ranks, ["torch", "pipecomm shm"])
    assert picture.read_bytes()[:8] == PNG


@pytest.mark.slow
def test_it_is_a_command_line_of_its_own():
    exit_code, output = run_script(RUN, "--help", is_fresh=True)
    assert exit_code == 0 and "--quick" in output, output


def check_world(world: dict, num_ranks: int, impls: list[str]) -> None:
    cases = ["constructor and barrier", "barrier", "broadcast, 4K", "broadcast, 1M"]
    cases += ["all-to-all, 256 a pair", "there and back, 1K"]
    assert world["num_ranks"] == num_ranks
    assert [(result["case"], result["impl"]) for result in world["results"]] == [
        (case, impl) for case in cases for impl in impls
    ]
    for result in world["results"]:
        assert result["num_wrong"] == 0 and result["time_us"]["median"] > 0, result
    assert [(footprint["impl"], footprint["stage"]) for footprint in world["footprints"]] == [
        (impl, stage) for impl in impls for stage in scale.STAGES
    ]
    for footprint in world["footprints"]:
        assert footprint["num_threads"] > 0 and footprint["num_descriptors"] > 0, footprint


def test_runs_on_ranks_that_are_there(ranks, tmp_path):
    """Posting has no bandwidth; relays have a case for each layout; a matrix decides what is sent; the link
    of such ranks cannot be limited."""
    numbers, matrix = tmp_path / "numbers.json", tmp_path / "matrix"

    def run(size: int, *arguments: object) -> tuple[str, dict]:
        output = run_on_ranks(ranks, size, "run", *arguments, "--warmup", 1, "--iters", 3, "--json", numbers)
        return output, json.loads(numbers.read_text())

    output, document = run(2, "host", "--quick", "--link", "800mbit", "--plot", tmp_path / "p.png")
    assert "the link is NOT limited: the ranks are there already" in output
    assert document["arguments"]["link"] is None
    assert all(result["algbw_gb_per_s"] is None for result in document["results"])

    output, _ = run(3, "relay", "--ranks", 3, "--sizes", "64K")
    assert "1 to 2, R to R" in output and "shm sharded" in output and "2 to 1, S0 to S1" in output

    matrix.write_text("# to 0, to 1\n0 64K\n1000 0\n")
    output, document = run(2, "all_to_all", "--matrix", matrix)
    assert "%bound" in output and "copies" in output
    assert [result["size_bytes"] for result in document["results"]] == [65536] * 2
    assert all(result["copy_passes"] == 0 and result["case"] == "matrix" for result in document["results"])

    _, document = run(2, "scale", "--quick", "--transport", "shm")
    [world] = document["worlds"]
    check_world(world, 2, ["torch", "pipecomm shm"])


# ---- the machine ------------------------------------------------------------------------------------------


@on_ranks(2)
def test_a_footprint_counts_threads_descriptors_and_memory(world):
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait)
    before = scale.Footprint.now()
    thread.start()
    descriptors = os.pipe()
    memory = bytearray(os.urandom(64 << 20))
    growth = scale.Footprint.now() - before
    ended.set()
    thread.join()
    for descriptor in descriptors:
        os.close(descriptor)
    assert (growth.num_threads, growth.num_descriptors) == (1, 2), growth
    # Meanwhile, other memory of the process may change.
    assert abs(growth.memory_kib - (64 << 10)) < 2 << 10, (growth, len(memory))


@pytest.mark.slow
def test_a_run_beside_busy_cores_says_so(tmp_path):
    numbers = tmp_path / "numbers.json"
    options = ["--ranks", 2, "--sizes", "4K", "--iters", 10, "--transport", "shm", "--json", numbers]
    exit_code, output = run_script(RUN, "barrier", "--busy", *options)
    assert exit_code == 0, output
    assert json.loads(numbers.read_text())["arguments"]["busy"] is True


def test_busy_cores_spin_and_end():
    def spinning() -> set[str]:
        children = [path.read_text().split() for path in Path("/proc/self/task").glob("*/children")]
        return set().union(*children)

    before = spinning()
    with busy_cores():
        assert len(spinning() - before) == len(os.sched_getaffinity(0))
    assert spinning() == before


@pytest.mark.parametrize("has_tools", [True, False])
def test_a_link_is_limited_or_the_reason_given(has_tools):
    program = (
        "import limited_link, subprocess, tools\n"
        f"{'' if has_tools else 'tools.folders = lambda: []'}\n"
        "print(limited_link.limit('800mbit'), flush=True)\n"
        "if tc := tools.find_tool('tc'): subprocess.run([tc, 'qdisc', 'show', 'dev', 'lo'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=REPOSITORY / "bench",
        env=os.environ | {"PYTHONPATH": str(REPOSITORY / "tests")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    reason, *rule = done.stdout.splitlines()
    if not has_tools:
        assert reason == "ip is not installed (package iproute2)"
    elif reason == "None":
        assert "tbf" in rule[0] and "rate 800Mbit" in rule[0]
    else:
        assert "takes root" in reason or "not installed" in reason or "tc qdisc add" in reason


def test_environment_is_a_whitelist(monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.setenv("HOME_ADDRESS", "1 Main Street")
    assert environment()["NCCL_DEBUG"] == "WARN" and "HOME_ADDRESS" not in environment()


# ---- arguments --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("p2p --ranks 1", "--ranks must be 2 or more"),
        ("p2p --sizes 4K,many", "'many' is not a size"),
        ("p2p --dtype float31", "'float31' is not a torch dtype"),
        ("p2p --transport pigeon", "'pigeon' is not one of auto, tcp, shm, nccl"),
        ("p2p --iters 0", "must be positive, got 0"),
        ("teleport", "invalid choice: 'teleport'"),
        ("p2p --ranks 2,4", "several numbers for scale only"),
        ("scale --ranks 4,1", "--ranks must be 2 or more"),
        ("scale --sizes 4K", "scale has sizes of its own"),
        ("scale --device cuda", "and cpu tensors"),
        ("ulysses --link fast", "'fast' is not a rate like 800mbit or 2gbit"),
        ("p2p --timeline x.png", "--timeline is for ulysses"),
        ("ulysses --attention flash", "invalid choice: 'flash'"),
        ("gather --matrix even", "--matrix is for all_to_all"),
        ("all_to_all --matrix none", "cannot read"),
        ("all_to_all --matrix rows", "as many sizes in each row"),
        ("all_to_all --matrix words", "'x' is not a size"),
        ("all_to_all --matrix one", "2 or more"),
    ],
)
def test_bad_arguments_are_explained(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    for name, text in {"even": "0 1\n1 0", "rows": "1 2\n3", "words": "1 x\n2 3", "one": "5"}.items():
        (tmp_path / name).write_text(f"{text}\n")
    assert_refused(capsys, parse_arguments, arguments, message)


def test_defaults_of_sizes_and_ranks():
    def parsed(arguments: str):
        return parse_arguments(arguments.split())

    assert parsed("p2p").sizes == parsed("pipeline_p2p").sizes == [4 << 10, 64 << 10, 1 << 20, 16 << 20]
    assert parsed("p2p --quick").sizes == [4 << 10, 1 << 20]
    assert parsed("host --quick").sizes == [1 << 10]
    assert parse_arguments(["p2p", "--sizes", "4K, 3m,7", "--quick"]).sizes == [4096, 3 << 20, 7]
    assert parsed("scale").rank_counts == [2, 4, 8, 16, 32, 48]
    assert parsed("scale --quick").rank_counts == [2, 4]
    assert parsed("scale").transport == ["tcp", "shm"]
    assert parsed("p2p").transport == ["auto"] and parsed("p2p").ranks == 2
    assert [size_text(size) for size in (1, 1000, 4096, 1 << 20, 3 << 30)] == ["1", "1000", "4K", "1M", "3G"]


# ---- pictures ---------------------------------------------------------------------------------------------


def test_a_picture_has_lines_over_sizes_or_a_group_of_bars_for_each_case(tmp_path):
    matplotlib = pytest.importorskip("matplotlib")

    def assert_drawn(labels: list[str], sizes: list[int], median_us: float, *texts: str) -> None:
        times = [median_us * factor for factor in (0.9, 1, 1.2)]
        results = [
            Result("op", impl, size, size, "uint8", 0, 1.0, True, times, label=label)
            for impl in ("one", "other")
            for label in labels
            for size in sizes
        ]
        with matplotlib.rc_context({"svg.fonttype": "none"}):
            draw(str(tmp_path / "drawn.svg"), results, "a title")
        drawn = (tmp_path / "drawn.svg").read_text()
        assert all(text in drawn for text in (">one<", ">other<", *texts)), texts

    labels, sizes = ["even", "uneven"], [4096, 1 << 20]
    assert_drawn([""], sizes, 20_000, ">4K<", ">1M<", ">20 ms<", ">a title<")
    assert_drawn(labels, [4096], 20_000, ">even<", ">uneven<", ">4 KiB<", "time (ms)")
    both = [4_185_600, 4_190_208, 25 << 20]
    assert_drawn(labels, both, 1_500, ">4 MiB<", ">25 MiB<", "time (ms)", ">1.2<")


# ---- MPI --------------------------------------------------------------------------------------------------


def test_without_mpi_the_command_says_how_to_get_it(monkeypatch, capsys):
    monkeypatch.setattr(mpi.importlib.util, "find_spec", lambda name: None)
    assert mpi.start(2) == 2
    assert "pip install 'pipecomm_ext[bench]'" in capsys.readouterr().err
    for options in (["--device", "cuda"], ["--link", "1gbit"]):
        with pytest.raises(SystemExit):
            parse_arguments(["p2p", "--mpi", *options])


MPI_OPS = ["p2p", "sendrecv", "pingpong", "broadcast", "all_reduce", "reduce_scatter", "all_gather"]
MPI_PROGRAM = f"""
import sys
sys.path.insert(0, {str(REPOSITORY / "bench")!r})
import run
import mpi
import torch.distributed as dist
mpi.join()
dist.init_process_group("gloo")
for op in {MPI_OPS}:
    if exit_code := run.main([op, "--mpi", "--quick", "--json", f"{{op}}.json"]):
        sys.exit(exit_code)
dist.destroy_process_group()  # else gloo's thread may abort a process that ends
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="mpi4py is not installed")
def test_mpi_moves_the_right_data(tmp_path, monkeypatch):
    """The command starts this program on ranks; all in one, since each new rank takes seconds."""
    (tmp_path / "program.py").write_text(MPI_PROGRAM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["program.py"])
    assert main(["p2p", "--mpi"]) == 0
    for op in MPI_OPS:
        every = json.loads((tmp_path / f"{op}.json").read_text())["results"]
        results = [result for result in every if result["impl"] == "mpi"]
        assert results and all(result["num_wrong"] == 0 for result in results), op
