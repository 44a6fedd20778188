"""The rank pool itself: results, errors as data, deadlines, replacement, disposable worlds, clean end."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from processes import running, start_of, state_of
from ranks import RankFailure, RankPool, on_ranks
from scripts import TESTS, Script

FOREVER_S = 10_000.0  # longer than any test may take


class DetailedError(RuntimeError):
    def __init__(self, text: str, peer: int):
        super().__init__(text)
        self.peer = peer


def identify(world, factor=1):
    return world.rank * factor, world.size, os.getpid()


def all_reduce_rank(world):
    total = torch.tensor([world.rank])
    dist.all_reduce(total, group=world.group)
    return int(total)


def raise_on(world, bad_rank):
    if world.rank == bad_rank:
        raise DetailedError(f"rank {world.rank} refuses", peer=7)
    return world.rank


def sleep_on(world, bad_rank, seconds):
    if world.rank == bad_rank:
        time.sleep(seconds)


def exit_on(world, bad_rank):
    if world.rank == bad_rank:
        os._exit(3)
    time.sleep(FOREVER_S)


def return_unpicklable(world):
    return lambda: None


def mark_and_sleep(world):
    world.mark("ready")
    time.sleep(60)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_results_come_in_rank_order(ranks, size):
    results = ranks.run(size, identify, factor=10)
    assert [r[:2] for r in results] == [(10 * rank, size) for rank in range(size)]
    assert len({r[2] for r in results}) == size, "every rank is a process of its own"


def test_processes_are_reused(ranks):
    assert ranks.run(2, identify) == ranks.run(2, identify)


@pytest.mark.parametrize("size", [2, 3])
def test_the_default_group_is_the_world(ranks, size):
    assert ranks.run(size, all_reduce_rank) == [sum(range(size))] * size


def test_attempt_carries_exceptions_and_keeps_the_world(ranks):
    pids = [r[2] for r in ranks.run(3, identify)]
    outcomes = ranks.attempt(3, raise_on, 1)
    assert [o.status for o in outcomes] == ["returned", "raised", "returned"]
    assert [o.value for o in outcomes] == [0, None, 2]
    error = outcomes[1].error
    assert issubclass(error.type, RuntimeError) and error.type is DetailedError
    assert error.text == "rank 1 refuses" and error.attributes["peer"] == 7
    assert "in raise_on" in error.traceback
    assert [r[2] for r in ranks.run(3, identify)] == pids


def test_run_raises_with_the_rank_and_its_traceback(ranks):
    with pytest.raises(RankFailure, match="rank 1 raised") as caught:
        ranks.run(2, raise_on, 1)
    assert "in raise_on" in str(caught.value) and "DetailedError: rank 1 refuses" in str(caught.value)
    assert ranks.run(2, all_reduce_rank) == [1, 1]


def test_one_failure_does_not_wait_for_the_deadline_of_the_others(ranks, monkeypatch):
    monkeypatch.setattr("ranks.GRACE_S", 0.2)
    with pytest.raises(RankFailure, match="rank 0 died with exit code 3"):
        ranks.run(2, exit_on, 0, deadline=FOREVER_S)


def test_a_hung_rank_is_killed_with_its_stacks_and_replaced(ranks):
    starts = {pid: start_of(pid) for _, _, pid in ranks.run(2, identify)}
    with pytest.raises(RankFailure, match="rank 1 did not finish") as caught:
        ranks.run(2, sleep_on, 1, 60, deadline=2)
    assert "in sleep_on" in str(caught.value), "faulthandler's stacks are part of the report"
    assert caught.value.outcomes[0].status == "returned"
    assert not running(starts)
    assert ranks.run(2, all_reduce_rank) == [1, 1]


def test_an_answer_that_cannot_travel_is_an_error(ranks):
    assert [o.status for o in ranks.attempt(2, return_unpicklable)] == ["raised", "raised"]


def test_a_local_function_is_refused(ranks):
    with pytest.raises(ValueError, match="not module-level"):
        ranks.run(2, lambda world: None)


def test_a_disposable_world_can_be_killed(ranks):
    with ranks.disposable(2, mark_and_sleep) as world:
        world.await_mark(0, "ready")
        marked_at = world.await_mark(1, "ready")
        starts = {world.pid(rank): start_of(world.pid(rank)) for rank in range(2)}
        killed_at = world.signal(1, signal.SIGKILL)
        outcomes = world.collect(deadline=0.5)
    assert marked_at <= killed_at <= outcomes[1].ended_at
    assert [o.status for o in outcomes] == ["hung", "died"] and outcomes[1].exit_code == -signal.SIGKILL
    assert "in mark_and_sleep" in outcomes[0].log
    assert not running(starts)


def test_a_missing_mark_is_reported(ranks):
    with (
        ranks.disposable(2, raise_on, 1) as world,
        pytest.raises(RankFailure, match="rank 1 never reached 'ready'"),
    ):
        world.await_mark(1, "ready")


@on_ranks(2, 3)
@pytest.mark.parametrize("word", ["one", "two"])
def test_decorated_bodies_run_on_every_rank(world, word, tmp_path):
    """The values of fixtures and parameters reach the ranks."""
    (tmp_path / f"{word}{world.rank}").touch()
    dist.barrier(world.group)
    assert len(list(tmp_path.iterdir())) == world.size


def test_a_pool_that_ends_leaves_nothing_behind():
    with RankPool() as pool:
        pids = {result[2] for size in (1, 2) for result in pool.run(size, identify)}
        starts, directory = {pid: start_of(pid) for pid in pids}, Path(pool._directory)
        assert len(pids) == 3 and len(list(directory.iterdir())) == 2
    assert not running(starts) and not directory.exists()


def test_idle_worlds_stand_still_until_they_are_used():
    with RankPool() as pool:
        pids = [result[2] for result in pool.run(2, identify)]
        for _ in range(2):
            pool.rest()
            while {state_of(pid) for pid in pids} != {"T"}:
                time.sleep(0.01)
            assert pool.run(2, all_reduce_rank) == [1, 1]
            assert {state_of(pid) for pid in pids} <= {"R", "S"}
        pool.rest()
    assert {state_of(pid) for pid in pids} == {None}


INNER_PROGRAM = """
import os, sys, time
from pathlib import Path
import inner
import ranks
from processes import start_of

