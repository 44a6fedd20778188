"""The benchmark's sequence-parallel ops: every implementation gives the right result, and work is counted."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from ranks import on_ranks
from scripts import REPOSITORY, run_on_ranks

sys.path.insert(0, str(REPOSITORY / "bench"))
import all_to_all as all_to_all_op  # noqa: E402
from measure import NUM_BLOCKS, measure  # noqa: E402
from ops import BASELINE, MEMCPY, Bench  # noqa: E402
from run import parse_arguments  # noqa: E402
from sequence_ops import SEQUENCE_OPS  # noqa: E402
from work import count_work  # noqa: E402


def bench_of(world, matrix=None) -> Bench:
    comms = {f"pipecomm {name}": world.shared_comm(transport=name) for name in ("c10d", "shm")}
    return Bench(world.rank, world.size, torch.device("cpu"), torch.bfloat16, comms, matrix)


@on_ranks(2, 3)
@pytest.mark.parametrize("op", SEQUENCE_OPS)
def test_all_implementations_give_the_same(world, op):
    num_cases = 0
    for case in SEQUENCE_OPS[op].build(bench_of(world), 200_000):
        num_cases += 1
        results = measure(op, case, torch.bfloat16, torch.device("cpu"), iters=NUM_BLOCKS, warmup=2)
        assert [result.impl for result in results] == list(case.calls) and results[0].impl == BASELINE
        for result in results:
            assert result.num_wrong == 0, (case.label, result.impl)
            assert result.label == case.label and (result.impl == MEMCPY or result.bound_ratio > 0)
            assert result.work.copy_passes >= 0 and result.work.allocated_bytes >= 0
    assert num_cases >= 4


@on_ranks(2)
def test_counted_work_is_what_the_algorithms_do(world):
    """Passes of the even and uneven cases with one batch, heads to sequence."""
    passes = {}
    for case in all_to_all_op.build(bench_of(world), 1_000_000):
        for _ in range(2):
            for call in case.calls.values():
                call()
        for impl in case.calls:
            passes[case.label, impl] = case.work(impl)
    for label, impl, expected in [
        ("even, H to S", BASELINE, 1),
        ("even, H to S", "pipecomm c10d", 1),
        ("even, H to S, B=2", BASELINE, 2),
        ("H uneven, H to S", BASELINE, 2),
        ("S uneven, H to S", BASELINE, 2),
        ("both uneven, H to S", all_to_all_op.LIST, 2),
        ("both uneven, H to S", "pipecomm c10d", 1),
        ("both uneven, S to H", all_to_all_op.LIST, 1),
        ("both uneven, H to S", all_to_all_op.BARE, 0),
    ]:
        assert passes[label, impl].copy_passes == pytest.approx(expected, abs=0.1), (label, impl)
    assert passes["even, H to S", all_to_all_op.BARE].allocated_bytes == 0
    ours = passes["even, H to S", "pipecomm c10d"]
    assert ours.allocated_bytes == next(iter(all_to_all_op.build(bench_of(world), 1_000_000))).num_bytes


def test_work_of_plain_torch():
    tensor = torch.zeros(100, 10)
    work = count_work(lambda: tensor.t().contiguous().view(-1).clone(), tensor.nbytes, None)
    assert work.copy_passes == 2 and work.allocated_bytes == 2 * tensor.nbytes
    assert count_work(lambda: tensor.view(-1), tensor.nbytes, None).copy_passes == 0


@on_ranks(3)
def test_a_matrix_of_bytes(world):
    matrix = ((0, 4096, 100), (8, 0, 0), (2, 30_000, 6))
    [case] = all_to_all_op.build(bench_of(world, matrix), 0)
    assert case.num_bytes == 34096  # what rank 1 receives
    results = measure("all_to_all", case, torch.bfloat16, torch.device("cpu"), iters=NUM_BLOCKS, warmup=1)
    assert [result.num_wrong for result in results] == [0, 0, 0]


def test_a_matrix_file(ranks, tmp_path):
    matrix, numbers = tmp_path / "matrix.txt", tmp_path / "numbers.json"
    matrix.write_text("# to 0, to 1\n0 64K\n1000 0\n")
    arguments = ["all_to_all", "--matrix", matrix, "--iters", 20, "--json", numbers]
    exit_code, output = run_on_ranks(ranks, 2, "run", *arguments)
    assert exit_code == 0, output
    assert "%bound" in output and "copies" in output
    results = json.loads(numbers.read_text())["results"]
    assert {result["size_bytes"] for result in results} == {65536} and len(results) == 2
    assert all(result["copy_passes"] == 0 and result["case"] == "matrix" for result in results)


@pytest.mark.parametrize(
    ("content", "message"),
    [("1 2\n3\n", "as many sizes in each row"), ("1 x\n2 3\n", "'x' is not a size"), ("5\n", "2 or more")],
)
def test_a_bad_matrix_is_explained(tmp_path, capsys, content, message):
    path = tmp_path / "matrix.txt"
    path.write_text(content)
    with pytest.raises(SystemExit) as ended:
        parse_arguments(["all_to_all", "--matrix", str(path)])
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_a_matrix_is_for_all_to_all(tmp_path, capsys):
    path = tmp_path / "matrix.txt"
    path.write_text("0 1\n1 0\n")
    for arguments in (["gather", "--matrix", str(path)], ["all_to_all", "--matrix", str(tmp_path / "none")]):
        with pytest.raises(SystemExit):
            parse_arguments(arguments)
    text = capsys.readouterr().err
    assert "--matrix is for all_to_all" in text and "cannot read" in text
