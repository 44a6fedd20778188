"""The benchmark of Ulysses attention: every implementation gives the right result; links, timelines."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from ranks import on_ranks
from scripts import REPOSITORY, run_on_ranks

sys.path.insert(0, str(REPOSITORY / "bench"))
import ulysses  # noqa: E402
from measure import NUM_BLOCKS, measure  # noqa: E402
from ops import BASELINE, Bench  # noqa: E402
from run import parse_arguments  # noqa: E402


def bench_of(world, attention, *transports) -> Bench:
    comms = {f"pipecomm {name}": world.shared_comm(transport=name) for name in transports}
    return Bench(world.rank, world.size, torch.device("cpu"), torch.float32, comms, attention=attention)


@pytest.mark.parametrize("attention", ["sdpa", "sleep"])
@on_ranks(3)
def test_all_implementations_give_the_same(world, attention):
    bench = bench_of(world, attention, "c10d", "shm")
    labels = []
    for case in ulysses.build(bench, 50_000):
        results = measure("ulysses", case, bench.dtype, bench.device, iters=NUM_BLOCKS, warmup=1)
        assert [result.impl for result in results] == list(case.calls) and results[0].impl == BASELINE
        for result in results:
            assert result.num_wrong == 0, (case.label, result.impl)
            assert (result.bound_ratio is None) == (result.impl in case.parts) and result.algbw is None
        labels.append((case.label, len(results)))
    num_calls = {"sdpa": [14], "sleep": [8, 8]}[attention]
    assert labels == [(label, num) for label in ("forward", "forward and backward") for num in num_calls]


@on_ranks(2)
def test_timelines_hold_what_a_call_did(world):
    for panel, calls in ulysses.timelines(bench_of(world, "sleep", "c10d"), 50_000).items():
        num_chunks = int(panel.split()[0])
        assert len(calls) == world.size
        for call in calls:
            attention, arrivals, returns = call.rows.values()
            assert [len(row) for row in (attention, arrivals, returns)] == [2, 2, 2]
            for chunk in range(num_chunks):
                forward, backward = (one_pass[chunk] for one_pass in attention)
                assert call.begin <= arrivals[0][chunk][0] < arrivals[0][chunk][1] <= forward[0]
                assert forward[1] <= returns[0][chunk][0] < returns[0][chunk][1] <= backward[0]
                assert returns[1][chunk][1] <= backward[0] < backward[1]
                assert backward[1] <= arrivals[1][chunk][0] < arrivals[1][chunk][1] <= call.end


def test_a_quick_run_draws_a_timeline(ranks, tmp_path):
    """On ranks that are there already, whose link cannot be limited."""
    numbers, picture = tmp_path / "numbers.json", tmp_path / "out" / "timeline.png"
    arguments = ["ulysses", "--quick", "--sizes", "64K", "--link", "800mbit", "--attention", "sleep"]
    exit_code, output = run_on_ranks(ranks, 2, "run", *arguments, "--json", numbers, "--timeline", picture)
    assert exit_code == 0, output
    assert "the link is NOT limited: the ranks are there already" in output
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    document = json.loads(numbers.read_text())
    assert document["arguments"]["link"] is None and document["arguments"]["attention"] == "sleep"
    assert all(result["num_wrong"] == 0 for result in document["results"])


def limit_in_a_process(before: str = "") -> list[str]:
    """What limiting said there, and the rule of its link afterwards."""
    program = (
        "import limited_link, subprocess, tools\n"
        f"{before}\n"
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
    return done.stdout.splitlines()


def test_a_link_is_limited_or_the_reason_given():
    reason, *rule = limit_in_a_process()
    if reason == "None":
        assert "tbf" in rule[0] and "rate 800Mbit" in rule[0]
    else:
        assert "takes root" in reason or "not installed" in reason or "tc qdisc add" in reason


def test_a_missing_program_is_named():
    [reason] = limit_in_a_process("tools.folders = lambda: ['/nonexistent']")
    assert reason == "ip is not installed (package iproute2)"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ulysses", "--link", "fast"], "'fast' is not a rate like 800mbit or 2gbit"),
        (["p2p", "--timeline", "x.png"], "--timeline is for ulysses"),
        (["ulysses", "--attention", "flash"], "invalid choice: 'flash'"),
    ],
)
def test_bad_arguments_are_explained(capsys, arguments, message):
    with pytest.raises(SystemExit) as ended:
        parse_arguments(arguments)
    assert ended.value.code == 2 and message in capsys.readouterr().err