del ranks.PRELOADED[2:]  # to import the others takes seconds

def body(world, directory):
    Path(directory, f"process{world.rank}").write_text(f"{os.getpid()} {start_of(os.getpid())}")
    time.sleep(10_000)

if __name__ == "__main__":
    with ranks.RankPool() as pool:
        pool.run(2, inner.body, sys.argv[1], deadline=10_000)
"""


@pytest.mark.slow
@pytest.mark.timeout(300)  # the server of the inner pool imports torch again
@pytest.mark.parametrize("strike", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_behind(tmp_path, strike):
    """A program whose warm pool is busy is interrupted, or its ranks are orphaned."""
    (tmp_path / "inner.py").write_text(INNER_PROGRAM)
    python_path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    with Script("inner.py", tmp_path, folder=tmp_path, is_fresh=True, PYTHONPATH=python_path) as script:
        wait_for(lambda: len(processes_in(tmp_path)) == 2, seconds=250)
        if strike == signal.SIGINT:
            os.killpg(script.process.pid, strike)
        else:
            script.process.kill()
        exit_code, output = script.finish(100)
        wait_for(lambda: not running(processes_in(tmp_path)), seconds=250)
        assert exit_code == -strike and ("KeyboardInterrupt" in output) == (strike == signal.SIGINT), output
        if strike == signal.SIGINT:
            script.assert_nothing_left(within_s=250)


def processes_in(directory: Path) -> dict[int, str | None]:
    """What the ranks of INNER_PROGRAM have written, with their starts."""
    written = [path.read_text(encoding="utf-8").split() for path in directory.glob("process*")]
    return {int(words[0]): words[1] for words in written if len(words) == 2}


def wait_for(condition, seconds: float) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "the condition never came true"
        time.sleep(0.02)
