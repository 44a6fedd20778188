"""The benchmark runs every op, counts wrong data, and writes what it promises."""

from __future__ import annotations

import json
import statistics
import sys

import pytest
import torch
from ranks import on_ranks
from scripts import REPOSITORY, run_on_ranks, run_script

sys.path.insert(0, str(REPOSITORY / "bench"))
from measure import NUM_BLOCKS, Result, measure  # noqa: E402
from ops import BASELINE, MEMCPY, OPS, Bench, Case  # noqa: E402
from plots import draw  # noqa: E402
from report import environment, row, size_text  # noqa: E402
from run import parse_arguments  # noqa: E402
from schedule import SCHEDULE_OPS  # noqa: E402

RUN = "bench/run.py"


def bench_of(world, dtype=torch.float32) -> Bench:
    return Bench(world.rank, world.size, torch.device("cpu"), dtype, {"pipecomm c10d": world.comm})


@on_ranks(2, 3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_every_op_moves_the_right_data(world, op, dtype):
    for num_bytes in (4, 4096, 100_000):
        case = OPS[op].build(bench_of(world, dtype), num_bytes)
        results = measure(op, case, dtype, torch.device("cpu"), iters=NUM_BLOCKS, warmup=1)
        bounds = [MEMCPY] if case.has_bandwidth else []
        assert [result.impl for result in results] == [BASELINE, "pipecomm c10d", *bounds]
        for result in results:
            assert (result.bound_ratio is not None) == (bool(bounds) and result.impl != MEMCPY)
            assert result.num_wrong == 0, row(result)
            assert len(result.iterations_us) == NUM_BLOCKS
            assert 0 < result.min_us <= result.median_us <= max(result.iterations_us)
        assert results[0].ratio == 1.0 and results[1].ratio > 0


@on_ranks(2)
def test_pipelines_compute_the_gradients_of_the_unsplit_model(world):
    for op in SCHEDULE_OPS:
        for case in SCHEDULE_OPS[op].build(bench_of(world), num_bytes=512):
            results = measure(op, case, torch.float32, torch.device("cpu"), iters=NUM_BLOCKS, warmup=1)
            assert [result.num_wrong for result in results] == [0, 0], row(results[-1])
            assert all(result.algbw is None and result.min_us > 0 for result in results)
            assert row(results[-1]).endswith(case.label)


@on_ranks(2)
def test_values_within_the_tolerance_are_right(world):
    buffer = torch.zeros(3)
    expected = torch.tensor([100.0, 1.0, 0.0])
    deviations = {BASELINE: 0.09, "far": 0.11, "not finite": float("nan")}
    calls = {
        name: lambda deviation=deviation: buffer.copy_(expected).add_(torch.tensor([0, deviation, 0]))
        for name, deviation in deviations.items()
    }
    case = Case(12, [(buffer, expected)], calls, tolerance=1e-3)
    results = measure("test", case, torch.float32, torch.device("cpu"), iters=NUM_BLOCKS, warmup=1)
    assert [result.num_wrong for result in results] == [0, 2, 2]


@on_ranks(2)
def test_wrong_data_is_counted_over_all_ranks(world):
    """A call that changes one element on each rank, and one that does nothing."""
    buffer = torch.zeros(10)

    def almost():
        buffer.fill_(5.0)
        buffer[world.rank] = 6.0

    case = Case(40, [(buffer, torch.full((10,), 5.0))], {BASELINE: almost, "lazy": lambda: None})
    results = measure("test", case, torch.float32, torch.device("cpu"), iters=NUM_BLOCKS, warmup=1)
    assert [result.num_wrong for result in results] == [2, 20]


@on_ranks(2)
def test_times_are_the_slowest_ranks(world):
    import time

    buffer = torch.zeros(1)
    case = Case(
        4,
        [(buffer, torch.zeros(1))],
        {BASELINE: lambda: time.sleep(0.002 * (1 + world.rank)), "quick": lambda: time.sleep(0.001)},
    )
    slow, quick = measure("test", case, torch.float32, torch.device("cpu"), iters=2 * NUM_BLOCKS, warmup=1)
    assert slow.min_us >= 4000 and quick.min_us >= 1000
    assert 1.2 < quick.ratio
    assert slow.algbw == pytest.approx(4 / slow.median_us / 1e3)


@pytest.mark.slow
def test_a_run_writes_table_json_and_picture(tmp_path, monkeypatch):
    monkeypatch.setenv("PIPECOMM_TRANSPORT", "c10d")
    monkeypatch.setenv("SECRET_TOKEN", "not for the report")
    numbers, picture = tmp_path / "out" / "numbers.json", tmp_path / "out" / "picture.png"
    exit_code, output = run_script(
        RUN, "p2p", "--ranks", 2, "--sizes", "4K,64K", "--iters", 20, "--json", numbers, "--plot", picture,
    )  # fmt: skip
    assert exit_code == 0, output
    for column in (
        "size",
        "count",
        "type",
        "impl",
        "min",
        "median",
        "p99",
        "algbw",
        "busbw",
        "ratio",
        "#wrong",
        "%bound",
    ):
        assert column in output
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and picture.stat().st_size > 10_000
    document = json.loads(numbers.read_text())
    assert document["format"] == 1 and document["version"] and document["torch"] == torch.__version__
    assert document["arguments"]["op"] == "p2p" and document["arguments"]["dtype"] == "torch.float32"
    assert document["environment"]["PIPECOMM_TRANSPORT"] == "c10d"
    assert "SECRET_TOKEN" not in numbers.read_text()
    assert list(document["transports"]) == ["pipecomm c10d"]
    assert [(r["size_bytes"], r["impl"]) for r in document["results"]] == [
        (size, impl) for size in (4096, 65536) for impl in (BASELINE, "pipecomm c10d", MEMCPY)
    ]
    for result in document["results"]:
        times = result["iterations_us"]
        assert result["num_wrong"] == 0 and result["count"] * 4 == result["size_bytes"] and len(times) == 20
        assert result["time_us"]["median"] == pytest.approx(statistics.median(times), abs=0.01)
        assert result["time_us"]["min"] == pytest.approx(min(times), abs=0.01)
        assert result["algbw_gb_per_s"] == pytest.approx(
            result["size_bytes"] / result["time_us"]["median"] / 1e3
        )
        assert result["busbw_gb_per_s"] == result["algbw_gb_per_s"] and result["ratio_to_baseline"] > 0


def test_a_quick_run_of_posting_has_no_bandwidth(ranks, tmp_path):
    numbers = tmp_path / "numbers.json"
    arguments = ["host", "--quick", "--json", numbers, "--plot", tmp_path / "p.png"]
    exit_code, output = run_on_ranks(ranks, 2, "run", *arguments)
    assert exit_code == 0, output
    assert all(result["algbw_gb_per_s"] is None for result in json.loads(numbers.read_text())["results"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["p2p", "--ranks", "1"], "--ranks must be 2 or more"),
        (["p2p", "--sizes", "4K,many"], "'many' is not a size"),
        (["p2p", "--dtype", "float31"], "'float31' is not a torch dtype"),
        (["p2p", "--transport", "pigeon"], "'pigeon' is not one of auto, c10d, shm, nccl"),
        (["p2p", "--iters", "0"], "must be positive, got 0"),
        (["teleport"], "invalid choice: 'teleport'"),
    ],
)
def test_bad_arguments_are_explained(capsys, arguments, message):
    with pytest.raises(SystemExit) as ended:
        parse_arguments(arguments)
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_environment_is_a_whitelist(monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.setenv("HOME_ADDRESS", "1 Main Street")
    assert environment()["NCCL_DEBUG"] == "WARN" and "HOME_ADDRESS" not in environment()


def test_default_sizes_and_quick_ones():
    assert parse_arguments(["p2p"]).sizes == [4 << 10, 64 << 10, 1 << 20, 16 << 20]
    assert parse_arguments(["p2p", "--quick"]).sizes == [4 << 10, 1 << 20]
    assert parse_arguments(["host", "--quick"]).sizes == [1 << 10]
    assert parse_arguments(["p2p", "--sizes", "4K, 3m,7", "--quick"]).sizes == [4096, 3 << 20, 7]


def test_sizes_are_short():
    assert [size_text(size) for size in (1, 1000, 4096, 1 << 20, 3 << 30)] == ["1", "1000", "4K", "1M", "3G"]


def drawn_texts(path, labels: list[str], sizes: list[int], median_us: float) -> str:
    """The source of a picture of results of two implementations."""
    matplotlib = pytest.importorskip("matplotlib")
    times = [median_us * factor for factor in (0.9, 1, 1.2)]
    results = [
        Result("op", impl, size, size, "uint8", 0, 1.0, True, times, label=label)
        for impl in ("one", "other")
        for label in labels
        for size in sizes
    ]
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        draw(str(path), results, "a title")
    return path.read_text()


def test_a_picture_has_lines_over_sizes_or_a_group_of_bars_for_each_case(tmp_path):
    lines = drawn_texts(tmp_path / "lines.svg", [""], [4096, 1 << 20], median_us=20_000)
    for text in (">4K<", ">1M<", ">20 ms<", ">one<", ">other<", ">a title<"):
        assert text in lines
    bars = drawn_texts(tmp_path / "bars.svg", ["even", "uneven"], [4096], median_us=20_000)
    for text in (">even<", ">uneven<", "time (ms)", ">one<", ">other<"):
        assert text in bars
    both = drawn_texts(tmp_path / "both.svg", ["even", "uneven"], [4096, 1 << 20], median_us=20)
    for text in (">even, 4K<", ">uneven, 1M<", "time (us)"):
        assert text in both
